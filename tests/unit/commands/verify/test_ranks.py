"""Starting ranks anew for the rows that a broken step kept unseen; the ranks are small programs."""

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
def tell(step, state="ok", evidence="seen"):
    row = {"step": step, "state": state, "evidence": evidence, "facts": {}}
    print("MARK" + json.dumps(row), flush=True)
steps = [int(step) for step in sys.argv[1].split(",")]
""".replace("MARK", MARK)


def ranks(body: str, log: Path) -> Callable[[Sequence[int]], Command]:
    """A command that runs ``body`` with ``steps`` and notes what it was asked for in ``log``."""

    def command(steps: Sequence[int]) -> Command:
        words = ",".join(map(str, steps))
        note = f"open({str(log)!r}, 'a').write(sys.argv[1] + '\\n')\n"
        return Command((sys.executable, "-c", ROW + note + body, words))

    return command


def test_one_start_where_all_is_well(tmp_path: Path) -> None:
    body = "print('a word between')\nfor step in steps: tell(step)"
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [(row.step, row.state) for row in rows] == [(step, OK) for step in range(1, 9)]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n"


def test_a_step_that_kills_its_ranks_leaves_the_others_alone(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        "    if step in (3, 7): print('out of memory', flush=True); os._exit(137)\n"
        "    tell(step)"
    )
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.step for row in rows if row.state == FAILED] == [3, 7]
    assert rows[2].evidence == "the ranks ended with exit code 137: out of memory"
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n4,5,6,7,8\n8\n"


def test_a_step_in_which_the_ranks_lose_each_other(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        "    tell(step, 'failed' if step == 5 else 'ok')\n"
        "    if step == 5: sys.exit()"
    )
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.step for row in rows if row.state == FAILED] == [5]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n6,7,8\n"


def test_a_step_that_hangs(tmp_path: Path) -> None:
    body = "for step in steps:\n    time.sleep(600 * (step == 8))\n    tell(step)"
    rows = start_ranks(ranks(body, tmp_path / "log"), 3)
    assert [row.step for row in rows if row.state == FAILED] == [8]
    assert rows[7].evidence == "no answer after 3 s: a rank hangs, or --timeout is too short"


def test_a_line_that_was_torn_is_asked_for_again(tmp_path: Path) -> None:
    body = (
        "for step in steps:\n"
        '    if step == 2 and len(steps) > 1: print(\'MARK{"step": 2, ano{"ther\')\n'
        "    else: tell(step)"
    ).replace("MARK", MARK)
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [row.state for row in rows] == [OK] * 8
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n2\n"


def test_without_a_world_there_is_one_start(tmp_path: Path) -> None:
    body = "tell(1, 'failed', 'two MPI libraries')"
    rows = start_ranks(ranks(body, tmp_path / "log"), 60)
    assert [(row.step, row.state) for row in rows] == [(1, FAILED)]
    assert (tmp_path / "log").read_text() == "1,2,3,4,5,6,7,8\n"


def test_a_program_that_does_not_exist() -> None:
    rows = start_ranks(lambda steps: Command(("/nowhere/mpirun",)), 60)
    assert [(row.step, row.state) for row in rows] == [(1, FAILED)]
    assert rows[0].evidence == (
        "the ranks ended with exit code 127: /nowhere/mpirun: No such file or directory"
    )


def test_wrong_use_is_what_the_ranks_said(tmp_path: Path) -> None:
    body = (
        "print('hvdtrain: error: --strategy zero is not built yet', file=sys.stderr)\nsys.exit(2)"
    )
    with pytest.raises(UsageError, match=r"^--strategy zero is not built yet$"):
        start_ranks(ranks(body, tmp_path / "log"), 60)
