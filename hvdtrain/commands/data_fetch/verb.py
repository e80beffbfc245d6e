"""``hvdtrain data-fetch``: download a public dataset, on a node with network access."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from hvdtrain.commands.data_fetch.catalogue import DATA_SETS
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import size

WIDTH = max(len(data_set.name) for data_set in DATA_SETS)
EPILOG = "\n".join(
    [
        "datasets:",
        *(f"  {d.name:<{WIDTH}}  {size(d.size):>9}  {d.description}" for d in DATA_SETS),
        "",
        "example:",
        "  hvdtrain data-fetch mnist --to ~/mnist",
        "  hvdtrain data-fetch imagenette --to ~/imagenette --dry-run",
        "",
        "Run it on a node with network access (a login node), into a file system shared",
        "with the compute nodes. If it is interrupted, run it again to continue.",
        "Published checksums are verified, otherwise size and CRCs. Each dataset has its",
        "owners' terms of use.",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    names = [data_set.name for data_set in DATA_SETS]
    parser.add_argument("name", metavar="NAME", choices=names, help="dataset, see the list below")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="output directory")
    parser.add_argument(
        "--mirror",
        metavar="URL",
        default="",
        help="base address of the files, as URL/FILE (default: their public addresses)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the addresses and the required disk space without downloading",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Download the missing files of the dataset.

    Raises:
        UsageError: the directory is unsuitable.
        HvdtrainError: a file cannot be downloaded; the next run continues.
    """
    data_set = next(candidate for candidate in DATA_SETS if candidate.name == arguments.name)
    folder: Path = arguments.to
    if arguments.mirror and not re.fullmatch(r"https?://[!-~]+", arguments.mirror):
        raise UsageError(
            f"--mirror {arguments.mirror}: must be an address, e.g. http://host/folder"
        )
    fetch = Fetch(data_set, folder, arguments.mirror)
    try:
        missing = fetch.missing()
    except OSError as error:
        raise UsageError(f"--to {folder}: {error.strerror}") from error
    files = [{"url": fetch.address(r), "bytes": r.size, "md5": r.md5} for r in missing]
    data = {"ok": True, "name": data_set.name, "folder": str(folder), "files": files}
    if arguments.dry_run:
        lines = [f"{fetch.address(remote)}  {size(remote.size)}" for remote in missing]
        lines += [f"needs up to {size(fetch.room())} in {folder}" if missing else "nothing to do"]
        return Report("\n".join(lines), {**data, "room": fetch.room()})
    if not fetch.is_done:
        fetch.run()
    lines = [f"{data_set.name} is in {folder}" + ("" if missing else " already")]
    trainer, *options = data_set.trainer.split()
    train = ["python", "-m", f"hvdtrain.{trainer}", "--data", str(folder), *options]
    lines.append(f"train on it: hvdtrain launch -n 2 -- {shlex.join(train)}")
    return Report("\n".join(lines), data)
