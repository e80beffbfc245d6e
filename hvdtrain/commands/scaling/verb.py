"""``hvdtrain scaling``: run a training on several numbers of ranks, and report its scaling."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.commands.scaling.batches import LINES, BatchSetting, make_study
from hvdtrain.commands.scaling.runs import read_folder, read_table
from hvdtrain.commands.scaling.sweep import ScalingOptions, make_sweep, submit_sizes
from hvdtrain.commands.study.command_options import NO_COMMAND
from hvdtrain.errors import UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import page
from hvdtrain.system.runtime import terminal

# Options for numbers of ranks, without a meaning for batch sizes.
OF_RANKS = ("weak", "strong", "allreduce", "predict")
USAGE = (
    "hvdtrain scaling --ranks N,N,... [options] -- COMMAND...\n"
    "       hvdtrain scaling --from FILE.csv [options]"
)
EPILOG = f"""example:
  hvdtrain scaling --ranks 1,2,4,8 -- python -m hvdtrain.resnet --num-steps 20
  hvdtrain scaling --ranks 1,2,4 --strong -- \\
      python -m hvdtrain.mnist --global-batch-size 256
  hvdtrain scaling --batches 64,512,4096 --optimizers sgd,lars,lamb \\
      --target accuracy=0.985 -- python -m hvdtrain.mnist --data ~/mnist
  hvdtrain scaling --ranks 4,8,16 --submit "--walltime 0:20:00 --ppn 4" -- \\
      python train.py
  hvdtrain scaling --from measured.csv --predict 16,32

To continue an interrupted study, run the same command again. Without a
command, the results in --out are reported again. {page("measuring")}
explains the figures."""


def run_verb(options: ScalingOptions) -> Report:
    """Measure the sizes as far as needed, and report them.

    Raises:
        UsageError: an option is wrong, or runs are not comparable.
        HvdtrainError: a run failed.
    """
    words = options.command
    if options.from_ is not None:
        if words or options.ranks or options.batches:
            raise UsageError("--from only reads a table: remove --ranks, --batches and the command")
        if options.target:
            raise UsageError("--target needs the training curves of the runs, not a table")
    elif options.batches or (not words and (options.folder / LINES).exists()):
        return _batch_study(options, words)
    elif options.optimizers:
        raise UsageError("--optimizers needs --batches, e.g. --batches 64,512,4096")
    elif words and options.submit is not None:
        return submit_sizes(options, words)
    elif words:
        if commands := make_sweep(options, words).execute():
            return commands
    elif options.ranks or options.dry_run or options.submit:
        raise UsageError(NO_COMMAND)
    with terminal.working("fitting, drawing and writing the results"):
        from hvdtrain.commands.scaling.report import report

        if options.from_ is not None:
            return report(read_table(options.from_), options.from_, options, options.out)
        folder = options.folder
        return report(read_folder(folder), folder, options, folder)


def _batch_study(options: ScalingOptions, words: Sequence[str]) -> Report:
    """Run and report a batch-size study; without a command only report it."""
    if options.submit is not None:
        raise UsageError(
            "--batches and --submit cannot be combined: use `hvdtrain submit` for the study itself"
        )
    for name in OF_RANKS:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: only for a study of numbers of ranks, not of --batches")
    settings: Sequence[BatchSetting] = ()
    if words:
        study = make_study(options, words)
        settings = study.batch_settings
        if commands := study.execute():
            return commands
    elif options.batches or options.optimizers or options.ranks or options.dry_run:
        raise UsageError(NO_COMMAND)
    with terminal.working("drawing and writing the results"):
        from hvdtrain.commands.scaling.batch_report import report

        return report(options.folder, options.target, settings)
