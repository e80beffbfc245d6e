"""Run a command in variants, in alternation, and record each run; completed ones are not repeated.

A study has a list of variants, e.g. numbers of ranks or strategies. Each is run several times; the
variants alternate, so that a slow period affects all of them. The records are those of the study.
"""

from __future__ import annotations

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hvdtrain.commands.launch.hosts import Allocation, lay_out
from hvdtrain.commands.launch.prepare import (
    Request,
    choose_hosts,
    hostfile_option,
    hosts_option,
    ppn_option,
    prepare,
    with_host_cores,
)
from hvdtrain.commands.study.command_options import difference
from hvdtrain.commands.study.curves import Target, read_target
from hvdtrain.commands.study.run import (
    CURVES,
    SUMMARY,
    RunOutcome,
    append_record,
    file_path,
    make_folder,
    measure,
    read_records,
    run_stem,
)
from hvdtrain.config.declare import command, json_switch, optional, switch
from hvdtrain.config.values import above_zero, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import physical_cores, processor
from hvdtrain.system.machine.threads import equal_threads
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import about, duration, number, plural
from hvdtrain.system.runtime.command import Command, termination_as_interrupt

log = logging.getLogger(__name__)

Run = TypeVar("Run", bound=Any)  # a record of a study
REPEATS = 3  # default
RESULTS = "directory for results and plots"
TARGET = "metric to reach, e.g. accuracy=0.985: report the time to it"


@dataclass(frozen=True)
class StudyOptions:
    """Options of every study; a study declares ``ranks`` and ``repeat`` in its own words."""

    ranks: Any = optional("numbers of ranks", positive, group="runs")
    repeat: int | None = optional("number of runs per variant", positive, metavar="K")
    hosts: str | None = hosts_option()
    hostfile: Path | None = hostfile_option()
    ppn: int | None = ppn_option()
    threads: int | None = optional(
        "threads per rank in every run (default: cores per rank)", positive, metavar="T"
    )
    timeout: float | None = optional(
        "time limit of one run, in seconds", above_zero, metavar="SECONDS"
    )
    dry_run: bool = switch("print the commands, run nothing")
    out: Path | None = optional(RESULTS, Path, group="report", metavar="DIR")
    target: Target | None = optional(TARGET, read_target, metavar="NAME=VALUE")
    json: bool = json_switch()
    command: tuple[str, ...] = command()

    default_folder: ClassVar[Path]

    @property
    def folder(self) -> Path:
        """The directory of the runs."""
        return self.out or self.default_folder


@dataclass(frozen=True)
class Variant:
    """What differs between the runs of a study."""

    name: str  # of its files, e.g. ``4`` (ranks) or ``ddp-pytorch-n2``
    title: str  # in messages
    request: Request  # its command, ranks and hosts, for ``hvdtrain launch``
    record: Any  # of its runs, to be completed by their repeat and outcome
    unavailable: str = ""  # the reason if it cannot run here


Planned = tuple[Variant, int]  # a variant, and the number of its repeat from 1


@dataclass(frozen=True)
class Plan(ABC, Generic[Run]):
    """The requested runs of a study, and their records; a study adds what is abstract here.

    A record is a dataclass with at least ``variant`` (its name), ``repeat``, ``command`` and
    ``summary``.
    """

    options: Any  # a ``StudyOptions``
    words: tuple[str, ...]  # the command as typed
    share: HostShare  # of a host, in every run

    file_name: ClassVar[str]  # of the records
    record_type: ClassVar[type[Any]]
    kind: ClassVar[str]  # of the study, in messages
    same: ClassVar[Sequence[tuple[str, str]]] = ()
    """Fields that are the same in all records, with their names in messages."""
    reverses: ClassVar[bool] = False
    """Whether every second repeat is in reverse order: a steady drift favours none."""
    independent: ClassVar[bool] = False
    """Whether a failed repeat does not predict the others, e.g. of other seeds."""

    @property
    @abstractmethod
    def variants(self) -> Sequence[Variant]:
        """The variants, in the order of the table."""

    @abstractmethod
    def check(self, variant: Variant, run: Run, outcome: RunOutcome) -> None:
        """Check a run that has ended, before it is recorded.

        Raises:
            UsageError, HvdtrainError: no further run would succeed.
        """

    def remedy(self, field: str, old: Run, new: Run) -> str:
        """Return what to do, besides using another --out, if ``field`` of two records differs."""
        return ""

    def repeat_words(self, repeat: int) -> Sequence[str]:
        """Return the options of a repeat."""
        return ()

    @property
    def repeats(self) -> int:
        """The number of runs of each variant."""
        return int(self.options.repeat or REPEATS)

    def read(self) -> list[Run]:
        """Return the records; an empty list without results."""
        return read_records(self.options.folder / self.file_name, self.record_type, self.kind)

    def runs(self) -> list[Planned]:
        """Return all runs in order: each variant once, then again."""
        variants = self.variants
        return [
            (variant, repeat)
            for repeat in range(1, self.repeats + 1)
            for variant in variants[:: -1 if self.reverses and repeat % 2 == 0 else 1]
        ]

    def missing(self) -> list[Planned]:
        """Return the runs that are not complete, in order.

        Raises:
            UsageError: the complete runs belong to another study.
        """
        folder, new, completed = self.options.folder, self.variants[0].record, set()
        for record in self.read():
            name = f"{record.variant}-{record.repeat}"
            if tuple(record.command) != tuple(self.words):
                raise UsageError(
                    f"{folder} has runs of another command: "
                    f"{difference(record.command, self.words)} (run {name}). Use another --out"
                )
            for field, label in self.same:
                old, now = getattr(record, field), getattr(new, field)
                if old != now:
                    raise UsageError(
                        f"{folder} has runs of another {label}: {old} in run {name}, now {now}. "
                        f"Use another --out{self.remedy(field, record, new)}"
                    )
            if record.summary:
                completed.add((record.variant, record.repeat))
        return [run for run in self.runs() if (run[0].name, run[1]) not in completed]

    def command(self, variant: Variant, repeat: int) -> Command:
        """Return the launcher's command for one run.

        Raises:
            UsageError: the ranks do not fit on the hosts, or there is no MPI.
        """
        stem = run_stem(self.options.folder, variant.name, repeat)
        files = [f"--summary={file_path(stem, SUMMARY)}", f"--metrics={file_path(stem, CURVES)}"]
        words = [*variant.request.words, *self.repeat_words(repeat), *files]
        return prepare(replace(variant.request, words=words), os.environ).command

    def execute(self) -> Report | None:
        """Execute the missing runs; with ``--dry-run`` return their commands instead.

        Raises:
            UsageError: the complete runs belong to another study, or a run cannot be started.
            HvdtrainError: no further run would succeed.
        """
        missing = self.missing()
        if self.options.dry_run:
            lines = [self.command(*run).show() for run in missing if not run[0].unavailable]
            return Report("\n".join(lines), {"ok": True, "commands": lines})
        with termination_as_interrupt():  # the ranks must not outlive this process
            self.carry_out(missing)
        return None

    def carry_out(self, missing: Sequence[Planned]) -> None:
        """Execute the ``missing`` runs, and record each as it ends.

        A variant without a summary is not run again, unless it failed and repeats are
        ``independent``.

        Raises:
            UsageError: a run cannot be started.
            KeyboardInterrupt: completed runs are kept.
        """
        folder = self.options.folder
        make_folder(folder)
        total = len(self.variants) * self.repeats
        durations: dict[str, float] = {}
        skipped: set[str] = set()
        try:
            for position, (variant, repeat) in enumerate(missing, total - len(missing) + 1):
                if variant.name in skipped:
                    continue
                head = f"[{position}/{total}] {variant.title}, run {repeat} of {self.repeats}"
                start_time = time.monotonic()
                outcome = RunOutcome(reason=variant.unavailable)
                if not variant.unavailable:
                    later = [planned[0] for planned in missing[position - total - 1 :]]
                    remaining = [v.name for v in later if not (v.unavailable or v.name in skipped)]
                    log.info("%s%s", head, time_left(durations, remaining))
                    stem = run_stem(folder, variant.name, repeat)
                    command = self.command(variant, repeat)
                    outcome = measure(command, stem, self.options.timeout, variant.title)
                self.record(variant, repeat, outcome)
                if outcome.summary is None:
                    if not (self.independent and outcome.failed):
                        skipped.add(variant.name)
                    state = "failed" if outcome.failed else "not available"
                    log.info("%s: %s: %s", head, state, outcome.reason)
                    continue
                seconds = durations[variant.name] = time.monotonic() - start_time
                rate = number(outcome.summary.images_per_second_mean or 0.0)
                log.info("    %s images/s, after %s", rate, duration(seconds))
        except KeyboardInterrupt:
            kept = "completed runs are kept in %s: run the same command again to continue"
            log.info(kept, folder)
            raise

    def record(self, variant: Variant, repeat: int, outcome: RunOutcome) -> None:
        """Append a run to the records; errors as of ``check``."""
        known = {name: v for name, v in vars(outcome).items() if hasattr(variant.record, name)}
        run = replace(variant.record, repeat=repeat, **known)
        self.check(variant, run, outcome)
        append_record(self.options.folder / self.file_name, run)


def time_left(durations: Mapping[str, float], remaining: Sequence[str]) -> str:
    """Return the estimated time for the remaining runs, as text; empty before the first run.

    Args:
        durations: seconds of a run of each variant that has run.
        remaining: the variants of the remaining runs; for a new one the mean duration is assumed.
    """
    if not durations:
        return ""
    mean = sum(durations.values()) / len(durations)
    return f" ({about(sum(durations.get(name, mean) for name in remaining))} to go)"


@dataclass(frozen=True)
class HostShare:
    """The machine, and the share of a host that each rank gets in every run."""

    machine: str  # description, stored in the records and compared
    cores: int | None = None  # of a host that this process may use; None with GPUs
    threads: int | None = None  # per rank
    ranks_per_host: int | None = None  # to divide the cores among, also where fewer ranks run

    def request(
        self, options: StudyOptions, ranks: int, words: Sequence[str], *, bind: bool = True
    ) -> Request:
        """Return the request for ``ranks``; without ``bind``, one process has the whole host."""
        hosts = None
        if options.hosts or options.hostfile:
            named = choose_hosts(options.hosts, options.hostfile, os.environ)
            used = used_hosts(named, ranks, options.ppn).hosts
            hosts = ",".join(f"{host.name}:{host.slots}" for host in used)
        return Request(
            ranks,
            words,
            ppn=None if options.ppn is None else min(options.ppn, ranks),
            threads=self.threads if bind else None,
            ranks_per_host=self.ranks_per_host if bind else None,
            bind=bind,
            hosts=hosts,
        )


def find_share(options: StudyOptions, sizes: Sequence[int]) -> HostShare:
    """Return the share of a host per rank for runs on these numbers of ranks.

    Raises:
        UsageError: the hosts cannot be read, or the ranks do not fit.
    """
    hosts = choose_hosts(options.hosts, options.hostfile, os.environ)
    ranks = fullest_host(sizes, options.ppn, hosts)
    threads = options.threads or equal_threads(ranks, with_host_cores(os.environ, hosts.hosts))
    if gpus := count_gpus(os.environ):
        return HostShare(f"{plural(gpus, 'GPU')} per host", None, threads, ranks)
    cores = physical_cores()
    whole = physical_cores(range(os.cpu_count() or 1))  # a batch job may have a part of them
    return HostShare(f"{processor()}, {plural(whole, 'core')} per host", cores, threads, ranks)


def fullest_host(sizes: Sequence[int], ppn: int | None, hosts: Allocation) -> int:
    """Return the ranks on the fullest host: at every size, each rank gets its share of that host.

    By default, one rank takes all cores of its host, and two ranks half of them each: then more
    ranks would not be more hardware, and no efficiency could approach 1. Without ``ppn``, ranks
    per host, each host is filled.

    Raises:
        UsageError: the ranks of a size do not fit.
    """
    layouts = [
        lay_out(ranks, used_hosts(hosts, ranks, ppn), ppn and min(ppn, ranks)) for ranks in sizes
    ]
    return ppn or max(layout.per_host for layout in layouts)


def used_hosts(hosts: Allocation, ranks: int, ppn: int | None) -> Allocation:
    """Return the first hosts, as many as ``ranks`` need; without ``ppn`` all of them.

    ``lay_out`` refuses hosts that the user names and that stay idle, as at the smaller sizes.
    """
    count = math.ceil(ranks / min(ppn, ranks)) if ppn else None
    return replace(hosts, hosts=hosts.hosts[:count])
