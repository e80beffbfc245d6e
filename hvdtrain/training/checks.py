"""The facts of a training for its checks (``config/checks.py``), and its first look at files.

The ranks of a job may have been started with different command lines (mpirun's application
contexts, a wrapper script), and a host may have another copy of the data: they would train with
different learning rates, orders or numbers of steps, or hang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.checks import check, of_launch, of_ranks, of_strategy
from hvdtrain.config.declare import declared, option_name
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.world import World
from hvdtrain.system.files import check_folder
from hvdtrain.system.runtime.detect import TORCHRUN, LaunchInfo, is_restarted
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.tasks.task import Task, Workload
from hvdtrain.training.plan import TrainingPlan, make_plan, origin_of
from hvdtrain.training.trackers import check_trackers

SHOWN = 12  # digits of a digest
# Options that only rank 0 uses, or that do not affect results.
LOCAL = ("quiet", "summary", "metrics", "tracker", "profile_dir", "workers")


def check_early(workload: Workload, options: Options, launch: LaunchInfo) -> None:
    """Raise if the training is impossible, as far as options and launcher tell.

    It needs no framework, and is called before one is imported. The strategy is checked once more
    when it is chosen, as the runtime may see another launch than the launcher reports.
    """
    restarts = launch.launcher == TORCHRUN and is_restarted(os.environ)
    restarts = restarts and not options.evaluates_only
    check(of_launch(options, launch, workload.models, restarts=restarts))
    world = World(launch.rank, launch.size, launch.local_rank, launch.local_size, "", 1)
    plan = make_plan(workload, options, world)
    if not options.evaluates_only:
        LearningRate(plan.lr, **plan.schedule)
    if options.strategy:
        strategy, compression = STRATEGIES[options.strategy], options.comm_options.compression
        check(of_strategy(strategy, options.framework, launch, compression))
    if launch.is_root:
        check_trackers(options.tracker)
    if options.profile and launch.rank in options.profile_ranks:
        check_folder(options.profile_dir, f"--profile-dir {options.profile_dir}")
    _check_origin(workload, options, plan)


def _check_origin(workload: Workload, options: Options, plan: TrainingPlan) -> None:
    """Raise if the checkpoint is of another training, as far as the options determine it."""
    path, source = options.checkpoint_dir, "--checkpoint-dir"
    if options.evaluates_only:
        path, source = options.checkpoint or path, "checkpoint"
    elif options.resume == "never":
        return
    checkpoint = checkpoints.read_newest_state(path) if path else None
    if checkpoint:
        checkpoints.check_origin(checkpoint, origin_of(workload, options, plan), source)


def check_options(adapter: CommonAdapter, options: Options, file: str) -> None:
    """Compare the options of all ranks, and the digest of the ``file`` that defines the task."""
    mine = {
        option_name(field): str(getattr(options, field.name))
        for field in declared(type(options))
        if field.name not in LOCAL
    }
    # Each host may have its copy in another directory; but the embedded data is different data.
    for name in ("data", "stage"):
        mine[f"--{name}"] = "given" if getattr(options, name) else "not given"
    mine["the file that defines the task (a digest)"] = file[:SHOWN]
    remedy = "start all ranks with the same options"
    plain = {"": "not given", "None": "not given", "True": "given", "False": "not given"}
    _compare(adapter, {name: plain.get(value, value) for name, value in mine.items()}, remedy)


def check_data(adapter: CommonAdapter, task: Task) -> None:
    """Compare the number and the digests of the samples of all ranks, in one collective."""
    mine = {
        "the number of training samples": f"{task.train.samples:,}",
        "the number of test samples": f"{task.test.samples if task.test else 0:,}",
        "the training data (a digest of labels and names)": task.train.digest[:SHOWN],
        "the test data (a digest of labels and names)": (
            task.test.digest[:SHOWN] if task.test else ""
        ),
        "the decoder of the images (name it: --decoder)": task.decoder or "none",
    }
    remedy = "use the same data on every host (--data), preferably on a shared file system"
    _compare(adapter, mine, remedy)


def _compare(adapter: CommonAdapter, mine: Mapping[str, str], remedy: str) -> None:
    """Raise, on all ranks, if a value differs between ranks; it is one collective."""
    values = adapter.communicator.gather_json(mine)
    try:
        check(of_ranks(values, [facts.host for facts in adapter.ranks], remedy))
    except UsageError as error:
        raise agreed(error) from None
