"""``hvdtrain.mnist`` with faults: ``faulty_trainer.py FAULT[:VALUE...][,FAULT...] OPTIONS...``.

Each fault is a function below, which takes the values; ranks are those of mpirun.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.steps.sharding import Part, permutation
from hvdtrain.system.runtime import waits
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks.dataset import Batch
from hvdtrain.training import loop as loop_module
from hvdtrain.training.loop import TrainingLoop

FRAMEWORK = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
SAMPLES = 1500  # of the embedded digits
BIT = 1 << 20  # of the mantissa, so that nothing else happens
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
tasks: Any = importlib.import_module(f"hvdtrain.tasks.training_step_{FRAMEWORK}")
Task: Any = tasks.TFTask if FRAMEWORK == "tensorflow" else tasks.TorchTask


def around_updates(
    rank: int,
    before: Callable[[Any, int], object] = lambda *_: None,
    after: Callable[[Any, int], object] = lambda *_: None,
) -> None:
    """Call functions of the task and the number of an update around each update of a rank."""
    update, made = Task.update, []

    def updated(task: Any, *arguments: Any, **more: Any) -> Any:
        made.append(1)
        if rank == RANK:
            before(task, len(made))
        loss = update(task, *arguments, **more)
        if rank == RANK:
            after(task, len(made))
        return loss

    Task.update = updated


def late(rank: str, milliseconds: str) -> None:
    """Let a rank sleep before each of its updates."""
    around_updates(int(rank), before=lambda *_: time.sleep(int(milliseconds) / 1000))


def flip(rank: str) -> None:
    """Flip a bit of a parameter of a rank after update 7."""

    def one_bit(task: Any, number: int) -> None:
        if number != 7:
            return
        if FRAMEWORK == "tensorflow":
            weights = task.model.trainable_variables[2]
            array = weights.numpy().copy()
        else:  # an array of the same memory
            array = list(task.model.parameters())[2].detach().numpy()
        array.reshape(-1).view(np.uint32)[5] ^= BIT
        if FRAMEWORK == "tensorflow":
            weights.assign(array)

    around_updates(int(rank), after=one_bit)


def as_on_a_gpu(*, defers: bool = True) -> None:
    """Make the optimizer a fused one, and let a gradient that is not finite be found later."""
    start = tasks.TorchTask.__init__

    def start_fused(task: Any, *arguments: Any, **named: Any) -> None:
        start(task, *arguments, **named)
        task.optimizer = tasks.make_optimizer(task.model, task.options, fused=True)
        task.may_defer = defers

    tasks.TorchTask.__init__ = start_fused


def bad_samples(first: str, end: str = "", fused: str = "") -> None:
    """Make samples of the first epoch not a number; ``fused``: at-once or deferred."""
    bad = permutation(SAMPLES, 0, 0)[int(first) : int(end) if end else int(first) + 1 or None]
    training = tasks.InMemory.training
    tensor = tasks.tf.constant if FRAMEWORK == "tensorflow" else tasks.torch.from_numpy

    def spoilt(data: Any, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        for part, batch in training(data, parts):
            factor = np.where(np.isin(part.indices, bad), np.nan, 1.0).reshape(-1, 1, 1, 1)
            yield part, Batch(tensor(np.asarray(batch.x) * factor), batch.y)

    tasks.InMemory.training = spoilt
    if fused:
        as_on_a_gpu(defers=fused == "deferred")


def scaled() -> None:
    """Scale the loss, as with fp16 on a GPU."""
    start = Task.__init__

    def start_scaled(task: Any, *arguments: Any, **named: Any) -> None:
        start(task, *arguments, **named)
        if FRAMEWORK == "pytorch":
            task.scaler = tasks.torch.amp.GradScaler("cpu", growth_interval=3)
        else:
            task.optimizer = tasks.keras.optimizers.LossScaleOptimizer(task.optimizer)
            task.optimizer.build(task.model.trainable_variables)

    Task.__init__ = start_scaled


def nan() -> None:
    """Make the input of step 4 not a number on rank 1."""
    whole, steps = tasks.TorchTask._input, []

    def broken(task: Any, pixels: Any) -> Any:
        steps.append(1)
        return whole(task, pixels) * (float("nan") if RANK == 1 and len(steps) == 4 else 1.0)

    tasks.TorchTask._input = broken


def hang() -> None:
    """Let rank 1 sleep within its third compiled step; others complain after a second."""
    waits.LATE_TIMEOUT, whole, calls = 1.0, tasks.TFTask._input, []

    def sleep(pixels: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and RANK == 1:
            time.sleep(4)
        return pixels

    def slow(task: Any, pixels: Any) -> Any:
        tensor = whole(task, pixels)
        called = tasks.tf.numpy_function(sleep, [tensor], tensor.dtype)
        return tasks.tf.ensure_shape(called, tensor.shape)

    tasks.TFTask._input = slow


def crash(how: str) -> None:
    """End rank 1 after step 3, in one of several ways."""
    update = TrainingLoop.train_step

    def crashing(run: TrainingLoop, *arguments: Any) -> bool:
        made = update(run, *arguments)
        if run.now.step != 3 or RANK != 1:
            return made
        print("crashing", time.time(), file=sys.stderr, flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "vanishes":
            os._exit(7)
        if how == "exits":
            sys.exit(3)
        raise MemoryError("no memory left")

    TrainingLoop.train_step = crashing  # type: ignore[method-assign]


def stop(when: str, step: str) -> None:
    """Request a stop on rank 1: for the flags of an update, or in the evaluation after it.

    Or lose rank 1 in that evaluation (``lost``).
    """
    update, evaluation, last = TrainingLoop.train_step, loop_module.evaluate, int(step)
    loops: list[TrainingLoop] = []

    def updated(run: TrainingLoop, *arguments: Any) -> bool:
        loops[:] = [run]
        if when == "update" and run.now.step == last - 1 and RANK == 1:
            run.preemption.want_stop("a test")
        return update(run, *arguments)

    def evaluated(*arguments: Any, **named: Any) -> Any:
        if loops and loops[0].now.step == last and RANK == 1:
            if when == "lost":
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "evaluation":
                loops[0].preemption.want_stop("a test")
        return evaluation(*arguments, **named)

    TrainingLoop.train_step, loop_module.evaluate = updated, evaluated  # type: ignore[method-assign]


def full(first: str, last: str) -> None:
    """Let the kernel refuse to write files, after update ``first`` until update ``last``."""
    update = TrainingLoop.train_step
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(run: TrainingLoop, *arguments: Any) -> bool:
        made = update(run, *arguments)
        if run.now.step == int(last):
            run.checkpoints.finish()
        size = 20_000 if int(first) <= run.now.step < int(last) else most
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return made

    TrainingLoop.train_step = limited  # type: ignore[method-assign]


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


def waits_for_no_tensor() -> None:
    """End where a step asks a tensor for a number: on a GPU it would wait.

    The first may, and the last, after which the losses are read.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class NothingIsAsked(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if name == "_local_scalar_dense" and args[0].dtype == tasks.torch.int32:
                name = ""  # DDP's map of the parameters that were used, which is in host memory
            assert not name.startswith(WAITS), f"a step asks for a number by {name}"
            return func(*args, **(kwargs or {}))

    step, begin = TrainingLoop.train_step, TrainingLoop.__init__

    def seldom(run: TrainingLoop, *arguments: Any) -> None:
        begin(run, *arguments)
        run.log_every = 1000  # log no step

    def watched(run: TrainingLoop, *arguments: Any) -> bool:
        if run.now.step in (0, run.total_steps - 1):
            return step(run, *arguments)
        with NothingIsAsked():
            return step(run, *arguments)

    TrainingLoop.__init__, TrainingLoop.train_step = seldom, watched  # type: ignore[method-assign]
    as_on_a_gpu()


FAULTS = (late, flip, bad_samples, scaled, nan, hang, crash, stop, full, waits_for_no_tensor)

if __name__ == "__main__":
    for words in sys.argv.pop(1).split(","):
        name, *values = words.split(":")
        {fault.__name__: fault for fault in FAULTS}[name](*values)
    run_and_exit(mnist.main)
