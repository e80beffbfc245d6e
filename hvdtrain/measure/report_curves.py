"""The plots of a report, as data that stands in the page itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.measure import plots
from hvdtrain.measure.report_find import Course

MOST = 6  # runs in one plot
FEW = 40  # points that still get markers


def inline(figure: Any) -> str:
    """``figure`` as a data URI, and closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def curves(courses: Sequence[Course]) -> list[tuple[str, str]]:
    """A plot of each quantity that some run has, as (title, data URI)."""
    panels = [
        ("Loss", "loss", [("steps", "loss", "training"), ("epochs", "eval_loss", "test")]),
        ("Test accuracy", "accuracy, %", [("epochs", "eval_accuracy", "test")]),
        ("Learning rate", "learning rate", [("steps", "learning_rate", "")]),
        ("Throughput", "images/s", [("steps", "images_per_second", "")]),
    ]
    plots.style()
    found = []
    for title, label, lines in panels:
        figure, axes = plt.subplots(figsize=(5.2, 3.2))
        if _draw(axes, courses[:MOST], lines):
            axes.set_xlabel("step")
            axes.set_ylabel(label)
            if len(axes.get_lines()) > 1:
                axes.legend(fontsize="small")
            found.append((title, inline(figure)))
        else:
            plt.close(figure)
    return found


def _draw(axes: Any, courses: Sequence[Course], lines: Sequence[tuple[str, str, str]]) -> bool:
    """Draw the lines of all runs; whether there were any."""
    number = 0
    for course in courses:
        for kind, key, name in lines:
            records = [one for one in getattr(course, kind) if one.get(key) is not None]
            if not records:
                continue
            factor = 100 if key.endswith("accuracy") else 1
            how = plots.series(number)
            if len(records) > FEW:
                how["marker"] = ""
            run = course.path.stem if len(courses) > 1 else ""
            axes.plot(
                [one["step"] for one in records],
                [factor * one[key] for one in records],
                label=" ".join(word for word in (run, name) if word) or key,
                **how,
            )
            number += 1
    return number > 0
