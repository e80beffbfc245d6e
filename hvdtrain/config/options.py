"""The options of the trainers: one frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hvdtrain.config.declare import option, optional, switch
from hvdtrain.config.strategies import COMPRESSIONS, NONE, STRATEGIES, CommOptions
from hvdtrain.config.values import (
    batch,
    count,
    counts,
    fraction,
    local_folder,
    non_negative,
    numbers,
    positive,
    random_seed,
    ranks,
    span,
    tracker,
)
from hvdtrain.steps.learning_rate import SCALINGS, SCHEDULES

LAYERWISE = ("lars", "lamb")  # optimizers that scale the update of each weight by its norm
OPTIMIZERS = ("sgd", "adam", "adamw", *LAYERWISE)
PRECISIONS = ("auto", "fp64", "fp32", "bf16", "fp16")
TASK_OPTIONS = "task options"  # title of the options that a workload adds


@dataclass(frozen=True)
class Options:
    """Options of a training; None: the default depends on the workload or the machine.

    A workload adds its options in a subclass; so does a file for ``hvdtrain.train``.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"--tensorboard": "--tracker tensorboard="}
    """Aliases: ``--option`` or ``--option value``, and the words that replace it.

    To words that end in ``=`` the value is attached.
    """

    framework: str = option(
        "pytorch",
        "deep-learning framework",
        choices=("pytorch", "tensorflow"),
        group="common options",
    )
    strategy: str | None = optional(
        "how ranks synchronize gradients (default: horovod; if it is missing, single for one "
        "process)",
        choices=tuple(STRATEGIES),
    )
    data: Path | None = optional("directory of the dataset", Path, either="data")
    model: str = option("", "model to train")
    epochs: int | None = optional(
        "number of epochs; length of the learning-rate schedule (default: of the task)", positive
    )
    num_steps: int | None = optional(
        "total number of updates after which to stop, counting those before a resume", count
    )
    batch_size: int | None = optional(
        "number of samples per rank and forward pass (default: of the task)", batch, either="batch"
    )
    lr: float | None = optional("learning rate for one rank (default: of the task)", non_negative)
    optimizer: str = option("sgd", "optimizer", choices=OPTIMIZERS)
    precision: str = option(
        "auto",
        "numeric precision; bf16 and fp16: of the forward pass in training (autocast)",
        choices=PRECISIONS,
    )
    checkpoint_dir: Path | None = optional(
        "directory to save checkpoints in and resume from", Path, either="checkpoint"
    )
    summary: Path | None = optional("JSON file for the result", Path)
    stage: Path | None = optional(
        "node-local directory to which each host copies the packed dataset (hvdtrain pack) before "
        "training; '$TMPDIR' is expanded on each host",
        local_folder,
        group="data",
        needs="--data, a dataset packed by `hvdtrain pack`",
    )
    workers: int | None = optional(
        "number of data-loading processes per rank; 0: load in the rank itself (default: 1; on a "
        "GPU the rank's cores minus one, at most 8)",
        count,
    )
    seed: int = option(
        0, "random seed for initialization, data order, dropout and augmentation", random_seed
    )
    global_batch_size: int | None = optional(
        "number of samples per step over all ranks, instead of --batch-size",
        batch,
        group="optimization",
        either="batch",
    )
    accumulate_steps: int = option(
        1, "number of forward and backward passes per update (gradient accumulation)", batch
    )
    lr_scaling: str | None = optional(
        "scaling of the learning rate with the number of ranks (default: linear, for lars and "
        "lamb sqrt; none if --global-batch-size is set; with the global batch instead for ssd300, "
        "and for lars and lamb without --lr)",
        choices=SCALINGS,
    )
    lr_base_batch: int | None = optional(
        "global batch to which --lr applies; --lr-scaling then scales by the global batch over "
        "this number instead of by the number of ranks",
        batch,
    )
    warmup_epochs: float | None = optional(
        "number of warm-up epochs", non_negative, either="warmup"
    )
    warmup_steps: int | None = optional(
        "number of warm-up updates, instead of --warmup-epochs", count, either="warmup"
    )
    lr_schedule: str | None = optional("learning-rate schedule after warm-up", choices=SCHEDULES)
    lr_milestones: tuple[float, ...] | None = optional(
        "epochs at which the multistep schedule decays, e.g. 30,60,80", numbers
    )
    lr_decay: float = option(
        0.1, "decay factor at each milestone of the multistep schedule", non_negative
    )
    momentum: float = option(0.9, "momentum of SGD and LARS", fraction)
    nesterov: bool = switch("use Nesterov momentum (--optimizer sgd)")
    weight_decay: float | None = optional(
        "weight decay; adamw, lamb: decoupled; otherwise added to the gradient (default: of the "
        "task)",
        non_negative,
    )
    no_decay_on_norm: bool = switch(
        "do not decay biases and the parameters of normalization layers (always so with lars and "
        "lamb, which do not scale their updates either)"
    )
    label_smoothing: float = option(0.0, "label smoothing in training", fraction)
    mixup: float = option(
        0.0,
        "mixup: weights of a training sample and the next one from Beta(ALPHA, ALPHA), e.g. 0.2; "
        "0: no mixup",
        non_negative,
        metavar="ALPHA",
    )
    random_erase: float = option(0.0, "probability of random erasing, in training", fraction)
    ema: float = option(
        0.0,
        "decay per update of a moving average of the weights, saved with them and evaluated in "
        "their place, e.g. 0.999; 0: none",
        fraction,
    )
    clip_norm: float = option(
        0.0, "maximum L2 norm of the gradients of an update; 0: no clipping", non_negative
    )
    sync_batchnorm: bool = switch("compute BatchNorm over the global batch")
    on_nan: str = option(
        "stop",
        "action if gradients are not finite: stop, or skip the update (at most 10 in a row)",
        choices=("stop", "skip"),
    )
    deterministic: bool = switch(
        "make runs on the same number of ranks bit-equal to each other",
        group="numerics and compilation",
    )
    tf32: bool = switch("use TF32 (10-bit mantissa) for fp32 matrix products on a GPU: faster")
    compile: bool = switch("compile the model with torch.compile")
    compression: str = option(
        NONE,
        "numeric type in which gradients are sent and summed",
        choices=COMPRESSIONS,
        group="distribution",
    )
    spawn: int | None = optional(
        "number of ranks to start on this host, without a launcher (--strategy ddp, zero, fsdp)",
        positive,
    )
    check_replicas: int = option(
        1000,
        "number of updates between checks that parameters and optimizer state are equal on all "
        "ranks; 0: check only when saving",
        count,
    )
    evaluate_epochs: tuple[int, ...] | None = optional(
        "epochs after which to evaluate, e.g. 20,30,40; the last is always evaluated (default: "
        "every epoch)",
        counts,
        group="evaluation",
    )
    evaluate_only: bool = switch("evaluate a checkpoint without training")
    checkpoint: Path | None = optional(
        "checkpoint to evaluate, or a directory of checkpoints (default: the newest in "
        "--checkpoint-dir)",
        Path,
        either="checkpoint",
    )
    predict: Path | None = optional(
        "CSV file for one prediction per sample; implies --evaluate-only", Path
    )
    benchmark: str = option(
        "",
        "measure throughput only: training (100 updates unless --num-steps is set, no evaluation) "
        "or inference (an evaluation; needs no checkpoint)",
        choices=("training", "inference"),
    )
    checkpoint_every: int | None = optional(
        "number of updates between checkpoints, in addition to one per epoch",
        positive,
        group="checkpoints",
    )
    save: str = option(
        "async",
        "how to write checkpoints; async: in the background, from a copy in host memory; sync: "
        "while the training waits, which ends if a write fails",
        choices=("async", "sync"),
    )
    keep: int = option(3, "number of recent checkpoints to keep, in addition to the best", positive)
    resume: str = option(
        "auto",
        "resume from --checkpoint-dir; auto: if it has a checkpoint; must: fail without one; "
        "never: start anew, old checkpoints are moved to DIR/before-1",
        choices=("auto", "never", "must"),
    )
    metrics: Path | None = optional(
        "JSON Lines file for loss, learning rate and throughput", Path, group="output"
    )
    log_every: int | None = optional(
        "number of updates between lines of --metrics (default: 20 lines per epoch)", positive
    )
    tracker: tuple[str, ...] = option(
        (),
        "record the run with wandb, mlflow or tensorboard, in the directory WHERE (default: ., "
        "mlruns, runs; mlflow: or at a URI); repeat it for several trackers",
        tracker,
        repeated=True,
    )
    timeline: Path | None = optional("file for Horovod's timeline (see hvdtrain timeline)", Path)
    timeline_steps: tuple[int, int | None] | None = optional(
        "updates to record in --timeline: A:B is A + 1 to B (default: all)",
        span,
        needs="--timeline FILE",
    )
    profile: tuple[int, int | None] | None = optional(
        "updates to profile with the framework's profiler: A:B is A + 1 to B", span
    )
    profile_dir: Path = option(
        Path("profile"),
        "directory for the traces of --profile, rank-N.json.gz",
        Path,
        needs="--profile A:B",
    )
    profile_ranks: tuple[int, ...] = option(
        (0,), "ranks to profile (default: 0)", ranks, needs="--profile A:B"
    )
    quiet: bool = switch("print errors only")
    device: Any = "cpu"
    """Device in the framework's notation; not an option: set by the trainer."""

    @property
    def evaluation(self) -> str:
        """The option by which a checkpoint is evaluated, without training; empty: none."""
        if self.predict is not None:
            return "--predict"
        if self.evaluate_only:
            return "--evaluate-only"
        return "--benchmark inference" if self.benchmark == "inference" else ""

    @property
    def evaluates_only(self) -> bool:
        """Whether a checkpoint is evaluated, without training."""
        return bool(self.evaluation)

    @property
    def comm_options(self) -> CommOptions:
        """Communication options; an evaluation sends no gradients, so it has none."""
        return CommOptions() if self.evaluates_only else CommOptions(self.compression)
