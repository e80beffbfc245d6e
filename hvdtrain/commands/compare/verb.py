"""``hvdtrain compare``: measure a training with several methods on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hvdtrain.commands.compare.methods import (
    LINES,
    CompareOptions,
    Method,
    make_comparison,
    read_trials,
)
from hvdtrain.commands.study.command_options import NO_COMMAND
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.steps.summary import nan_to_null, unit_of
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import write_csv
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal

USAGE = "hvdtrain compare [options] -- COMMAND...\n       hvdtrain compare --out DIR"
EPILOG = f"""example:
  hvdtrain compare -- python -m hvdtrain.resnet --num-steps 30
  hvdtrain compare --strategies single,ddp --precision fp32,bf16 -- \\
      python -m hvdtrain.mnist
  HOROVOD_AUTOTUNE=1 hvdtrain compare --strategies horovod --out autotune -- \\
      python -m hvdtrain.resnet
  hvdtrain compare --out compare

To continue an interrupted comparison, run the same command again. Without a
command, the results in --out are reported again. {page("measuring")}
explains the figures."""


def run_verb(options: CompareOptions) -> Report:
    """Measure the methods as far as needed, and report them.

    Raises:
        UsageError: an option or the command is wrong, or runs are not comparable.
    """
    methods = None
    if options.command:
        comparison = make_comparison(options, options.command)
        methods = comparison.methods
        if commands := comparison.execute():
            return commands
    else:
        chosen = (options.strategies, options.precision, options.frameworks, options.ranks)
        if any((*chosen, options.repeat, options.dry_run)):
            raise UsageError(NO_COMMAND)
    with terminal.working("drawing and writing the results"):
        return report(options, methods)


def report(options: CompareOptions, methods: Sequence[Method] | None = None) -> Report:
    """Report a comparison, and write its table and plots.

    Args:
        options: those of the report.
        methods: the requested rows; None: all.

    Raises:
        UsageError: there are no runs, or a file cannot be written.
    """
    from hvdtrain.commands.compare import plot, table

    folder, target = options.folder, options.target
    trials = read_trials(folder)
    if not trials:
        raise UsageError(
            f"no results in {folder} ({LINES}): use a command after --, or the --out of a previous "
            "comparison"
        )
    if methods is not None:
        trials = [trial for trial in trials if trial.method in methods]
    curves = table.read_all_curves(trials, folder)
    rows = table.make_rows(trials, methods, curves, target)
    files = [folder / f"{table.STEM}.csv"]
    cells = [asdict(row) for row in rows]
    write_csv(files[0], list(cells[0]), [list(row.values()) for row in cells])
    lines = table.evaluated(curves, target) if target else []
    unit = unit_of(trial.summary for trial in trials)
    files += plot.draw(rows, folder / table.STEM, lines, target, unit)
    row_data = [nan_to_null(asdict(row)) for row in rows]
    data = {"ok": True, "rows": row_data, "files": list(map(str, files))}
    head = table.headline(trials) + (f", target {target}" if target else "")
    failed = any(row.reason and row.reason.startswith("failed") for row in rows)
    text = table.report_text(head, rows, files, unit)
    return Report(text, data, EXIT_FAILURE if failed else EXIT_OK)
