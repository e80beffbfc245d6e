"""Draw the plots of a report, as data that stands in the page itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.commands.runs.course import Course
from hvdtrain.system.output import plots
from hvdtrain.system.output.text import plural, short

MOST = 6  # runs in one plot
FEW = 12  # markers per line, about
SIZE = 5.2, 3.2  # inches
ROW = 0.2  # inches of a row of the legend
LONG = 60  # characters that stand in one


def curves(courses: Sequence[Course]) -> list[tuple[str, str]]:
    """Draw each quantity that some run has, as (title, data URI)."""
    return [(title, plots.inline(figure)) for title, figure in figures(first(courses))]


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


def figures(courses: Sequence[Course]) -> Iterator[tuple[str, Any]]:
    """Yield the plots, each after its title; the caller closes them."""
    panels = [
        ("Loss", "loss", [("steps", "loss", "training"), ("epochs", "eval_loss", "test")]),
        ("Test accuracy", "accuracy, %", [("epochs", "eval_accuracy", "test")]),
        ("Learning rate", "learning rate", [("steps", "learning_rate", "")]),
        ("Throughput", "images/s", [("steps", "images_per_second", "")]),
    ]
    for name in metrics(courses):
        panels.insert(2, (f"Test {name}", name, [("epochs", f"eval_{name}", "test")]))
    plots.style()
    runs = names([course.path for course in courses])
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


def names(paths: Sequence[Path]) -> list[str]:
    """Return what runs are called: the file, or the path where two files are called alike.

    A single one needs no name, and one of a study is called by its ranks.
    """
    if len(paths) < 2:
        return [""] * len(paths)
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
            records = [one for one in getattr(course, kind) if one.get(key) is not None]
            if not records:
                continue
            factor = 100 if key.endswith("accuracy") else 1
            axes.plot(
                [one["step"] for one in records],
                [factor * one[key] for one in records],
                label=" ".join(word for word in (run, name) if word) or key,
                markevery=-(-len(records) // FEW),
                **_style(number if len(courses) > 1 else place, place),
            )
    return bool(axes.get_lines())


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
