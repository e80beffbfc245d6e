"""``hvdtrain data-fetch``: download a public dataset, on a node with network access."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.data_fetch.catalogue import DATA_SETS
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.config.declare import REQUIRED, argument, json_switch, option, switch
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
        "MD5 checksums are verified. Each dataset has its",
        "owners' terms of use.",
    ]
)


@dataclass(frozen=True)
class DataFetchOptions:
    """Options and arguments of ``hvdtrain data-fetch``."""

    name: str = argument(
        "dataset, see the list below", str, [d.name for d in DATA_SETS], metavar="NAME"
    )
    to: Path = option(REQUIRED, "output directory", Path, metavar="DIR")
    mirror: str = option(
        "",
        "base address of the files, as URL/FILE (default: their public addresses)",
        metavar="URL",
    )
    dry_run: bool = switch("print the addresses and the required disk space without downloading")
    json: bool = json_switch()


def run_verb(options: DataFetchOptions) -> Report:
    """Download the missing files of the dataset.

    Raises:
        UsageError: the directory is unsuitable.
        HvdtrainError: a file cannot be downloaded; the next run continues.
    """
    data_set = next(candidate for candidate in DATA_SETS if candidate.name == options.name)
    folder = options.to
    if options.mirror and not re.fullmatch(r"https?://[!-~]+", options.mirror):
        raise UsageError(f"--mirror {options.mirror}: must be an address, e.g. http://host/folder")
    fetch = Fetch(data_set, folder, options.mirror)
    try:
        missing = fetch.missing()
    except OSError as error:
        raise UsageError(f"--to {folder}: {error.strerror}") from error
    files = [{"url": fetch.address(r), "bytes": r.size, "md5": r.md5} for r in missing]
    data = {"ok": True, "name": data_set.name, "folder": str(folder), "files": files}
    if options.dry_run:
        lines = [f"{fetch.address(remote)}  {size(remote.size)}" for remote in missing]
        lines += [f"needs up to {size(fetch.room())} in {folder}" if missing else "nothing to do"]
        return Report("\n".join(lines), {**data, "room": fetch.room()})
    if not fetch.is_done:
        fetch.run()
    lines = [f"{data_set.name} is in {folder}" + ("" if missing else " already")]
    trainer, *more = data_set.trainer.split()
    train = ["python", "-m", f"hvdtrain.{trainer}", "--data", str(folder), *more]
    lines.append(f"train on it: hvdtrain launch -n 2 -- {shlex.join(train)}")
    return Report("\n".join(lines), data)
