"""Run a script on several ranks and then on one to compare with, and watch every rank."""

from __future__ import annotations

import logging
import os
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

from hvdtrain.commands.launch.hosts import find_allocation
from hvdtrain.commands.launch.prepare import Request, prepare
from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK, StepRow, not_seen, show
from hvdtrain.commands.verify.script import judge
from hvdtrain.commands.verify.script.judge_gradients import KERAS
from hvdtrain.commands.verify.script.judge_replay import (
    STEP,
    obstacle,
    read_replayed,
    replay_row,
)
from hvdtrain.commands.verify.script.record import DETAILED, Record, Records, read_record
from hvdtrain.commands.verify.script.replay import REGULAR, UPDATES
from hvdtrain.commands.verify.script.watch_distributed import FSDP1
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import message
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, CommandResult, run

log = logging.getLogger(__name__)

# Of a script that is distributed in another way, and of one that Horovod or hvdtrain distributes.
OTHER_WORDS = r"tf\.distribute\b|\b(?:mp|multiprocessing)\.Process(?=\([^)]*\(\w*rank\b)"
OUR_IMPORTS = r"(?m)^\s*(?:from|import)\s+(?:horovod|hvdtrain)\b"

HUNG = "a hang"
# Errors that are due to another rank's failure: of Horovod, and of gloo.
CONSEQUENCES = ("HorovodInternalError", "Connection closed by peer", "Connection reset by peer")
CAUSES = {  # known causes and remedies, by a part of the error
    "has no attribute 'ref'": f"Keras 3: with model.fit use `{KERAS}`\n"
    "-> in a loop of your own pass the value of each variable: hvd.broadcast_variables([v.value "
    "for v in model.variables], root_rank=0), likewise to the gradient method of "
    "hvd.DistributedGradientTape"
}


class OtherScriptError(HvdtrainError):
    """The script is distributed in a way that cannot be watched."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class ScriptResult:
    """The result of watching a script."""

    rows: list[StepRow]  # all eight, and that of the replay if there was one
    ended: list[str | None]  # how, by rank, if known; ``updates`` if by --updates
    updates: int  # number of updates made

    @property
    def broken(self) -> str | None:
        """The failure of the script and its rank; None if there was none.

        If one rank fails, the others fail or are ended with it; their errors come last.
        """
        failures = [pair for pair in enumerate(self.ended) if pair[1] not in {None, *REGULAR}]
        if not failures:
            return None
        rank, end = min(failures, key=lambda f: any(word in (f[1] or "") for word in CONSEQUENCES))
        return f"rank {rank}: {end}"

    @property
    def crash(self) -> str:
        """When and why the script failed; empty if it did not."""
        if not self.broken:
            return ""
        when = f"after {plural(self.updates, 'update')}" if self.updates else "before update 1"
        unseen = not self.updates and all(row.state != FAILED for row in self.rows)
        note = "; nothing was checked" if unseen else ""
        cause = next((f"\n-> {cause}" for text, cause in CAUSES.items() if text in self.broken), "")
        verb = "hung" if HUNG in self.broken else "crashed"
        return f"{verb} {when}{note}: {self.broken}{cause}"


def watch(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    updates: int | None = DETAILED,
    timeout: float = 300.0,
    bind: bool = True,
    exact: bool = False,
    replay: bool = True,
) -> ScriptResult:
    """Run ``script`` on ``ranks`` ranks, then on one, and judge the records.

    The script really runs and writes its files. Its output goes to the log.

    Args:
        script: a Python file that trains with Horovod, torch.distributed or hvdtrain;
            ``arguments`` are its command line.
        ranks: number of ranks to start.
        updates: number of updates after which it is ended; None: not at all.
        timeout: seconds for each run.
        bind: whether the launcher binds each rank to cores; if not, step 2 is the script's task.
        exact: whether to replay in fp64; ``replay``: whether to do so, in three runs more.

    Raises:
        OtherScriptError: the script is distributed in a way that cannot be watched.
        HvdtrainError: no rank started the script.
    """
    shared = Path.cwd() if len(find_allocation(os.environ).hosts) > 1 else None
    _check(script, [])
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-", dir=shared) as folder:

        def run_on(
            size: int, limit: int | None, path: Path, *, more: Sequence[str] = ()
        ) -> tuple[list[Record], CommandResult]:
            """Run the script; return the records, by rank, and the result of the command."""
            path.mkdir(exist_ok=True)
            start = build(size, script, arguments, limit, path, bind=bind, more=more)
            log.info("%s", start.show())
            then = ", then on 1" if size > 1 else f", to compare with {ranks}" if ranks > 1 else ""
            with terminal.working(f"{script.name} runs on {plural(size, 'rank')}{then}"):
                result = run(start, on_line=lambda line: log.info("%s", line), timeout=timeout)
            files = sorted(path.glob("*.json"), key=lambda file: int(file.stem))
            return [read_record(file) for file in files], result

        records, result = run_on(ranks, updates, Path(folder))
        if not records:
            raise HvdtrainError(f"{script} could not be started: {_last(result)}")
        _check(script, records)
        single: list[Record] = []
        if trained := ranks > 1 and any(record.updates for record in records):
            # To its end only if the ranks do; without a checkpoint if they began without one.
            fresh = [] if any(record.resumed for record in records) else ["--fresh"]
            runs, _ = run_on(1, updates and DETAILED, Path(folder, "single_rank"), more=fresh)
            single = [run for run in runs if run.spawned in (None, 1)]  # not of a fixed nprocs
        rows = judge.rows(records, *single)
        if replay and trained and rows[0].state == OK:
            rows.append(_replay(run_on, Path(folder), ranks, exact=exact))
    ended = _ends(records, ranks, result, timeout)
    return ScriptResult(rows, ended, min(record.done for record in records))


def _replay(run_on: Callable[..., object], folder: Path, ranks: int, *, exact: bool) -> StepRow:
    """Return the row of the replay: run the ranks once more, and then one process in their place.

    ``run_on``: see ``watch``.
    """
    drawn, whole, perturbed = (folder / name for name in ("drawn", "whole", "perturbed"))
    more = ["--fresh", "--replay", str(drawn), *["--exact"] * exact]
    run_on(ranks, UPDATES, drawn, more=more)
    more += ["--stands-for", str(ranks)]
    try:
        by_rank = [read_replayed(drawn, rank) for rank in range(ranks)]
        if reason := obstacle(by_rank):
            return not_seen(STEP, f"cannot be replayed: {reason}")
        run_on(1, UPDATES, whole, more=more)
        run_on(1, UPDATES, perturbed, more=[*more, "--perturbed"])
        together, noise = read_replayed(whole, 0), read_replayed(perturbed, 0)
    except (OSError, ValueError, BadZipFile):  # a rank was killed before or while it wrote
        return not_seen(STEP, "cannot be replayed: the script did not end")
    return replay_row(by_rank, together, noise, exact=exact)


def _check(script: Path, records: Records) -> None:
    """Raise OtherScriptError if the script is distributed in a way that cannot be watched."""
    if library := other_library(records, script):
        verified = "only scripts of Horovod, hvdtrain or torch.distributed can be verified"
        raise OtherScriptError(f"{script}: distributed by {library}; {verified}")
    for record in records:
        if record.spawned not in (None, record.started):
            remedy = f"-n {record.spawned}" if record.spawned > 1 else f"nprocs={record.started}"
            counts = f"nprocs={record.spawned}, verify {plural(record.started, 'rank')}"
            raise OtherScriptError(f"{script}: mp.spawn starts {counts}: use {remedy}")


def other_library(records: Records, script: Path) -> str:
    """Return what distributes a script and is not watched; empty if nothing does."""
    text = script.read_text(errors="replace")  # it may have failed before it used them
    if any(record.library == FSDP1 for record in records):
        return FSDP1
    if any(record.judged for record in records) or re.search(OUR_IMPORTS, text):
        return ""
    word = re.search(OTHER_WORDS, re.sub("#.*", "", text))
    names = (record.library for record in records if record.library)
    return next(names, word.group() if word else "")


def _ends(records: Records, ranks: int, result: CommandResult, timeout: float) -> list[str | None]:
    """Return how the script ended on each rank."""
    missing = ranks - len(records)
    ended = [record.ended for record in records]
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
    more: Sequence[str] = (),
) -> Command:
    """Return the command that starts the ranks; ``more`` options of the module."""
    limit = [] if updates is None else ["--updates", str(updates)]
    options = ["--folder", str(folder), *limit, *more]
    if not re.search(OUR_IMPORTS, script.read_text(errors="replace")):
        options += ["--master", rendezvous()]
    module = [sys.executable, "-m", "hvdtrain.commands.verify.script"]
    return prepare(Request(ranks, [*module, *options, str(script), *arguments], bind=bind)).command


def rendezvous() -> str:
    """Return host and port at which the ranks of a script of torch.distributed meet."""
    hosts = find_allocation(os.environ).hosts
    # Not a free port of the system's choice: it may give that to mpirun meanwhile.
    port = random.SystemRandom().randrange(20_000, 32_000)
    return f"{hosts[0].name if len(hosts) > 1 else '127.0.0.1'}:{port}"


def _last(result: CommandResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {result.exit_code}"


@dataclass(frozen=True)
class ScriptRun:
    """What ``hvdtrain verify --script`` runs."""

    script: Path
    arguments: Sequence[str]  # of the script
    ranks: int
    updates: int | None = DETAILED  # after which it is ended; None: it runs to its end
    strict: bool = False  # whether a step that was not seen is a failure
    exact: bool = False  # whether it is replayed in fp64


def observe(run: ScriptRun, *, timeout: float, dry_run: bool) -> Report:
    """Watch the script and report it; each of its runs has ``timeout`` seconds.

    Raises:
        UsageError: the script does not exist.
    """
    if not run.script.is_file():
        raise UsageError(f"--script {run.script}: no such file")
    if dry_run:
        line = build(run.ranks, run.script, run.arguments, run.updates, Path("FOLDER")).show()
        return Report(line, {"ok": True, "commands": [line]})
    result = watch(
        run.script,
        run.arguments,
        ranks=run.ranks,
        updates=run.updates,
        timeout=timeout,
        exact=run.exact,
    )
    return report(result, run)


def report(result: ScriptResult, run: ScriptRun) -> Report:
    """Return the rows as a table and as data; a crash of the script comes first."""
    failed = sum(row.state == FAILED for row in result.rows)
    unseen = [row.step for row in result.rows if row.state == NOT_SEEN]
    more = _more(run) if set(unseen) - {STEP} and not result.broken else None
    total = len(result.rows)
    end = f"{failed} of {total} steps failed" if failed else "all steps took effect"
    if result.broken and not failed:
        end = f"no step failed, but the script {result.crash.split()[0]}"
    elif unseen and not failed:
        end = "nothing failed, but this is no pass"
    if unseen:
        end += ", " if failed or result.broken else ": "
        end += f"{len(unseen)} of {total} not seen ({', '.join(map(str, unseen))})"
        end += ", a failure with --strict" if run.strict else ""
        end += "; to see more, run it to its end:" if more else ""
    end = message(end) + (f"\n  {more}" if more else "")  # a command is not wrapped
    headline = f"hvdtrain verify: {run.script.name}, {plural(run.ranks, 'rank')}, "
    headline += plural(result.updates, "update")
    if result.crash:
        headline += f"\n{result.crash}"
    ok = not failed and not result.broken and not (run.strict and unseen)
    data = {
        "ok": ok,
        "script": str(run.script),
        "ranks": run.ranks,
        "updates": result.updates,
        "ended": result.ended,
        "crash": result.crash,
        "not_seen": unseen,
        "to_see_more": more,
        "rows": [row.data() for row in result.rows],
    }
    no_rows = result.crash and not result.updates and not failed
    text = message(headline) if no_rows else f"{show(headline, result.rows)}\n{end}"
    return Report(text, data, EXIT_OK if ok else EXIT_FAILURE)


def _more(run: ScriptRun) -> str | None:
    """Return the command that would show more steps; None if this one was it."""
    if run.ranks > 1 and run.updates is None:
        return None
    command = ["hvdtrain", "verify", "-n", str(max(run.ranks, 2)), "--updates", "all"]
    command += ["--strict"] * run.strict + ["--exact"] * run.exact
    arguments = ["--", *run.arguments] if run.arguments else []
    return shlex.join([*command, "--script", str(run.script), *arguments])
