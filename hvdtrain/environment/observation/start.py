"""Starting a script on several ranks, each watched, and on one alone to compare with."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.environment.observation.judge import rows as judge
from hvdtrain.environment.observation.record import DETAILED
from hvdtrain.environment.verification.rows import FAILED, NOT_SEEN, Row, several, show
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.launch.detect import detect
from hvdtrain.launch.hosts import find_allocation
from hvdtrain.launch.launch import command
from hvdtrain.launch.run import TIMED_OUT, Command, Result, run
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

ALL = "all"

Seen = tuple[list[dict[str, Any]], Result]  # what the ranks wrote down, and how the run ended


@dataclass(frozen=True)
class Watched:
    """What was seen of a script.

    Attributes:
        rows: the eight rows.
        ended: how the script ended on each rank that told; ``updates`` where it was ended.
        updates: updates that it made.
    """

    rows: list[Row]
    ended: list[str | None]
    updates: int

    @property
    def broken(self) -> str | None:
        """The first rank's failure that is the script's own."""
        fine = {None, "updates", "its own end", "exit code 0"}
        return next((end for end in self.ended if end not in fine), None)


def words(script: Path, arguments: Sequence[str], updates: int | None, folder: Path) -> list[str]:
    """What each rank runs."""
    limit = [] if updates is None else ["--updates", str(updates)]
    module = "hvdtrain.environment.observation"
    options = ["--folder", str(folder), *limit]
    return [sys.executable, "-m", module, *options, str(script), *arguments]


def watch(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    updates: int | None = DETAILED,
    timeout: float = 300.0,
    bind: bool = True,
) -> Watched:
    """Run ``script`` on ``ranks`` ranks, then on one, and judge what was seen.

    It really runs: what it writes, it writes. What it prints goes to the log.

    Args:
        script: a Python file that trains with Horovod.
        arguments: its command line.
        ranks: how many to start.
        updates: after how many updates it is ended; None: at its own end.
        timeout: seconds for each of the two runs.
        bind: whether the launcher gives each rank cores of its own, as it should. Without, step 2
            is the script's alone, on a machine without GPUs too.

    Raises:
        HvdtrainError: not one rank came so far that it could tell something.
    """
    place = Path.cwd() if len(find_allocation(os.environ).hosts) > 1 else None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-", dir=place) as folder:

        def run_on(size: int, limit: int | None, place: Path) -> Seen:
            start = build(size, script, arguments, limit, place, bind=bind)
            return _run(start, size, place, timeout)

        everyone, result = run_on(ranks, updates, Path(folder))
        if not everyone:
            raise HvdtrainError(f"{script} could not be started: {_last(result)}")
        alone = None
        if ranks > 1 and any(record["updates"] for record in everyone):
            # To its end only where the ranks went to theirs: then it shows what an epoch is.
            limit = None if updates is None else DETAILED
            records, _ = run_on(1, limit, Path(folder) / "alone")
            alone = records[0] if records else None
    rows = judge(everyone, alone)
    ended = [record["ended"] for record in everyone]
    if len(everyone) < ranks:
        ended.append(f"{several(ranks - len(everyone), 'rank')} that told nothing")
    if result.exit_code == TIMED_OUT:
        ended.append(f"a hang: it was ended after {timeout:g} s")
    return Watched(rows, ended, min(record["done"] for record in everyone))


def _run(start: Command, ranks: int, folder: Path, timeout: float) -> Seen:
    """What the ranks wrote down, by rank, and how the run ended."""
    folder.mkdir(exist_ok=True)
    log.info("%s", start.show())
    result = run(start, on_line=lambda line: log.info("%s", line), timeout=timeout)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_bytes()) for file in files if file.is_file()], result


def build(
    ranks: int,
    script: Path,
    arguments: Sequence[str],
    updates: int | None,
    folder: Path,
    *,
    bind: bool = True,
) -> Command:
    """The command that starts the ranks."""
    return command(ranks, words(script, arguments, updates, folder), bind=bind)


def _last(result: Result) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {result.exit_code}"


def observe(options: argparse.Namespace, ranks: int | None) -> Report:
    """What ``hvdtrain verify --script`` does.

    Raises:
        UsageError: no such script, or this process is one of a launcher's ranks.
    """
    if detect(os.environ).launcher:
        raise UsageError(
            "--script starts its ranks itself: give -n N instead of starting hvdtrain by mpirun"
        )
    ranks = ranks or 1
    script: Path = options.script
    if not script.is_file():
        raise UsageError(f"--script {script}: no such file")
    if options.updates != ALL and not (options.updates.isdecimal() and int(options.updates)):
        raise UsageError(f"--updates {options.updates}: give a number of at least 1, or all")
    updates = None if options.updates == ALL else int(options.updates)
    if options.dry_run:
        line = build(ranks, script, options.arguments, updates, Path("FOLDER")).show()
        return Report(line, {"ok": True, "commands": [line]})
    seen = watch(script, options.arguments, ranks=ranks, updates=updates, timeout=options.timeout)
    return report(seen, script, ranks)


def report(seen: Watched, script: Path, ranks: int) -> Report:
    """The rows as a table and as data."""
    failed = sum(row.state == FAILED for row in seen.rows)
    unseen = sum(row.state == NOT_SEEN for row in seen.rows)
    made = several(seen.updates, "update")
    end = f"{failed} of 8 steps failed" if failed else "nothing failed"
    if unseen:
        end += f", {unseen} not seen"
    if ranks == 1:
        end += "; a script shows what it does between ranks only on several: -n 2"
    if seen.broken:
        end += f"; the script ended with {seen.broken}"
    headline = f"hvdtrain verify: {script.name}, {several(ranks, 'rank')}, {made}"
    ok = not failed and not seen.broken
    data = {
        "ok": ok,
        "script": str(script),
        "ranks": ranks,
        "updates": seen.updates,
        "ended": seen.ended,
        "rows": [row.data() for row in seen.rows],
    }
    return Report(f"{show(headline, seen.rows)}\n{end}", data, EXIT_OK if ok else EXIT_FAILURE)
