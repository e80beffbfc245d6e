"""``hvdtrain pack``: pack a dataset of small files into tar shards."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

from hvdtrain.commands.pack.check import problems
from hvdtrain.commands.pack.packing import Packing
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural, size
from hvdtrain.workloads.data.packed import IMAGES, MNIST, Pack, is_packed

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MAX_WORKERS = 16
EPILOG = """\
DIR is an image folder (train/CLASS/*.jpg, val/), has the layout of COCO (train2017/, val2017/,
annotations/instances_train2017.json, ...), or has the four IDX files of MNIST. Train with
--data OUT: the samples and their order are the same, and DIR is no longer needed.

Shards are plain tar files. If the command is interrupted, run it again to continue.

example:
  hvdtrain pack ~/imagenet ~/imagenet-packed
  hvdtrain pack --check ~/imagenet-packed
  hvdtrain pack ~/imagenet ~/imagenet-256 --resize 256
"""


def byte_count(text: str) -> int:
    """Parse a number of bytes, in KiB, MiB or GiB, e.g. ``256M``.

    Raises:
        ArgumentTypeError: ``text`` has another form, or is 0.
    """
    match = re.fullmatch(r"(\d{1,9})([KMG]?)(i?B)?", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size, e.g. 256M or 1G")
    return int(match[1]) * UNITS[match[2].upper()]


def count(text: str) -> int:
    """Parse a positive integer.

    Raises:
        ArgumentTypeError: ``text`` is anything else.
    """
    if not re.fullmatch(r"\d{1,6}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 or more")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.usage = "hvdtrain pack DIR OUT [options]\n       hvdtrain pack --check OUT [options]"
    parser.add_argument(
        "folders", metavar="DIR OUT", type=Path, nargs="+", help="dataset, output directory"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=byte_count,
        default="256M",
        help="approximate size of a shard in bytes, with K, M or G (default: 256M)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=count,
        help=f"number of parallel workers (default: one per core, at most {MAX_WORKERS})",
    )
    parser.add_argument(
        "--resize",
        metavar="SHORT",
        type=count,
        default=0,
        help="maximum pixels of the shorter side of an image (default: no resizing)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only verify every byte of OUT; exit code 1 if any was changed",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Pack a dataset, or check packed data.

    Raises:
        UsageError: a directory is unsuitable.
        HvdtrainError: a disk is full, or files were changed meanwhile; the next run continues.
    """
    folders: list[Path] = arguments.folders
    if len(folders) not in ((1, 2) if arguments.check else (2,)):
        raise UsageError("DIR and OUT are required (see hvdtrain pack --help)")
    out = folders[-1]
    workers = arguments.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    if arguments.check:
        return _check(out, workers)
    packing = Packing(
        folders[0],
        out,
        shard_size=arguments.shard_size,
        workers=workers,
        resize=arguments.resize,
    )
    pack, already = packing.run()
    contents, facts = pack.contents, _facts(pack)
    samples = f"{plural(facts['samples'], 'sample')}, " if contents.splits else ""
    shards = f"{plural(len(contents.shards), 'shard')}, {size(facts['bytes'])}"
    state = "was already packed" if already else "packed"
    lines = [message(f"{folders[0]} {state} into {out}: {samples}{shards}")]
    lines.append(f"check it: hvdtrain pack --check {shlex.quote(str(out))}")
    trainers = {IMAGES: "resnet", MNIST: "mnist"}
    if contents.kind in trainers:
        train = f"python -m hvdtrain.{trainers[contents.kind]} --data {shlex.quote(str(out))}"
        lines.append(f"train on it: hvdtrain launch -n 2 -- {train}")
    return Report("\n".join(lines), {"ok": True, **facts})


def _check(out: Path, workers: int) -> Report:
    """Check the packed data in ``out``."""
    if not is_packed(out):
        raise UsageError(f"{out} has no packed data (see hvdtrain pack --help)")
    bad = problems(out, workers)
    pack = Pack(out, complete=False)
    facts = {"ok": not bad, **_facts(pack), "problems": bad}
    text = f"{out}: {plural(len(pack.contents.shards), 'shard')}, {size(facts['bytes'])}"
    if bad:
        lines = [*bad, f"{text}: {len(bad)} bad; copy them again, or remove {out} and repack"]
        return Report("\n".join(map(message, lines)), facts, EXIT_FAILURE)
    return Report(message(f"{text}: every byte is unchanged"), facts, EXIT_OK)


def _facts(pack: Pack) -> dict[str, Any]:
    contents = pack.contents
    return {
        "folder": str(pack.folder),
        "kind": contents.kind,
        "samples": sum(len(split) for split in contents.splits.values()),
        "splits": {name: len(split) for name, split in contents.splits.items()},
        "shards": len(contents.shards),
        "bytes": sum(shard.size for shard in contents.shards),
        "resize": contents.resize,
    }
