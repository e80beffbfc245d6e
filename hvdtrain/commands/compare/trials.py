"""Execute the runs of a comparison, the methods in turn, and record each as it ends."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.methods import (
    AUTO,
    Method,
    method_from_json,
    method_words,
    title,
    unavailable_reason,
)
from hvdtrain.commands.launch.prepare import Request, prepare
from hvdtrain.commands.runs import json_lines
from hvdtrain.commands.runs.command_options import difference
from hvdtrain.commands.runs.start import (
    KEPT,
    LOG,
    exit_reason,
    file_options,
    file_path,
    read_summary,
    start,
    time_left,
)
from hvdtrain.errors import EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.text import duration, number, plural
from hvdtrain.system.runtime.command import Command, Result

log = logging.getLogger(__name__)

LINES = "compare.jsonl"
OUT = Path("compare")
SHOWN = 12  # last lines of a failed run's output
MESSAGE = re.compile(r"^hvdtrain: (?:rank \d+ on [^:]*: )?(?:error: )?(.+)$", re.MULTILINE)
NO_MEMORY = re.compile(
    r"out of memory(?!\?)|OutOfMemoryError|ResourceExhausted|can't allocate memory|std::bad_alloc"
)


@dataclass(frozen=True)
class Comparison:
    """The requested runs of one training by several methods."""

    words: tuple[str, ...]  # the command as typed
    methods: tuple[Method, ...]
    batch: int  # global: samples per update, in every row
    repeats: int
    folder: Path
    machine: str
    threads: int | None = None  # per rank
    ranks_per_host: int = 0  # that share a host's cores, also for the baseline
    ppn: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    timeout: float | None = None  # seconds, of one run

    def stem(self, method: Method, repeat: int) -> Path:
        """Return the path of a run's files, without their suffixes."""
        return run_stem(self.folder, method, repeat)


def run_stem(folder: Path, method: Method, repeat: int) -> Path:
    """Return the path of a run's files, without their suffixes."""
    return folder / "runs" / f"{method.name}-{repeat}"


@dataclass(frozen=True)
class Trial:
    """One run of a method, or the reason for its absence."""

    method: Method
    repeat: int  # from 1
    command: tuple[str, ...]  # of the comparison
    batch: int
    machine: str = ""
    threads: int | None = None
    summary: Summary | None = None
    reason: str = ""  # if there is no summary
    failed: bool = False  # the method is available, but the run failed

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of its line."""
        content = {**vars(self), "method": asdict(self.method)}
        return {**content, "summary": self.summary and self.summary.to_json()}


def _trial(content: Any) -> Trial:
    """Return the trial in a line; raise one of ``json_lines.INVALID`` if it is not a trial."""
    summary = content["summary"]
    fields = {
        **content,
        "method": method_from_json(content["method"]),
        "command": tuple(content["command"]),
    }
    trial = Trial(**{**fields, "summary": None if summary is None else Summary.from_json(summary)})
    if trial.summary is not None and not (trial.summary.images_per_second_mean or 0) > 0:
        raise ValueError("no throughput")
    return trial


def read_trials(folder: Path) -> list[Trial]:
    """Return the runs in a comparison's directory; an empty list without results.

    Raises:
        UsageError: they cannot be read.
    """
    return json_lines.read(folder / LINES, _trial, "comparison")


def run_order(methods: Sequence[Method], repeats: int) -> Iterator[tuple[Method, int]]:
    """Yield the runs, the methods in turn (A B A B), so that a slow period affects all of them."""
    for repeat in range(1, repeats + 1):
        for method in methods:
            yield method, repeat


def command(
    plan: Comparison, method: Method, repeat: int, environ: Mapping[str, str] = os.environ
) -> Command:
    """Return the launcher's command for one run.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    words = method_words(plan.words, method, plan.batch)
    return launch(plan, method, [*words, *file_options(plan.stem(method, repeat))], environ)


def launch(
    plan: Comparison,
    method: Method,
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> Command:
    """Return the launcher's command for ``words`` on the ranks of a method.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    unbound = method.uses_all_devices
    request = Request(
        method.ranks,
        words,
        ppn=None if plan.ppn is None else min(plan.ppn, method.ranks),
        threads=None if unbound else plan.threads,
        ranks_per_host=None if unbound else plan.ranks_per_host,
        bind=not unbound,
        hosts=plan.hosts,
        hostfile=plan.hostfile,
    )
    return prepare(request, environ).command


def missing_runs(plan: Comparison) -> list[tuple[Method, int]]:
    """Return the runs that are not complete, in order.

    Raises:
        UsageError: the complete runs belong to another comparison.
    """
    trials = read_trials(plan.folder)
    for trial in trials:
        if trial.command != plan.words:
            raise UsageError(
                f"{plan.folder} has runs of another command: "
                f"{difference(trial.command, plan.words)}. Use another --out"
            )
        for label, old, now in (
            ("global batch", trial.batch, plan.batch),
            ("machine", trial.machine, plan.machine),
            ("number of threads per rank", trial.threads, plan.threads),
        ):
            if old != now:
                raise UsageError(
                    f"{plan.folder} has runs of another {label}: {old}, now {now}. "
                    "Use another --out"
                )
    complete = {(trial.method, trial.repeat) for trial in trials if trial.summary}
    return [pair for pair in run_order(plan.methods, plan.repeats) if pair not in complete]


def run_comparison(plan: Comparison, hint: str = "") -> None:
    """Execute the missing runs, and record each as it ends.

    A method that cannot run is reported once, then skipped. ``hint``: how to reduce the runs.

    Raises:
        UsageError: the command is invalid, even for a single process.
        KeyboardInterrupt: completed runs are kept.
    """
    missing, total = missing_runs(plan), len(plan.methods) * plan.repeats
    durations: dict[Method, float] = {}
    skipped: set[Method] = set()

    def can_run(method: Method) -> bool:
        return method not in skipped and not unavailable_reason(method)

    if runs := sum(can_run(method) for method, _ in missing):
        estimate = "time estimate after the first run"
        log.info("%s%s; %s", plural(runs, "run"), hint, estimate)
    try:
        for position, (method, repeat) in enumerate(missing, total - len(missing) + 1):
            if method in skipped:
                continue
            head = f"[{position}/{total}] {title(method)}, run {repeat} of {plan.repeats}"
            reason = unavailable_reason(method)
            if not reason:
                remaining = [m for m, _ in missing[position - total - 1 :] if can_run(m)]
                log.info("%s%s", head, time_left(durations, remaining))
            start_time = time.monotonic()
            trial = _not_run(plan, method, repeat, reason) if reason else _run(plan, method, repeat)
            json_lines.append(plan.folder / LINES, trial.to_json(), _trial)
            if trial.summary is None:
                skipped.add(method)
                log.info("%s: %s", head, failure_text(trial))
            else:
                durations[method] = time.monotonic() - start_time
                rate = number(trial.summary.images_per_second_mean or 0.0)
                log.info("    %s images/s, after %s", rate, duration(durations[method]))
    except KeyboardInterrupt:
        log.info(KEPT, plan.folder)
        raise


def failure_text(trial: Trial) -> str:
    """Return the message for a method without a run."""
    return f"{'failed' if trial.failed else 'not available'}: {trial.reason}"


def _not_run(
    plan: Comparison, method: Method, repeat: int, reason: str, *, failed: bool = False
) -> Trial:
    plan.folder.mkdir(parents=True, exist_ok=True)
    return Trial(
        method,
        repeat,
        command=plan.words,
        batch=plan.batch,
        machine=plan.machine,
        threads=plan.threads,
        reason=reason,
        failed=failed,
    )


def _run(plan: Comparison, method: Method, repeat: int) -> Trial:
    """Start the ranks, wait for them, and read their summary."""
    stem = plan.stem(method, repeat)
    result = start(command(plan, method, repeat), stem, plan.timeout, title(method))
    if not result.ok:
        reason, failed = classify_failure(result, plan.batch)
        if method.is_baseline and result.exit_code == EXIT_USAGE and method.precision == AUTO:
            raise UsageError(
                f"the command cannot be run, even in a single process: {reason}. Put options of "
                "single strategies after their names, e.g. --strategies 'horovod --autotune'"
            )
        if failed:
            for line in result.output.splitlines()[-SHOWN:]:
                log.info("  %s", line)
            reason = f"{reason}; see its output in {file_path(stem, LOG)}"
        return _not_run(plan, method, repeat, reason, failed=failed)
    try:
        summary = read_summary(stem, title(method))
    except HvdtrainError as error:
        return _not_run(plan, method, repeat, str(error), failed=True)
    if not summary.images_per_second_mean:
        return _not_run(plan, method, repeat, "no step was run", failed=True)
    return Trial(method, repeat, plan.words, plan.batch, plan.machine, plan.threads, summary)


def classify_failure(result: Result, batch: int) -> tuple[str, bool]:
    """Return the reason for an unsuccessful run, and whether it failed or is just unavailable."""
    if NO_MEMORY.search(result.output):
        return (
            f"the global batch of {batch} does not fit in memory; use --accumulate-steps in the "
            "command to split it"
        ), False
    messages = MESSAGE.findall(result.output)
    reason = messages[-1].strip() if messages else exit_reason(result)
    return reason, result.exit_code != EXIT_USAGE
