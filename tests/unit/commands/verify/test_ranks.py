"""Restarting the ranks for the steps after one that ended them; the ranks are small programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvdtrain.commands.verify.ranks import MARK, start_ranks
from hvdtrain.commands.verify.rows import FAILED, OK
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.command import Command

ROW = """
import json, os, sys, time
def print_row(step, state="ok", evidence="seen"):
    row = {"step": step, "state": state, "evidence": evidence, "facts": {}}
    print("MARK" + json.dumps(row), flush=True)
steps = [int(step) for step in sys.argv[1].split(",")]
""".replace("MARK", MARK)


def ranks(body: str, log: Path) -> Callable[[Sequence[int]], Command]:
    """Return a command that runs ``body`` with ``steps``, which it appends to ``log``."""

    def command(steps: Sequence[int]) -> Command:
        numbers = ",".join(map(str, steps))
        note = f"open({str(log)!r}, 'a').write(sys.argv[1] + '\\n')\n"
        return Command((sys.executable, "-c", ROW + note + body, numbers))

    return command


def test_one_start_if_no_step_fails(tmp_path: Path) -> None:
    body = "print('another line')\nfor step in steps: print_row(step)"
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [(row.step, row.state) for row in rows] == [(step, OK) for step in range(1, 9)]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n"


def test_steps_after_one_that_kills_the_ranks_are_verified(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        "    if step in (3, 7): print('out of memory', flush=True); os._exit(137)\n"
        "    print_row(step)"
    )
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.step for row in rows if row.state == FAILED] == [3, 7]
    assert "code 137: out of memory" in rows[2].evidence
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n4,5,6,7,8\n8\n"


def test_steps_after_one_that_ends_the_ranks_are_verified(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        "    print_row(step, 'failed' if step == 5 else 'ok')\n"
        "    if step == 5: sys.exit()"
    )
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.step for row in rows if row.state == FAILED] == [5]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n6,7,8\n"


def test_a_step_that_hangs(tmp_path: Path) -> None:
    body = "for step in steps:\n    time.sleep(600 * (step == 8))\n    print_row(step)"
    rows = start_ranks(ranks(body, tmp_path / "log"), 3)
    assert [row.step for row in rows if row.state == FAILED] == [8]
    assert "3 s" in rows[7].evidence and "--timeout" in rows[7].evidence


def test_a_step_whose_line_was_torn_is_verified_again(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        '    if step == 2 and len(steps) > 1: print(\'MARK{"step": 2, ano{"ther\')\n'
        "    else: print_row(step)"
    ).replace("MARK", MARK)
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.state for row in rows] == [OK] * 8
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n2\n"


def test_without_a_world_there_is_one_start(tmp_path: Path) -> None:
    body = "print_row(1, 'failed', 'two MPI libraries')"
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [(row.step, row.state) for row in rows] == [(1, FAILED)]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n"


def test_a_program_that_does_not_exist() -> None:
    rows = start_ranks(lambda steps: Command(("/nowhere/mpirun",)), 60)
    assert [(row.step, row.state) for row in rows] == [(1, FAILED)]
    assert "code 127: /nowhere/mpirun: No such file or directory" in rows[0].evidence


def test_wrong_use_of_the_ranks_is_raised(tmp_path: Path) -> None:
    body = (
        "print('hvdtrain: error: --strategy zero is not built yet', file=sys.stderr)\nsys.exit(2)"
    )
    with pytest.raises(UsageError, match=r"^--strategy zero is not built yet$"):
        start_ranks(ranks(body, tmp_path / "log"), 60)
