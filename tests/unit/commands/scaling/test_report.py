"""The report of a scaling study: text, JSON, files, plots, and the time to a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from hvdtrain import cli
from hvdtrain.commands.scaling import plot
from hvdtrain.commands.scaling.report import fit_text, report, study_text
from hvdtrain.commands.scaling.results import WIDEST, Study, make_study, summarize
from hvdtrain.commands.scaling.runs import LINES, MeasuredRun
from hvdtrain.commands.scaling.sweep import ScalingOptions
from hvdtrain.commands.study.run import append_record
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output import plots
from tests.studies import TUTORIAL, run

RATES = {1: 281.22, 2: 382.01, 4: 689.22, 8: 1341.25}  # images/s of the tutorial
# By ranks and repeat: seconds and accuracy at the end of each epoch.
CURVES = {
    (1, 1): [(10.0, 0.5), (20.0, 0.9), (30.0, 0.95)],
    (1, 2): [(12.0, 0.5), (24.0, 0.9), (36.0, 0.95)],
    (2, 1): [(6.0, 0.4), (12.0, 0.8), (18.0, 0.92)],
    (4, 1): [(4.0, 0.3), (8.0, 0.6), (12.0, 0.7)],
}


def tutorial() -> Study:
    runs = [
        MeasuredRun(ranks, 1, Summary(images_per_second_mean=rate)) for ranks, rate in RATES.items()
    ]
    return make_study(runs, "weak")


def flat(study: Study) -> str:
    """Return the report of a study without line breaks."""
    return " ".join(study_text(study).split())


def table(tmp_path: Path, text: str = TUTORIAL) -> str:
    file = tmp_path / "measured.csv"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("exposed", "phrase", "absent"),
    [
        ((0.0, 0.01, 0.03, 0.07), "bandwidth: too small a part of a step to measure", "GB/s"),
        ((0.0, 0.01, 0.015, 0.0175), "latency: too small a part of a step to measure", "per hop"),
    ],
)
def test_a_part_that_the_fit_cannot_determine_has_no_value(
    exposed: tuple[float, ...], phrase: str, absent: str
) -> None:
    """The exposed seconds are those of the hops, or those of the bytes, of a ring alone."""
    runs = []
    for ranks, communication in zip((1, 2, 4, 8), exposed, strict=True):
        split = {"data": 0.0, "compute": 0.1, "communication": communication, "waiting": 0.0}
        rate = 64 * ranks / (0.1 + communication)
        messages = {"count": 4, "bytes": 10**8}
        runs.append(run(ranks, 1, rate, step_split=split, gradient_messages=messages))
    study = make_study(runs, "weak")
    assert phrase in fit_text(study) and absent not in fit_text(study)
    assert phrase in fit_text(replace(study, traffic=None))


def test_the_tutorials_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "--from", table(tmp_path), "--predict", "16,4096"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Efficiency on 8 ranks: 59.6 % (4.77 times the images/s of 1 rank)"
    assert lines[4:9] == [
        "  ranks   images/s   speed-up   efficiency",
        "  1         281.22       1.00      100.0 %",
        "  2         382.01       1.36       67.9 %",
        "  4         689.22       2.45       61.3 %",
        "  8        1,341.2       4.77       59.6 %",
    ]
    assert any(line.startswith("  16 ") for line in lines)
    assert list(tmp_path.iterdir()) == [tmp_path / "measured.csv"]  # nothing is written
    assert cli.main([*words, "--json", "--out", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)
    efficiencies = [round(100 * size["efficiency"], 1) for size in data["sizes"]]
    assert (data["ok"], efficiencies) == (True, [100.0, 67.9, 61.3, 59.6])
    assert [prediction["ranks"] for prediction in data["predictions"]] == [16, 4096]
    for prediction in data["predictions"]:
        efficiency = prediction["efficiency"]
        assert efficiency["low"] < efficiency["middle"] < efficiency["high"]
    names = ["results.csv", "scaling.pdf", "scaling.png"]
    assert [Path(file).name for file in data["files"]] == names
    assert all(Path(file).stat().st_size for file in data["files"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "none.csv"], "--from none.csv cannot be read: No such file or directory"),
        (["--batches", "8", "--strong"], "--strong: only for a study of numbers of ranks"),
        (["--leave-out", "4"], "--leave-out was removed: use --from FILE without the rows"),
        (["--optimizers", "lars"], "--optimizers needs --batches"),
        (["--from", "x", "--ranks", "1,2"], "remove --ranks, --batches and the command"),
        (["--from", "x", "--", "python"], "remove --ranks, --batches and the command"),
        (["--ranks", "1,2"], "missing command"),
        (["--dry-run"], "missing command"),
        (["--saves", "s.json"], "--saves was removed: choose --checkpoint-every by"),
        (["--", "python"], "--ranks is required"),
        (["--ranks", "1", "--timeout", "0", "--", "python"], "--timeout: 0 is not"),
        (["--out", "nowhere"], "no results in nowhere"),
        (["--from", "{}", "--target", "accuracy=0.5"], "--target needs the training curves"),
    ],
)
def test_wrong_use_is_reported(
    words: list[str], message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert message in refused("scaling", *(word.format(table(tmp_path)) for word in words))


def test_a_study_as_text() -> None:
    renamed = [run(n, rate=100.0 * n, unit="samples", model="mnist") for n in (1, 2)]
    text = study_text(make_study(renamed, "weak"))
    assert "times the samples/s of 1 rank" in text and "images" not in text
    assert "\nmnist; pytorch" in text
    rates = {1: (100.0, 102.0), 2: (190.0, 194.0), 4: (200.0, 210.0)}
    runs = [
        run(ranks, 1 + k, rate, machine="a machine, 2 cores", cores=2)
        for ranks, repeats in rates.items()
        for k, rate in enumerate(repeats)
    ]
    text = study_text(make_study(runs, "weak"))
    assert text.split("\n\n")[:4] == [
        "Efficiency on 2 ranks: 95.0 % (1.90 times the images/s of 1 rank)",
        "mnist tutorial; pytorch over horovod; bf16; weak scaling, batch 64 per rank; 2 runs per "
        "size; a\nmachine, 2 cores",
        """\
  ranks   hosts   images/s      ±      95 % interval   speed-up   efficiency            95 %
  1           1     101.00   1.41    88.29 to 113.71       1.00      100.0 %               -
  2           1     192.00   2.83   166.59 to 217.41       1.90       95.0 %   89.2 to 100.9
  4*          1     205.00   7.07   141.47 to 268.53       2.03       50.7 %    41.0 to 60.5""",
        """\
  ranks     step     data   compute   communication   waiting
  1       400 ms   100 ms    300 ms            0 µs      0 µs
  2       400 ms   100 ms    300 ms            0 µs      0 µs
  4*      400 ms   100 ms    300 ms            0 µs      0 µs""",
    ]
    assert "* oversubscribed (more threads than cores)" in text
    assert "No prediction: it needs three non-oversubscribed sizes" in text


@pytest.mark.parametrize(
    ("cores", "sizes", "reason"),
    [
        (None, (1,), "it needs three sizes, e.g. --ranks 1,2,4"),
        (None, (1, 2), "it needs three sizes"),
        (2, (1, 2, 4), "it needs three non-oversubscribed sizes"),
        (None, (1, 2, 4), ""),
    ],
)
def test_a_prediction_needs_three_sizes(
    cores: int | None, sizes: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    runs = [run(ranks, rate=100.0 * ranks**0.9, step_split=None, cores=cores) for ranks in sizes]
    result = report(runs, tmp_path, ScalingOptions(predict=(8,)), None)
    text = " ".join(result.text.split())
    last = 2 if cores else sizes[-1]
    assert text.startswith(f"Efficiency on {last} ranks: ") is (len(sizes) > 1)
    assert ("Predicted efficiency" in text) is (not reason)
    assert f"No prediction: {reason}" in text if reason else "No prediction" not in text
    assert ("the prediction assumes" in text) is (not reason)
    assert len(result.text.splitlines()) <= (13 if reason else 60)
    assert bool(result.data["predictions"]) is (not reason)
    assert (result.data["no_fit_reason"] or "").startswith(reason)


def test_strong_scaling_predicts_at_most_as_many_ranks_as_samples() -> None:
    strong = {"scaling": "strong", "global_batch_size": 100}
    runs = [run(n, rate=100.0 * n**0.9, **strong) for n in (1, 2, 4)]
    study = make_study(runs, "strong")
    assert [prediction.ranks for prediction in study.predictions] == [16, 32, 64]
    study = make_study(runs, "strong", ranks=(64, 128))
    assert study.not_predicted == (128,)
    assert "Not predicted: 128 ranks." in flat(study)
    assert "more than 100 would be more ranks than samples" in flat(study)


# Parts of a step that a table reports


def runs_of(*each: dict[str, float]) -> list[MeasuredRun]:
    """Return runs on 1, 2, 4 ... ranks, 10 images per rank and step, 0.1 seconds per step."""
    return [
        run(n, rate=100.0 * n, global_batch_size=10 * n, step_split=parts)
        for n, parts in zip((1, 2, 4, 8), each, strict=False)
    ]


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ({"data": 0.001}, 0.1),
        ({"communication": 0.02}, 0.1),
        ({"data": 0.01, "compute": 0.05, "communication": 0.02}, 0.1),
        ({"data": 0.01, "compute": 0.05, "communication": 0.02, "waiting": 0.01}, 0.09),
        ({"data": 0.01, "undivided": 0.07}, 0.08),
        ({}, 0.1),
    ],
)
def test_a_step_is_the_sum_of_its_parts_if_all_are_known(
    parts: dict[str, float], seconds: float
) -> None:
    assert summarize(runs_of(parts))[0].seconds == pytest.approx(seconds)


# The prediction


def test_ranks_that_are_not_predicted_are_named() -> None:
    runs = tutorial().runs
    study = make_study(runs, "weak", ranks=(6, 8, 16))
    assert [prediction.ranks for prediction in study.predictions] == [16]
    assert study.not_predicted == (6, 8)
    assert "Not predicted: 6, 8 ranks. The largest size measured has 8" in study_text(study)
    assert "no network between hosts" in flat(make_study([run(n) for n in (1, 2, 4)], "weak"))
    assert "Not predicted: 6 ranks." in study_text(make_study(runs, "weak", ranks=(6,)))
    assert "6, 8 ranks" not in study_text(tutorial())  # not requested


def test_only_significant_digits_are_printed() -> None:
    study = tutorial()
    hidden = [p.ranks for p in study.predictions if p not in study.shown]
    assert hidden and hidden[-1] == 4096  # still in the JSON
    text = study_text(study)
    assert f"Not predicted: {', '.join(map(str, hidden))} ranks." in flat(study)
    lines = text.splitlines()
    assert not any(line.startswith(f"  {ranks} ") for ranks in hidden for line in lines)
    for prediction in study.shown:
        efficiency = prediction.efficiency
        assert efficiency.high - efficiency.low <= WIDEST
        row = next(line for line in lines if line.startswith(f"  {prediction.ranks} "))
        assert f" {100 * efficiency.middle:.0f} % " in row  # without decimals
    assert f"At {study.shown[-1].ranks} ranks bandwidth is the limit." in text


def test_runs_that_vary_too_much_have_no_prediction() -> None:
    steady = [run(2, rate=6900.0), run(4, rate=12_000.0)]
    first = [run(1, n, rate) for n, rate in enumerate((1057.0, 3830.0, 6603.0), 1)]
    study = make_study([*first, *steady], "weak")  # 3,830 ± 2,773
    assert (study.fit, study.predictions) == (None, ())
    text = flat(study)
    assert "No prediction: the runs on 1 rank vary too much" in text
    assert "± 42 %" in text
    assert "3,830.0 2,773.0" in text


@pytest.mark.parametrize("sizes", [2, 4])  # without and with a prediction
def test_no_legend_covers_a_curve(sizes: int) -> None:
    plots.style()
    parts = {"data": 0.01, "compute": 0.05, "communication": 0.02, "waiting": 0.02}
    study = make_study(runs_of(*[parts] * sizes), "weak")
    figures = [plot.make_figure(study), *(figure for _, figure in plot.panel_figures(study))]
    assert [len(figure.axes) for figure in figures] == [3, 1, 1, 1]
    for figure in figures:
        figure.draw_without_rendering()
        for axes in figure.axes:
            legend = axes.get_legend().get_window_extent()
            assert not legend.overlaps(axes.get_window_extent())
            assert figure.bbox.y1 >= legend.y1  # not cut off
        plt.close(figure)


# The time to a target


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for (ranks, repeat), curve in CURVES.items():
        append_record(tmp_path / LINES, run(ranks, repeat, rate=100.0 * ranks, step_split=None))
        with (tmp_path / "runs" / f"{ranks}-{repeat}.jsonl").open("w") as file:
            for epoch, (seconds, accuracy) in enumerate(curve):
                record = {"kind": "epoch", "step": epoch, "epoch": epoch}
                record |= {"elapsed": seconds, "eval_accuracy": accuracy}
                file.write(json.dumps(record) + "\n")
    return tmp_path


def test_the_time_at_each_size(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "--out", str(evaluated), "--target", "accuracy=0.9"]
    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["target"] == {
        "metric": "accuracy",
        "value": 0.9,
        "sizes": [
            {"ranks": 1, "seconds": 22.0, "speedup": 1.0, "runs": 2},
            {"ranks": 2, "seconds": 18.0, "speedup": 22 / 18, "runs": 1},
            {"ranks": 4, "seconds": None, "speedup": None, "runs": 1},
        ],
    }
    assert str(evaluated / "target.png") in data["files"]
    assert (evaluated / "target.pdf").read_bytes().startswith(b"%PDF")
    assert cli.main(words) == 0
    assert "not reached" in capsys.readouterr().out


def test_a_target_without_evaluations_is_reported(
    evaluated: Path, refused: Callable[..., str]
) -> None:
    message = refused("scaling", "--out", str(evaluated), "--target", "map=0.5")
    assert f"no run in {evaluated} has an evaluation with this metric" in message
