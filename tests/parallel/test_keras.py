"""hvdtrain.keras: a plain ``model.fit`` over the ranks is that of one process."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hvdtrain.system.runtime.walltime import ENDS
from tests.conftest import BIN, LONG, ROOT, ended
from tests.parallel import resident
from tests.parallel.conftest import SCRIPTS, Start, ranks_of, run_script, send, until

MPIRUN = (str(BIN / "mpirun"), "--oversubscribe", "-n", "2")
# Ways to train (functions of the script): all of them over two ranks, those that depend on the
# number of ranks over three, too; with HVDTRAIN_LONG=1 all over each number.
WAYS = {
    1: "plain,rates,stand_ins",
    2: "all",
    3: "plain,datasets,own_loop,resumed,stand_ins,stops",
    **({5: "all"} if LONG else {}),
}


@pytest.mark.parametrize("number", WAYS)
def test_fit_is_that_of_one_process(number: int, tmp_path: Path) -> None:
    """Uneven tails, clipping, accumulation, several steps a call, callbacks, resume, and misuse."""
    words = (str(tmp_path), "all" if LONG else WAYS[number])
    run_script(number, "keras_fit.py", *words, folder=tmp_path, framework="tensorflow")


@pytest.mark.parametrize("number", [1, 2, 3] if LONG else [3])
def test_losses_that_are_no_means_over_samples(number: int, tmp_path: Path) -> None:
    """Masks, ignored classes, weights and sums, also of several outputs, and in a validation."""
    run_script(number, "keras_losses.py", str(tmp_path), folder=tmp_path, framework="tensorflow")


def test_horovods_own_wrapper_trains_two_models(tmp_path: Path) -> None:
    """With ``horovod.tensorflow.keras`` the weights go apart: why this package is there."""
    run_script(2, "keras_horovod.py", str(tmp_path), folder=tmp_path, framework="tensorflow")
    weights = [(tmp_path / f"{rank}-of-2").read_text() for rank in range(2)]
    assert weights[0] != weights[1]


def test_the_homework_with_fit(tmp_path: Path) -> None:
    script = str(ROOT / "homework" / "tensorflow2_keras_mnist_hvd.py")
    options = ["--epochs=2", "--lr=0.02", "--warmup-epochs=1", f"--out={tmp_path}"]
    outcome = resident.ranks(2, script, *options, framework="tensorflow", code=0)
    assert [line.split(":")[0] for line in outcome.out.splitlines()] == ["epoch 1", "epoch 2"]
    with (tmp_path / "metrics_2.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    assert (tmp_path / "model.weights.h5").is_file()


TO_STOP = ("keras_preempted.py", "--epochs=60")  # 7 batches each
WALLTIME = 60.0 if LONG else 40.0  # seconds; it stops at 30 at most, as nothing is known of saves


@pytest.fixture(scope="session")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two ranks that nobody stops."""
    folder = tmp_path_factory.mktemp("uncut")
    run_script(2, *TO_STOP, str(folder), folder=folder, framework="tensorflow")
    return folder


def stop(process: subprocess.Popen[str], folder: Path, cause: str, first: int = 0) -> str:
    """Stop two ranks that wait in ``folder``, from rank ``first`` on; return when they did."""
    if cause.startswith("SIG"):  # not to mpirun, which gives its ranks half a second
        until(lambda: len(list(folder.glob("ready-*"))) == 2, process)
        send(signal.Signals[cause], ranks_of(process)[first:])
        (folder / "go").touch()
    said = ended(process, 75)
    (line,) = [line for line in said.splitlines() if line.startswith("hvdtrain:")]
    reason, done, path, remedy = re.split(": stopped |, saved |: ", line.removeprefix("hvdtrain: "))
    assert (reason, remedy) == (
        cause + " on rank 1" * first,
        "run the same command again to continue",
    )
    assert Path(path).is_dir()
    assert not list(folder.glob("*-of-2"))
    return done


@pytest.mark.parametrize("number", range(5 if LONG else 1))
@pytest.mark.parametrize("cause", ["SIGTERM", "SIGUSR1", "the walltime is near"])
def test_a_fit_that_is_stopped_continues_as_if_it_were_not(
    cause: str, number: int, uncut: Path, tmp_path: Path, started: Start
) -> None:
    """Saved after the next batch, with exit code 75; then model and optimizer are bit-equal."""
    script, *options = TO_STOP
    line = [*MPIRUN, *resident.command(str(SCRIPTS / script), *options, framework="tensorflow")]
    signalled = cause.startswith("SIG")
    ends = time.time() + (3600 if signalled else WALLTIME)
    line += [f"--wait={number}" if signalled else "--pause=0.15", str(tmp_path)]
    process = started("env", f"{ENDS}={ends}", *line)
    done = stop(process, tmp_path, cause, first=number % 2 if signalled else 0)
    if signalled:  # the batch after the one that waits sends it
        assert done == f"in epoch 2 after batch {number + 2}"
    run_script(2, *TO_STOP, str(tmp_path), folder=tmp_path, framework="tensorflow")
    for rank in ("0-of-2", "1-of-2"):
        assert (tmp_path / rank).read_bytes() == (uncut / rank).read_bytes()


@pytest.mark.parametrize("number", [1, 3] if LONG else [3])
def test_a_fit_that_is_stopped_continues_on_another_number_of_ranks(
    number: int, tmp_path: Path, started: Start
) -> None:
    """Within the epoch, so that each sample is trained on once: the script compares the weights."""
    script, *words = (str(SCRIPTS / "keras_preempted.py"), "--epochs=4", "--exact", str(tmp_path))
    line = resident.command(script, *words, "--wait=1", framework="tensorflow")
    assert stop(started(*MPIRUN, *line), tmp_path, "SIGTERM") == "in epoch 2 after batch 3"
    run_script(number, "keras_preempted.py", *words, folder=tmp_path, framework="tensorflow")
