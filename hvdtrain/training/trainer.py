"""The training loop: the eight steps, top to bottom, in ``train``; then epochs in ``Run``."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, TrainingError, UsageError
from hvdtrain.launch import ending
from hvdtrain.launch.tuning import keep_freed_memory
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.randomness import seed_of
from hvdtrain.steps.sharding import Part, Position, Shards, evaluation_parts
from hvdtrain.training import options as option_parser
from hvdtrain.training.options import Options
from hvdtrain.training.plan import Plan, Workload, check_writable, choose_model, make_plan
from hvdtrain.training.preemption import on_stop_signal
from hvdtrain.training.progress import Progress, Silent
from hvdtrain.training.result import Clock, rows
from hvdtrain.workloads.base import Loaded, Task, TaskOptions
from hvdtrain.workloads.precision import choose, processor_has_bf16

log = logging.getLogger(__name__)

LINES_PER_EPOCH = 20  # log intervals
EVALUATION_BATCH = 4  # times the training batch of a rank: no gradients need memory


def main(workload: Workload, arguments: Sequence[str], *, description: str, epilog: str) -> int:
    """What ``python -m hvdtrain.WORKLOAD`` does: read the options, train.

    Returns:
        The exit code.
    """
    options = option_parser.parse(workload.name, arguments, description=description, epilog=epilog)
    level = logging.ERROR if options.quiet else logging.WARNING
    logging.basicConfig(level=level, format="hvdtrain: %(message)s")
    return train(workload, options)


def train(workload: Workload, options: Options) -> int:
    """Train ``workload`` in eight steps; every rank calls it with the same options.

    Returns:
        0, or 75 when a signal stopped it and a checkpoint was saved.

    Raises:
        HvdtrainError: see ``errors.py``.
    """
    model_name = choose_model(workload, options)
    check_writable(options.summary, "--summary")
    keep_freed_memory()
    adapter = select_adapter(options.framework, options.strategy)
    world = adapter.initialize(short_steps=workload.short_steps(model_name))  # step 1
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
    if options.sync_batchnorm:
        adapter.synchronize_batchnorm(task)
    shards = adapter.shard_data(  # step 3
        task.train.samples, global_batch=plan.global_batch, seed=options.seed
    )
    rate = adapter.scale_learning_rate(plan.lr, scaling=plan.lr_scaling, **plan.schedule)  # step 4
    task.optimizer = adapter.distribute_optimizer(task.optimizer)  # step 5
    run = Run(workload.name, options, plan, adapter, task, shards, rate)
    run.resume()
    adapter.broadcast_state(task.model, task.optimizer)  # step 6
    run.show = adapter.communicator.together(lambda: _reporter(options, world.is_writer))
    run.announce(device, precision)
    return run.run()  # with steps 7 and 8


def _reporter(options: Options, writes: bool) -> Silent:
    if not writes:
        return Silent()
    return Progress(quiet=options.quiet, metrics=options.metrics, tensorboard=options.tensorboard)


class Run:
    """One training from where it stands to where it stops; see ``train`` for how it is made."""

    def __init__(
        self,
        name: str,
        options: Options,
        plan: Plan,
        adapter: CommonAdapter,
        task: Task,
        shards: Shards,
        rate: LearningRate,
    ) -> None:
        self.name, self.options, self.plan = name, options, plan
        self.adapter, self.task, self.shards, self.rate = adapter, task, shards, rate
        self.show = Silent()
        self.clock = Clock()
        self.position = Position()
        self.step_number = 0
        self.samples = 0
        self.loss_sum, self.loss_count = 0.0, 0  # of this epoch, on this rank
        self.pending: list[tuple[Part, Any]] = []  # losses that nobody has looked at yet
        self.train_loss: float | None = None
        self.evaluation: dict[str, Any] | None = None
        self.saved: tuple[int, bool] | None = None  # step, and whether with an evaluation
        self.checkpoint_path: str | None = None
        self.origin = {
            "framework": options.framework,
            "workload": name,
            "model": plan.model,
            "optimizer": options.optimizer,
            "training_samples": task.train.samples,
            "seed": options.seed,
        }
        # Reading a loss waits for a GPU; a CPU has it already.
        self.look_every = 20 if adapter.has_gpu else 1
        self.log_every = max(1, math.ceil(shards.steps_per_epoch / LINES_PER_EPOCH))
        if plan.num_steps is not None:
            self.log_every = max(1, min(self.log_every, plan.num_steps // LINES_PER_EPOCH))

    @property
    def total_steps(self) -> int:
        """Updates of the whole training."""
        all_epochs = self.plan.epochs * self.shards.steps_per_epoch
        return all_epochs if self.plan.num_steps is None else min(self.plan.num_steps, all_epochs)

    def resume(self) -> None:
        """Go on from the newest checkpoint, as ``--resume`` says."""
        directory, mode = self.options.checkpoint_dir, self.options.resume
        if directory is None:
            return
        root = self.adapter.communicator.on_root
        root(lambda: check_writable(directory / checkpoints.STATE_FILE, "--checkpoint-dir"))
        if mode == "never":
            root(lambda: checkpoints.set_aside(directory))
            return
        state = self.adapter.load_checkpoint(
            directory, self.task.model, self.task.optimizer, origin=self.origin
        )
        if state is None:
            if mode == "must":
                raise ending.agreed(
                    UsageError(f"--resume must: there is no checkpoint in {directory}")
                )
            return
        self.position = Position(**state["position"])
        self.step_number, self.samples = state["step"], state["samples"]
        self.evaluation = state["metrics"]
        self.checkpoint_path = state["path"]
        self.saved = (self.step_number, self.evaluation is not None)
        if self.adapter.world.is_writer:  # one rank carries the sums of the epoch so far
            self.loss_sum, self.loss_count = state["loss_sum"], state["loss_count"]

    def announce(self, device: str, precision: str) -> None:
        """Say what is about to be trained, and how."""
        world, plan, rate = self.adapter.world, self.plan, self.rate
        peak = rate.base * rate.factor
        lines = [
            f"hvdtrain {self.name}: {plan.model}, {self.options.framework} over "
            f"{self.adapter.name}, {world.size} rank{'s' if world.size > 1 else ''} on "
            f"{world.hosts} host{'s' if world.hosts > 1 else ''}, {device} a rank, {precision}",
            f"{self.task.train.samples:,} images, global batch {plan.global_batch}, "
            f"{self.shards.steps_per_epoch:,} steps an epoch, "
            f"{plan.epochs} epoch{'s' if plan.epochs > 1 else ''}, "
            f"learning rate {rate.base:g} x {rate.factor:g} = {peak:g}",
            *self.task.notes,
        ]
        if self.step_number:
            lines.append(
                f"resumed from {self.checkpoint_path}: step {self.step_number}, epoch "
                f"{self.position.epoch}, {self.position.consumed:,} of its images done"
            )
        self.show.begin(lines, self.total_steps, self.step_number)

    def run(self) -> int:
        """Train until the end, ``--num-steps`` or a signal; save, evaluate, sum up.

        Returns:
            The exit code.
        """
        if self.options.checkpoint_dir:
            on_stop_signal(lambda: setattr(self.adapter, "stop_wanted", True))
        stopped = self._finished()
        while stopped is None:
            stopped = self._epoch()
        if stopped != "preempted" and not self._evaluate():
            stopped = "preempted"
        self._save()
        self.task.train.close()
        self._sum_up(stopped)
        return EXIT_PREEMPTED if stopped == "preempted" else EXIT_OK

    def _finished(self) -> str | None:
        if self.plan.num_steps is not None and self.step_number >= self.plan.num_steps:
            return "steps"
        return "finished" if self.position.epoch >= self.plan.epochs else None

    def _epoch(self) -> str | None:
        """Train to the end of the epoch, or to a stop; why it stopped, None to go on."""
        epoch = self.position.epoch
        parts = self.shards.epoch(epoch, self.position.consumed)
        self.clock.resume()
        for part, batch in self.task.train.training(parts):
            self._update(part, batch)
            if self._wants_stop():
                self._look()
                return "preempted"
            if reason := self._finished():
                if reason == "finished" or self.position.epoch > epoch:
                    break
                self._end_of_epoch_loss(reset=False)
                return reason
            every = self.options.checkpoint_every
            if every and self.step_number % every == 0:
                self._save()
                self.clock.resume()
        self._end_of_epoch_loss(reset=True)
        if not self._evaluate():
            return "preempted"
        self._save()
        self.show.epoch(self._epoch_record(epoch))
        return self._finished()

    def _wants_stop(self) -> bool:
        # On a GPU the answer waits for the device, so it is asked for now and then.
        return self.step_number % self.look_every == 0 and self.adapter.stop_agreed

    def _update(self, part: Part, batch: Loaded) -> None:
        ending.stage = f"step {self.step_number + 1}"
        place = part.start.epoch + part.start.consumed / self.shards.samples
        loss = self.task.update(
            batch,
            learning_rate=self.rate(place),
            seed=seed_of(self.options.seed, self.step_number, self.adapter.world.rank),
            weigh=functools.partial(self.adapter.weigh, part=part),
        )
        self.step_number += 1
        self.samples += part.global_count
        self.position = part.end
        self.evaluation = None
        self.pending.append((part, loss))
        if self.step_number % self.look_every == 0:
            self._look()
        self.clock.step(part.global_count)
        if self.step_number % self.log_every == 0:
            self._log(part, place)

    def _look(self) -> None:
        """Read the losses that are pending; stop where one is not finite."""
        values = self.task.loss_values([loss for _, loss in self.pending])
        for back, ((part, _), value) in enumerate(zip(self.pending, values, strict=True)):
            if not math.isfinite(value):
                step = self.step_number - len(values) + back + 1
                raise TrainingError(
                    f"the loss is {value} at step {step} (epoch {part.start.epoch}): lower --lr, "
                    "or look at the data of this rank. Checkpoints on disk are of earlier steps"
                )
            self.loss_sum += value * part.count
            self.loss_count += part.count
        self.pending.clear()

    def _log(self, part: Part, place: float) -> None:
        means, _ = self.adapter.average_metrics(self.loss_count, loss=self.loss_sum)
        rate = self.clock.recent_rate(self.log_every)
        record = {
            "step": self.step_number,
            "epoch": part.start.epoch,
            "loss": means["loss"],
            "learning_rate": self.rate(place),
            "images_per_second": rate,
            "seconds_per_step": self.plan.global_batch / rate if rate else 0.0,
        }
        self.show.step(record)

    def _end_of_epoch_loss(self, *, reset: bool) -> None:
        self._look()
        means, count = self.adapter.average_metrics(self.loss_count, loss=self.loss_sum)
        self.train_loss = means["loss"] if count else None
        if reset:
            self.loss_sum, self.loss_count = 0.0, 0

    def _evaluate(self) -> bool:
        """Evaluate on the whole test set, each sample once; False if a signal cut it short."""
        if self.task.test is None or self.evaluation is not None:
            return True
        world, total = self.adapter.world, self.task.test.samples
        batch = max(1, EVALUATION_BATCH * self.plan.global_batch // world.size)
        loss, correct, count = 0.0, 0, 0
        with self.adapter.averaged_buffers(self.task.model):
            batches = evaluation_parts(total, batch, world.rank, world.size)
            for loaded in self.task.test.evaluation(batches):
                batch_loss, batch_correct = self.task.evaluate(loaded)
                loss += batch_loss
                correct += batch_correct
                count += len(loaded.y)
                if self.adapter.stop_wanted:
                    break
        means, seen = self.adapter.average_metrics(count, loss=loss, accuracy=correct)
        if seen < total:
            return False
        self.evaluation = {**means, "samples": seen}
        return True

    def _epoch_record(self, epoch: int) -> dict[str, Any]:
        tested = self.evaluation or {}
        return {
            "epoch": epoch,
            "step": self.step_number,
            "loss": self.train_loss,
            "seconds": sum(self.clock.seconds),
            "eval_loss": tested.get("loss"),
            "eval_accuracy": tested.get("accuracy"),
            "eval_samples": tested.get("samples"),
        }

    def _save(self) -> None:
        now = (self.step_number, self.evaluation is not None)
        if self.options.checkpoint_dir is None or self.saved == now:
            return
        self._look()
        means, count = self.adapter.average_metrics(self.loss_count, loss=self.loss_sum)
        state = {
            "step": self.step_number,
            "position": {"epoch": self.position.epoch, "consumed": self.position.consumed},
            "samples": self.samples,
            "loss_sum": means["loss"] * count if count else 0.0,
            "loss_count": count,
            "metrics": self.evaluation,
            "origin": self.origin,
        }
        path = self.adapter.save_checkpoint(  # step 7
            self.options.checkpoint_dir,
            self.task.model,
            self.task.optimizer,
            state=state,
            keep=self.options.keep,
        )
        self.saved, self.checkpoint_path = now, str(path)

    def _sum_up(self, stopped: str) -> None:
        tested = self.evaluation or {}
        world = self.adapter.world
        summary = {
            "workload": self.name,
            "framework": self.options.framework,
            "strategy": self.adapter.name,
            "model": self.plan.model,
            "world_size": world.size,
            "hosts": world.hosts,
            "precision": self.task.options.precision,
            "global_batch_size": self.plan.global_batch,
            "epochs_completed": self.position.epoch,
            "steps_completed": self.step_number,
            "samples_trained": self.samples,
            "train_loss": self.train_loss,
            "eval_loss": tested.get("loss"),
            "eval_accuracy": tested.get("accuracy"),
            "eval_samples": tested.get("samples"),
            **self.clock.figures(),
            "parameter_norm": self.task.parameter_norm(),
            "stopped": stopped,
            "checkpoint": self.checkpoint_path,
        }
        self.show.end(f"hvdtrain {self.name}", rows(summary))
        if world.is_writer and self.options.summary:
            checkpoints.write_json(self.options.summary, summary)
