"""The study of batch sizes: its commands, its results, and the largest batch that learns."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.scaling import batch_report
from hvdtrain.commands.scaling.batches import LINES, BatchRun, BatchSetting, make_study, read_runs
from hvdtrain.commands.scaling.sweep import ScalingOptions
from hvdtrain.commands.study import engine
from hvdtrain.commands.study.curves import Target
from hvdtrain.commands.study.run import RunOutcome
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output import plots

WORDS = ("python", "-m", "hvdtrain.mnist", "--epochs", "2")
TARGET = Target("accuracy", 0.9)


def options(folder: Path, **more: Any) -> ScalingOptions:
    """Return the options of a study."""
    given: dict[str, Any] = {"batches": (16, 100), "target": TARGET, "repeat": 2, **more}
    return ScalingOptions(out=folder, hosts="localhost:4", **given)


def test_each_run_has_the_batch_of_many_ranks_in_passes_of_one(tmp_path: Path) -> None:
    optimizers = ("sgd", "lamb --lr-scaling sqrt")
    study = make_study(options(tmp_path, optimizers=optimizers, ranks=(3,)), WORDS)
    lines = [shlex.join(study.command(*run).argv) for run in study.missing()]
    assert len(lines) == 8
    # 16 is the batch of the embedded digits; 100 on 3 ranks are 34 each, in 3 passes.
    passes = "--global-batch-size 16 --accumulate-steps 1", "--global-batch-size 100 --accumulate"
    for line, batch in zip(lines, passes * 4, strict=True):
        assert batch in line
        assert "--lr-base-batch 16 --optimizer" in line
    assert "--accumulate-steps 3 --lr-base-batch 16 --optimizer sgd --seed 1" in lines[1]
    assert "--optimizer lamb --lr-scaling sqrt --seed 2" in lines[-1]
    assert "lamb-lr-scaling-sqrt-100-2.json" in lines[-1]


def test_a_base_batch_of_the_command_is_kept(tmp_path: Path) -> None:
    study = make_study(
        options(tmp_path, batches=(512,)), [*WORDS, "--batch-size=128", "--lr-base-batch=64"]
    )
    line = shlex.join(study.command(*study.missing()[0]).argv)
    assert "--accumulate-steps 4" in line
    assert line.count("--lr-base-batch") == 1


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        ({"target": None}, (), "--batches needs the metric to compare, e.g. --target accuracy="),
        ({"ranks": (1, 2)}, (), "--batches: use a single number of --ranks"),
        ({}, ("--seed", "3"), "--seed in the command: each repeat has another one"),
        ({}, ("--num-steps", "30"), "--num-steps in the command: each batch is trained"),
        ({}, ("--global-batch-size=3",), "--global-batch-size in the command: use --batches"),
        ({"optimizers": ("sgd --seed 1",)}, (), "--optimizers 'sgd --seed 1': --seed is not"),
        ({"optimizers": ("sgd '",)}, (), '--optimizers "sgd \'": No closing quotation'),
        ({}, ("--batch-size=0",), "missing batch size in the command, e.g. `--batch-size 64`"),
    ],
)
def test_what_cannot_be_studied(
    more: dict[str, Any], words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        make_study(options(tmp_path, **more), [*WORDS, *words])
    assert str(error.value).startswith(message)


def test_an_unknown_program_needs_a_batch_size(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing batch size"):
        make_study(options(tmp_path), ["python", "train.py"])


def test_a_seed_that_diverges_does_not_end_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {
        "16-1": RunOutcome(reason="the loss is nan at step 3", failed=True),
        "16-2": RunOutcome(Summary(steps_completed=20)),
        "100-1": RunOutcome(reason="the global batch does not fit in memory"),
    }
    monkeypatch.setattr(engine, "measure", lambda command, stem, *_: outcomes[stem.name])
    study = make_study(options(tmp_path), WORDS)
    study.carry_out(study.missing())
    recorded = {f"{run.setting.name}-{run.repeat}": run for run in read_runs(tmp_path)}
    assert recorded.keys() == outcomes.keys()
    assert recorded["16-2"].summary and not recorded["16-1"].summary


def test_a_batch_larger_than_the_training_set_is_refused(tmp_path: Path) -> None:
    study = make_study(options(tmp_path), WORDS)
    variant = study.variant_of(BatchSetting("", 100))
    whole, small = (
        Summary(epochs_completed=2, steps_completed=2, samples_trained=samples)
        for samples in (200, 180)
    )
    study.record(variant, 1, RunOutcome(whole))
    with pytest.raises(UsageError, match="--batches 100: more than the 90 samples of an epoch"):
        study.record(variant, 2, RunOutcome(small))
    assert len(read_runs(tmp_path)) == 1


def finish(folder: Path, setting: BatchSetting, repeat: int, values: list[float]) -> None:
    """Write the files of a run with these accuracies after each epoch."""
    study = make_study(options(folder, optimizers=(setting.optimizer,)), WORDS)
    variant = study.variant_of(setting)
    stem = folder / "runs" / f"{setting.name}-{repeat}.jsonl"
    stem.parent.mkdir(exist_ok=True, parents=True)
    finite = [value if math.isfinite(value) else None for value in values]
    with stem.open("w") as file:
        for epoch, value in enumerate(finite):
            record = {"kind": "epoch", "step": 10 * (epoch + 1), "epoch": epoch}
            record |= {"elapsed": 2.0 * epoch, "eval_accuracy": value}
            file.write(json.dumps(record) + "\n")
    summary = Summary(steps_completed=10 * len(values), images_per_second_mean=5.0)
    study.record(variant, repeat, RunOutcome(summary))


def test_the_report(tmp_path: Path) -> None:
    for repeat, last in ((1, 0.95), (2, 0.93)):
        finish(tmp_path, BatchSetting("sgd", 16), repeat, [0.5, last])
        finish(tmp_path, BatchSetting("lamb", 16), repeat, [0.91, last])
        finish(tmp_path, BatchSetting("lamb", 100), repeat, [0.8, last - 0.02])
    finish(tmp_path, BatchSetting("sgd", 100), 1, [0.1, 0.91])
    study = make_study(options(tmp_path, optimizers=("sgd", "lamb")), WORDS)
    failed = RunOutcome(reason="the loss is nan at step 3", failed=True)
    diverged = tmp_path / "runs" / "sgd-100-2.jsonl"  # after an epoch that had been evaluated
    diverged.write_text('{"kind": "epoch", "step": 10, "epoch": 0, "eval_accuracy": 0.95}\n')
    study.record(study.variant_of(BatchSetting("sgd", 100)), 2, failed)
    assert [(variant.name, repeat) for variant, repeat in study.missing()] == [("sgd-100", 2)]
    report = batch_report.report(tmp_path, TARGET, study.batch_settings)
    assert report.data["largest"] == {"sgd": 16, "lamb": 100}
    rows = {(row["optimizer"], row["batch"]): row for row in report.data["rows"]}
    assert rows["sgd", 100]["reached"] == 1
    assert rows["sgd", 100]["values"] == (0.91,)
    assert rows["sgd", 100]["epochs"] is None
    assert rows["lamb", 16]["epochs"] == 1
    assert rows["lamb", 100]["values"] == (0.9299999999999999, 0.91)
    for words in (
        "0.9400 (0.9300 to 0.9500)",
        "1 of 2",
        "sgd, global batch 100: the loss is nan at step 3",
        "largest batch that reaches accuracy 0.9, sgd: 16",
    ):
        assert words in report.text
    table = (tmp_path / "batches.csv").read_text().splitlines()
    assert table[:2] == ["optimizer,batch,updates,run,value", "sgd,16,20,1,0.95"]
    for file in report.data["files"]:
        assert Path(file).stat().st_size > 0
    finish(tmp_path, BatchSetting("sgd", 100), 2, [0.1, 0.92])  # the failed run, repeated
    report = batch_report.report(tmp_path, TARGET, study.batch_settings)
    assert report.data["largest"] == {"sgd": 100, "lamb": 100}
    assert "nan" not in report.text


def test_runs_that_miss_the_target_count_in_the_median_of_the_epochs(tmp_path: Path) -> None:
    setting, late = BatchSetting("sgd", 16), [0.1, 0.2, 0.95]
    for repeat, values in enumerate(([0.95], late, [0.1]), 1):
        finish(tmp_path, setting, repeat, values)
    (row,) = batch_report.report(tmp_path, TARGET).data["rows"]
    assert row["epochs"] == 3  # not 2, as of the runs that reach it


def test_a_study_whose_runs_all_failed_reports_why(tmp_path: Path) -> None:
    study = make_study(options(tmp_path, optimizers=("sgd",)), WORDS)
    variant = study.variant_of(BatchSetting("sgd", 16))
    study.record(variant, 1, RunOutcome(reason="timed out", failed=True))
    with pytest.raises(HvdtrainError, match="failed; the last one: timed out") as error:
        batch_report.report(tmp_path, TARGET)
    assert error.value.exit_code == 1


def test_a_largest_batch_that_always_fails_is_reported_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    finish(tmp_path, BatchSetting("", 16), 1, [0.95])
    variant = make_study(options(tmp_path), WORDS).variant_of(BatchSetting("", 100))
    make_study(options(tmp_path), WORDS).record(variant, 1, RunOutcome(reason="loss", failed=True))
    assert "\nglobal batch 100: loss\n" in batch_report.report(tmp_path, TARGET).text
    assert not recwarn.list


def test_a_metric_that_is_not_finite_at_the_end_does_not_reach_the_target(tmp_path: Path) -> None:
    for repeat, values in ((1, [0.95, math.nan]), (2, [0.5, 0.95])):
        finish(tmp_path, BatchSetting("sgd", 16), repeat, values)
    (row,) = batch_report.report(tmp_path, TARGET).data["rows"]
    assert (row["values"], row["reached"], row["runs"]) == ((0.95,), 1, 2)


def test_another_spelling_of_an_optimizer_continues_its_runs(tmp_path: Path) -> None:
    finish(tmp_path, BatchSetting("lars --lr 2", 16), 1, [0.95])
    study = make_study(options(tmp_path, optimizers=("lars --lr=2",), batches=(16,)), WORDS)
    assert [repeat for _, repeat in study.missing()] == [2]
    finish(tmp_path, *study.batch_settings, 2, [0.85])
    for settings in (study.batch_settings, ()):
        (row,) = batch_report.report(tmp_path, TARGET, settings).data["rows"]
        assert (row["optimizer"], row["values"]) == ("lars --lr 2", (0.95, 0.85))


def test_the_seeds_after_one_that_failed_keep_their_numbers(tmp_path: Path) -> None:
    setting = BatchSetting("sgd", 16)
    study = make_study(options(tmp_path, optimizers=("sgd",)), WORDS)
    study.record(study.variant_of(setting), 1, RunOutcome(reason="the loss is nan", failed=True))
    finish(tmp_path, setting, 2, [0.95])
    batch_report.report(tmp_path, TARGET)
    assert (tmp_path / "batches.csv").read_text().splitlines()[1:] == ["sgd,16,10,2,0.95"]


def test_an_optimizer_has_one_colour_in_both_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(options(tmp_path, optimizers=("sgd",)), WORDS)
    variant = study.variant_of(BatchSetting("sgd", 16))
    study.record(variant, 1, RunOutcome(reason="the loss is nan", failed=True))
    for name in ("lars", "lamb"):
        finish(tmp_path, BatchSetting(name, 100), 1, [0.5, 0.95])
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, stem: figures.append(figure) or [])
    batch_report.report(tmp_path, TARGET)
    colours = [
        [
            artist.get_color()
            for artist in axes.lines
            if len(artist.get_xdata()) and artist.get_marker() != "None"
        ]
        for axes in figures[0].axes
    ]
    assert len(set(colours[0])) == 2
    assert set(colours[0]) == set(colours[1])


def test_a_study_of_another_kind_is_not_continued(tmp_path: Path) -> None:
    finish(tmp_path, BatchSetting("sgd", 16), 1, [0.95])
    with pytest.raises(UsageError, match="--epochs was 2, now 3"):
        make_study(options(tmp_path), [*WORDS[:-1], "3"]).missing()
    with pytest.raises(UsageError, match="another number of ranks: 1 in run sgd-16-1, now 2"):
        make_study(options(tmp_path, ranks=(2,)), WORDS).missing()
    assert isinstance(read_runs(tmp_path)[0], BatchRun)


def test_reports_that_cannot_be_made(tmp_path: Path) -> None:
    finish(tmp_path, BatchSetting("", 16), 1, [0.95])
    with pytest.raises(UsageError, match="use --target NAME=VALUE to report it"):
        batch_report.report(tmp_path, None)
    with pytest.raises(UsageError, match=r"no run in .* has an evaluation with this metric"):
        batch_report.report(tmp_path, Target("map", 0.2))
    assert "accuracy" in batch_report.report(tmp_path, TARGET).text
    assert (tmp_path / LINES).exists()


@pytest.mark.parametrize("words", [["--optimizers", "sgd"], ["--ranks", "2"], ["--dry-run"]])
def test_options_of_runs_need_a_command(
    words: list[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    finish(tmp_path, BatchSetting("sgd", 16), 1, [0.95])
    study = ["--out", str(tmp_path), "--target", "accuracy=0.9"]
    assert "missing command" in refused("scaling", *study, *words)
