"""Restarting the ranks for the steps after one that ended them; the ranks are small programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.commands.verify.ranks import MARK, start_ranks
from hvdtrain.commands.verify.rows import FAILED, OK
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command

ROW = f"""
import json, os, sys, time
def print_row(step, state="ok", evidence="seen"):
    row = {{"step": step, "state": state, "evidence": evidence, "facts": {{}}}}
    print("{MARK}" + json.dumps(row), flush=True)
steps = [int(step) for step in sys.argv[1].split(",")]
"""
ALL = "1,2,3,4,5,6,7,8"

# Ranks: their program, the steps of each of their starts, and the failed rows with their evidence.
RANKS: dict[str, tuple[str, list[str], dict[int, str]]] = {
    "no step fails": ("print('another line')\nfor step in steps: print_row(step)", [ALL], {}),
    "steps 3 and 7 kill the ranks": (
        """for step in steps:
    if step in (3, 7): print('out of memory', flush=True); os._exit(137)
    print_row(step)""",
        [ALL, "4,5,6,7,8", "8"],
        {3: "code 137: out of memory", 7: "code 137: out of memory"},
    ),
    "step 5 fails and ends the ranks": (
        """for step in steps:
    print_row(step, 'failed' if step == 5 else 'ok')
    if step == 5: sys.exit()""",
        [ALL, "6,7,8"],
        {5: "seen"},
    ),
    "step 8 hangs": (
        "for step in steps:\n    time.sleep(600 * (step == 8))\n    print_row(step)",
        [ALL],
        {8: "no answer after 3 s: a rank hangs, or --timeout is too short"},
    ),
    "the line of step 2 is torn": (
        f"""for step in steps:
    if step == 2 and len(steps) > 1: print('{MARK}{{"step": 2, ano{{"ther')
    else: print_row(step)""",
        [ALL, "2"],
        {},
    ),
    "there is no world": ("print_row(1, 'failed', 'two MPI libraries')", [ALL], {1: "two MPI"}),
}


@pytest.mark.parametrize("name", RANKS)
def test_each_step_has_its_row(name: str, tmp_path: Path) -> None:
    program, expected_starts, failures = RANKS[name]
    starts = []

    def command(steps: Sequence[int]) -> Command:
        starts.append(",".join(map(str, steps)))
        return Command((sys.executable, "-c", ROW + program, starts[-1]))

    rows = start_ranks(command, 3 if "hangs" in name else 60)
    assert starts == expected_starts
    assert [row.step for row in rows] == ([1] if 1 in failures else list(range(1, 9)))
    assert {row.step for row in rows if row.state == FAILED} == failures.keys()
    assert {row.state for row in rows} <= {OK, FAILED}
    for step, evidence in failures.items():
        assert evidence in rows[step - 1].evidence


def test_a_program_that_does_not_exist() -> None:
    rows = start_ranks(lambda steps: Command(("/nowhere/mpirun",)), 60)
    assert [(row.step, row.state) for row in rows] == [(1, FAILED)]
    assert "code 127: /nowhere/mpirun: No such file or directory" in rows[0].evidence


def test_wrong_use_of_the_ranks_is_raised() -> None:
    error = "print('hvdtrain: error: --strategy zero: cannot', file=sys.stderr)\nsys.exit(2)"
    command = Command((sys.executable, "-c", f"import sys\n{error}"))
    with pytest.raises(UsageError, match=r"^--strategy zero: cannot$"):
        start_ranks(lambda steps: command, 60)
