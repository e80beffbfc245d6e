"""Plot style of the project, and saving as PDF and PNG.

Series plotted with ``series`` differ in colour, line and marker, so that a plot is readable in grey
and by the colour-blind. ``homework/plot_accuracy.py`` has the same settings, as it is
self-contained; a test keeps the two equal.

matplotlib is imported on use, to keep ``hvdtrain VERB --help`` fast.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing

# The palette of Okabe and Ito ("Color Universal Design", 2008), less its yellow, which is lost on
# white paper; ordered so that neighbours differ in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#D55E00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x", "P")
GREY = "#666666"  # for anything but measurements: ideal lines, notes

Panels = Mapping[str, Callable[[Any], None]]  # functions that draw into axes, by title
Size = tuple[float, float]  # width and height

SETTINGS: dict[str, object] = {
    "figure.figsize": (6.4, 4.0),  # inches
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,  # 0.0125, not 1e-7 + 1.25e-2
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # embedded TrueType fonts: editable, and accepted by journals
}


def check_installed(purpose: str) -> None:
    """Raise ``UsageError`` if a package is missing that ``purpose``, a verb or option, needs."""
    for name in ("matplotlib", "scipy", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{purpose} needs {name}: pip install 'hvdtrain[studies]'")


def style() -> None:
    """Set the plot style and the non-interactive back end for this process."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    matplotlib.rcParams.update({**SETTINGS, "axes.prop_cycle": cycler(color=COLOURS)})


def series(number: int) -> dict[str, object]:
    """Return the arguments of ``axes.plot`` for a series, numbered from 0."""
    index = number % len(COLOURS)
    return {"color": COLOURS[index], "linestyle": LINES[index], "marker": MARKERS[index]}


def figure_of(panels: Panels, size: Size, *, sharey: bool = False) -> Any:
    """Return a figure of the panels side by side, each of ``size`` inches, without their titles."""
    import matplotlib.pyplot as plt

    style()
    shape = {"figsize": (size[0] * len(panels), size[1]), "squeeze": False, "sharey": sharey}
    figure, axes = plt.subplots(1, len(panels), **shape)
    for panel, draw in zip(axes[0], panels.values(), strict=True):
        draw(panel)
    return figure


def figures_of(panels: Panels, size: Size) -> Iterator[tuple[str, Any]]:
    """Yield each panel as (title, figure); the caller closes the figures."""
    for title, draw in panels.items():
        yield title, figure_of({title: draw}, size)


def save(figure: Any, stem: Path) -> list[Path]:
    """Write ``figure`` as ``stem``.pdf and ``stem``.png, and close it.

    The same figure gives the same bytes: the files have no date.

    Args:
        figure: a matplotlib figure.
        stem: the path; a suffix .pdf or .png is removed, a missing directory created.

    Returns:
        The paths of the PDF and of the PNG.
    """
    import matplotlib.pyplot as plt

    stem = stem.with_suffix("") if stem.suffix in (".pdf", ".png") else stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, metadata in (("pdf", {"CreationDate": None}), ("png", {})):
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        with replacing(paths[-1]) as file:
            figure.savefig(file, format=kind, metadata=metadata)
    plt.close(figure)
    return paths


def inline(figure: Any) -> str:
    """Return ``figure`` as a data URI to embed in an HTML page, and close it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
