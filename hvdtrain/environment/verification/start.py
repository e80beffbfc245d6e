"""Starting ranks that verify the steps, and starting them anew for what a broken step kept unseen.

A step that makes the ranks hang or die takes the ones after it along. It is then known which it
was, and the others are asked for in another start.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence

from hvdtrain.environment.verification.rows import ALL, FAILED, Row, read_row
from hvdtrain.errors import EXIT_USAGE, UsageError
from hvdtrain.launch.run import TIMED_OUT, Command, Result, run

MARK = "hvdtrain-verify-row "  # begins each row that rank 0 prints
SAID = "hvdtrain: "  # begins what a rank says when it ends


def words(framework: str, strategy: str | None, steps: Sequence[int]) -> list[str]:
    """What each rank runs to verify ``steps``."""
    chosen = ["--strategy", strategy] if strategy else []
    numbers = ",".join(map(str, steps))
    module = "hvdtrain.environment.verification"
    return [sys.executable, "-m", module, "--framework", framework, *chosen, "--steps", numbers]


def verify(command: Callable[[Sequence[int]], Command], timeout: float) -> list[Row]:
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
    """Why the ranks ended without a row, in one line."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    if result.exit_code == EXIT_USAGE and said:
        raise UsageError(said[-1].removeprefix("error: "))
    if result.exit_code == TIMED_OUT:
        return f"no answer after {seconds:.0f} s: a rank hangs, or --timeout is too short"
    last = said or [line for line in lines if MARK not in line]
    return f"the ranks ended with exit code {result.exit_code}" + (f": {last[-1]}" if last else "")
