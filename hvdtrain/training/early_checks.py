"""Checks of options, recipe and launcher that need no framework, before it is imported.

They are repeated later with all ranks, whose values may differ from those that the launcher
reports for this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.adapters.select import check_fit
from hvdtrain.config.comm_options import check_adasum, check_comm_options, check_stages
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.detect import LaunchInfo
from hvdtrain.tasks.task import Workload
from hvdtrain.training.plan import TrainingPlan, make_plan


def check_early(
    workload: Workload, options: Options, launch: LaunchInfo, environ: Mapping[str, str]
) -> None:
    """Raise if the training is impossible.

    Args:
        workload: the workload to train.
        options: the options.
        launch: the launcher's information on this process.
        environ: the environment, of which variables may contradict options.

    Raises:
        UsageError: naming the option and a remedy.
    """
    world = World(launch.rank, launch.size, launch.local_rank, launch.local_size, "", 1)
    plan = make_plan(workload, options, world)
    if not options.evaluates_only:
        LearningRate(plan.lr, **plan.schedule)
    if options.strategy:
        record = STRATEGIES[options.strategy]
        check_fit(record, options.framework, launch)
        check_comm_options(options.comm_options, record, options.framework, environ)
        if record.splits_model:
            check_stages(options.comm_options, launch.size)
    check_adasum(options.comm_options, launch.size, gpu=False)
    _check_origin(workload, options, plan)


def _check_origin(workload: Workload, options: Options, plan: TrainingPlan) -> None:
    """Raise if the checkpoint is of another training, as far as the options determine it."""
    origin = {
        "framework": options.framework,
        "workload": workload.name,
        "model": plan.model,
        "optimizer": options.optimizer,
        "seed": options.seed,
    }
    path, source = options.checkpoint_dir, "--checkpoint-dir"
    if options.evaluates_only:
        origin = {name: origin[name] for name in ("framework", "workload", "model")}
        path, source = options.checkpoint or path, "checkpoint"
    elif options.resume == "never":
        return
    checkpoint = checkpoints.read_newest_state(path) if path else None
    if checkpoint:
        checkpoints.check_origin(checkpoint, origin, source)
