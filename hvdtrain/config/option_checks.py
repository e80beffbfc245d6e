"""Checks of the trainers' options against each other, before anything is imported or started."""

from __future__ import annotations

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError

TENSORFLOWS_SEED = 2**32 - 1  # of keras.utils.set_random_seed and NumPy's legacy generator


def check(options: Options) -> Options:
    """Raise if options cannot be combined.

    Raises:
        UsageError: naming the options.
    """
    for names in options.EITHER:
        values = [getattr(options, name) for name in names]
        if all(value is not None and value is not False for value in values):  # 0 is a value
            first, second = (f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(f"{first} and {second} cannot be combined: omit one")
    if options.nesterov and (options.optimizer != "sgd" or not options.momentum):
        raise UsageError("--nesterov needs --optimizer sgd with --momentum")
    if options.accumulate_steps > 1 and options.sync_batchnorm:
        raise UsageError(
            "--sync-batchnorm needs the global batch in one pass, --accumulate-steps cuts it into "
            "several: omit one"
        )
    if options.compile and options.framework != "pytorch":
        raise UsageError("--compile is for PyTorch only: omit it with --framework tensorflow")
    if options.stage and options.data is None:
        raise UsageError("--stage needs --data, a dataset packed by `hvdtrain pack`")
    if options.timeline_steps and options.timeline is None:
        raise UsageError("--timeline-steps needs --timeline FILE")
    _check_output(options)
    _check_values(options)
    if options.evaluates_only:
        _check_evaluation(options)  # options of updates may be those of the training
    else:
        _check_training(options)
    return options


def _check_output(options: Options) -> None:
    names = [choice.partition("=")[0] for choice in options.tracker]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--tracker {min(repeated)} is given twice: give each tracker once")
    if options.profile is None:
        for name in ("profile_dir", "profile_ranks"):
            if getattr(options, name) != Options.__dataclass_fields__[name].default:
                raise UsageError(f"--{name.replace('_', '-')} needs --profile A:B")
    elif options.profile[1] is None:
        raise UsageError(f"--profile {options.profile[0]}: needs an end, e.g. 20:30")


def _check_values(options: Options) -> None:
    """Raise if a value is out of the range of the framework, the library or other options."""
    if options.framework == "tensorflow" and options.seed > TENSORFLOWS_SEED:
        raise UsageError(f"--seed {options.seed}: TensorFlow accepts at most {TENSORFLOWS_SEED}")
    batch, passes = options.global_batch_size, options.accumulate_steps
    if batch is not None and passes > batch:
        raise UsageError(
            f"--accumulate-steps {passes}: must be at most the --global-batch-size, {batch}"
        )
    if options.lr_milestones:
        rising = sorted(set(options.lr_milestones))
        if rising != list(options.lr_milestones):
            specified, order = (
                ",".join(f"{epoch:g}" for epoch in milestones)
                for milestones in (options.lr_milestones, rising)
            )
            raise UsageError(f"--lr-milestones {specified}: must be in rising order: {order}")


def _check_training(options: Options) -> None:
    if options.checkpoint:
        raise UsageError(
            "--checkpoint is for --evaluate-only and --predict; a training resumes from "
            "--checkpoint-dir"
        )
    if options.checkpoint_dir is None:
        if options.checkpoint_every:
            raise UsageError("--checkpoint-every needs --checkpoint-dir")
        if options.resume == "must":
            raise UsageError("--resume needs --checkpoint-dir")


def _check_evaluation(options: Options) -> None:
    mode = "--evaluate-only" if options.evaluate_only else "--benchmark inference"
    mode = "--predict" if options.predict else mode
    if options.benchmark == "training":
        raise UsageError(f"--benchmark training and {mode} cannot be combined: omit one")
    if not (options.benchmark or options.checkpoint or options.checkpoint_dir):
        raise UsageError(
            f"{mode} needs --checkpoint PATH or --checkpoint-dir DIR: the weights to evaluate"
        )
    if options.resume == "never":
        raise UsageError(f"--resume never and {mode} cannot be combined: omit one")
    for name in ("timeline", "profile"):
        if getattr(options, name):
            raise UsageError(f"--{name} records updates, and {mode} performs none: omit one")
