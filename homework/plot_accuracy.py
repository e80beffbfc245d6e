"""The homework's plots: accuracy over epochs for each number of ranks, and a page across them.

python plot_accuracy.py results/pytorch --warmup results/pytorch-warmup

Reads metrics_N.csv and writes accuracy_N and accuracy_summary, as PDF and PNG, into the first
folder. What note.txt in it says, such as the machine of the runs, stands below each plot.
"""

import argparse
import csv
import textwrap
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Colour, line and marker all differ: legible in grey, and to the colour-blind (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#D55E00", "#56B4E9")
LINES = ("-", "--", "-.", ":", (0, (8, 2)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "x", "P")
GREY = "#666666"  # for what is no measurement: ideal lines, notes
SETTINGS = {
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
Runs = dict[int, dict[str, list[float]]]  # the columns of metrics_N.csv, by N


def read(folder: Path) -> Runs:
    runs = {}
    for path in folder.glob("metrics_*.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        ranks = int(path.stem.removeprefix("metrics_"))
        runs[ranks] = {name: [float(row[name]) for row in rows] for name in rows[0]}
    return dict(sorted(runs.items()))


def series(number: int) -> dict:
    index = number % len(COLOURS)
    return {"color": COLOURS[index], "linestyle": LINES[index], "marker": MARKERS[index]}


def draw_epochs(axes: plt.Axes, title: str, lines: dict[str, tuple[dict, str]]) -> None:
    """Accuracy over epochs: a line for each name, with a run and which of its columns."""
    for number, (name, (run, column)) in enumerate(lines.items()):
        axes.plot(run["epoch"], [100 * x for x in run[column]], label=name, **series(number))
    axes.set(title=title, xlabel="epoch", ylabel="accuracy, %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def draw_ranks(axes: plt.Axes, label: str, lines: dict[str, dict[int, float]]) -> None:
    """A value over the number of ranks: a line for each name."""
    for number, (name, values) in enumerate(lines.items()):
        axes.plot(list(values), list(values.values()), label=name, **series(number))
    axes.set_xscale("log", base=2)
    ranks = sorted({rank for values in lines.values() for rank in values})
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set(xlabel="ranks", ylabel=label)


def draw_run(plain: dict, warm: dict | None, title: str) -> plt.Figure:
    figure, axes = plt.subplots()
    lines = {"training": (plain, "train_accuracy"), "validation": (plain, "validation_accuracy")}
    if warm:
        lines["training, warm-up"] = (warm, "train_accuracy")
        lines["validation, warm-up"] = (warm, "validation_accuracy")
    draw_epochs(axes, title, lines)
    return figure


def draw_summary(kinds: dict[str, Runs]) -> plt.Figure:
    figure, panels = plt.subplots(2, 2, figsize=(10, 7))
    panels[0, 1].set_visible(len(kinds) > 1)
    panels[0, 1].sharey(panels[0, 0])
    last, times = {}, {}
    for axes, (kind, runs) in zip(panels[0], kinds.items(), strict=False):
        lines = {named(ranks): (run, "validation_accuracy") for ranks, run in runs.items()}
        draw_epochs(axes, f"validation, {kind}", lines)
        last[kind] = {ranks: 100 * run["validation_accuracy"][-1] for ranks, run in runs.items()}
        times[kind] = {ranks: median(run["seconds"]) for ranks, run in runs.items()}
    draw_ranks(panels[1, 0], "validation accuracy at the end, %", last)
    draw_ranks(panels[1, 1], "training of an epoch (median), s", times)
    seconds = next(iter(times.values()))
    ideal = [seconds[min(seconds)] * min(seconds) / ranks for ranks in seconds]
    panels[1, 1].plot(list(seconds), ideal, color=GREY, linestyle=":", label="ideal")
    panels[1, 1].set_ylim(bottom=0)
    for axes in panels[1]:
        axes.legend()
    return figure


def named(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks > 1)


def save(figure: plt.Figure, stem: Path, note: str) -> None:
    figure.supxlabel(textwrap.fill(note, 110), fontsize=7, color=GREY)
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})
    figure.savefig(stem.with_suffix(".png"))
    plt.close(figure)
    print(stem.with_suffix(".pdf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where metrics_N.csv are and the plots go")
    parser.add_argument("--warmup", type=Path, help="folder with those of runs with warm-up")
    args = parser.parse_args()
    plain, warm = read(args.folder), read(args.warmup) if args.warmup else {}
    if not plain:
        parser.error(f"{args.folder} holds no metrics_N.csv")
    note = args.folder / "note.txt"
    note = note.read_text() if note.is_file() else ""
    plt.rcParams.update(SETTINGS)
    for ranks, run in plain.items():
        figure = draw_run(run, warm.get(ranks), named(ranks))
        save(figure, args.folder / f"accuracy_{ranks}", note)
    kinds = {"without warm-up": plain}
    if warm:  # one rank has nothing to warm up to: its run stands for both
        kinds["with warm-up"] = {ranks: run for ranks, run in plain.items() if ranks == 1} | warm
    save(draw_summary(kinds), args.folder / "accuracy_summary", note)


if __name__ == "__main__":
    main()
