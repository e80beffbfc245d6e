"""A launch that went wrong: found on every rank, with cause and remedy, exit code 2, no hang."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import BIN, Outcome, run

LINE = (sys.executable, "-m", "hvdtrain.mnist", "--num-steps=2", "--quiet")
TRAIN = """
import sys
from hvdtrain import mnist
from hvdtrain.launch import ending
sys.argv += ["--num-steps=2", "--quiet"]
ending.run(mnist.main)
"""


def assert_refused(outcome: Outcome, *words: str, lines: int = 1) -> None:
    assert outcome.code == 2, outcome.err[-2000:]
    assert len(outcome.said) == lines, outcome.err[-2000:]
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.said[0]


def test_worlds_of_one_under_another_mpirun(mpich: Path) -> None:
    outcome = run([str(mpich / "bin" / "mpirun"), "-n", "2", *LINE])
    assert_refused(
        outcome,
        "mpiexec (Hydra) started 2 processes, but Horovod sees a world of 1",
        f"{mpich / 'bin' / 'hydra_pmi_proxy'}",  # what started it
        "libmpi.so",  # what Horovod has
        "hvdtrain install-horovod --rebuild",
    )


def test_two_mpi_libraries_in_one_process(mpich: Path, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2\n" + TRAIN)
    library = mpich / "lib" / "libmpi.so.12"
    outcome = run(
        [str(mpich / "bin" / "mpirun"), "-n", "2", sys.executable, str(script)],
        MPI4PY_LIBMPI=str(library),
    )
    assert outcome.code == 2, outcome.err[-2000:]
    assert "two MPI libraries are loaded in this process" in outcome.said[0]
    assert (
        f"MPICH {mpich.parent.name.split('-')[1].removesuffix('.data')}, {library}"
        in (outcome.said[0])
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            ("srun started 2 processes", "world of 1", "srun --mpi=pmix"),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
            ("RANK and WORLD_SIZE tell of 4 processes", "world of 1", "unset RANK and WORLD_SIZE"),
        ),
    ],
)
def test_worlds_of_one_that_only_variables_connect(
    variables: dict[str, str], words: tuple[str, ...]
) -> None:
    assert_refused(run(list(LINE), **variables), *words)


def contexts(*commands: tuple[str, ...]) -> Outcome:
    """Run each command on one rank of one job: mpirun's application contexts."""
    words = [str(BIN / "mpirun"), "--oversubscribe"]
    for number, command in enumerate(commands):
        words += [":"] * (number > 0) + ["-n", "1", *command]
    return run(words)


def test_a_world_whose_launcher_was_hidden() -> None:
    hidden = ("env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE", *LINE)
    outcome = contexts(hidden, hidden)
    assert outcome.code == 2
    assert "the command line started 1 process, but Horovod sees a world of 2" in outcome.said[0]
    assert "env -i" in outcome.said[0]


def test_different_options_are_named() -> None:
    outcome = contexts(LINE, (*LINE, "--batch-size=32"))
    assert_refused(outcome, "--batch-size differs: not given on", "(rank 0), 32 on", "(rank 1)")


def test_different_frameworks_are_named() -> None:
    outcome = contexts(LINE, (*LINE, "--framework=tensorflow"))
    assert_refused(outcome, "--framework differs: pytorch on", "tensorflow on", "(rank 1)")


def write_mnist(folder: Path, samples: int) -> Path:
    """A set of ``samples`` grey images in MNIST's form."""
    folder.mkdir()
    for prefix in ("train", "t10k"):
        images = np.zeros((samples, 28, 28), np.uint8)
        labels = np.arange(samples, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


def test_a_rank_without_its_data_is_named_with_host_and_path(tmp_path: Path) -> None:
    data, gone = write_mnist(tmp_path / "data", 64), tmp_path / "gone"
    outcome = contexts((*LINE, f"--data={data}"), (*LINE, f"--data={gone}"))
    assert_refused(outcome, "rank 1 on ", f"--data {gone}: no such directory")


def test_a_rank_with_other_data_is_named(tmp_path: Path) -> None:
    data, less = write_mnist(tmp_path / "data", 64), write_mnist(tmp_path / "less", 63)
    outcome = contexts((*LINE, f"--data={data}"), (*LINE, f"--data={less}"))
    assert_refused(outcome, "the number of training samples differs: 64 on", "63 on", "(rank 1)")


def test_different_versions_are_listed(tmp_path: Path) -> None:
    script = tmp_path / "older.py"
    script.write_text("import hvdtrain\nhvdtrain.__version__ = '0.0.9'\n" + TRAIN)
    outcome = contexts(LINE, (sys.executable, str(script)))
    assert_refused(outcome, "do not run the same software: hvdtrain ", "(rank 0), 0.0.9 (code")


def test_a_library_of_horovod_that_does_not_load(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler: apt-get install gcc")
    library = tmp_path / "libmpi.so.40"  # of the right name, with nothing in it
    flags = ["-shared", "-x", "c", "-Wl,-soname,libmpi.so.40", "/dev/null", "-o", str(library)]
    subprocess.run([compiler, *flags], check=True, timeout=60)
    outcome = run(list(LINE), LD_LIBRARY_PATH=str(tmp_path))
    assert_refused(outcome, "Horovod is installed but cannot be loaded", "hvdtrain doctor")
