"""Verify the eight steps on each rank, and start the ranks, again if a step ended them.

``hvdtrain verify -n N`` starts this module on N ranks. A failed row does not affect the others: the
true world replaces a false one, the checks prepare the input of each step themselves, and the ranks
exchange their results after each step, even failures. If the ranks wait in different collectives,
Horovod's stall check ends the wait after ``STALLED`` seconds, and that row fails. If a step makes
the ranks hang or exit, its row fails, and the steps after it are verified in another start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hvdtrain.adapters import select
from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.commands.verify import STALLED, check_ranks, check_updates
from hvdtrain.commands.verify.check_ranks import host_name, true_world
from hvdtrain.commands.verify.probe import Facts, Probe
from hvdtrain.commands.verify.rows import ALL, FAILED, Row, progress, read_row
from hvdtrain.errors import EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import set_defaults

Emit = Callable[[Row], None]

MARK = "hvdtrain-verify-row "  # prefix of each row that rank 0 prints
PREFIX = "hvdtrain: "  # of the message of a rank that ends

Check = tuple[Callable[[Probe], Facts], Callable[[list[Facts]], Row]]
"""The measurement of a step, made on every rank, and the judgement of all results."""

CHECKS: dict[int, Check] = {
    1: (check_ranks.measure_world, check_ranks.judge_world),
    2: (check_ranks.measure_devices, check_ranks.judge_devices),
    3: (check_ranks.measure_shards, check_ranks.judge_shards),
    4: (check_updates.measure_rate, check_updates.judge_rate),
    5: (check_updates.measure_gradient, check_updates.judge_gradient),
    6: (check_updates.measure_broadcast, check_updates.judge_broadcast),
    7: (check_updates.measure_checkpoint, check_updates.judge_checkpoint),
    8: (check_ranks.measure_metrics, check_ranks.judge_metrics),
}


def main() -> int:
    """Verify the requested steps; return 0 even if a row failed, because the row says so."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.commands.verify.ranks")
    parser.add_argument("--framework", required=True)
    parser.add_argument("--strategy")
    parser.add_argument("--steps", default=",".join(map(str, ALL)))
    options = parser.parse_args()
    steps = [int(step) for step in options.steps.split(",")]
    verify(options.framework, options.strategy, print_row, steps)
    return 0


def print_row(row: Row) -> None:
    """Print a row on rank 0, in one write, prefixed with ``MARK``."""
    if detect(os.environ).is_root:
        sys.stdout.write(f"{MARK}{json.dumps(row.data())}\n")
        sys.stdout.flush()


class LostError(Exception):
    """The ranks no longer take part in the same collectives."""


def verify(
    framework: str, strategy: str | None, emit: Emit, steps: Collection[int] = ALL
) -> list[Row]:
    """Verify ``steps``; all ranks must call it, and all return the same rows.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: see ``select.adapter``.
        emit: called with each row as soon as it is known, on every rank.
        steps: their numbers. The first is always executed, because the others need it.

    Returns:
        The rows in order, without those of steps that were not reached.

    Raises:
        UsageError: framework, strategy and launcher do not fit together.
    """
    adapter = select.adapter(framework, strategy)
    set_defaults(STALLED)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        emit(row)

    try:
        probe = initialize(adapter, framework)
    except Exception as error:
        add(Row(1, FAILED, describe(error)))
        return rows
    for step in sorted(steps):
        try:
            add(run_check(probe, step))
        except LostError as error:
            add(Row(step, FAILED, str(error)))
            break
    return rows


def initialize(adapter: CommonAdapter, framework: str) -> Probe:
    """Execute step 1, then set the true world in the adapter, even if it returned another."""
    claimed = adapter.initialize()
    communicator = adapter.communicator
    hosts = [host.decode() for host in communicator.gather(host_name().encode())]
    adapter.world = true_world(communicator.rank, hosts)
    return Probe(adapter, framework, claimed)


def run_check(probe: Probe, step: int) -> Row:
    """Measure on every rank, exchange the results, and judge them.

    Raises:
        LostError: on every rank, if they wait in different collectives.
    """
    measure, judge = CHECKS[step]
    failure = ""
    facts: Facts = {}
    try:
        facts = measure(probe)
    except Exception as error:
        failure = describe(error)
    results = exchange(probe, step, {"failure": failure, "facts": facts})
    failures = {rank: result["failure"] for rank, result in enumerate(results) if result["failure"]}
    if failures:
        first, text = next(iter(failures.items()))
        prefix = "" if len(failures) == len(results) else f"rank {first}: "
        return Row(step, FAILED, prefix + text, {"failures": len(failures)})
    return judge([result["facts"] for result in results])


def exchange(probe: Probe, step: int, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of all ranks for ``step``, by rank; all ranks must call it."""
    try:
        packed = json.dumps([step, result]).encode()
        messages = [json.loads(data) for data in probe.adapter.communicator.gather(packed)]
        if [message[0] for message in messages] != [step] * probe.size:
            raise LostError("the ranks are in different steps")
    except Exception as error:
        cause = result["failure"] or describe(error)
        launch = detect(os.environ)
        if launch.rank and result["failure"]:
            sys.stderr.write(f"{PREFIX}rank {launch.rank}, step {step}: {cause}\n")
        raise LostError(f"the ranks wait in different collectives: {cause}") from error
    return [message[1] for message in messages]


def describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    if "Horovod has been shut down" in text:
        return "Horovod shut down because a rank did not participate in a collective"
    return text if isinstance(error, HvdtrainError) else f"{type(error).__name__}: {text[:300]}"


def rank_command(framework: str, strategy: str | None, steps: Sequence[int]) -> list[str]:
    """Return the command line of each rank that verifies ``steps``."""
    options = ["--framework", framework, *(["--strategy", strategy] if strategy else [])]
    options += ["--steps", ",".join(map(str, steps))]
    return [sys.executable, "-m", "hvdtrain.commands.verify.ranks", *options]


def start_ranks(command: Callable[[Sequence[int]], Command], timeout: float) -> list[Row]:
    """Run ``command(steps)`` until each step has its row, or step 1 failed and ended the ranks.

    Args:
        command: returns the command of ranks that verify the steps with these numbers.
        timeout: seconds for each start.

    Raises:
        UsageError: the ranks exited because of wrong options.
    """
    rows: dict[int, Row] = {}
    pending = list(ALL)
    while pending:
        seen: list[Row] = []
        start = time.monotonic()

        def read_line(line: str, seen: list[Row] = seen) -> None:
            _, mark, text = line.partition(MARK)
            # A step whose line is mixed with another rank's is verified again.
            with contextlib.suppress(ValueError):
                seen += [read_row(json.loads(text))] if mark else []
                if mark:
                    terminal.status(progress(seen[-1]))

        result = run(command(pending), on_line=read_line, timeout=timeout)
        last = pending[-1]
        new = [row for row in seen if row.step in pending]
        rows |= {row.step: row for row in new}
        pending = [step for step in pending if step not in rows]
        if pending and not (new and (new[-1].step == last or new[-1].state == FAILED)):
            # No row explains the end, so the ranks ended in the next step.
            step = pending.pop(0)
            rows[step] = Row(step, FAILED, _cause(result, time.monotonic() - start))
        if rows[1].state == FAILED and set(rows) == {1}:
            break  # without a world no step can be verified
    return [rows[step] for step in sorted(rows)]


def _cause(result: Result, seconds: float) -> str:
    """Return why the ranks ended without a row, in one line."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    messages = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    if result.exit_code == EXIT_USAGE and messages:
        raise UsageError(messages[-1].removeprefix("error: "))
    if result.exit_code == TIMED_OUT:
        return f"no answer after {seconds:.0f} s: a rank hangs, or --timeout is too short"
    last = messages or [line for line in lines if MARK not in line]
    return f"the ranks exited with code {result.exit_code}" + (f": {last[-1]}" if last else "")


if __name__ == "__main__":
    run_and_exit(main)
