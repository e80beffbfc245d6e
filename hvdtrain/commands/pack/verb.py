"""``hvdtrain pack``: gather the many files of a data set in few."""

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
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural, size
from hvdtrain.workloads.data.packed import IMAGES, MNIST, Pack, is_packed

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MOST_WORKERS = 16
EPILOG = """\
DIR is an image folder (train/CLASS/*.jpg, val/), has the layout of COCO (train2017/, val2017/,
annotations/instances_train2017.json, ...), or holds the four IDX files of MNIST. OUT is then given
to a training as --data OUT: the same samples, in the same order. It needs DIR no longer.

A shard is a plain tar; broken off, the same command goes on where it stood.

example:
  hvdtrain pack ~/imagenet ~/imagenet-packed
  hvdtrain pack --check ~/imagenet-packed
  hvdtrain pack ~/imagenet ~/imagenet-256 --resize 256
"""


def byte_count(text: str) -> int:
    """Read such as ``256M``: bytes, in KiB, MiB or GiB.

    Raises:
        ArgumentTypeError: it is something else, or no shard of a tar.
    """
    found = re.fullmatch(r"(\d{1,9})([KMG]?)(i?B)?", text, re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no size such as 256M or 1G")
    return int(found[1]) * UNITS[found[2].upper()]


def count(text: str) -> int:
    """Read a whole number of 1 or more.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if not re.fullmatch(r"\d{1,6}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 or more")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.usage = "hvdtrain pack DIR OUT [options]\n       hvdtrain pack --check OUT [options]"
    parser.add_argument("folders", metavar="DIR OUT", type=Path, nargs="+", help="from, to")
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=byte_count,
        default="256M",
        help="bytes of the files in a shard, about (256M; K, M and G are taken)",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=count,
        help=f"shards written or checked at once (default: one per core, at most {MOST_WORKERS})",
    )
    parser.add_argument(
        "--resize",
        metavar="SHORT",
        type=count,
        default=0,
        help="make images smaller, until the shorter side has this many pixels",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="pack nothing: read each byte of OUT, and exit with 1 if one is wrong",
    )
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Pack a folder, or check what was packed.

    Raises:
        UsageError: a folder is not fit for it.
        HvdtrainError: a disk is full, or files change meanwhile; the next call goes on.
    """
    folders: list[Path] = arguments.folders
    if len(folders) not in ((1, 2) if arguments.check else (2,)):
        raise UsageError(
            "give DIR and OUT: what is packed, and where to (see hvdtrain pack --help)"
        )
    out = folders[-1]
    workers = arguments.workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
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
    held = f"{plural(facts['samples'], 'sample')}, " if contents.splits else ""
    shards = f"{plural(len(contents.shards), 'shard')}, {size(facts['bytes'])}"
    done = f"{out} holds {folders[0]}{' already' if already else ''}: {held}{shards}"
    lines = [message(done)]
    lines.append(f"check it: hvdtrain pack --check {shlex.quote(str(out))}")
    trainers = {IMAGES: "resnet", MNIST: "mnist"}
    if contents.kind in trainers:
        train = f"python -m hvdtrain.{trainers[contents.kind]} --data {shlex.quote(str(out))}"
        lines.append(f"train on it: hvdtrain launch -n 2 -- {train}")
    return Report("\n".join(lines), {"ok": True, **facts})


def _check(out: Path, workers: int) -> Report:
    """Check what was packed."""
    if not is_packed(out):
        raise UsageError(f"{out} holds no packed data (see hvdtrain pack --help)")
    wrong = problems(out, workers)
    pack = Pack(out, complete=False)
    facts = {"ok": not wrong, **_facts(pack), "problems": wrong}
    text = f"{out}: {plural(len(pack.contents.shards), 'shard')}, {size(facts['bytes'])}"
    if wrong:
        lines = [*wrong, f"{text}: {len(wrong)} bad; remove {out} and pack it again, or copy those"]
        return Report("\n".join(map(message, lines)), facts, EXIT_FAILURE)
    return Report(message(f"{text}: every byte is what was packed"), facts, EXIT_OK)


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
