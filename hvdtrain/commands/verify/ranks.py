"""Verify the eight steps on each rank, and start the ranks that do: as often as it takes.

``hvdtrain verify -n N`` starts this module on N ranks. A row that fails leaves the others as they
are: the true world replaces a false one, each step is given what it needs by hand, and what all
ranks found is exchanged after each step whatever it was. Where the ranks lose each other (one waits
in a collective that another never enters) Horovod is told to give up after ``STALLED`` seconds, and
that row fails. A step that makes the ranks hang or die takes the ones after it along: it is then
known which it was, and the others are asked for in another start.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hvdtrain.adapters import select
from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.commands.verify import STALLED, check_ranks, check_updates
from hvdtrain.commands.verify.check_ranks import host_name, true_world
from hvdtrain.commands.verify.harness import Bench, Check, Facts
from hvdtrain.commands.verify.rows import ALL, FAILED, STEPS, Row, coming, read_row
from hvdtrain.errors import EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import set_defaults

Emit = Callable[[Row], None]

MARK = "hvdtrain-verify-row "  # begins each row that rank 0 prints
SAID = "hvdtrain: "  # begins what a rank says when it ends

CHECKS = {
    1: Check(check_ranks.measure_world, check_ranks.judge_world),
    2: Check(check_ranks.measure_devices, check_ranks.judge_devices),
    3: Check(check_ranks.measure_shards, check_ranks.judge_shards),
    4: Check(check_updates.measure_rate, check_updates.judge_rate),
    5: Check(check_updates.measure_gradient, check_updates.judge_gradient),
    6: Check(check_updates.measure_broadcast, check_updates.judge_broadcast),
    7: Check(check_updates.measure_checkpoint, check_updates.judge_checkpoint),
    8: Check(check_ranks.measure_metrics, check_ranks.judge_metrics),
}


def main() -> int:
    """Verify the steps that are asked for; return 0 also where a row failed: the row says so."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.commands.verify.ranks")
    parser.add_argument("--framework", required=True)
    parser.add_argument("--strategy")
    parser.add_argument("--steps", default=",".join(map(str, ALL)))
    options = parser.parse_args()
    steps = [int(step) for step in options.steps.split(",")]
    verify(options.framework, options.strategy, tell, steps)
    return 0


def tell(row: Row) -> None:
    """Print a row on rank 0, in one piece, marked as one."""
    if detect(os.environ).is_root:
        sys.stdout.write(f"{MARK}{json.dumps(row.data())}\n")
        sys.stdout.flush()


class LostError(Exception):
    """The ranks no longer take part in the same collectives."""


def verify(
    framework: str, strategy: str | None, emit: Emit, steps: Collection[int] = ALL
) -> list[Row]:
    """Verify ``steps``; all ranks call it, and all get the same rows.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: see ``select.adapter``.
        emit: called with each row as soon as it is known, on every rank.
        steps: their numbers. The first is done in any case, the others need it.

    Returns:
        The rows in order; those that could not be seen any more are missing.

    Raises:
        UsageError: framework, strategy and launcher do not fit together.
    """
    adapter = select.adapter(framework, strategy)
    set_defaults(STALLED)
    rows: list[Row] = []
    try:
        bench = start(adapter, framework)
    except Exception as error:
        _note(rows, emit, Row(1, FAILED, describe(error)))
        return rows
    for step in STEPS:
        if step.number not in steps:
            continue
        try:
            _note(rows, emit, examine(bench, CHECKS[step.number], step.number))
        except LostError as error:
            _note(rows, emit, Row(step.number, FAILED, str(error)))
            break
    return rows


def _note(rows: list[Row], emit: Emit, row: Row) -> None:
    rows.append(row)
    emit(row)


def start(adapter: CommonAdapter, framework: str) -> Bench:
    """Do step 1 itself; afterwards the adapter has the true world, whatever it believed."""
    claimed = adapter.initialize()
    exchange = adapter.communicator
    hosts = [host.decode() for host in exchange.gather(host_name().encode())]
    adapter.world = true_world(exchange.rank, hosts)
    kits: Any = importlib.import_module(f"{__package__}.kit_{framework}")
    return Bench(adapter, kits.FrameworkKit(adapter), claimed)


def examine(bench: Bench, check: Check, step: int) -> Row:
    """Measure on every rank, exchange what was found, and judge it.

    Raises:
        LostError: on every rank: they wait in different collectives.
    """
    failure = ""
    facts: Facts = {}
    try:
        facts = check.measure(bench)
    except Exception as error:
        failure = describe(error)
    everyone = exchange(bench, step, {"failure": failure, "facts": facts})
    failures = {rank: one["failure"] for rank, one in enumerate(everyone) if one["failure"]}
    if failures:
        first, text = next(iter(failures.items()))
        who = "" if len(failures) == len(everyone) else f"rank {first}: "
        return Row(step, FAILED, who + text, {"failures": len(failures)})
    return check.judge([one["facts"] for one in everyone])


def exchange(bench: Bench, step: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank found in ``step``, by rank; all ranks call it."""
    try:
        packed = json.dumps([step, found]).encode()
        answers = [json.loads(one) for one in bench.adapter.communicator.gather(packed)]
        if [answer[0] for answer in answers] != [step] * bench.size:
            raise LostError("the ranks are in different steps")
    except Exception as error:
        own = found["failure"] or describe(error)
        place = detect(os.environ)
        if place.rank and found["failure"]:
            sys.stderr.write(f"hvdtrain: rank {place.rank}, step {step}: {own}\n")
        raise LostError(f"the ranks wait for each other in different places: {own}") from error
    return [answer[1] for answer in answers]


def describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    if "Horovod has been shut down" in text:
        return "Horovod gave up because one of the ranks did not take part"
    return text if isinstance(error, HvdtrainError) else f"{type(error).__name__}: {text[:300]}"


def rank_words(framework: str, strategy: str | None, steps: Sequence[int]) -> list[str]:
    """Return the command line of each rank that verifies ``steps``."""
    chosen = ["--strategy", strategy] if strategy else []
    numbers = ",".join(map(str, steps))
    options = ["--framework", framework, *chosen, "--steps", numbers]
    return [sys.executable, "-m", "hvdtrain.commands.verify.ranks", *options]


def start_ranks(command: Callable[[Sequence[int]], Command], timeout: float) -> list[Row]:
    """Run ``command(steps)`` until each step has its row, or the ranks do not even come together.

    Args:
        command: starts ranks that verify the steps with these numbers.
        timeout: seconds for each start.

    Raises:
        UsageError: the ranks refused to start with these options.
    """
    rows: dict[int, Row] = {}
    pending = list(ALL)
    while pending:
        seen: list[Row] = []
        begin = time.monotonic()

        def take(line: str, seen: list[Row] = seen) -> None:
            _, mark, text = line.partition(MARK)
            # A line that another rank's has run into is asked for again.
            with contextlib.suppress(ValueError):
                seen += [read_row(json.loads(text))] if mark else []
                if mark:
                    terminal.status(coming(seen[-1]))

        result = run(command(pending), on_line=take, timeout=timeout)
        last = pending[-1]
        new = [row for row in seen if row.step in pending]
        rows |= {row.step: row for row in new}
        pending = [step for step in pending if step not in rows]
        if pending and not (new and (new[-1].step == last or new[-1].state == FAILED)):
            # No row tells of the end, so it came in the step that was due.
            due = pending.pop(0)
            rows[due] = Row(due, FAILED, _cause(result, time.monotonic() - begin))
        if rows[1].state == FAILED and set(rows) == {1}:
            break  # without a world there is nothing to verify
    return [rows[step] for step in sorted(rows)]


def _cause(result: Result, seconds: float) -> str:
    """Say why the ranks ended without a row, in one line."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    if result.exit_code == EXIT_USAGE and said:
        raise UsageError(said[-1].removeprefix("error: "))
    if result.exit_code == TIMED_OUT:
        return f"no answer after {seconds:.0f} s: a rank hangs, or --timeout is too short"
    last = said or [line for line in lines if MARK not in line]
    return f"the ranks ended with exit code {result.exit_code}" + (f": {last[-1]}" if last else "")


if __name__ == "__main__":
    run_and_exit(main)
