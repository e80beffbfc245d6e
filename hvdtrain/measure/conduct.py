"""What ``hvdtrain scaling`` does: the missing runs of a ladder, then what all runs say together."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.launch.launch import choose_hosts
from hvdtrain.measure import ladder, records
from hvdtrain.measure.alike import check_alike, check_going_on
from hvdtrain.measure.allreduce_table import read_reductions
from hvdtrain.measure.data import study_data
from hvdtrain.measure.records import LINES
from hvdtrain.measure.scaling import OUT
from hvdtrain.measure.study import Study, make_study
from hvdtrain.measure.tables import number
from hvdtrain.measure.text import study_text
from hvdtrain.measure.words import check_words, with_batch
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

TABLE, FIGURE = "results.csv", "scaling"


def run(arguments: argparse.Namespace) -> Report:
    """Do what the parsed ``arguments`` of the verb ask for.

    Raises:
        UsageError: an option is wrong, or runs do not belong together.
        HvdtrainError: a run failed.
    """
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if arguments.table is not None:
        if words or arguments.ranks:
            raise UsageError("--from runs nothing: leave --ranks and the command out")
        return _told(records.read_table(arguments.table), arguments, arguments.out)
    folder = arguments.out or OUT
    if words:
        plan = _plan(arguments, words, folder)
        if arguments.submit is not None:
            from hvdtrain.measure.jobs import submit_sizes

            return submit_sizes(plan, arguments.submit, dry_run=arguments.dry_run)
        if arguments.dry_run:
            lines = [ladder.command(plan, *run).show() for run in _runs(plan)]
            return Report("\n".join(lines), {"ok": True, "commands": lines})
        _climb(plan)
    elif arguments.ranks or arguments.dry_run or arguments.submit:
        raise UsageError("what should be run? Give it after --, as in `-- python train.py`")
    return _told(read_folder(folder), arguments, folder)


def _plan(arguments: argparse.Namespace, words: Sequence[str], folder: Path) -> ladder.Plan:
    """The ladder as asked for, with every default filled in."""
    scaling = records.STRONG if arguments.strong else records.WEAK
    check_words(words, scaling, os.environ)
    if not arguments.ranks:
        raise UsageError("--ranks: on how many ranks? Such as --ranks 1,2,4")
    if arguments.timeout is not None and arguments.timeout <= 0:
        raise UsageError(f"--timeout {arguments.timeout:g}: give seconds, more than 0")
    threads, room = arguments.threads, None
    if arguments.submit is None:  # else each job sees what its nodes have
        hosts = choose_hosts(arguments.hosts, arguments.hostfile, os.environ)
        room = ladder.room(arguments.ranks, arguments.ppn, hosts)
        threads = threads or ladder.threads(room, os.environ)
    return ladder.Plan(
        words=tuple(with_batch(words, scaling, arguments.ranks[0])),
        sizes=arguments.ranks,
        repeats=arguments.repeat,
        scaling=scaling,
        folder=folder,
        ppn=arguments.ppn,
        threads=threads,
        room=room,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        timeout=arguments.timeout,
    )


def _runs(plan: ladder.Plan) -> list[tuple[int, int]]:
    """The runs that are still to be done, after a look at those that are."""
    done, source = records.read_lines(plan.folder / LINES), str(plan.folder)
    check_going_on(done, ladder.outline(plan, 1, 1), source)
    check_alike(done, plan.scaling, source)
    there = {(run.ranks, run.repeat) for run in done}
    return [run for run in ladder.order(plan.sizes, plan.repeats) if run not in there]


def _climb(plan: ladder.Plan) -> None:
    """Carry the ladder out, each run kept as it ends."""
    missing, total = _runs(plan), len(plan.sizes) * plan.repeats
    done = records.read_lines(plan.folder / LINES)
    for place, (ranks, repeat) in enumerate(missing, total - len(missing) + 1):
        run = ladder.carry_out(plan, ranks, repeat)
        check_alike([*done, run], plan.scaling, str(plan.folder))
        records.append_line(plan.folder / LINES, run)
        done.append(run)
        log.info(
            "[%d/%d] %d rank%s, run %d: %s images/s in %.0f s",
            *(place, total, ranks, "s" if ranks > 1 else "", repeat),
            *(number(run.rate), run.summary.get("seconds_total") or 0.0),
        )


def read_folder(folder: Path) -> list[records.Run]:
    """The runs in a study's directory, and in those of its sizes where each was a job of its own.

    Raises:
        UsageError: there are none.
    """
    files = [folder / LINES, *sorted(folder.glob(f"ranks-*/{LINES}"))]
    runs = [run for file in files for run in records.read_lines(file)]
    if not runs:
        raise UsageError(
            f"no results in {folder} ({LINES}): give --ranks and a command after --, the --out of "
            "a ladder, or --from FILE.csv"
        )
    return runs


def _told(
    runs: Sequence[records.Run], arguments: argparse.Namespace, folder: Path | None
) -> Report:
    """What the runs say; table and plot are written where there is a directory for them."""
    source = str(arguments.table or folder)
    asked = records.STRONG if arguments.strong else records.WEAK if arguments.weak else None
    scaling = asked or runs[0].scaling or records.WEAK
    check_alike(runs, scaling, source)
    strategy = runs[0].summary.get("strategy")
    study = make_study(
        runs,
        scaling,
        ranks=arguments.predict,
        reductions=read_reductions(arguments.allreduce, strategy),
        leave_out=arguments.leave_out,
    )
    data, lines = study_data(study), [study_text(study)]
    if folder is not None:
        files = _write(study, folder)
        data["files"] = [str(file) for file in files]
        lines.append("written: " + ", ".join(data["files"]))
    return Report("\n\n".join(lines), data)


def _write(study: Study, folder: Path) -> list[Path]:
    from hvdtrain.measure import figure  # imports matplotlib, which only a plot needs

    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / TABLE
        with replacing(table, "--out") as file:
            file.write(records.table_text(study.runs).encode())
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    return [table, *figure.draw(study, folder / FIGURE)]
