"""One quiet style for every plot of the project, and saving as PDF and PNG.

Series that are plotted with ``series`` differ in colour, line and marker, so a plot can also be
read in grey and by the colour-blind. ``homework/plot_accuracy.py`` holds the same settings, as it
has to be complete in one file; a test keeps the two equal.

matplotlib is imported on use: ``hvdtrain VERB --help`` has to answer at once.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from hvdtrain.system.files import replacing

# The palette of Okabe and Ito ("Color Universal Design", 2008), less its yellow, which is lost on
# white paper; ordered so that neighbours differ in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#D55E00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x", "P")
GREY = "#666666"  # for what is no measurement: ideal lines, notes

SETTINGS: dict[str, Any] = {
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
    "pdf.fonttype": 42,  # whole TrueType fonts in the file: editable, and journals take it
}


def style() -> None:
    """Draw without a screen, and in the style of the project, from here on in this process."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    matplotlib.rcParams.update({**SETTINGS, "axes.prop_cycle": cycler(color=COLOURS)})


def series(number: int) -> dict[str, Any]:
    """Return how the series of this number, from 0, is drawn: arguments for ``axes.plot``."""
    place = number % len(COLOURS)
    return {"color": COLOURS[place], "linestyle": LINES[place], "marker": MARKERS[place]}


def save(figure: Any, stem: Path) -> list[Path]:
    """Write ``figure`` as ``stem``.pdf and ``stem``.png, and close it.

    The same figure gives the same bytes: the files carry no date.

    Args:
        figure: a matplotlib figure.
        stem: the path, whose ending .pdf or .png is taken off; its folder is made where it is
            missing.

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
    """Return ``figure`` as a data URI, which stands in a page itself, and close it."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
