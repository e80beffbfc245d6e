"""A launch that went wrong: found on every rank, with cause and remedy, exit code 2, no hang."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import BIN, LONG, ROOT, Outcome, ranks, run
from tests.parallel import resident
from tests.parallel.conftest import (
    FRAMEWORKS,
    SCRIPTS,
    SOME,
    WAYS,
    Training,
    assert_bit_equal,
    assert_close,
    assert_one_line,
    completed,
    empty_library,
)
from tests.unit.workloads.mnist.test_data import idx

LINE = (sys.executable, "-m", "hvdtrain.mnist", "--num-steps=2", "--quiet")
TRAIN = """
import sys
from hvdtrain import mnist
from hvdtrain.system.runtime.exit import run_and_exit
sys.argv += ["--num-steps=2", "--quiet"]
run_and_exit(mnist.main)
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
            ("RANK and WORLD_SIZE announce 4 processes", "world of 1", "unset RANK and WORLD_SIZE"),
        ),
    ],
)
def test_worlds_of_one_that_only_variables_connect(
    variables: dict[str, str], words: tuple[str, ...]
) -> None:
    assert_refused(run(list(LINE), **variables), *words)


def contexts(*commands: Sequence[str], cwd: Path = ROOT) -> Outcome:
    """Run each command on one rank of one job: mpirun's application contexts."""
    words = [str(BIN / "mpirun"), "--oversubscribe"]
    for number, command in enumerate(commands):
        words += [":"] * (number > 0) + ["-n", "1", *command]
    return run(words, cwd=cwd)


def test_a_world_whose_launcher_was_hidden() -> None:
    hidden = ("env", "-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE", *LINE)
    outcome = contexts(hidden, hidden)
    assert outcome.code == 2
    assert "the command line started 1 process, but Horovod sees a world of 2" in outcome.said[0]
    assert "env -i" in outcome.said[0]


def write_mnist(folder: Path, samples: int, last: int = 3) -> Path:
    """A set of grey images in MNIST's form; the ``last`` label to train on."""
    folder.mkdir()
    for prefix in ("train", "t10k"):
        images = np.zeros((samples, 28, 28), np.uint8)
        labels = np.arange(samples, dtype=np.uint8) % 10
        labels[-1] = last
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


MNIST = "-m hvdtrain.mnist --num-steps=2 --quiet"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (f"{MNIST} --batch-size=32", ("--batch-size differs: not given on", "(rank 0), 32 on")),
        (f"{MNIST} --framework=tensorflow", ("--framework differs: pytorch on", "tensorflow on")),
        ("older.py", ("do not run the same software: hvdtrain ", "(rank 0), 0.0.9 (code")),
        (f"{MNIST} --data=gone", ("rank 1 on ", "--data gone: no such directory")),
        (f"{MNIST} --data=less", ("the number of training samples differs: 64 on", "63 on")),
        (f"{MNIST} --data=other", ("the training data (a digest", "differs", "(rank 0)")),
    ],
)
def test_a_rank_that_differs_is_named(second: str, words: tuple[str, ...], tmp_path: Path) -> None:
    older = f"import hvdtrain\nhvdtrain.__version__ = '0.0.9'\n{TRAIN}"
    (tmp_path / "older.py").write_text(older)
    write_mnist(tmp_path / "data", 64)
    write_mnist(tmp_path / "less", 63)
    write_mnist(tmp_path / "other", 64, last=4)
    first = f"{MNIST} --data=data" if "--data" in second else MNIST
    outcome = contexts(*(resident.command(*line.split()) for line in (first, second)), cwd=tmp_path)
    assert_refused(outcome, *words, *["(rank 1)"] * ("gone" not in second))


def test_a_training_resumes_with_its_own_data_only_wherever_that_is(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data", 64)
    write_mnist(tmp_path / "other", 64, last=4)
    line = ("-m", "hvdtrain.mnist", "--model=small", f"--checkpoint-dir={tmp_path / 'saved'}")
    completed(1, *line, f"--data={tmp_path / 'data'}", "--num-steps=1")
    (tmp_path / "data").rename(tmp_path / "moved")
    completed(1, *line, f"--data={tmp_path / 'moved'}", "--num-steps=2", "--resume=must")
    outcome = resident.ranks(2, *line, f"--data={tmp_path / 'other'}", "--num-steps=3", "--quiet")
    assert_refused(outcome, "another training (training data digest '", "' here)", "data of that")
    completed(1, *line, f"--data={tmp_path / 'other'}", "--evaluate-only")


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_a_checkpoint_directory_that_a_rank_does_not_share(strategy: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a rank a file system of its own")
    line = (*LINE, f"--strategy={strategy}", f"--checkpoint-dir={tmp_path}")
    hides = 'mount -t tmpfs none "$0" && exec "$@"'
    outcome = contexts(line, ("unshare", "-m", "sh", "-c", hides, str(tmp_path), *line))
    assert_refused(
        outcome, "rank 1 on ", f"{tmp_path} is another directory than rank 0's", strategy
    )
    assert not list(tmp_path.iterdir())


def test_a_library_of_horovod_that_does_not_load(tmp_path: Path) -> None:
    empty_library(tmp_path / "libmpi.so.40")
    outcome = run(list(LINE), LD_LIBRARY_PATH=str(tmp_path))
    assert_refused(outcome, "Horovod is installed but cannot be loaded", "hvdtrain doctor")


FAULTY = str(SCRIPTS / "faulty_trainer.py")
NAN = (
    *("--model=small", "--epochs=3", "--global-batch-size=1499", "--lr=0.01", "--dropout=0"),
    *("--precision=fp64", "--lr-scaling=none"),
)


def train_on_a_bad_sample(
    number: int, folder: Path, *options: str, bad: str = "-1", code: int = 0
) -> Training:
    """Two updates an epoch, of 1,499 samples and of one; in the first epoch that one is bad."""
    outcome = (ranks if code else resident.ranks)(
        number,
        *(FAULTY, f"bad_samples:{bad}", *NAN, *options, "--quiet"),
        f"--summary={folder / 'summary.json'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
    )
    assert outcome.code == code, outcome.err[-3000:]
    return Training(outcome, folder)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_that_are_not_finite(framework: str, tmp_path: Path) -> None:
    """Rank 1 has no sample in the first bad update, and takes part in leaving it out."""
    line, folder = f"--framework={framework}", tmp_path / "two"
    stopped = train_on_a_bad_sample(2, folder, line, code=1)
    assert len(stopped.outcome.said) == 1
    # TensorFlow's ReLU makes a 0 of what is not a number, so there the loss is one.
    own = "its loss is nan" if framework == "pytorch" else "its gradient of small/conv1/kernel"
    for words in ("step 2 (epoch 1)", "first", f"(rank 0): {own}", "--on-nan"):
        assert words in stopped.outcome.said[0]
    assert "Traceback" not in stopped.outcome.err
    assert stopped.summary["stopped"] == "diverged"
    assert stopped.summary["steps_completed"] == 1
    assert stopped.summary["parameter_norm"] > 0
    assert stopped.newest.name == "step-000000001"

    again = train_on_a_bad_sample(2, folder, line, "--on-nan=skip")
    assert again.summary["stopped"] == "finished"
    assert again.summary["steps_skipped"] == 3  # one per epoch
    assert again.summary["steps_completed"] == 3
    assert again.summary["samples_trained"] == 1499 + 1 + 1

    if framework in SOME:
        alone = train_on_a_bad_sample(1, tmp_path / "one", line, "--on-nan=skip")
        assert alone.summary["steps_skipped"] == 3
        assert_close(alone, again, 1e-9)


NORMALIZED = """
import numpy as np
import torch
from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

def task(options):
    torch.manual_seed(1)
    x = np.random.default_rng(0).standard_normal((40, 3))
    x[-1] = np.nan
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    data = InMemory(x, np.arange(40) % 2, options.device)
    return TorchTask(model, options, data, None)
"""


def test_a_bad_update_leaves_nothing_in_the_state(tmp_path: Path) -> None:
    """Statistics of BatchNorm, and the counts of batches and samples, are as before it."""
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    line = ("-m", "hvdtrain.train", f"{tmp_path / 'normalized.py'}", "--precision=fp64")
    line += ("--epochs=1", "--global-batch-size=4", "--lr=0.1", "--seed=2", "--quiet")
    for mode, code, every in (("stop", 1, 1000), ("skip", 0, 1)):
        folder = tmp_path / mode
        files = (f"--summary={folder}.json", f"--checkpoint-dir={folder}")
        saves = ("--keep=99", f"--checkpoint-every={every}")
        assert ranks(2, *line, f"--on-nan={mode}", *saves, *files).code == code
    stopped = json.loads((tmp_path / "stop.json").read_text())
    assert stopped["stopped"] == "diverged"
    last = f"step-{stopped['steps_completed']:09}"
    assert (tmp_path / "stop" / last).is_dir()
    assert (tmp_path / "skip" / f"step-{9:09}").is_dir()  # of ten updates one is skipped
    for file in ("model", "training"):
        one, two = (
            load_file(tmp_path / mode / last / f"{file}.safetensors") for mode in ("skip", "stop")
        )
        assert one.keys() == two.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, two[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_scaler_skips_updates_and_its_scale_is_resumed(
    framework: str, tmp_path: Path
) -> None:
    """In each epoch one update of two has a loss that is not finite, on one rank."""
    line, bad = f"--framework={framework}", "-1,scaled"
    uncut = train_on_a_bad_sample(2, tmp_path / "uncut", line, bad=bad)
    assert uncut.summary["steps_completed"] == 6
    assert uncut.summary["train_loss"] > 0
    train_on_a_bad_sample(2, tmp_path / "cut", line, "--num-steps=4", bad=bad)
    resumed = train_on_a_bad_sample(2, tmp_path / "cut", line, bad=bad)
    assert_bit_equal(uncut, resumed)
    first, second = (
        json.loads((one.newest / "state.json").read_text()) for one in (uncut, resumed)
    )
    initial = 2**15 if framework == "tensorflow" else 2**16
    assert first["loss_scale"] == second["loss_scale"] == {"scale": initial / 8, "updates": 1}


def test_a_loss_scale_that_falls_ever_further_ends_the_training(tmp_path: Path) -> None:
    stopped = train_on_a_bad_sample(2, tmp_path, *MANY_STEPS, bad="0:1500,scaled", code=1)
    assert_one_line(stopped.outcome, 1, "loss scale", "at step 27", "--precision bf16")
    assert stopped.summary["stopped"] == "diverged"
    assert stopped.newest.name == "step-000000027"


MANY_STEPS = ("--global-batch-size=100", "--momentum=0.9")


@pytest.mark.parametrize("place", ["0", "750"] if LONG else ["0"])
def test_an_update_that_is_found_later_not_to_be_made(place: str, tmp_path: Path) -> None:
    """As on a GPU, looked at every 20 steps: the same bits as where each step is looked at."""

    def train(folder: str, fused: str, *options: str, code: int = 0) -> Training:
        line, bad = (*MANY_STEPS, *options), f"{place}::{fused}"
        return train_on_a_bad_sample(2, tmp_path / folder, *line, bad=bad, code=code)

    once = train("at-once", "at-once", "--on-nan=skip")
    later = train("deferred", "deferred", "--on-nan=skip")
    for one in (once, later):
        assert one.summary["steps_skipped"] == 3  # one per epoch
        assert one.summary["steps_completed"] == 3 * 15 - 3
        assert one.summary["samples_trained"] == 3 * 1400
    assert_bit_equal(once, later)
    assert once.summary["train_loss"] == later.summary["train_loss"]

    stopped = train("stopped", "deferred", code=1)
    step = int(place) // 100 + 1
    assert f"step {step} (epoch 1)" in stopped.outcome.said[0]
    assert ": its loss is nan" in stopped.outcome.said[0]
    assert stopped.summary["steps_completed"] == step - 1


def test_updates_that_are_found_later_are_not_left_out_for_ever(tmp_path: Path) -> None:
    line = (*MANY_STEPS, "--on-nan=skip")
    stopped = train_on_a_bad_sample(1, tmp_path, *line, bad="200:1500:deferred", code=1)
    assert "step 3 (epoch 1)" in stopped.outcome.said[0]
    assert "10 updates before it were skipped" in stopped.outcome.said[0]
    assert stopped.summary["steps_skipped"] == 10


@pytest.mark.parametrize("way", [way for way in WAYS if str(way.id).startswith("pytorch")])
def test_a_step_asks_no_tensor_for_a_number(way: tuple[str, ...]) -> None:
    """On a GPU the host would wait for it; FSDP has no fused SGD."""
    line = ("--model=small", "--num-steps=12", "--optimizer=adamw", "--clip-norm=1", "--quiet")
    resident.ranks(2, FAULTY, "waits_for_no_tensor", *line, *way, code=0)


def flip(number: int, rank: int, *options: str) -> Outcome:
    line = ("--model=small", "--num-steps=12", "--quiet", *options)
    return resident.ranks(number, FAULTY, f"flip:{rank}", *line)


# With FSDP no parameter is there twice: there is nothing to compare.
@pytest.mark.parametrize("way", [way for way in WAYS if "fsdp" not in str(way.id)])
def test_one_flipped_bit_is_found_by_the_next_check(way: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "step-000000006"
    outcome = flip(
        *(2, 1, *way, "--check-replicas=4", "--checkpoint-every=6"), f"--checkpoint-dir={tmp_path}"
    )
    assert outcome.code == 1, outcome.err[-3000:]
    name = "small/conv2/kernel" if "tensorflow" in way[0] else "3.weight"
    assert len(outcome.said) == 1, outcome.err
    for words in (
        f"after step 7 the model of {socket.gethostname()} (rank 1) differs from rank 0's, first "
        f"in {name}: ",
        f"it resumes from {saved};",
    ):
        assert words in outcome.said[0]
    assert "Traceback" not in outcome.err
    assert [one.name for one in tmp_path.glob("step-*")] == [saved.name]


def test_one_flipped_bit_on_rank_0_of_3_and_where_nothing_flips() -> None:
    outcome = flip(3, 0, "--check-replicas=8")
    assert outcome.code == 1, outcome.err[-3000:]
    assert "after step 7 the model of" in outcome.said[0]
    assert "(rank 0) differs from the other ranks', first in 3.weight" in outcome.said[0]
    assert flip(3, 3, "--check-replicas=1").code == 0
