"""What options, recipe and launcher alone tell is told before a framework is imported.

All of it is checked again, or was found, where all ranks take part: they may disagree with what the
launcher says of this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.adapters.select import check_fit
from hvdtrain.config.levers import check_adasum, check_levers, check_stages
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.detect import LaunchInfo
from hvdtrain.training.plan import TrainingPlan, make_plan
from hvdtrain.workloads.task import Workload


def check_early(
    workload: Workload, options: Options, launch: LaunchInfo, environ: Mapping[str, str]
) -> None:
    """Refuse what cannot be trained.

    Args:
        workload: what is to be trained.
        options: how.
        launch: what the launcher says of this process.
        environ: the environment, where variables contradict options.

    Raises:
        UsageError: naming the option and what to give instead.
    """
    world = World(launch.rank, launch.size, launch.local_rank, launch.local_size, "", 1)
    plan = make_plan(workload, options, world)
    if not options.evaluates_only:
        LearningRate(plan.lr, **plan.schedule)
    if options.strategy:
        record = STRATEGIES[options.strategy]
        check_fit(record, options.framework, launch)
        check_levers(options.levers, record, options.framework, environ)
        if record.splits_model:
            check_stages(options.levers, launch.size)
    check_adasum(options.levers, launch.size, gpu=False)
    _check_origin(workload, options, plan)


def _check_origin(workload: Workload, options: Options, plan: TrainingPlan) -> None:
    """Refuse the checkpoint of another training, as far as options tell that it is one."""
    origin = {
        "framework": options.framework,
        "workload": workload.name,
        "model": plan.model,
        "optimizer": options.optimizer,
        "seed": options.seed,
    }
    path, given = options.checkpoint_dir, "--checkpoint-dir"
    if options.evaluates_only:
        origin = {name: origin[name] for name in ("framework", "workload", "model")}
        path, given = options.checkpoint or path, "checkpoint"
    elif options.resume == "never":
        return
    found = checkpoints.glance(path) if path else None
    if found:
        checkpoints.check_origin(found, origin, given)
