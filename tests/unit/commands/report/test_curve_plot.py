"""Curves of several runs: all are distinguishable, in colour and in grey."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from hvdtrain.commands.report.curve_plot import (
    MARKERS,
    MAX_RUNS,
    SMOOTH,
    figures,
    first,
    names,
    smoothed,
)
from hvdtrain.commands.study.curves import TrainingCurves

STYLE = ("color", "linestyle", "marker", "markerfacecolor")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def training(path: str, points: int = 5) -> TrainingCurves:
    steps = [{"step": n, "step_loss": 1 / (1 + n), "learning_rate": 0.1} for n in range(points)]
    epochs = [{"step": n, "eval_loss": 2 / (1 + n), "eval_accuracy": 0.5} for n in range(points)]
    return TrainingCurves(Path(path), steps, epochs)


def drawn(runs: list[TrainingCurves]) -> dict[str, list[dict[str, Any]]]:
    """Return the styles of the lines by title, in the order of the legend."""
    styles = {}
    for title, figure in figures(runs):
        lines = figure.axes[0].get_lines()
        styles[title] = [
            {**{key: plt.getp(line, key) for key in STYLE}, "line": line} for line in lines
        ]
        labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert labels == ([line.get_label() for line in lines] if len(lines) > 1 else [])
    return styles


def test_all_lines_have_different_styles() -> None:
    runs = [training(f"run-{number}/metrics.jsonl") for number in range(MAX_RUNS)]
    for title, lines in drawn(runs).items():
        styles = {tuple(line[key] for key in STYLE) for line in lines}
        grey = {style[1:] for style in styles}
        labels = {line["line"].get_label() for line in lines}
        assert len(styles) == len(labels) == len(lines), title
        assert len({(line["linestyle"], line["marker"]) for line in lines}) == len(lines), title
        assert len(grey) == len(lines), title


def test_a_run_has_one_colour_and_two_line_styles() -> None:
    lines = drawn([training("run-0/m.jsonl"), training("run-1/m.jsonl")])["Loss"]
    assert [line["line"].get_label() for line in lines] == [
        *("run-0/m training", "run-0/m test", "run-1/m training", "run-1/m test"),
    ]
    first_train, first_test, second_train, second_test = lines
    assert first_train["color"] == first_test["color"]
    assert second_train["color"] == second_test["color"] != first_train["color"]
    assert first_train["linestyle"] == second_train["linestyle"] != first_test["linestyle"]
    assert first_train["markerfacecolor"] != first_test["markerfacecolor"]


def test_a_single_run_has_two_colours_and_no_name() -> None:
    lines = drawn([training("run-0/metrics.jsonl")])["Loss"]
    assert lines[0]["color"] != lines[1]["color"]
    assert [line["line"].get_label() for line in lines] == ["training", "test"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/m.jsonl"], [""]),
        (["a/one.jsonl", "b/two.jsonl"], ["one", "two"]),
        (["a/m.jsonl", "b/m.jsonl", "c.jsonl"], ["a/m", "b/m", "c"]),
        (["_a.jsonl", "b.jsonl"], ["./_a", "b"]),
        (["runs/1-1.jsonl", "runs/16-2.jsonl"], ["1 rank, run 1", "16 ranks, run 2"]),
        (["runs/1-1.jsonl", "runs/old.jsonl"], ["1-1", "old"]),
        (["\udcff.jsonl", "\x1b.jsonl"], ["?", "?"]),
    ],
)
def test_run_names_are_unique(paths: list[str], expected: list[str]) -> None:
    assert names([Path(path) for path in paths]) == expected


def test_the_axis_of_a_nearly_constant_rate_has_no_offset() -> None:
    run = training("m.jsonl")
    for number, record in enumerate(run.steps):
        record["learning_rate"] = 0.0125 + 1e-9 * number
    plot = dict(figures([run]))["Learning rate"]
    plot.draw_without_rendering()
    axis = plot.axes[0].yaxis
    assert axis.get_offset_text().get_text() == ""  # no 1e-7+1.25e-2
    assert next(label.get_text() for label in axis.get_ticklabels()) == "0.000"
    bottom, top = plot.axes[0].get_ylim()
    assert bottom == 0 and top > 1.02 * 0.0125  # the line is not cut


@pytest.mark.parametrize("stems", [("1", "2", "8", "16"), ("ddp-n2", "horovod-n2", "mpi-n2")])
def test_the_first_runs_of_each_size_or_method_are_drawn(stems: tuple[str, ...]) -> None:
    paths = [Path(f"runs/{name}-{repeat}.jsonl") for repeat in (1, 2, 3) for name in stems]
    runs = first([TrainingCurves(path, [], []) for path in sorted(paths)])
    assert [run.path for run in runs] == paths[:MAX_RUNS]


def test_the_loss_does_not_fall_at_the_end_of_an_epoch() -> None:
    """The loss of the steps decreases evenly; the running mean of the epoch jumps."""
    run, per_epoch = training("m.jsonl", points=60), 20
    for step, record in enumerate(run.steps):
        record["step_loss"] = 3 - step / 60
        done = step % per_epoch + 1
        record["loss"] = sum(3 - (step - k) / 60 for k in range(done)) / done
    shown = drawn([run])["Loss"][0]["line"].get_ydata()
    decreases = [before - after for before, after in itertools.pairwise(shown)]
    assert max(decreases) < 2 / 60 and min(decreases) > 0


def test_smoothing_has_no_bias_and_keeps_few_points() -> None:
    assert smoothed([]) == []
    assert smoothed([3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0]
    assert smoothed([2.0] * 1000) == pytest.approx([2.0] * 1000)
    noisy = [2.0 + (-1) ** number for number in range(10 * SMOOTH)]
    assert max(abs(value - 2) for value in smoothed(noisy)[10:]) < 0.2


def test_runs_of_a_comparison_are_named_by_their_method() -> None:
    paths = [Path(f"runs/{name}-n2-{repeat}.jsonl") for name in "ab" for repeat in (1, 2)]
    methods = {path: f"method {path.name[0]}" for path in paths}
    assert names(paths[::2], methods) == ["method a", "method b"]
    assert names(paths[:2], methods) == ["method a, run 1", "method a, run 2"]
    assert names([*paths, Path("other.jsonl")], methods)[0] == "a-n2-1"


@pytest.mark.parametrize(
    "name", ["ddp-pytorch-packed-n2-", "short", "MW" * 40, "l" * 52, r"$\frac$", "\udcff", "_"]
)
def test_no_entry_of_a_legend_is_cut_off(name: str) -> None:
    runs = [training(f"{name}{number}.jsonl") for number in range(MAX_RUNS)]
    for title, figure in figures(runs):
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0, title
        assert box.y1 < figure.axes[0].get_tightbbox().y0 + 1, title


def test_long_curves_have_few_markers() -> None:
    (line,) = drawn([training("m.jsonl", points=100 * MARKERS)])["Learning rate"]
    assert line["line"].get_markevery() == 100


def test_each_metric_of_a_task_has_a_plot() -> None:
    run = training("run-0/metrics.jsonl")
    for record in run.epochs:
        del record["eval_accuracy"]
        record |= {"eval_map": 0.25, "eval_map50": 0.5, "eval_samples": 72}
    titles = list(drawn([run, training("run-1/metrics.jsonl")]))
    accuracy = titles.index("Test accuracy")
    assert titles[accuracy + 1 : accuracy + 3] == ["Test map", "Test map50"]
    assert [title for title in titles if "samples" in title] == []
    first_map = drawn([run])["Test map"][0]["line"]
    assert first_map.get_ydata().tolist() == [0.25] * 5  # a metric is not a percentage
