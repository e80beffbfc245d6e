"""The trainers as users run them: real data, signals, summary, files."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hvdtrain.steps.checkpoint import newest_name
from hvdtrain.steps.summary import Saves, Summary
from hvdtrain.system.runtime.outlive import STOP_SIGNALS
from tests.conftest import BIN, LONG, ROOT, ended, run
from tests.parallel import resident
from tests.parallel.conftest import (
    FRAMEWORKS,
    SOME,
    Start,
    assert_bit_equal,
    assert_gone,
    assert_one_line,
    completed,
    ranks_of,
    send,
    train,
    until,
)

KEYS = list(Summary().to_json())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("number", [1, 2, 3] if LONG else [2])
def test_mnist(framework: str, number: int, mnist: Path, tmp_path: Path) -> None:
    """Short in CI: the small net for one epoch. HVDTRAIN_LONG=1: six of the tutorial's to 99 %."""
    options = ("--epochs=6",) if LONG else ("--epochs=1", "--model=small")
    line = (f"--framework={framework}", f"--data={mnist}", *options)
    done = train(number, tmp_path, "mnist", *line, timeout=1800)
    assert list(done.summary) == list(Summary(saves=Saves()).to_json())
    assert done.summary["eval_samples"] == 10_000
    assert done.summary["eval_accuracy"] >= (0.99 if LONG else 0.95)
    assert done.summary["samples_trained"] == 60_000 * (6 if LONG else 1)
    assert done.summary["stopped"] == "finished"
    assert done.summary["world_size"] == number


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resnet_on_real_images(
    framework: str, few_images: Path, imagenette: Path, tmp_path: Path
) -> None:
    trained, evaluated = (400, 120) if LONG else (40, 10)
    line = (
        *(f"--framework={framework}", f"--data={imagenette if LONG else few_images}"),
        *("--model=resnet18", f"--image-size={128 if LONG else 64}", "--epochs=1"),
        f"--batch-size={trained // 20}",
    )
    first = train(2, tmp_path, "resnet", *line, "--num-steps=4", "--workers=0", timeout=400)
    assert first.summary["stopped"] == "steps"
    done = train(2, tmp_path, "resnet", *line, "--resume=must", timeout=400)
    assert done.summary["samples_trained"] == trained
    assert done.summary["eval_samples"] == evaluated
    assert done.summary["epochs_completed"] == 1


@pytest.mark.parametrize(
    ("framework", "options", "first"),
    [
        (
            "pytorch",
            (),
            "no --data: measuring speed on random images, {}; use --data DIR to train",
        ),
        (
            "tensorflow",
            ("--synthetic", "--epochs=1"),
            "--synthetic: measuring speed on random images, {}; nothing is learned",
        ),
    ],
)
def test_resnet_without_data_looks_like_the_benchmark_that_it_is(
    framework: str, options: tuple[str, ...], first: str, tmp_path: Path
) -> None:
    line = (f"--framework={framework}", "--model=resnet18", "--image-size=32", "--batch-size=2")
    files = (f"--summary={tmp_path / 's.json'}", f"--metrics={tmp_path / 'm.jsonl'}")
    program = ("-m", "hvdtrain.resnet", *line, *options, *files)
    outcome = completed(2, *program, "--num-steps=5")
    lines = outcome.out.splitlines()
    assert lines[0] == first.format("5 updates")
    assert lines[2] == "global batch 4"
    for word in ("1,281,167", "epoch", "loss", "learning rate", "accuracy"):
        assert word not in outcome.out, outcome.out
    assert "20 random images in 5 updates" in outcome.out
    summary = json.loads((tmp_path / "s.json").read_text())
    assert list(summary) == KEYS
    assert (summary["training_samples"], summary["steps_completed"]) == (1_281_167, 5)
    assert summary["train_loss"] > 0 and summary["eval_samples"] is None
    records = [json.loads(one) for one in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert all(one["loss"] > 0 and one["learning_rate"] > 0 for one in records)


def test_when_to_evaluate_and_what_a_benchmark_leaves_out(tmp_path: Path) -> None:
    options = ("--model=small", "--global-batch-size=500", "--epochs=4", "--log-every=2")
    course = tmp_path / "metrics.jsonl"
    train(2, tmp_path, "mnist", *options, f"--metrics={course}", "--evaluate-epochs", "2", "3")
    records = [json.loads(line) for line in course.read_text().splitlines()]
    epochs = [one for one in records if "eval_loss" in one]
    assert [one["eval_samples"] for one in epochs] == [None, 297, 297, 297]  # and at the end
    steps = {one["step"]: one for one in records if "learning_rate" in one}
    assert list(steps) == [2, 4, 6, 8, 10, 12]
    # Three steps an epoch: ``loss`` begins anew with each, ``step_loss`` is that of two steps.
    assert steps[2]["step_loss"] == pytest.approx(steps[2]["loss"])
    third = 3 * epochs[0]["loss"] - 2 * steps[2]["loss"]
    assert 2 * steps[4]["step_loss"] == pytest.approx(third + steps[4]["loss"])
    assert 2 * steps[6]["step_loss"] == pytest.approx(3 * steps[6]["loss"] - steps[4]["loss"])
    short = ("--benchmark=training", "--num-steps=5")
    done = train(2, tmp_path / "training", "mnist", *options, *short).summary
    assert (done["steps_completed"], done["eval_samples"]) == (5, None)
    line = ("-m", "hvdtrain.mnist", *options, "--benchmark=inference", "--quiet")
    completed(2, *line, f"--summary={tmp_path / 'inference.json'}")
    done = json.loads((tmp_path / "inference.json").read_text())
    assert (done["steps_completed"], done["eval_samples"], done["checkpoint"]) == (0, 297, None)
    assert done["images_per_second_mean"] > 0


@pytest.mark.parametrize("framework", SOME)
def test_a_signal_saves_and_the_same_command_goes_on(
    framework: str, tmp_path: Path, started: Start
) -> None:
    options = (f"--framework={framework}", "--model=small", "--epochs=20")
    uncut = train(2, tmp_path / "uncut", "mnist", *options)
    cut = tmp_path / "cut"
    files = (f"--summary={cut / 'summary.json'}", f"--checkpoint-dir={cut / 'checkpoints'}")
    mpirun = (str(BIN / "mpirun"), "-n", "2", sys.executable, "-m", "hvdtrain.mnist")
    process = started(*mpirun, *options, "--quiet", *files)
    # Before the first step nothing is there to save, and a signal just ends the ranks.
    until(lambda: list(cut.glob("checkpoints/step-*")), process)
    # Not to mpirun, which gives its ranks half a second to write all of this.
    send(signal.SIGTERM, ranks_of(process))
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    summary = json.loads((cut / "summary.json").read_text())
    assert summary["stopped"] == "preempted"
    assert 0 < summary["steps_completed"] < uncut.summary["steps_completed"]
    done = f"stopped after step {summary['steps_completed']}, saved {summary['checkpoint']}"
    assert f"hvdtrain: SIGTERM: {done}: run the same command again to continue\n" in said
    assert_bit_equal(uncut, train(2, cut, "mnist", *options))


def test_a_signal_to_one_process_alone_gives_75_and_nobody_uses_its_directory(
    tmp_path: Path, started: Start
) -> None:
    (tmp_path / ".partial-step-000000007").mkdir()  # of a save that was killed
    line = ["-m", "hvdtrain.mnist", "--model=small", "--quiet", "--epochs=400"]
    line.append(f"--checkpoint-dir={tmp_path}")
    process = started(sys.executable, *line)
    until(lambda: list(tmp_path.glob("step-*")), process)
    second = resident.ranks(2, *line)
    process.terminate()
    ended(process, 75)
    words = f"process {process.pid} of "
    assert_one_line(second, 2, f"--checkpoint-dir {tmp_path} is in use", words)
    assert not list(tmp_path.glob(".*"))


def test_a_signal_to_all_processes_of_a_job_saves_although_workers_read_its_data(
    few_images: Path, tmp_path: Path, started: Start
) -> None:
    """As PBS and a terminal send it: a rank needs its worker processes until it has saved."""
    line = ["-m", "hvdtrain.resnet", "--model=resnet18", "--image-size=32", "--batch-size=4"]
    line += [f"--data={few_images}", "--workers=1", "--epochs=400", "--checkpoint-every=5"]
    process = started(sys.executable, *line, "--quiet", f"--checkpoint-dir={tmp_path}")
    until(lambda: newest_name(tmp_path), process)
    workers = psutil.Process(process.pid).children(recursive=True)
    for number in STOP_SIGNALS:
        send(number, workers)
    later = (
        f"step-{int((newest_name(tmp_path) or '')[5:]) + 10:09}"  # more than they have read ahead
    )
    until(lambda: (tmp_path / later).exists(), process)
    process.terminate()
    ended(process, 75)
    assert_gone(workers)


def test_alone_without_horovod_says_so(tmp_path: Path) -> None:
    """A package that hides Horovod stands in for an environment without it."""
    (tmp_path / "horovod.py").write_text("raise ImportError('hidden by a test')\n")
    line = [sys.executable, "-m", "hvdtrain.mnist", "--model=small", "--num-steps=2"]
    path = f"{tmp_path}:{ROOT}"
    alone = run(line, PYTHONPATH=path, code=0)
    assert "Horovod is not installed" in alone.err
    assert "over single" in alone.out
    together = run([str(BIN / "mpirun"), "-n", "2", *line], PYTHONPATH=path)
    assert_one_line(together, 2, "hvdtrain install-horovod")
