"""Carry out the runs of a comparison, the methods in turn, and keep each as it ends."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.methods import AUTO, Method, as_method, method_words, title, why_not
from hvdtrain.commands.launch.prepare import Request, prepare
from hvdtrain.commands.runs import lines
from hvdtrain.commands.runs.start import (
    KEPT,
    LOG,
    file_of,
    file_words,
    read_summary,
    start,
    time_left,
    why,
)
from hvdtrain.commands.runs.words import difference
from hvdtrain.errors import EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.text import duration, number, plural
from hvdtrain.system.runtime.command import Command, Result

log = logging.getLogger(__name__)

LINES = "compare.jsonl"
OUT = Path("compare")
SHOWN = 12  # last lines of a failed run's output
SPEAKS = re.compile(r"^hvdtrain: (?:rank \d+ on [^:]*: )?(?:error: )?(.+)$", re.MULTILINE)
NO_MEMORY = re.compile(
    r"out of memory(?!\?)|OutOfMemoryError|ResourceExhausted|can't allocate memory|std::bad_alloc"
)


@dataclass(frozen=True)
class Comparison:
    """The same training by several methods, as asked for."""

    words: tuple[str, ...]  # the command as the user gave it
    methods: tuple[Method, ...]
    batch: int  # global: samples of an update, in every row
    repeats: int
    folder: Path
    machine: str
    threads: int | None = None  # per rank
    ranks_per_host: int = 0  # to share a host out among, for the one process, too
    ppn: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    timeout: float | None = None  # seconds that one run may take

    def stem(self, method: Method, repeat: int) -> Path:
        """Return where a run's files lie, without their endings."""
        return run_stem(self.folder, method, repeat)


def run_stem(folder: Path, method: Method, repeat: int) -> Path:
    """Return where a run's files lie, without their endings."""
    return folder / "runs" / f"{method.name}-{repeat}"


@dataclass(frozen=True)
class Trial:
    """One run of a method, or why it has none."""

    method: Method
    repeat: int  # from 1
    command: tuple[str, ...]  # of the comparison
    batch: int
    machine: str = ""
    threads: int | None = None
    summary: Summary | None = None
    reason: str = ""  # why there is none
    failed: bool = False  # it should have run

    def to_json(self) -> dict[str, Any]:
        """Return the content of its line."""
        content = {**vars(self), "method": asdict(self.method)}
        return {**content, "summary": self.summary and self.summary.to_json()}


def _trial(content: Any) -> Trial:
    """Return the trial in a line; one of ``lines.NO_RUN`` where it is none."""
    summary = content["summary"]
    fields = {
        **content,
        "method": as_method(content["method"]),
        "command": tuple(content["command"]),
    }
    trial = Trial(**{**fields, "summary": None if summary is None else Summary.from_json(summary)})
    if trial.summary is not None and not (trial.summary.images_per_second_mean or 0) > 0:
        raise ValueError("no throughput")
    return trial


def read_trials(folder: Path) -> list[Trial]:
    """Return the runs of a comparison in its directory; none where there is none.

    Raises:
        UsageError: they cannot be read.
    """
    return lines.read(folder / LINES, _trial, "comparison")


def order(methods: Sequence[Method], repeats: int) -> Iterator[tuple[Method, int]]:
    """Yield the runs, the methods in turn, so that a slow minute meets all of them: A B A B."""
    for repeat in range(1, repeats + 1):
        for method in methods:
            yield method, repeat


def command(
    plan: Comparison, method: Method, repeat: int, environ: Mapping[str, str] = os.environ
) -> Command:
    """Return what one run starts.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    words = method_words(plan.words, method, plan.batch)
    return launch(plan, method, [*words, *file_words(plan.stem(method, repeat))], environ)


def launch(
    plan: Comparison,
    method: Method,
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> Command:
    """Return what starts ``words`` on the ranks of a method.

    Raises:
        UsageError: the ranks do not fit on the hosts, or there is no MPI.
    """
    whole = method.takes_the_host
    request = Request(
        method.ranks,
        words,
        ppn=None if plan.ppn is None else min(plan.ppn, method.ranks),
        threads=None if whole else plan.threads,
        ranks_per_host=None if whole else plan.ranks_per_host,
        bind=not whole,
        hosts=plan.hosts,
        hostfile=plan.hostfile,
    )
    return prepare(request, environ).command


def missing(plan: Comparison) -> list[tuple[Method, int]]:
    """Return the runs that are still to be done, in order.

    Raises:
        UsageError: those that are done are of another comparison.
    """
    done = read_trials(plan.folder)
    for trial in done:
        if trial.command != plan.words:
            raise UsageError(
                f"{plan.folder} holds runs of another command: "
                f"{difference(trial.command, plan.words)}. Give another --out"
            )
        for label, old, now in (
            ("global batch", trial.batch, plan.batch),
            ("machine", trial.machine, plan.machine),
            ("number of threads per rank", trial.threads, plan.threads),
        ):
            if old != now:
                raise UsageError(
                    f"{plan.folder} holds runs of another {label}: {old}, now {now}. "
                    "Give another --out"
                )
    there = {(trial.method, trial.repeat) for trial in done if trial.summary}
    return [one for one in order(plan.methods, plan.repeats) if one not in there]


def carry_out(plan: Comparison, hint: str = "") -> None:
    """Do the runs that are missing, each kept as it ends.

    A method that cannot run is told once, and passed over from there on. ``hint``: how there would
    be fewer.

    Raises:
        UsageError: the command itself is wrong: not even one process takes it.
        KeyboardInterrupt: what was measured is kept.
    """
    todo, total = missing(plan), len(plan.methods) * plan.repeats
    took: dict[Method, float] = {}
    out: set[Method] = set()

    def can_run(method: Method) -> bool:
        return method not in out and not why_not(method)

    if runs := sum(can_run(method) for method, _ in todo):
        known = "how long they take is known after the first"
        log.info("%s%s; %s", plural(runs, "run"), hint, known)
    try:
        for place, (method, repeat) in enumerate(todo, total - len(todo) + 1):
            if method in out:
                continue
            head = f"[{place}/{total}] {title(method)}, run {repeat} of {plan.repeats}"
            reason = why_not(method)
            if not reason:
                rest = [one for one, _ in todo[place - total - 1 :] if can_run(one)]
                log.info("%s%s", head, time_left(took, rest))
            began = time.monotonic()
            trial = _not_run(plan, method, repeat, reason) if reason else _run(plan, method, repeat)
            lines.append(plan.folder / LINES, trial.to_json(), _trial)
            if trial.summary is None:
                out.add(method)
                log.info("%s: %s", head, said(trial))
            else:
                took[method] = time.monotonic() - began
                rate = number(trial.summary.images_per_second_mean or 0.0)
                log.info("    %s images/s, after %s", rate, duration(took[method]))
    except KeyboardInterrupt:
        log.info(KEPT, plan.folder)
        raise


def said(trial: Trial) -> str:
    """Return what is said of a method that has no run."""
    return f"{'failed' if trial.failed else 'not available'}: {trial.reason}"


def _not_run(
    plan: Comparison, method: Method, repeat: int, reason: str, *, failed: bool = False
) -> Trial:
    facts = (plan.words, plan.batch, plan.machine, plan.threads)
    plan.folder.mkdir(parents=True, exist_ok=True)
    return Trial(method, repeat, *facts, reason=reason, failed=failed)


def _run(plan: Comparison, method: Method, repeat: int) -> Trial:
    """Start the ranks, wait for them, and read what they measured."""
    stem = plan.stem(method, repeat)
    result = start(command(plan, method, repeat), stem, plan.timeout, title(method))
    if not result.ok:
        reason, failed = why_no_result(result, plan.batch)
        if method.is_baseline and result.exit_code == EXIT_USAGE and method.precision == AUTO:
            raise UsageError(
                f"the command cannot be run, not even in one process: {reason}. What only some "
                "strategies take stands behind their names, as in --strategies 'horovod --autotune'"
            )
        if failed:
            for line in result.output.splitlines()[-SHOWN:]:
                log.info("  %s", line)
            reason = f"{reason}; its output is in {file_of(stem, LOG)}"
        return _not_run(plan, method, repeat, reason, failed=failed)
    try:
        summary = read_summary(stem, title(method))
    except HvdtrainError as error:
        return _not_run(plan, method, repeat, str(error), failed=True)
    if not summary.images_per_second_mean:
        return _not_run(plan, method, repeat, "it took no step", failed=True)
    return Trial(method, repeat, plan.words, plan.batch, plan.machine, plan.threads, summary)


def why_no_result(result: Result, batch: int) -> tuple[str, bool]:
    """Return why a run left nothing, and whether that is a failure: it should have run."""
    if NO_MEMORY.search(result.output):
        return (
            f"the global batch of {batch} does not fit in memory; --accumulate-steps in the "
            "command takes it in parts"
        ), False
    spoken = SPEAKS.findall(result.output)
    reason = spoken[-1].strip() if spoken else why(result)
    return reason, result.exit_code != EXIT_USAGE
