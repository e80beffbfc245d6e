"""hvdtrain launch with other launchers than this environment's: Open MPI 4, MPICH, Slurm's srun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.conftest import BIN, Outcome, begin, ended, run

LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch"]
LAST_OUTPUT = r"last output from rank (\d) on \S+, at step 1\1: 'step 1\1 of 100'$"
# A rank that prints its launch, and saves for 3 s on a stop request.
RANK = """
import os, signal, sys, time
from hvdtrain.system.runtime.detect import detect
launch = detect(os.environ)
signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(3), os._exit(75)))
print(launch, flush=True)
if sys.argv[1:] == ["hang"]:
    print("step", 10 + launch.rank, "of 100", flush=True)
if sys.argv[1:]:
    time.sleep(300)
"""


@dataclass(frozen=True)
class Stack:
    """An MPI and its environment."""

    launcher: str  # its name in ``hvdtrain.system.runtime.detect``
    environ: dict[str, str]  # its environment variables

    def launch(self, *words: str, code: int = 0) -> Outcome:
        """Run `hvdtrain launch` with it first on the PATH."""
        return run([*LAUNCH, *words], **self.environ, code=code)


def first(folder: Path) -> str:
    """Return a PATH with ``folder`` first."""
    return os.pathsep.join([str(folder), str(BIN), os.environ["PATH"]])


@pytest.fixture(scope="session")
def openmpi4(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Debian 12's Open MPI, unpacked into a temporary folder: nothing is installed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("Open MPI 4 comes from Debian's packages: no apt-get here")
    folder = tmp_path_factory.mktemp("openmpi4")
    install = ["apt-get", "install", "--simulate", "--no-install-recommends", "openmpi-bin"]
    if run(install).code and os.geteuid() == 0:
        run(["apt-get", "update", "-qq"])  # a fresh container has no lists
    planned = run(install)
    packages = re.findall(r"^Inst (\S+)", planned.out, re.MULTILINE)
    fetched = run(["apt-get", "download", "-qq", *packages], cwd=folder) if packages else planned
    if fetched.code:
        pytest.skip(f"Open MPI 4 cannot be fetched: {fetched.err.strip()[-200:]}")
    for package in folder.glob("*.deb"):
        run(["dpkg", "--extract", str(package), str(folder)], code=0)
    root = folder if packages else Path("/")  # installed here already
    files = sorted(root.glob("usr/lib/*/libmpi.so.40"))
    if not files or not list(files[0].parent.glob("libopen-rte.so.40")):
        pytest.skip("the openmpi-bin of this system is no Open MPI 4")
    library, programs = files[0], folder / "first"
    programs.mkdir()
    for name in ("mpirun", "mpiexec"):
        (programs / name).symlink_to(root / "usr/bin/orterun")
    (programs / "orted").symlink_to(root / "usr/bin/orted")
    libraries = [library.parent, root / "lib" / library.parent.name]
    libraries += [file.parent for file in library.parent.glob("libpsm*/*.so.1")]
    return Stack(
        "mpirun (Open MPI)",
        {
            "PATH": first(programs),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            "OPAL_PREFIX": str(root / "usr"),
            "PMIX_INSTALL_PREFIX": str(library.parent / "pmix2"),
            "MPI4PY_LIBMPI": str(library),
        },
    )


@pytest.fixture(scope="session")
def hydra(mpich: Path) -> Stack:
    """MPICH from its wheel."""
    library = mpich / "lib" / "libmpi.so.12"
    variables = {"PATH": first(mpich / "bin"), "MPI4PY_LIBMPI": str(library)}
    return Stack("mpiexec (Hydra)", variables)


@pytest.fixture(params=["openmpi4", "hydra"])
def stack(request: pytest.FixtureRequest) -> Stack:
    """Each of the other launchers."""
    stack: Stack = request.getfixturevalue(request.param)
    return stack


def launches(launcher: str, size: int) -> list[str]:
    """Return the sorted output of the ranks on one host."""
    return [
        f"[{rank}] LaunchInfo(launcher='{launcher}', rank={rank}, size={size}, local_rank={rank}, "
        f"local_size={size})"
        for rank in range(size)
    ]


def test_each_rank_detects_its_launch(stack: Stack) -> None:
    for size in (2, 3):
        outcome = stack.launch("-n", str(size), "--tag", "--", sys.executable, "-c", RANK)
        seen = sorted(line for line in outcome.out.splitlines() if "LaunchInfo(" in line)
        assert seen == launches(stack.launcher, size)


def test_pi_has_the_same_digits_as_with_open_mpi_5(stack: Stack) -> None:
    words = ("-n", "2", "--", sys.executable, "-m", "hvdtrain.pi", "--samples=1e6", "--json")
    outcome, default = stack.launch(*words), run([*LAUNCH, *words])
    assert default.code == 0, default.err
    result, expected = (json.loads(text.out.splitlines()[-1]) for text in (outcome, default))
    assert (result["ranks"], result["pi"]) == (2, expected["pi"])


def test_silence_reports_the_last_output(stack: Stack) -> None:
    line = ("-n", "2", "--timeout", "8", "--", sys.executable, "-c", RANK, "hang")
    (message,) = stack.launch(*line, code=124).said
    assert re.search(LAST_OUTPUT, message)


def test_term_is_forwarded_and_waited_for(stack: Stack) -> None:
    line = [*LAUNCH, "-n", "2", "--tag", "--", sys.executable, "-c", RANK, "stop"]
    process = begin(line, stack.environ)
    assert process.stdout is not None
    seen: list[str] = []
    while len(seen) < 2:  # until both handle signals
        line = process.stdout.readline()
        assert line, "it ended before"
        seen += [line] if "LaunchInfo(" in line else []
    process.send_signal(signal.SIGTERM)
    ended(process, 75)


def test_srun_where_no_mpi_is_on_the_path(cluster: slurm.Cluster, tmp_path: Path) -> None:
    (tmp_path / "srun").symlink_to(shutil.which("srun") or "srun")
    # Debian's srun lacks the library for --mpi=pmix, so the ranks get only their numbers.
    bare = {"PATH": str(tmp_path), "SLURM_MPI_TYPE": "none"}
    allocation = (shutil.which("salloc") or "salloc", "--quiet", "--ntasks=3")

    def launch(*words: str) -> Outcome:
        return cluster.command(*allocation, *LAUNCH, *words, cwd=tmp_path, **bare)

    program = ("--", sys.executable, "-c", RANK)
    outcome = launch("-n", "3", "--tag", *program)
    assert outcome.code == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == launches("srun", 3)
    assert f"{tmp_path}/srun --ntasks=3 --nodes=1 --nodelist=" in outcome.err
    assert launch("-n", "2", "--", sys.executable, "-c", "exit(75)").code == 75
    hung = launch("-n", "2", "--timeout", "8", *program, "hang")
    assert hung.code == 124, hung.err
    (message,) = hung.said
    assert re.search(LAST_OUTPUT, message)
    too_many = launch("-n", "4", *program)
    assert too_many.code == 2
    assert "-n 4 is more than the 3 slots of Slurm" in too_many.said[0]
