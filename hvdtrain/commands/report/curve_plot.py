"""Draw the training curves of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.commands.study.curves import Record, TrainingCurves
from hvdtrain.system.output import plots
from hvdtrain.system.output.text import plural, short

MAX_RUNS = 6  # runs in one plot
MARKERS = 12  # markers per line, about
SMOOTH = 40  # number of points above which a loss is smoothed
SIZE = 5.2, 3.2  # inches
ROW = 0.2  # height of a row of the legend, inches
FULL = 0.95  # maximum width of a legend, as a fraction of the figure
MAX_LABEL = 60  # maximum characters of a label
LOSS = "step_loss"  # training loss since the previous record, not since the start of the epoch


def first(runs: Sequence[TrainingCurves]) -> list[TrainingCurves]:
    """Return the runs for one plot, at most ``MAX_RUNS``: first repeats before later ones."""
    return sorted(runs, key=lambda run: _ranks_and_repeat(run.path)[::-1])[:MAX_RUNS]


def _ranks_and_repeat(path: Path) -> tuple[int, int]:
    """Return ranks and repeat of a run from its file name; 0 if it has none.

    ``runs/RANKS-REPEAT`` is of a scaling study, ``runs/METHOD-REPEAT`` of a comparison.
    """
    name = re.fullmatch(r"runs/(?:(\d{1,9})|.*)-(\d{1,9})", f"{path.parent.name}/{path.stem}")
    return (int(name[1] or 0), int(name[2])) if name else (0, 0)


def figures(
    runs: Sequence[TrainingCurves],
    unit: str = "images",
    methods: Mapping[Path, str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (title, figure) for each quantity that some run has; the caller closes them.

    Args:
        runs: the curves of each run.
        unit: unit of the samples, in the plural.
        methods: labels of the runs of a comparison or of a batch-size study, by path.
    """
    panels = [
        ("Loss", "loss", [("steps", LOSS, "training"), ("epochs", "eval_loss", "test")]),
        ("Test accuracy", "accuracy, %", [("epochs", "eval_accuracy", "test")]),
        ("Learning rate", "learning rate", [("steps", "learning_rate", "")]),
        ("Throughput", f"{unit}/s", [("steps", "images_per_second", "")]),
    ]
    for name in metrics(runs):
        panels.insert(2, (f"Test {name}", name, [("epochs", f"eval_{name}", "test")]))
    plots.style()
    labels = names([run.path for run in runs], methods)
    for title, label, lines in panels:
        figure, axes = plt.subplots(figsize=SIZE)
        if not _draw(axes, list(zip(labels, runs, strict=True)), lines):
            plt.close(figure)
            continue
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if title in ("Learning rate", "Throughput"):
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # small changes must not fill the plot
        if len(axes.get_lines()) > 1:
            _legend(figure, axes)
        yield title, figure


def metrics(runs: Sequence[TrainingCurves]) -> list[str]:
    """Return the names of the evaluated metrics other than loss and accuracy."""
    keys = {key for run in runs for record in run.epochs for key in record}
    evaluated = {key.removeprefix("eval_") for key in keys if key.startswith("eval_")}
    return sorted(evaluated - {"loss", "accuracy", "samples"}, reverse=True)


def names(paths: Sequence[Path], methods: Mapping[Path, str] | None = None) -> list[str]:
    """Return labels of runs: the file name, or the path if file names are not unique.

    A single run needs no label. A run of a scaling study is labelled by its ranks, a run of a
    comparison by its method, of a batch-size study by its setting.
    """
    if len(paths) < 2:
        return [""] * len(paths)
    numbers = [_ranks_and_repeat(path) for path in paths]
    if methods and all(path in methods for path in paths):
        several = any(repeat > 1 for _, repeat in numbers)
        return [
            short(methods[path], MAX_LABEL) + f", run {repeat}" * several
            for path, (_, repeat) in zip(paths, numbers, strict=True)
        ]
    if all(ranks for ranks, _ in numbers):
        return [f"{plural(ranks, 'rank')}, run {repeat}" for ranks, repeat in numbers]
    stems = [path.stem for path in paths]
    ambiguous = len(set(stems)) < len(stems)
    labels = [
        short(str(path.with_suffix("")) if ambiguous else path.stem, MAX_LABEL) for path in paths
    ]
    # matplotlib omits lines from the legend whose labels start with an underscore.
    return [f"./{label}" if label.startswith("_") else label for label in labels]


def _draw(
    axes: Any, runs: Sequence[tuple[str, TrainingCurves]], lines: Sequence[tuple[str, str, str]]
) -> bool:
    """Draw the lines of all runs, given as (label, curves); return whether there are any."""
    for number, (label, curves) in enumerate(runs):
        for index, (kind, key, name) in enumerate(lines):
            steps, values = _values(getattr(curves, kind), key)
            if not steps:
                continue
            axes.plot(
                steps,
                values,
                label=" ".join(word for word in (label, name) if word) or key,
                markevery=-(-len(steps) // MARKERS),
                **_style(number if len(runs) > 1 else index, index),
            )
    return bool(axes.get_lines())


def _values(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a quantity was recorded, and its values."""
    recorded = [record for record in records if record.get(key) is not None]
    factor = 100 if key.endswith("accuracy") else 1
    values = [factor * record[key] for record in recorded]
    return [record["step"] for record in recorded], smoothed(values) if key == LOSS else values


def smoothed(values: Sequence[float]) -> list[float]:
    """Return exponential means with bias correction (as Adam's moments, Kingma 2015)."""
    share = min(1.0, SMOOTH / max(1, len(values)))  # weight of the newest value
    total = weights = 0.0
    means = []
    for value in values:
        total += share * (value - total)
        weights += share * (1 - weights)
        means.append(total / weights)
    return means


def _style(number: int, index: int) -> dict[str, object]:
    """Return the colour and marker of a run; its second line is dashed, with hollow markers."""
    style = {**plots.series(number), "linestyle": plots.LINES[index]}
    return {**style, "markerfacecolor": "white"} if index else style


def _legend(figure: Any, axes: Any) -> None:
    """Place the legend below the plot, and enlarge the figure by its height."""
    labels = [line.get_label() for line in axes.get_lines()]
    columns = 1 if max(map(len, labels)) > MAX_LABEL / 2 else 2
    figure.set_figheight(SIZE[1] + ROW * -(-len(labels) // columns))
    legend = figure.legend(loc="outside lower center", ncols=columns, fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a path may have dollar signs
    width = legend.get_window_extent().width / figure.bbox.width
    for text in legend.get_texts() if width > FULL else ():  # reduce the font size
        text.set_fontsize(FULL * text.get_fontsize() / width)
