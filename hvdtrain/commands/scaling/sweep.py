"""The variants of a scaling study: one training on increasing numbers of ranks.

With ``--submit`` each number of ranks is a job that runs ``hvdtrain scaling`` on separate nodes.
Each job waits for the end of the previous one: at the same time, on a shared node, they would slow
one another down. They write to separate subdirectories of the study's directory, which
``hvdtrain scaling --out DIR`` then reads together.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.scaling.runs import (
    LINES,
    OUT,
    STRONG,
    WEAK,
    MeasuredRun,
    check_comparable,
    read_lines,
)
from hvdtrain.commands.study.command_options import (
    batch_sizes,
    check_measurable,
    entries,
    global_batch,
)
from hvdtrain.commands.study.engine import (
    REPEATS,
    RESULTS,
    Plan,
    Planned,
    StudyOptions,
    Variant,
    find_share,
)
from hvdtrain.commands.study.run import LOG, RunOutcome, file_path, run_stem
from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.site import load_site
from hvdtrain.commands.submit.submission import submit
from hvdtrain.config.command_line import without_option
from hvdtrain.config.declare import add_options, from_namespace, option, optional, switch
from hvdtrain.config.values import counts, positive
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output import Report
from hvdtrain.system.output.text import plural

log = logging.getLogger(__name__)

# Options that are set by the sweep, or make no sense for one of its jobs.
RESERVED = (
    "nodes",
    "name",
    "threads",
    "array",
    "ladder",
    "chain",
    "once",
    "stage_env",
    "follow",
    "command",
)


def sizes(text: str) -> tuple[int, ...]:
    """Read ``1,2,4`` as increasing numbers, without duplicates."""
    return tuple(sorted(set(counts(text))))


@dataclass(frozen=True)
class ScalingOptions(StudyOptions):
    """The options of ``hvdtrain scaling``."""

    ranks: tuple[int, ...] = option((), "numbers of ranks", sizes, group="runs", metavar="N,N,...")
    repeat: int = option(
        REPEATS, "number of runs per size", positive, metavar="K", alias="--repeats"
    )
    weak: bool = switch("constant batch per rank (default)", group="runs", either="scaling")
    strong: bool = switch("constant global batch", either="scaling")
    batches: tuple[int, ...] = option(
        (),
        "global batch sizes to compare by the --target metric, on one number of ranks, instead of "
        "numbers of ranks",
        sizes,
        metavar="B,B,...",
    )
    optimizers: tuple[str, ...] = option(
        (),
        "optimizers for --batches, each with its options in quotes (default: that of the command)",
        entries,
        metavar="O,O,...",
    )
    submit: str | None = optional(
        "options of hvdtrain submit, in quotes: submit each size as a job", metavar="OPTIONS"
    )
    out: Path | None = optional(f"{RESULTS} (default: {OUT})", Path, group="report", metavar="DIR")
    from_: Path | None = optional(
        "table to report instead of runs, with columns ranks, images_per_second",
        Path,
        group="report",
        metavar="FILE.csv",
    )
    allreduce: Sequence[Path] = option(
        (),
        "JSON of `hvdtrain doctor -n N --json`, for the prediction; repeatable",
        Path,
        metavar="FILE",
        repeated=True,
    )
    predict: tuple[int, ...] = option(
        (), "numbers of ranks to predict (default: 16 ... 4096)", sizes, metavar="N,N,..."
    )

    default_folder = OUT

    @property
    def scaling(self) -> str:
        """The scaling of the runs."""
        return STRONG if self.strong else WEAK


def sweep_words(
    words: Sequence[str], options: ScalingOptions, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the command of each rank, with the batch size option of the scaling.

    In strong scaling ``--batch-size`` is the batch per rank and pass at the smallest size.

    Raises:
        UsageError: the command cannot be measured, or there are no sizes.
    """
    check_measurable(words, environ)
    per_rank, total = batch_sizes(words)
    if options.strong and total is None and per_rank is None:
        raise UsageError(
            "--strong needs a global batch size in the command, e.g. "
            "`-- python -m hvdtrain.mnist --global-batch-size 256`"
        )
    if not options.strong and total is not None:
        raise UsageError(
            "--global-batch-size in the command or its --config file needs --strong; for weak "
            "scaling use --batch-size, the batch per rank"
        )
    if not options.ranks:
        raise UsageError("--ranks is required, e.g. --ranks 1,2,4")
    if not options.strong or per_rank is None or total is not None:
        return tuple(words)
    kept = without_option(words, "--batch-size")
    return (*kept, "--global-batch-size", str(global_batch(words, options.ranks[0])))


@dataclass(frozen=True)
class Sweep(Plan[MeasuredRun]):
    """The requested runs of one training at increasing numbers of ranks.

    ``words`` are those of ``sweep_words``.
    """

    file_name, record_type, kind = LINES, MeasuredRun, "sweep"
    reverses = True
    same = (
        ("scaling", "scaling"),
        ("machine", "machine"),
        ("share", "share of a host"),
        ("threads", "threads per rank"),
    )

    @property
    @override
    def variants(self) -> list[Variant]:
        return [
            Variant(
                str(ranks),
                plural(ranks, "rank"),
                self.share.request(self.options, ranks, self.words),
                MeasuredRun(
                    ranks,
                    0,
                    Summary(),
                    scaling=self.options.scaling,
                    command=self.words,
                    machine=self.share.machine,
                    cores=self.share.cores,
                    threads=self.share.threads,
                    ranks_per_host=self.share.ranks_per_host,
                ),
            )
            for ranks in self.options.ranks
        ]

    @override
    def missing(self) -> list[Planned]:
        missing = super().missing()
        check_comparable(self.read(), self.options.scaling, str(self.options.folder))
        return missing

    @override
    def remedy(self, field: str, old: MeasuredRun, new: MeasuredRun) -> str:
        if field == "threads" and old.threads:
            return f", or --threads {old.threads}"
        before, now = old.ranks_per_host, new.ranks_per_host
        if field != "share" or not before or not now:
            return ""
        later = f"; with --ppn {now} from the start, more ranks can be added later"
        return f", or --ppn {before}" if now < before else later

    @override
    def check(self, variant: Variant, run: MeasuredRun, outcome: RunOutcome) -> None:
        folder = self.options.folder
        if outcome.summary is None:
            output = file_path(run_stem(folder, variant.name, run.repeat), LOG)
            hint = "" if outcome.failed else f"; see its output in {output}"
            raise HvdtrainError(
                f"the run on {variant.title} failed: {outcome.reason}{hint}. Completed runs are "
                "kept: run the same command again to continue"
            )
        check_comparable([*self.read(), run], self.options.scaling, str(folder))


def make_sweep(options: ScalingOptions, words: Sequence[str]) -> Sweep:
    """Return the sweep that this process runs.

    Raises:
        UsageError: the command cannot be measured, or the ranks do not fit.
    """
    return Sweep(options, sweep_words(words, options), find_share(options, options.ranks))


def submit_sizes(options: ScalingOptions, words: Sequence[str]) -> Report:
    """Submit a job for each size that is not complete, or show its script.

    Args:
        options: those of the sweep; a ``--ppn`` in ``options.submit`` overrides its ``ppn``, and
            without both the GPUs of a node are its ranks.
        words: the command, as typed.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused a job.
    """
    words = sweep_words(words, options)
    if options.hosts or options.hostfile:
        excluded = "--hosts" if options.hosts else "--hostfile"
        raise UsageError(
            f"--submit and {excluded} cannot be combined: the batch system allocates the hosts"
        )
    template = _parse(options.submit or "")
    full = _ranks_per_node(template, options)
    texts: list[str] = []
    jobs = []
    previous = None
    for ranks in options.ranks:
        runs = read_lines(options.folder / f"ranks-{ranks}" / LINES)
        if {run.repeat for run in runs}.issuperset(range(1, options.repeat + 1)):
            log.info("%s: no job needed, all runs are complete", plural(ranks, "rank"))
            continue
        report = submit(_job_request(template, options, words, ranks, full), previous)
        previous = next(iter(report.data.get("jobs", ())), None)
        texts.append(report.text)
        jobs.append({"ranks": ranks, **report.data})
    if not options.dry_run:
        hint = "After the jobs end, report the results" if jobs else "Nothing to submit. To report"
        texts.append(f"{hint}: hvdtrain scaling --out {options.folder}")
    return Report("\n\n".join(texts), {"ok": True, "jobs": jobs})


def _parse(options: str) -> Job:
    """Parse the options of the jobs as ``hvdtrain submit`` does.

    Raises:
        UsageError: an option is unknown, or is set by the sweep.
    """
    parser = argparse.ArgumentParser(prog="--submit", allow_abbrev=False, exit_on_error=False)
    add_options(parser, Job)
    try:
        arguments, unknown = parser.parse_known_args(shlex.split(options))
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"--submit {options!r}: {error}") from error
    if unknown:
        raise UsageError(f"--submit {options!r}: hvdtrain submit has no {unknown[0]}")
    for name in RESERVED:
        if getattr(arguments, name) != parser.get_default(name) and getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--submit {options!r}: {option} is set by the sweep: omit it")
    return from_namespace(Job, arguments)


def _ranks_per_node(template: Job, options: ScalingOptions) -> int:
    """Return the ranks of a full node, with the default of ``hvdtrain submit``.

    Raises:
        UsageError: the ranks of a size do not fill their nodes.
    """
    gpus = template.gpus_per_node
    if gpus is None:
        gpus = load_site(template.site, os.environ).gpus_per_node
    full = template.ppn or options.ppn or gpus or 1
    for ranks in options.ranks:
        if ranks > full and ranks % full:
            raise UsageError(
                f"--ranks {ranks}: must be at most {full}, the ranks per node, or a multiple of it "
                "(--submit '--ppn K' sets it)"
            )
    return full


def _job_request(
    template: Job, options: ScalingOptions, words: Sequence[str], ranks: int, full: int
) -> Job:
    """Return the request to ``hvdtrain submit`` for one size; ``full``: ranks of a full node."""
    ppn = min(full, ranks)
    command = ["hvdtrain", "scaling", "--ranks", str(ranks), "--repeat", str(options.repeat)]
    command += ["--strong"] if options.strong else []
    # The ranks of a full host determine the threads per rank, also if fewer ranks run.
    command += ["--ppn", str(full), "--out", str(options.folder / f"ranks-{ranks}")]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--timeout", f"{options.timeout:g}"] if options.timeout else []
    return replace(
        template,
        nodes=math.ceil(ranks / ppn),
        ppn=ppn,
        threads=options.threads,
        name=f"scaling-{ranks}",
        once=True,
        dry_run=options.dry_run,
        command=(*command, "--", *words),
    )
