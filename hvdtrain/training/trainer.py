"""The trainer: the eight steps, top to bottom, in ``train``; its epochs stand in ``loop.py``."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Sequence

from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.files import check_writable
from hvdtrain.launch import ending, terminal
from hvdtrain.launch.tuning import keep_freed_memory
from hvdtrain.training import options as option_parser
from hvdtrain.training import timeline_window
from hvdtrain.training.agreement import check_data, check_options
from hvdtrain.training.loop import Run
from hvdtrain.training.options import Options
from hvdtrain.training.plan import Workload, choose_model, make_plan
from hvdtrain.training.preemption import leave_on_signal
from hvdtrain.training.progress import Progress, Silent
from hvdtrain.workloads.base import TaskOptions
from hvdtrain.workloads.precision import choose, processor_has_bf16


def main(workload: Workload, arguments: Sequence[str], *, description: str, epilog: str) -> int:
    """What ``python -m hvdtrain.WORKLOAD`` does: read the options, train.

    Returns:
        The exit code.
    """
    options = option_parser.parse(workload.name, arguments, description=description, epilog=epilog)
    leave_on_signal(options.checkpoint_dir, resumes=options.resume != "never")
    level = logging.ERROR if options.quiet else logging.WARNING
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be of any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=level, format="hvdtrain: %(message)s")
    if options.quiet:
        terminal.clear()
    return train(workload, options)


def train(workload: Workload, options: Options) -> int:
    """Train ``workload`` in eight steps; every rank calls it with the same options.

    Returns:
        0, or 75 when a signal stopped it and a checkpoint was saved.

    Raises:
        HvdtrainError: see ``errors.py``.
    """
    model_name = choose_model(workload, options)
    for name in ("summary", "metrics", "timeline"):
        check_writable(getattr(options, name), f"--{name}")
    keep_freed_memory()
    ending.leave_nothing_behind()  # before a framework notes where temporary files go
    terminal.status(f"importing {options.framework} and its libraries")
    with _hidden("matplotlib", "sklearn"):  # Keras imports them where they are, in 1.5 s
        adapter = select_adapter(options.framework, options.strategy)
    timeline_window.prepare(options, adapter.name)
    terminal.status(f"starting {adapter.name}, waiting for all ranks")
    world = adapter.initialize(short_steps=workload.short_steps(model_name))  # step 1
    check_options(adapter, options)
    device = adapter.pin_device()  # step 2
    plan = make_plan(workload, options, world)
    precision = choose(
        options.precision,
        prefers_bf16=workload.prefers_bf16(plan.model),
        gpu=adapter.has_gpu,
        has_bf16=adapter.has_gpu or processor_has_bf16(),
    )
    if options.deterministic:
        adapter.make_deterministic()
    terminal.status(f"reading the data, building {plan.model}")
    settings = TaskOptions(
        model=plan.model,
        precision=precision,
        seed=options.seed,
        optimizer=options.optimizer,
        momentum=options.momentum,
        weight_decay=plan.weight_decay,
        dropout=options.dropout,
        image_size=options.image_size or 224,
        workers=1 if options.workers is None else options.workers,
        device=adapter.device,
    )
    task = adapter.communicator.together(lambda: workload.build(options, settings))
    check_data(adapter, task)
    if options.sync_batchnorm:
        adapter.synchronize_batchnorm(task)
    shards = adapter.shard_data(  # step 3
        task.train.samples, global_batch=plan.global_batch, seed=options.seed
    )
    rate = adapter.scale_learning_rate(plan.lr, scaling=plan.lr_scaling, **plan.schedule)  # step 4
    task.model, task.optimizer = adapter.distribute_optimizer(  # step 5
        task.model, task.optimizer
    )
    run = Run(workload.name, options, plan, adapter, task, shards, rate)
    run.resume()
    adapter.broadcast_state(task.model, task.optimizer)  # step 6
    run.show = adapter.communicator.together(lambda: _reporter(options, world.is_writer))
    run.announce(device, precision)
    try:
        return run.run()  # with steps 7 and 8
    finally:
        run.show.stop()


@contextlib.contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Let whoever can do without ``modules`` do so; what is imported already stays."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: cannot be imported
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _reporter(options: Options, writes: bool) -> Silent:
    if not writes:
        return Silent()
    return Progress(
        quiet=options.quiet,
        metrics=options.metrics,
        tensorboard=options.tensorboard,
        summary=options.summary,
    )
