"""Options that contradict one another, or have a value that makes no sense."""

from __future__ import annotations

from hvdtrain.config.levers import ADASUM
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError

TENSORFLOWS_SEED = 2**32 - 1  # keras.utils.set_random_seed, and NumPy's old generator below it
LONGEST_CYCLE = 1000  # milliseconds
LARGEST_FUSION = 2**20  # MiB: a tebibyte


def check(options: Options) -> Options:
    """Refuse options that contradict one another.

    Raises:
        UsageError: naming the options.
    """
    for names in options.EITHER:
        values = [getattr(options, name) for name in names]
        if all(value is not None and value is not False for value in values):  # 0 is given
            one, other = (f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(f"{one} and {other} contradict each other: give one")
    if options.accumulate_steps > 1 and options.sync_batchnorm:
        raise UsageError(
            "--sync-batchnorm computes over a global batch at once, --accumulate-steps in several "
            "passes: give one"
        )
    if options.reduction == ADASUM and options.sync_batchnorm:
        raise UsageError(
            "--reduction adasum takes the gradients of each rank's part, --sync-batchnorm makes "
            "them the global batch's: give one"
        )
    if options.autotune and options.deterministic:
        raise UsageError(
            "--autotune chooses by timings, so no run is bit-equal to another, and --deterministic "
            "asks for that: give one"
        )
    if options.compile and options.framework != "pytorch":
        raise UsageError("--compile is PyTorch's: leave it out with --framework tensorflow")
    if options.stage and options.data is None:
        raise UsageError("--stage needs --data: what `hvdtrain pack` has made")
    if options.timeline_steps and options.timeline is None:
        raise UsageError("--timeline-steps needs --timeline FILE")
    _check_values(options)
    if options.evaluates_only:
        _check_evaluation(options)  # what concerns updates may be what it was in the training
    else:
        _check_training(options)
    return options


def _check_values(options: Options) -> None:
    """Refuse values that the framework, the library or the other options make no sense of."""
    if options.framework == "tensorflow" and options.seed > TENSORFLOWS_SEED:
        raise UsageError(f"--seed {options.seed}: TensorFlow takes at most {TENSORFLOWS_SEED}")
    cycle = options.cycle_time_ms
    if cycle is not None and cycle > LONGEST_CYCLE:
        raise UsageError(
            f"--cycle-time-ms {cycle:g}: give at most {LONGEST_CYCLE}; each sum of gradients waits "
            "for the end of a cycle"
        )
    fusion = options.fusion_threshold_mb
    if fusion is not None and fusion > LARGEST_FUSION:
        raise UsageError(f"--fusion-threshold-mb {fusion:g}: give at most {LARGEST_FUSION:,}")
    whole, passes = options.global_batch_size, options.accumulate_steps
    if whole is not None and passes > whole:
        raise UsageError(
            f"--accumulate-steps {passes}: --global-batch-size {whole} cannot be cut into so many "
            f"passes; give at most {whole}"
        )
    if options.lr_milestones:
        rising = sorted(set(options.lr_milestones))
        if rising != list(options.lr_milestones):
            given, order = (
                ",".join(f"{one:g}" for one in milestones)
                for milestones in (options.lr_milestones, rising)
            )
            raise UsageError(f"--lr-milestones {given}: write them in rising order, {order}")


def _check_training(options: Options) -> None:
    if options.checkpoint:
        raise UsageError(
            "--checkpoint is for --evaluate-only and --predict: a training goes on from what is in "
            "--checkpoint-dir"
        )
    if options.checkpoint_dir is None:
        for name in ("checkpoint_every", "resume"):
            if getattr(options, name) not in (None, "auto", "never"):
                raise UsageError(f"--{name.replace('_', '-')} needs --checkpoint-dir")
        if options.on_nan == "rollback":
            raise UsageError("--on-nan rollback needs --checkpoint-dir")


def _check_evaluation(options: Options) -> None:
    given = "--predict" if options.predict else "--evaluate-only"
    if options.benchmark == "training":
        raise UsageError(f"--benchmark training and {given} contradict each other: give one")
    if not (options.benchmark or options.checkpoint or options.checkpoint_dir):
        raise UsageError(
            f"{given} needs --checkpoint PATH or --checkpoint-dir DIR: the weights to evaluate"
        )
    if options.resume == "never":
        raise UsageError(f"--resume never and {given} contradict each other: leave one out")
    if options.timeline:
        raise UsageError(f"--timeline records updates, and {given} makes none: leave one out")
