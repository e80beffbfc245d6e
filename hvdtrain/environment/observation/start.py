"""Starting a script on several ranks, each watched, and on one alone to compare with."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
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

HUNG = "a hang"
CONSEQUENCE = "HorovodInternalError"  # of another rank's failure
CAUSES = (  # that are known, by what the error says
    (
        "has no attribute 'ref'",
        "Keras 3: its variables are no tf.Variable, which Horovod expects. Give Horovod the value "
        "of each: hvd.broadcast_variables([v.value for v in model.variables], root_rank=0), and "
        "the same to the gradient of hvd.DistributedGradientTape",
    ),
)

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
        """The failure that is the script's own, and where; None where it ended in order.

        Where one rank fails, Horovod and the launcher end the others: theirs count last.
        """
        fine = {None, "updates", "its own end", "exit code 0"}
        found = [(rank, end) for rank, end in enumerate(self.ended) if end not in fine]
        if not found:
            return None
        rank, end = min(found, key=lambda one: (one[1] or "").startswith(CONSEQUENCE))
        return f"rank {rank}: {end}"

    @property
    def crash(self) -> str:
        """How it came to its end too early, and why; empty where it ended in order."""
        if not self.broken:
            return ""
        when = f"after {several(self.updates, 'update')}" if self.updates else "before update 1"
        unseen = not self.updates and all(row.state != FAILED for row in self.rows)
        nothing = "; nothing was checked" if unseen else ""
        cause = next((f"\n-> {told}" for mark, told in CAUSES if mark in self.broken), "")
        word = "hung" if HUNG in self.broken else "crashed"
        return f"{word} {when}{nothing}: {self.broken}{cause}"


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
        ended += [f"not started: {_last(result)}"] * (ranks - len(everyone))
    if result.exit_code == TIMED_OUT:
        hung = f"{HUNG}: ended after {timeout:g} s (--timeout)"
        ended = [end or hung for end in ended] if None in ended else [hung, *ended[1:]]
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
    return report(seen, options, ranks)


def report(seen: Watched, options: argparse.Namespace, ranks: int) -> Report:
    """The rows as a table and as data; how the script crashed comes before them."""
    failed = sum(row.state == FAILED for row in seen.rows)
    unseen = [row.step for row in seen.rows if row.state == NOT_SEEN]
    more = _more(options, ranks) if unseen and not seen.broken else None
    end = f"{failed} of 8 steps failed" if failed else "nothing failed"
    if unseen:
        end += ", " if failed else ", but this is no pass: "
        end += f"{len(unseen)} of 8 not seen ({', '.join(map(str, unseen))})"
        end += f"; to see more, run it to its end:\n  {more}" if more else ""
    headline = f"hvdtrain verify: {options.script.name}, {several(ranks, 'rank')}, "
    headline += several(seen.updates, "update")
    if seen.crash:
        headline += f"\n{seen.crash}"
    ok = not failed and not seen.broken and not (options.strict and unseen)
    data = {
        "ok": ok,
        "script": str(options.script),
        "ranks": ranks,
        "updates": seen.updates,
        "ended": seen.ended,
        "crash": seen.crash,
        "not_seen": unseen,
        "to_see_more": more,
        "rows": [row.data() for row in seen.rows],
    }
    nothing = seen.crash and not seen.updates and not failed
    text = headline if nothing else f"{show(headline, seen.rows)}\n{end}"
    return Report(text, data, EXIT_OK if ok else EXIT_FAILURE)


def _more(options: argparse.Namespace, ranks: int) -> str | None:
    """The command that would see more of the script; None where all was looked at."""
    if ranks > 1 and options.updates == ALL:
        return None
    words = ["hvdtrain", "verify", "-n", str(max(ranks, 2)), "--updates", ALL]
    given = ["--", *options.arguments] if options.arguments else []
    return shlex.join([*words, "--script", str(options.script), *given])
