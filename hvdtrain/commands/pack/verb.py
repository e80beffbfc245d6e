"""``hvdtrain pack``: pack a dataset of small files into tar shards."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.config.declare import argument
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.stderr import Display
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural, size
from hvdtrain.workloads.data.coco import SPLITS
from hvdtrain.workloads.data.packed import COCO, IMAGES, MNIST, Pack, is_packed

USAGE = "hvdtrain pack DIR OUT [options]\n       hvdtrain pack --check OUT [options]"
EPILOG = """\
DIR is an image folder (train/CLASS/*.jpg, val/), has the layout of COCO
(train2017/, val2017/, annotations/instances_train2017.json, ...), or has the
four IDX files of MNIST. Train with --data OUT: the samples and their order are
the same, and DIR is no longer needed.

Shards are plain tar files. If the command is interrupted, run it again to
continue.

example:
  hvdtrain pack ~/imagenet ~/imagenet-packed
  hvdtrain pack --check ~/imagenet-packed
  hvdtrain pack ~/imagenet ~/imagenet-256 --resize 256
"""


@dataclass(frozen=True)
class PackArguments(PackOptions):
    """Options and arguments of ``hvdtrain pack``."""

    folders: tuple[Path, ...] = argument(
        "dataset, output directory", Path, metavar="DIR OUT", number="+"
    )


def run_verb(options: PackArguments) -> Report:
    """Pack a dataset, or check packed data.

    Raises:
        UsageError: a directory is unsuitable.
        HvdtrainError: a disk is full, or files were changed meanwhile; the next run continues.
    """
    folders = options.folders
    if len(folders) not in ((1, 2) if options.check else (2,)):
        raise UsageError("DIR and OUT are required (see hvdtrain pack --help)")
    out = folders[-1]
    if options.check:
        return _check(out, options.threads)
    packing = Packing(folders[0], out, options)
    pack, already = packing.run()
    contents, facts = pack.contents, _facts(pack)
    samples = f"{plural(facts['samples'], 'sample')}, " if contents.splits else ""
    shards = f"{plural(len(contents.shards), 'shard')}, {size(facts['bytes'])}"
    state = "was already packed" if already else "packed"
    lines = [message(f"{folders[0]} {state} into {out}: {samples}{shards}")]
    lines += map(message, packing.notes)
    lines.append(f"check it: hvdtrain pack --check {shlex.quote(str(out))}")
    trainers = {IMAGES: "resnet", MNIST: "mnist", COCO: "ssd300"}
    if contents.kind != COCO or SPLITS[0] in contents.splits:  # not e.g. of 2014
        train = f"python -m hvdtrain.{trainers[contents.kind]} --data {shlex.quote(str(out))}"
        lines.append(f"train on it: hvdtrain launch -n 2 -- {train}")
    return Report("\n".join(lines), {"ok": True, **facts})


def _check(out: Path, workers: int) -> Report:
    """Check the packed data in ``out``."""
    if not is_packed(out):
        raise UsageError(f"{out} has no packed data (see hvdtrain pack --help)")
    pack, bad, done = Pack(out, complete=False), [], 0
    shards = pack.contents.shards
    total = sum(shard.size for shard in shards)
    try:
        pack.check_index()
    except UsageError as error:
        bad.append(str(error))
    with ThreadPoolExecutor(workers) as pool, Display() as display:
        display.stage(f"reading {plural(len(shards), 'shard')}, {size(total)}")
        problems = pool.map(pack.problem, range(len(shards)))
        for shard, problem in zip(shards, problems, strict=True):
            done += shard.size
            display.show(f"read {size(done)} of {size(total)}", done / max(1, total))
            bad += [f"{out / shard.name}: {problem}"] if problem else []
    facts = {"ok": not bad, **_facts(pack), "problems": bad}
    text = f"{out}: {plural(len(shards), 'shard')}, {size(total)}"
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
