"""The one list of what is refused before a training begins, by the phase that can tell.

A phase is a function of facts, whose rows are a condition and the message that it yields. They name
options that the user has given, never a default. What an option needs, of a trainer or a verb,
stands at its field (``declare.option``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hvdtrain.config.declare import declared, exclusive, option_name
from hvdtrain.config.strategies import COMPRESSIONS, NONE, STRATEGIES, Strategy
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import differences
from hvdtrain.system.runtime.detect import LaunchInfo

if TYPE_CHECKING:
    from hvdtrain.config.options import Options

TENSORFLOWS_SEED = 2**32 - 1  # of keras.utils.set_random_seed and NumPy's legacy generator


def check(refusals: Iterable[str]) -> None:
    """Raise ``UsageError`` with the first of the ``refusals`` of a phase, if there is one."""
    for message in refusals:
        raise UsageError(message)


def specified(options: Any) -> dict[str, str]:
    """Return the names of the options that are not the default, by their fields; 0 may be one."""
    return {
        field.name: option_name(field)
        for field in declared(type(options))
        if getattr(options, field.name) != field.default
    }


def of_fields(options: Any) -> Iterator[str]:
    """Refuse options, of a trainer or a verb, that are given without the one that they need."""
    names = specified(options)
    for field in declared(type(options)):
        needs = field.metadata["needs"]
        if needs and field.name in names and needs.split()[0].rstrip(",") not in names.values():
            yield f"{names[field.name]} needs {needs}"


def of_options(options: Options) -> Iterator[str]:
    """Refuse options of a trainer alone: before anything is imported or started."""
    names = specified(options)
    for first, second in exclusive(type(options)):
        if first in names and second in names:
            yield f"{names[first]} and {names[second]} cannot be combined: omit one"
    yield from of_fields(options)
    if options.nesterov and (options.optimizer != "sgd" or not options.momentum):
        yield "--nesterov needs --optimizer sgd with --momentum"
    if options.accumulate_steps > 1 and options.sync_batchnorm:
        yield (
            "--sync-batchnorm needs the global batch in one pass, --accumulate-steps cuts it into "
            "several: omit one"
        )
    if options.compile and options.framework != "pytorch":
        yield "--compile is for PyTorch only: omit it with --framework tensorflow"
    trackers = sorted(choice.partition("=")[0] for choice in options.tracker)
    for name, following in pairwise(trackers):
        if name == following:
            yield f"--tracker {name} is set twice: omit one"
    if options.profile and options.profile[1] is None:
        yield f"--profile {options.profile[0]}: needs an end, e.g. 20:30"
    if options.framework == "tensorflow" and options.seed > TENSORFLOWS_SEED:
        yield f"--seed {options.seed}: TensorFlow accepts at most {TENSORFLOWS_SEED}"
    batch, passes = options.global_batch_size, options.accumulate_steps
    if batch is not None and passes > batch:
        yield f"--accumulate-steps {passes}: must be at most the --global-batch-size, {batch}"
    milestones = options.lr_milestones or ()
    if milestones != (rising := tuple(sorted(set(milestones)))):
        typed, order = (",".join(f"{epoch:g}" for epoch in each) for each in (milestones, rising))
        yield f"--lr-milestones {typed}: must be in rising order: {order}"
    # Those of updates may be those of the training whose checkpoint is evaluated.
    yield from _of_evaluation(options) if options.evaluation else _of_training(options)


def _of_training(options: Options) -> Iterator[str]:
    if options.checkpoint:
        yield (
            "--checkpoint is for --evaluate-only and --predict; a training resumes from "
            "--checkpoint-dir"
        )
    if options.checkpoint_dir is None:
        if options.checkpoint_every:
            yield "--checkpoint-every needs --checkpoint-dir"
        if options.resume == "must":
            yield "--resume needs --checkpoint-dir"


def _of_evaluation(options: Options) -> Iterator[str]:
    mode = options.evaluation
    if options.benchmark == "training":
        yield f"--benchmark training and {mode} cannot be combined: omit one"
    if not (options.benchmark or options.checkpoint or options.checkpoint_dir):
        yield f"{mode} needs --checkpoint PATH or --checkpoint-dir DIR: the weights to evaluate"
    if options.resume == "never":
        yield f"--resume never and {mode} cannot be combined: omit one"
    for name in ("timeline", "profile"):
        if getattr(options, name):
            yield f"--{name} records updates, and {mode} performs none: omit one"


def of_launch(
    options: Options, launch: LaunchInfo, models: Sequence[str], *, restarts: bool
) -> Iterator[str]:
    """Refuse options that do not fit the launch: before a framework is imported.

    Args:
        options: of the trainer.
        launch: as the launcher reports it.
        models: those of the workload; empty: any.
        restarts: whether the launcher restarts the ranks if one fails.
    """
    if options.model and models and options.model not in models:
        yield f"--model {options.model}: choose from {', '.join(models)}"
    absent = [str(rank) for rank in options.profile_ranks if rank >= launch.size]
    if options.profile and absent:
        ranks = "only rank 0" if launch.size == 1 else f"ranks 0 to {launch.size - 1}"
        yield f"--profile-ranks {','.join(absent)}: this run has {ranks}"
    if restarts and options.resume == "never":
        yield (
            "--resume never: restarted ranks resume from --checkpoint-dir; omit the option, or use "
            "a directory without checkpoints"
        )
    if restarts and options.checkpoint_dir is None:
        yield (
            "torchrun --max-restarts and hvdtrain launch --elastic restart the ranks if one fails, "
            "and without --checkpoint-dir the training from its beginning: use both or neither"
        )


def of_strategy(
    strategy: Strategy, framework: str, launch: LaunchInfo, compression: str = NONE
) -> Iterator[str]:
    """Refuse a strategy, of a trainer or a program of one's own, that does not fit the rest."""
    option = f"--strategy {strategy.name}"
    rivals = [record for record in STRATEGIES.values() if framework in record.adapters]
    if framework not in strategy.adapters:
        yield (
            f"{option} is for {', '.join(strategy.adapters)}, not for --framework {framework}: "
            "omit the option"
        )
    if launch.size > 1 and not strategy.launchers:
        yield (
            f"{option} trains in one process, {launch.launcher} started {launch.size}: omit the "
            "option, or start one process"
        )
    if launch.launcher and strategy.launchers and launch.launcher not in strategy.launchers:
        others = [f" or --strategy {r.name}" for r in rivals if launch.launcher in r.launchers]
        remedy = ",".join(["use mpirun", *others])
        yield f"{option} is started by mpirun, not by {launch.launcher}: {remedy}"
    if compression not in COMPRESSIONS:
        yield f"--compression {compression}: choose from {', '.join(COMPRESSIONS)}"
    if compression in (NONE, *strategy.compressions):
        return
    if strategy.compressions:
        yield (
            f"--compression {compression}: {strategy.library} cannot sum in that type: use "
            f"--compression {' or '.join(strategy.compressions)}"
        )
    able = " or ".join(rival.name for rival in rivals if compression in rival.compressions)
    yield f"--compression {compression} is not for {option}: omit it, or use --strategy {able}"


def of_device(options: Options, *, gpu: bool) -> Iterator[str]:
    """Refuse options of a trainer that do not fit the device of this rank: after step 2."""
    if options.precision == "fp16" and not gpu:  # it needs loss scaling, and is not faster
        yield "--precision fp16 needs a GPU: use bf16 or fp32 on a CPU"
    if options.tf32 and not gpu:
        yield "--tf32 is for GPUs, and this run computes on a CPU: omit it"


def of_ranks(
    values: Sequence[Mapping[str, str]], hosts: Sequence[str], remedy: str
) -> Iterator[str]:
    """Refuse values, by rank, that must be equal, such as those of options."""
    for name, owners in differences(values, hosts):
        yield f"{name} differs: {owners}: {remedy}"
