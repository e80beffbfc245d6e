"""``hvdtrain data-fetch``: download a public data set, on a login node."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from hvdtrain.commands.data_fetch.catalogue import DATA_SETS
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.errors import UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.text import size

WIDTH = max(len(one.name) for one in DATA_SETS)
EPILOG = "\n".join(
    [
        "data sets:",
        *(f"  {one.name:<{WIDTH}}  {size(one.size):>9}  {one.what}" for one in DATA_SETS),
        "",
        "example:",
        "  hvdtrain data-fetch mnist --to ~/mnist",
        "  hvdtrain data-fetch imagenette --to ~/imagenette --dry-run",
        "",
        "Run it where there is network, on a login node, into a folder that the compute nodes see.",
        "Broken off, it goes on where it stood. Checksums are checked where they are published,",
        "else the size and the archive's own CRCs. Each data set has its owners' terms of use.",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    names = [one.name for one in DATA_SETS]
    parser.add_argument("name", metavar="NAME", choices=names, help="one of those below")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="where it goes")
    parser.add_argument(
        "--mirror",
        metavar="URL",
        default="",
        help="take the files from URL/FILE instead of their public addresses",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would be downloaded, and the room it takes",
    )
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Fetch the data set, or what of it is missing.

    Raises:
        UsageError: the folder is not fit for it.
        HvdtrainError: a file cannot be had; the next call goes on with it.
    """
    data_set = next(one for one in DATA_SETS if one.name == arguments.name)
    folder: Path = arguments.to
    if arguments.mirror and not re.fullmatch(r"https?://[!-~]+", arguments.mirror):
        raise UsageError(
            f"--mirror {arguments.mirror}: it is no address such as http://host/folder"
        )
    fetch = Fetch(data_set, folder, arguments.mirror)
    try:
        missing = fetch.missing()
    except OSError as error:
        raise UsageError(f"--to {folder}: {error.strerror}") from error
    files = [{"url": fetch.address(one), "bytes": one.size, "md5": one.md5} for one in missing]
    data = {"ok": True, "name": data_set.name, "folder": str(folder), "files": files}
    if arguments.dry_run:
        lines = [f"{fetch.address(one)}  {size(one.size)}" for one in missing]
        lines += [f"takes up to {size(fetch.room())} in {folder}" if missing else "nothing to do"]
        return Report("\n".join(lines), {**data, "room": fetch.room()})
    if not fetch.is_done:
        fetch.run()
    lines = [f"{data_set.name} is in {folder}" + ("" if missing else " already")]
    if data_set.trainer:
        trainer, *options = data_set.trainer.split()
        train = ["python", "-m", f"hvdtrain.{trainer}", "--data", str(folder), *options]
        lines.append(f"train on it: hvdtrain launch -n 2 -- {shlex.join(train)}")
    return Report("\n".join(lines), data)
