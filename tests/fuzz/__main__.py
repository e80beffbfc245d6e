"""``python -m tests.fuzz TARGET... --seconds N``: search with a limit of time in a process each."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import TARGETS

STARTING = 300  # seconds for imports, and for the last input


def main() -> int:
    """Search in each target; return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="+", metavar="TARGET", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--out", type=Path, help="folder of the inputs found (a new one)")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="fuzz-found-"))
    coverage = importlib.util.find_spec("atheris") is not None
    engine = "atheris" if coverage else "mutations without coverage (pip install atheris)"
    print(f"{engine}, --seed {arguments.seed}", flush=True)
    failed = False
    for name in TARGETS if "all" in arguments.targets else arguments.targets:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-B", "-m", "tests.fuzz.search"]
        with tempfile.TemporaryDirectory() as scratch, (folder / "log").open("wb") as log:
            try:
                subprocess.run(
                    [*command, name, str(arguments.seconds), str(arguments.seed), str(folder)],
                    env={**os.environ, "TMPDIR": scratch},
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    timeout=arguments.seconds + STARTING,
                    check=True,
                )
            except subprocess.SubprocessError as error:  # the other targets still have their turn
                failed = True
                print(f"{name}: {error}; see {folder}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
