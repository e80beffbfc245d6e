"""``--evaluate-only`` and ``--predict``: evaluate a checkpoint, without training or saving."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.steps.summary import Stopped
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.tasks.task import Task, Workload
from hvdtrain.training.evaluation import Lines, evaluate
from hvdtrain.training.plan import TrainingPlan
from hvdtrain.training.progress import Progress, Silent
from hvdtrain.training.summary import described, evaluated, evaluation_rows, headline, measured
from hvdtrain.training.throughput import Clock


class EvaluationRun:
    """One evaluation, created by ``trainer.train`` after step 2 with the built task."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        plan: TrainingPlan,
        adapter: CommonAdapter,
        task: Task,
    ) -> None:
        self.workload, self.options, self.plan = workload, options, plan
        self.adapter, self.task = adapter, task
        self.clock = Clock()

    def run(self, device: str) -> int:
        """Load, evaluate, write predictions and summary; all ranks must call it.

        Args:
            device: description of this rank's device.

        Returns:
            The exit code.

        Raises:
            UsageError: on every rank: there is nothing to evaluate on, or no such checkpoint.
        """
        task, adapter, test = self.task, self.adapter, self.task.test
        if test is None or not test.samples:
            remedy = "use --data DIR that contains val/, or a task with test samples"
            raise agreed(UsageError(f"there are no samples to evaluate on: {remedy}"))
        task.model, task.optimizer = adapter.distribute_optimizer(task.model, task.optimizer)
        state = self._load()
        show = self._begin(state, test.samples, device)
        process_status.stage = "evaluation"
        lines = Lines(task.columns, test.samples, adapter.world)
        also = [lines] if self.options.predict else []
        started = time.perf_counter()
        batch = self.plan.global_batch
        metrics = evaluate(adapter, task, batch, moved=show.evaluating, also=also)
        assert metrics is not None
        rate = test.samples / (time.perf_counter() - started)
        if self.options.predict:
            show.predictions(lines.pieces(adapter.data_communicator))
        test.close()
        self._sum_up(show, state, metrics, rate)
        return EXIT_OK

    def _load(self) -> dict[str, Any]:
        """Load the checkpoint's weights on all ranks; return its other values.

        Without a checkpoint, in a benchmark, all ranks receive the weights of rank 0.
        """
        origin = {
            "framework": self.options.framework,
            "workload": self.workload.name,
            "model": self.plan.model,
        }
        path = self.options.checkpoint or self.options.checkpoint_dir
        state: dict[str, Any] = {"path": None, "step": 0}
        if path is not None:
            state = self.adapter.load_weights(path, self.task.model, origin=origin)
        self.adapter.broadcast_state(self.task.model)
        return state

    def _begin(self, state: dict[str, Any], samples: int, device: str) -> Silent:
        world, options = self.adapter.world, self.options
        show = self.adapter.communicator.together(
            lambda: Progress(options, self.workload.unit) if world.is_writer else Silent()
        )
        lines = [
            headline(self.workload, self.adapter, self.task, device),
            f"evaluating {state['path'] or 'new weights'}, step {state['step']}, on {samples:,} "
            f"{self.workload.unit}",
            *self.task.notes,
        ]
        show.begin(lines, total=0, done=0)
        return show

    def _sum_up(
        self, show: Silent, state: dict[str, Any], metrics: dict[str, Any], rate: float
    ) -> None:
        summary = dataclasses.replace(
            self.clock.figures(),
            **described(self.workload, self.options, self.adapter, self.task),
            **evaluated(metrics),
            epochs_completed=state.get("position", {}).get("epoch"),
            steps_completed=state["step"],
            samples_trained=state.get("samples"),
            parameter_norm=self.task.parameter_norm(),
            stopped=Stopped.FINISHED,
            checkpoint=state["path"],
            images_per_second_mean=rate if self.options.benchmark else None,
        )
        shown = measured(self.task.metrics, metrics)
        table = evaluation_rows(summary, shown, self.options.predict, self.workload.unit)
        show.end(f"hvdtrain {self.workload.name}", table, summary)
