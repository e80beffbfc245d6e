"""Start a script on several ranks, each watched, and on one alone to compare with."""

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

from hvdtrain.commands.launch.hosts import find_allocation
from hvdtrain.commands.launch.prepare import Request, prepare
from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, Row, show
from hvdtrain.commands.verify.script import judge
from hvdtrain.commands.verify.script.record import DETAILED, Noted
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.output.result import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run
from hvdtrain.system.runtime.detect import detect

log = logging.getLogger(__name__)

ALL = "all"

HUNG = "a hang"
CONSEQUENCE = "HorovodInternalError"  # of another rank's failure
CAUSES = {  # that are known, by what the error says
    "has no attribute 'ref'": "Keras 3: its variables are no tf.Variable, which Horovod expects. "
    "Give Horovod the value of each: hvd.broadcast_variables([v.value for v in model.variables], "
    "root_rank=0), and the same to the gradient of hvd.DistributedGradientTape"
}

Seen = tuple[list[Noted], Result]  # what the ranks wrote down, and how the run ended


@dataclass(frozen=True)
class Watched:
    """What was seen of a script."""

    rows: list[Row]  # all eight
    ended: list[str | None]  # how, on each rank that told; ``updates`` where it was ended
    updates: int  # that it made

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
        when = f"after {plural(self.updates, 'update')}" if self.updates else "before update 1"
        unseen = not self.updates and all(row.state != FAILED for row in self.rows)
        nothing = "; nothing was checked" if unseen else ""
        cause = next((f"\n-> {told}" for mark, told in CAUSES.items() if mark in self.broken), "")
        word = "hung" if HUNG in self.broken else "crashed"
        return f"{word} {when}{nothing}: {self.broken}{cause}"


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
        script: a Python file that trains with Horovod; ``arguments`` are its command line.
        ranks: how many to start.
        updates: after how many it is ended; None: at its own end.
        timeout: seconds for each of the two runs.
        bind: whether the launcher gives each rank cores of its own; without, step 2 is the
            script's alone.

    Raises:
        HvdtrainError: not one rank came so far that it could tell something.
    """
    place = Path.cwd() if len(find_allocation(os.environ).hosts) > 1 else None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-", dir=place) as folder:

        def run_on(size: int, limit: int | None, place: Path, *, fresh: bool = False) -> Seen:
            place.mkdir(exist_ok=True)
            start = build(size, script, arguments, limit, place, bind=bind, fresh=fresh)
            then = ", then on 1" if size > 1 else f", to compare with {ranks}" if ranks > 1 else ""
            with terminal.working(f"{script.name} runs on {plural(size, 'rank')}{then}"):
                return _run(start, place, timeout)

        everyone, result = run_on(ranks, updates, Path(folder))
        if not everyone:
            raise HvdtrainError(f"{script} could not be started: {_last(result)}")
        alone: list[Noted] = []
        if ranks > 1 and any(record["updates"] for record in everyone):
            # To its end only where the ranks went to theirs, to show what an epoch is.
            # It trains from the start if they did, not from what they have saved.
            fresh = not any(record["resumed"] for record in everyone)
            alone, _ = run_on(1, updates and DETAILED, Path(folder) / "alone", fresh=fresh)
    rows, ended = judge.rows(everyone, *alone), _ends(everyone, ranks, result, timeout)
    return Watched(rows, ended, min(record["done"] for record in everyone))


def _run(start: Command, folder: Path, timeout: float) -> Seen:
    """Run the script; return what the ranks wrote down, by rank, and how the run ended."""
    log.info("%s", start.show())
    result = run(start, on_line=lambda line: log.info("%s", line), timeout=timeout)
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_bytes()) for file in files], result


def _ends(
    everyone: Sequence[Noted], ranks: int, result: Result, timeout: float
) -> list[str | None]:
    """Return how the script ended on each rank."""
    missing = ranks - len(everyone)
    ended = [record["ended"] for record in everyone]
    ended += [f"not started: {_last(result)}"] * missing
    if result.exit_code == TIMED_OUT:
        hung = f"{HUNG}: ended after {timeout:g} s (--timeout)"
        ended = [end or hung for end in ended] if None in ended else [hung, *ended[1:]]
    return ended


def build(
    ranks: int,
    script: Path,
    arguments: Sequence[str],
    updates: int | None,
    folder: Path,
    *,
    bind: bool = True,
    fresh: bool = False,
) -> Command:
    """Return the command that starts the ranks."""
    limit = [] if updates is None else ["--updates", str(updates)]
    how = [*limit, *["--fresh"] * fresh]
    options = ["--folder", str(folder), *how, str(script), *arguments]
    words = [sys.executable, "-m", "hvdtrain.commands.verify.script", *options]
    return prepare(Request(ranks, words, bind=bind)).command


def _last(result: Result) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {result.exit_code}"


def observe(options: argparse.Namespace, ranks: int | None) -> Report:
    """Carry ``hvdtrain verify --script`` out.

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
    """Return the rows as a table and as data; how the script crashed comes before them."""
    failed = sum(row.state == FAILED for row in seen.rows)
    unseen = [row.step for row in seen.rows if row.state == NOT_SEEN]
    more = _more(options, ranks) if unseen and not seen.broken else None
    end = f"{failed} of 8 steps failed" if failed else "nothing failed"
    if unseen:
        end += ", " if failed else ", but this is no pass: "
        end += f"{len(unseen)} of 8 not seen ({', '.join(map(str, unseen))})"
        end += "; to see more, run it to its end:" if more else ""
    end = message(end) + (f"\n  {more}" if more else "")  # a command stays whole
    headline = f"hvdtrain verify: {options.script.name}, {plural(ranks, 'rank')}, "
    headline += plural(seen.updates, "update")
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
    text = message(headline) if nothing else f"{show(headline, seen.rows)}\n{end}"
    return Report(text, data, EXIT_OK if ok else EXIT_FAILURE)


def _more(options: argparse.Namespace, ranks: int) -> str | None:
    """Return the command that would see more of the script; None where all was looked at."""
    if ranks > 1 and options.updates == ALL:
        return None
    words = ["hvdtrain", "verify", "-n", str(max(ranks, 2)), "--updates", ALL]
    given = ["--", *options.arguments] if options.arguments else []
    return shlex.join([*words, "--script", str(options.script), *given])
