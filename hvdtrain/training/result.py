"""What a training is summed up by: throughput, and the JSON object of ``--summary``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from hvdtrain.adapters.communicator import Communicator
from hvdtrain.training.step_split import StepSplit

STOPPED = {
    "preempted": "preempted and saved: run the same command again to go on",
    "diverged": "diverged: what it computes is no longer finite",
}


@dataclass
class Clock:
    """Seconds of each step; what happens between steps (evaluation, saving) does not count."""

    seconds: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    split: StepSplit = field(default_factory=StepSplit)
    started: float = field(default_factory=lambda: psutil.Process().create_time())
    first_step: float | None = None
    _last: float = 0.0

    def resume(self) -> None:
        """Steps begin to count from now on."""
        self._last = time.perf_counter()
        self.split.resume()

    def step(self, images: int, *, counts: bool = True, blocked: float | None = None) -> None:
        """A step over ``images`` samples, of all ranks, has ended.

        It ``counts`` for the throughput unless something slowed it down, such as a timeline. For
        ``blocked`` see ``StepSplit.step``.
        """
        now = time.perf_counter()
        if not counts:
            self.left_out.add(len(self.seconds))
        self.seconds.append(now - self._last)
        self.images.append(images)
        self.split.step(blocked)
        self._last = now
        if self.first_step is None:
            self.first_step = time.time() - self.started

    def recent_rate(self, steps: int) -> float:
        """Images per second over the last ``steps`` steps."""
        seconds = sum(self.seconds[-steps:])
        return sum(self.images[-steps:]) / seconds if seconds else 0.0

    def longest_recent(self) -> float:
        """Seconds of the slowest of the last hundred steps."""
        return max(self.seconds[-100:], default=0.0)

    def rates(self) -> list[float]:
        """Images per second of each step that counts."""
        pairs = zip(self.images, self.seconds, strict=True)
        return [count / second for count, second in itertools.compress(pairs, self._counted())]

    def figures(self) -> dict[str, float | None]:
        """The time keys of the summary, over the steps that count.

        The first min(5, steps // 5) steps are dropped. The mean is all images over all seconds;
        the deviation is over the rates of the steps.
        """
        seconds = list(itertools.compress(self.seconds, self._counted()))
        images = list(itertools.compress(self.images, self._counted()))
        rates = self.rates()
        return {
            "images_per_second_mean": sum(images) / sum(seconds) if seconds else None,
            "images_per_second_std": statistics.pstdev(rates) if rates else None,
            "step_seconds_median": statistics.median(seconds) if seconds else None,
            "seconds_total": time.time() - self.started,
            "seconds_to_first_step": self.first_step,
        }

    def step_split(self, communicator: Communicator) -> dict[str, Any] | None:
        """The mean step of those that count, taken apart; all ranks call it."""
        return self.split.gather(communicator, self.seconds, self._counted())

    def _counted(self) -> list[bool]:
        drop = min(5, len(self.seconds) // 5)
        return [step >= drop and step not in self.left_out for step in range(len(self.seconds))]


def rows(summary: dict[str, Any], rates: Sequence[float]) -> list[tuple[str, str]]:
    """The summary as a person reads it: label and value.

    Args:
        summary: that of ``--summary``.
        rates: images per second of the steps that count. Their deviation would be larger than
            their mean where few steps are slow, so median and range are shown.
    """

    def number(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    epochs = summary["epochs_completed"]
    done = (
        f"{summary['samples_trained']:,} images in {summary['steps_completed']:,} steps, "
        f"{epochs} whole epoch{'' if epochs == 1 else 's'}"
    )
    accuracy = "-"
    if summary["eval_accuracy"] is not None:
        accuracy = f"{100 * summary['eval_accuracy']:.2f} % of {summary['eval_samples']:,}"
    speed = "-"
    if rates:
        middle, low, high = statistics.median(rates), min(rates), max(rates)
        speed = f"{middle:,.1f} in the median step, {low:,.1f} to {high:,.1f}; over all ranks"
    if summary["timeline"]:
        speed = f"{speed}, without the steps recorded" if rates else "- (steps recorded)"
    first = number(summary["seconds_to_first_step"], ".1f")
    table = [
        ("trained", done),
        ("training loss", number(summary["train_loss"], ".4f")),
        ("test loss", number(summary["eval_loss"], ".4f")),
        ("test accuracy", accuracy),
        ("images/s", speed),
        ("seconds", f"{summary['seconds_total']:.1f}, the first step after {first}"),
        ("stopped", STOPPED.get(summary["stopped"], summary["stopped"])),
    ]
    table += [(key, summary[key]) for key in ("checkpoint", "timeline") if summary[key]]
    return table
