"""Draw the plots of a report, as data that stands in the page itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.commands.runs.course import Course, Record
from hvdtrain.system.output import plots
from hvdtrain.system.output.text import plural, short

MOST = 6  # runs in one plot
FEW = 12  # markers per line, about
SMOOTH = 40  # points of a loss that stay apart; the noise of more is smoothed
SIZE = 5.2, 3.2  # inches
ROW = 0.2  # inches of a row of the legend
FULL = 0.95  # share of the width that a legend may take
LONG = 60  # characters that stand in one
LOSS = "step_loss"  # of the training: that of the steps, not of the epoch so far


def curves(
    courses: Sequence[Course], unit: str = "images", methods: Mapping[Path, str] | None = None
) -> list[tuple[str, str]]:
    """Draw each quantity that some run has, as (title, data URI).

    Args:
        courses: of the runs.
        unit: what their samples are, in the plural.
        methods: what the runs of a comparison are called, by path.
    """
    found = figures(first(courses), unit, methods)
    return [(title, plots.inline(figure)) for title, figure in found]


def first(courses: Sequence[Course]) -> list[Course]:
    """Return as many runs as one plot holds; of a study the first of each size come first.

    Of a comparison the first of each method.
    """
    return sorted(courses, key=lambda one: (_repeat(one.path), _measured(one.path)))[:MOST]


def _repeat(path: Path) -> int:
    """Return the repeat from the file name of a run of a study; zero for any other."""
    number = re.fullmatch(r"runs/.*-(\d{1,9})", f"{path.parent.name}/{path.stem}")
    return int(number[1]) if number else 0


def _measured(path: Path) -> tuple[int, int]:
    """Return ranks and repeat from the file name of a run of a study; zeros for any other."""
    numbers = re.fullmatch(r"runs/(\d{1,9})-(\d{1,9})", f"{path.parent.name}/{path.stem}")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def figures(
    courses: Sequence[Course], unit: str = "images", methods: Mapping[Path, str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the plots, each after its title; the caller closes them; see ``curves``."""
    panels = [
        ("Loss", "loss", [("steps", LOSS, "training"), ("epochs", "eval_loss", "test")]),
        ("Test accuracy", "accuracy, %", [("epochs", "eval_accuracy", "test")]),
        ("Learning rate", "learning rate", [("steps", "learning_rate", "")]),
        ("Throughput", f"{unit}/s", [("steps", "images_per_second", "")]),
    ]
    for name in metrics(courses):
        panels.insert(2, (f"Test {name}", name, [("epochs", f"eval_{name}", "test")]))
    plots.style()
    runs = names([course.path for course in courses], methods)
    for title, label, lines in panels:
        figure, axes = plt.subplots(figsize=SIZE)
        if not _draw(axes, list(zip(runs, courses, strict=True)), lines):
            plt.close(figure)
            continue
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if title in ("Learning rate", "Throughput"):
            axes.set_ylim(bottom=0)  # so that what hardly changes looks so
        if len(axes.get_lines()) > 1:
            _legend(figure, axes)
        yield title, figure


def metrics(courses: Sequence[Course]) -> list[str]:
    """Return the metrics besides loss and accuracy that some evaluation has, by name."""
    keys = {key for course in courses for one in course.epochs for key in one}
    found = {key.removeprefix("eval_") for key in keys if key.startswith("eval_")}
    return sorted(found - {"loss", "accuracy", "samples"}, reverse=True)


def names(paths: Sequence[Path], methods: Mapping[Path, str] | None = None) -> list[str]:
    """Return what runs are called: the file, or the path where two files are called alike.

    A single one needs no name, one of a study is called by its ranks, and one of a comparison by
    its method.
    """
    if len(paths) < 2:
        return [""] * len(paths)
    if methods and all(path in methods for path in paths):
        several = any(_repeat(path) > 1 for path in paths)
        runs = [f", run {_repeat(path)}" * several for path in paths]
        return [short(methods[path], LONG) + run for path, run in zip(paths, runs, strict=True)]
    measured = [_measured(path) for path in paths]
    if all(ranks for ranks, _ in measured):
        return [f"{plural(ranks, 'rank')}, run {repeat}" for ranks, repeat in measured]
    stems = [path.stem for path in paths]
    alike = len(set(stems)) < len(stems)
    found = [short(str(path.with_suffix("")) if alike else path.stem, LONG) for path in paths]
    # matplotlib leaves lines out of the legend whose names begin so.
    return [f"./{name}" if name.startswith("_") else name for name in found]


def _draw(
    axes: Any, courses: Sequence[tuple[str, Course]], lines: Sequence[tuple[str, str, str]]
) -> bool:
    """Draw the lines of all runs, each given with its name; return whether there were any."""
    for number, (run, course) in enumerate(courses):
        for place, (kind, key, name) in enumerate(lines):
            steps, values = _values(getattr(course, kind), key)
            if not steps:
                continue
            axes.plot(
                steps,
                values,
                label=" ".join(word for word in (run, name) if word) or key,
                markevery=-(-len(steps) // FEW),
                **_style(number if len(courses) > 1 else place, place),
            )
    return bool(axes.get_lines())


def _values(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a quantity is known, and what it is there."""
    smooth = key == LOSS
    if smooth and not any(LOSS in one for one in records):
        key = "loss"  # of the epoch so far: all that an older file has
    known = [one for one in records if one.get(key) is not None]
    factor = 100 if key.endswith("accuracy") else 1
    values = [factor * one[key] for one in known]
    return [one["step"] for one in known], smoothed(values) if smooth else values


def smoothed(values: Sequence[float]) -> list[float]:
    """Return exponential means, which begin without a bias (as Adam's moments, Kingma 2015)."""
    share = min(1.0, SMOOTH / max(1, len(values)))  # of the newest value
    total = weights = 0.0
    means = []
    for value in values:
        total += share * (value - total)
        weights += share * (1 - weights)
        means.append(total / weights)
    return means


def _style(number: int, place: int) -> dict[str, Any]:
    """Return a colour and marker per run; its second line is dashed, its markers hollow."""
    style = {**plots.series(number), "linestyle": plots.LINES[place]}
    return {**style, "markerfacecolor": "white"} if place else style


def _legend(figure: Any, axes: Any) -> None:
    """Put the legend below the plot, where it hides nothing; the figure grows by it."""
    labels = [line.get_label() for line in axes.get_lines()]
    columns = 1 if max(map(len, labels)) > LONG / 2 else 2
    figure.set_figheight(SIZE[1] + ROW * -(-len(labels) // columns))
    legend = figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a path may hold dollar signs
    wide = legend.get_window_extent().width / figure.bbox.width
    for text in legend.get_texts() if wide > FULL else ():  # wide letters: smaller ones
        text.set_fontsize(FULL * text.get_fontsize() / wide)
