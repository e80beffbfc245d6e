"""The training loop: epochs, steps, evaluation and stop, in ``TrainingLoop``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math

from hvdtrain.adapters.preemption import Preemption, wait_for_agent
from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, CheckpointError, TrainingError
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.sharding import Part, Position, Shards, seed_of
from hvdtrain.steps.summary import GradientMessages, Stopped
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.tasks.dataset import Batch
from hvdtrain.training.checkpoint_manager import CheckpointManager
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.plan import Session
from hvdtrain.training.progress import Progress
from hvdtrain.training.summary import (
    evaluation_figures,
    headlines,
    measured,
    rows,
    with_evaluation,
    with_session,
    with_usage,
)
from hvdtrain.training.throughput import Clock
from hvdtrain.training.updates import Updates
from hvdtrain.training.windows import ProfileWindow, TimelineWindow

log = logging.getLogger(__name__)

LINES_PER_EPOCH = 20  # log intervals


class TrainingLoop:
    """One training, from its start or a checkpoint to its stop; created by ``trainer.train``.

    The constructor loads the checkpoint; then call ``broadcast_state``.
    """

    def __init__(self, session: Session, shards: Shards, rate: LearningRate) -> None:
        self.session, self.shards, self.rate = session, shards, rate
        self.task = session.task
        self.options, self.plan = options, plan = session.options, session.plan
        self.adapter = adapter = session.adapter
        self.clock = Clock()
        self.checkpoints = CheckpointManager(session)
        self.now = self.checkpoints.resume()
        self.updates = Updates(session, self.now)
        self.preemption = Preemption(adapter.communicator, self._want_stop)
        self.timeline = TimelineWindow(options, adapter)
        self.profile = ProfileWindow(options, adapter)
        self.compiled: set[int] = set()  # sizes of global batches
        # Reading a loss synchronizes with a GPU; on a CPU it is free.
        self.read_every = 20 if adapter.has_gpu or self.task.deferred else 1
        self.total_steps = plan.epochs * shards.steps_per_epoch  # updates of the whole training
        every = math.ceil(shards.steps_per_epoch / LINES_PER_EPOCH)
        if plan.num_steps is not None:
            self.total_steps = min(self.total_steps, plan.num_steps)
            every = min(every, plan.num_steps // LINES_PER_EPOCH)
        self.log_every = options.log_every or max(1, every)

    def announce(self, show: Progress, device: str) -> None:
        """Show the headline of the training, and from now on its progress, by ``show``."""
        self.show = show
        now, steps = self.now, self.shards.steps_per_epoch
        updates = max(0, self.total_steps - now.step)
        lines = headlines(
            self.session, device, rate=self.rate, steps_per_epoch=steps, updates=updates
        )
        if now.step:
            epoch, consumed = now.position.epoch, now.position.consumed
            done = f"epoch {epoch + 1}, {consumed:,} of its {self.session.workload.unit} done"
            if epoch >= self.plan.epochs:
                done = f"finished after {plural(epoch, 'epoch')}"
            lines.append(f"resumed from {self.checkpoints.path}: step {now.step}, {done}")
        show.begin(lines, self.total_steps, now.step)

    def run(self) -> int:
        """Train to the end or a stop; save, evaluate, write the summary; return the exit code.

        Raises:
            CheckpointError: on every rank, after the summary, if the last save failed.
            TrainingError: the training failed.
        """
        if self.options.checkpoint_dir:
            self.preemption.listen()
            self.preemption.watch()
        try:
            stopped, save_error = self._train()
        except TrainingError as error:
            if error.agreed:
                self._save_before_error()
                self._end(Stopped.DIVERGED)
            raise
        self._end(stopped)
        if save_error:
            raise save_error
        if stopped is not Stopped.PREEMPTED:
            return EXIT_OK
        wait_for_agent(lambda: bool(self.preemption.reason))
        return EXIT_PREEMPTED

    def _train(self) -> tuple[Stopped, CheckpointError | None]:
        """Train, evaluate and save; return why it stopped, and the error of the last save."""
        # Resumed after more updates than --num-steps: there is nothing to do or to save.
        beyond = self.plan.num_steps is not None and self.now.step > self.plan.num_steps
        stopped = Stopped.STEPS if beyond else self._finished()
        while stopped is None:
            stopped = self._train_epoch()
        if stopped is not Stopped.PREEMPTED and not self._evaluate():
            stopped = Stopped.PREEMPTED
        # Before the save: afterwards the launcher may already have ended a rank.
        reason, rank = self.preemption.agree() if stopped is Stopped.PREEMPTED else ("", 0)
        save_error = None
        try:
            if not beyond:
                self._save(last=True)
        except CheckpointError as error:
            save_error = error
        self.checkpoints.close()  # not at the exit: a launcher may kill this rank before
        if stopped is Stopped.PREEMPTED and not save_error:
            self.show.stop()
            done = f"stopped after step {self.now.step}, saved {self.checkpoints.path}"
            self.preemption.announce(reason, rank, done)
        return stopped, save_error

    @property
    def _at_epoch_end(self) -> bool:
        """Whether the updates of the epoch are done, but not ``_end_epoch``."""
        return self.now.position.consumed >= self.shards.samples

    def _finished(self) -> Stopped | None:
        if self._at_epoch_end:
            return None
        if self.now.step == self.plan.num_steps:
            return Stopped.STEPS
        return Stopped.FINISHED if self.now.position.epoch >= self.plan.epochs else None

    @property
    def _pauses(self) -> bool:
        """Whether the end of the epoch or of the training follows."""
        return self._at_epoch_end or self._finished() is not None

    def _train_epoch(self) -> Stopped | None:
        """Train from ``now`` to the end of its epoch; return the reason of a stop.

        It also returns, without one, after an update that was not made: call it again.
        """
        parts = self.shards.parts(self.now.position.epoch, self.now.position.consumed)
        self.clock.resume()
        for part, batch in self.clock.fetching(self.task.train.training(parts)):
            if not self.train_step(part, batch):
                return None
            self._watch_walltime()
            if self.now.step % self.read_every == 0:  # what all ranks know is on the GPU
                if self.adapter.flags_agreed.stop:
                    return Stopped.PREEMPTED
                self.checkpoints.poll()
            self._check_replicas()
            if reason := self._finished():
                self.updates.average_epoch()
                return reason
            if self.checkpoints.is_due(self.now.step) and not self._at_epoch_end:
                self._save()
                self.clock.resume()
        return self._end_epoch()

    def train_step(self, part: Part, batch: Batch) -> bool:
        """Make the update of ``part``; return whether it and those before it were made.

        If not, the training continues at ``now``: after ``part``, or before an earlier one that a
        GPU has skipped. All ranks call it, and return the same.
        """
        step, task = self.now.step, self.task
        process_status.stage = f"step {step + 1}"
        self.timeline.enter(step)
        self.profile.enter(step)
        rate = self.rate(part.start.epoch + part.start.consumed / self.shards.samples)
        seed = seed_of(self.options.seed, step, self.adapter.world.rank)
        if part.stand_in:
            batch = dataclasses.replace(batch, stand_in=True)
        with self.shards.step(part):
            loss = task.update(batch, learning_rate=rate, seed=seed)
        if task.not_finite:
            self.updates.skip(part, task.not_finite, self.show.message)
            return False
        self.updates.add(part, loss)
        if not self._read_losses():
            return False
        self._record(part, rate)
        return True

    def _read_losses(self) -> bool:
        """Read the losses, which synchronizes with a GPU, if what follows this step needs them.

        Return False if some of the updates were not made: ``now`` is before the first of those.
        """
        step = self.now.step
        regular = step % self.read_every == 0 or step % self.log_every == 0
        if not (regular or self._pauses or self.checkpoints.is_due(step)):
            return True
        are_made = self.updates.read()
        if self.adapter.meter:
            self.adapter.meter.sample()
        if are_made:
            self.updates.check_loss_scale()
        return are_made

    def _record(self, part: Part, rate: float) -> None:
        """Record the time of the step that has just ended, and show its progress."""
        step = self.now.step
        profiled = self.profile.leave(step, pauses=self._pauses)
        recorded = self.timeline.leave(step)
        # The first update of a size compiles the model; each rank's part has its own.
        compiles = self.options.compile and part.global_count not in self.compiled
        self.compiled.add(part.global_count)
        counts = not (compiles or profiled or recorded)
        self.clock.step(part.global_count, counts=counts, blocked=self.adapter.blocked_seconds)
        self.show.advance(step)
        if step % self.log_every:
            return
        with self.clock.timing_collective():
            loss, step_loss = self.updates.interval_losses()
        speed = self.clock.recent_rate(self.log_every)
        record = {
            "step": step,
            "epoch": part.start.epoch,
            "loss": loss,
            "step_loss": step_loss,
            "learning_rate": rate,
            "images_per_second": speed,
            "seconds_per_step": self.plan.global_batch / speed if speed else 0.0,
        }
        if self.adapter.meter and self.adapter.meter.recent is not None:
            record["gpu_busy"] = self.adapter.meter.recent
        self.show.step(record)

    def _end_epoch(self) -> Stopped | None:
        """Evaluate, save and record the epoch whose updates are done; return as ``_train_epoch``.

        Until the evaluation is done, the position remains at the end of that epoch: a training
        that resumes there repeats this method.
        """
        now, epoch, selected = self.now, self.now.position.epoch, self.options.evaluate_epochs
        self.updates.average_epoch()
        chosen = selected is None or epoch + 1 in selected or epoch + 1 >= self.plan.epochs
        if chosen and self._can_evaluate:
            if self.checkpoints.is_due(now.step):
                self._save()
            if not self._evaluate():
                return Stopped.PREEMPTED
        now.position = Position(epoch + 1)
        now.loss_sum, now.loss_count = 0.0, 0
        self._save()
        figures = {
            "epoch": epoch,
            "step": now.step,
            "loss": now.train_loss,
            "seconds": sum(self.clock.seconds),
            "elapsed": self.clock.elapsed(),
            **evaluation_figures(self.task.metrics, now.metrics or {}),
        }
        shown = measured(self.task.metrics, now.metrics or {})
        self.show.epoch(figures, "  ".join(f"{name} {value}" for name, value in shown.items()))
        return self._finished()

    def _check_replicas(self) -> None:
        """Compare the ranks' models according to ``--check-replicas``; all ranks call it.

        It is called before the next update, which with some strategies overwrites a difference.
        """
        every = self.options.check_replicas
        if every and (self.now.step + 1) % every == 0 and self.adapter.world.size > 1:
            self.checkpoints.finish()  # if the check fails, this is what resumes
            self.adapter.check_replicas(self.task.model, self.task.optimizer, step=self.now.step)
            self.clock.resume()

    def _want_stop(self) -> None:
        # It reaches the other ranks with the gradients.
        self.adapter.stop_wanted = True

    def _watch_walltime(self) -> None:
        if self.preemption.walltime.ends is not None:
            self.preemption.walltime.saved(self.checkpoints.longest)
            self.preemption.watch_walltime(self.clock.longest_recent(self.read_every))

    @property
    def _can_evaluate(self) -> bool:
        test = self.task.test
        return test is not None and test.samples > 0 and not self.options.benchmark

    def _evaluate(self) -> bool:
        """Evaluate on the whole test set, each sample once; False if a stop interrupted it."""
        if self.now.metrics is not None or not self._can_evaluate:
            return True
        self.checkpoints.finish()  # nothing would complete it during the evaluation

        def stops() -> bool:
            self._watch_walltime()
            return self.adapter.stop_wanted

        self.now.metrics = evaluate(
            self.adapter, self.task, self.plan.global_batch, stops=stops, moved=self.show.evaluating
        )
        return self.now.metrics is not None

    def _save(self, *, last: bool = False) -> None:
        self.checkpoints.save(self.now, self._finished(), last=last)  # step 7

    def _save_before_error(self) -> None:
        """Save before a ``TrainingError`` of all ranks ends the training; it remains the error."""
        try:
            with contextlib.suppress(TrainingError):
                # Here one rank alone may find a loss that is not finite.
                self.adapter.communicator.together(self.updates.read)
                self._save(last=True)
        except CheckpointError as error:
            text = str(error)
            self.adapter.communicator.on_root(lambda: log.warning("%s", text))

    def _end(self, stopped: Stopped) -> None:
        """Close what was open, and write the summary."""
        # Ranks that stop early must not wait for one another any more.
        early = stopped in (Stopped.PREEMPTED, Stopped.DIVERGED)
        self.task.train.close()
        self.timeline.close()
        self.profile.close(discards=early)
        messages = self.adapter.gradient_messages
        summary = with_session(self.clock.figures(), self.session)
        summary = with_evaluation(summary, self.now.metrics)
        if not early:
            summary = with_usage(summary, self.adapter, self.clock)
        summary = dataclasses.replace(
            summary,
            global_batch_size=self.plan.global_batch,
            epochs_completed=self.now.position.epoch + self._at_epoch_end,
            steps_completed=self.now.step,
            samples_trained=self.now.samples,
            training_samples=self.task.train.samples,
            train_loss=self.now.train_loss,
            step_split=None if early else self.clock.step_split(self.adapter.communicator),
            gradient_messages=GradientMessages(**messages) if messages else None,
            parameter_norm=None
            if early and self.adapter.strategy.shards_state
            else self.task.parameter_norm(),
            steps_skipped=self.now.skipped or None,
            saves=self.checkpoints.figures(self.shards.steps_per_epoch),
            stopped=stopped,
            checkpoint=self.checkpoints.path,
            timeline=self.timeline.recorded,
            profile=self.profile.recorded,
        )
        table = rows(
            summary,
            self.clock.rates(),
            measured(self.task.metrics, self.now.metrics or {}),
            speed_only=bool(self.task.speed_only),
        )
        self.show.end(f"hvdtrain {self.session.workload.name}", table, summary)
