"""The trainer: the eight steps, top to bottom, in ``train``; the epochs are in ``loop.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.preemption import leave_on_signal
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.adapters.select import choose_strategy
from hvdtrain.config.checks import check, of_device
from hvdtrain.config.command_line import parse
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.system.files import check_writable
from hvdtrain.system.folder import private_folder
from hvdtrain.system.machine.threads import local_cores
from hvdtrain.system.runtime import spawn, terminal
from hvdtrain.system.runtime.detect import SPAWN, detect
from hvdtrain.system.runtime.scratch import use_scratch_directory
from hvdtrain.system.runtime.tuning import keep_freed_memory
from hvdtrain.tasks.task import Task, Workload
from hvdtrain.training.checks import check_data, check_early, check_options
from hvdtrain.training.evaluation import evaluate_only
from hvdtrain.training.loop import TrainingLoop
from hvdtrain.training.plan import (
    Session,
    TrainingPlan,
    choose_model,
    choose_precision,
    choose_workers,
    make_plan,
    notes,
    processor_has_bf16,
)
from hvdtrain.training.progress import progress_of
from hvdtrain.training.staging import stage
from hvdtrain.training.windows import prepare_timeline


def main(workload: Workload, arguments: Sequence[str]) -> int:
    """Read the options and train, as ``python -m hvdtrain.WORKLOAD`` does; return the exit code."""
    options = parse(
        workload.program or workload.name,
        arguments,
        description=workload.description,
        epilog=workload.epilog,
        kind=workload.options,
    )
    launch = detect(os.environ)
    spawns = options.spawn and launch.launcher != SPAWN
    launch = spawn.spawned(options.spawn) if options.spawn and spawns else launch
    check_early(workload, options, launch)
    saves_to = None if options.evaluates_only else options.checkpoint_dir
    if options.spawn and spawns:
        return _spawn(options, options.spawn)
    leave_on_signal(saves_to, resumes=options.resume != "never")
    spawn.join()
    level = logging.ERROR if options.quiet else logging.WARNING
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be of any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = terminal.Handler(sys.stderr)
    logging.basicConfig(level=level, format="hvdtrain: %(message)s", handlers=[handler])
    if options.quiet:
        terminal.clear()
    return train(workload, options)


def _spawn(options: Options, size: int) -> int:
    """Start the ranks; this process only waits for them."""
    spawn.check_no_launcher(os.environ)
    choose_strategy(options.strategy, options.framework, spawn.spawned(size), STRATEGIES)
    terminal.clear()
    return spawn.spawn(size)


def train(workload: Workload, options: Options) -> int:
    """Train ``workload`` in eight steps; every rank calls it with the same options.

    Returns 0, or 75 if it was preempted and saved a checkpoint.
    """
    model = choose_model(workload, options)
    adapter = _prepare(options)
    world = adapter.initialize(short_steps=workload.short_steps(model))  # step 1
    check_options(adapter, options, workload.digest)
    device = adapter.pin_device()  # step 2
    plan = make_plan(workload, options, world)
    task = _build(workload, options, plan, adapter)
    session = Session(workload, options, plan, adapter, task)
    if options.evaluates_only:
        return evaluate_only(session, device)
    shards = adapter.shard_data(  # step 3
        task.train.samples, global_batch=plan.global_batch, seed=options.seed
    )
    task.notes = (*task.notes, *notes(options, plan, task.train.samples))
    schedule = plan.schedule_over(task.train.samples)
    rate = adapter.scale_learning_rate(plan.lr, scaling=plan.lr_scaling, **schedule)  # step 4
    task.model, task.optimizer = adapter.distribute_optimizer(  # step 5
        task.model, task.optimizer
    )
    loop = TrainingLoop(session, shards, rate)  # which loads the checkpoint
    adapter.broadcast_state(task.model, task.optimizer)  # step 6
    show = progress_of(session, loop.now.training_id, loop.now.step)
    loop.announce(show, device)
    try:
        return loop.run()  # steps 7 and 8, save_checkpoint and average_metrics
    finally:
        show.stop()


def _prepare(options: Options) -> CommonAdapter:
    """Check the output files, and import framework and strategy, without starting them."""
    for name in ("summary", "metrics", "timeline", "predict"):
        check_writable(getattr(options, name), f"--{name}")
    keep_freed_memory()
    if options.compile and not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        # In the usual place for temporary files, for the next run; what is in it is executed.
        kernels = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        remedy = "set TMPDIR to a directory that only you can write to"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = private_folder(kernels, "--compile", remedy)
    use_scratch_directory()  # before a framework reads the directory of temporary files
    terminal.status(f"importing {options.framework} and its libraries")
    with _hidden("matplotlib", "sklearn"):  # Keras imports them if installed, in 1.5 s
        adapter = select_adapter(
            options.framework, options.strategy, comm_options=options.comm_options
        )
    prepare_timeline(options, adapter.name)
    terminal.status(f"starting {adapter.name}, waiting for all ranks")
    return adapter


def _build(
    workload: Workload, options: Options, plan: TrainingPlan, adapter: CommonAdapter
) -> Task:
    """Build the task, and check that its data is the same on all ranks."""
    check(of_device(options, gpu=adapter.has_gpu))
    filled_in = _filled_in(workload, options, plan, adapter)
    adapter.framework.use_tf32(options.tf32)
    if options.deterministic:
        adapter.framework.make_deterministic()
    staged = ""
    if options.stage and options.data:
        data, staged = stage(adapter, options.data, options.stage)
        filled_in = dataclasses.replace(filled_in, data=data)
    terminal.status(f"reading the data, building model {plan.model}")
    task = adapter.communicator.together(lambda: workload.build(filled_in))
    check_data(adapter, task)
    if staged:
        task.notes = (*task.notes, staged)
    strategy = adapter.strategy
    task.collective_passes, task.leave_out = strategy.collective_passes, adapter.leave_out
    task.no_sync, task.sum_shards = strategy.no_sync, strategy.sum_shards
    task.start_sum = strategy.start_sum
    task.share_weights = strategy.share_weights
    if options.sync_batchnorm:
        strategy.synchronize_batchnorm(task)
    if options.compile and not options.evaluates_only:
        terminal.status("compiling")
        adapter.communicator.together(lambda: strategy.compile(task))
    return task


def _filled_in(
    workload: Workload, options: Options, plan: TrainingPlan, adapter: CommonAdapter
) -> Options:
    """Return the options with every default filled in, for the task on this rank."""
    precision = choose_precision(
        options.precision,
        prefers_bf16=workload.prefers_bf16(plan.model),
        has_bf16=adapter.has_gpu or processor_has_bf16(),
    )
    if options.evaluates_only and precision != "fp64":
        precision = "fp32"
    cores = local_cores(adapter.world.local_rank, adapter.world.local_size)
    return dataclasses.replace(
        options,
        model=plan.model,
        precision=precision,
        weight_decay=plan.weight_decay,
        workers=choose_workers(options.workers, gpu=adapter.has_gpu, cores=cores),
        device=adapter.device,
    )


@contextlib.contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Hide optional ``modules`` from imports within the block; those already imported stay."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: cannot be imported
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
