"""The report of a script: its crash, the rows, the steps not seen, and the exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, OK, StepRow
from hvdtrain.commands.verify.script import start
from hvdtrain.commands.verify.script.record import Record
from hvdtrain.commands.verify.script.start import ScriptResult, ScriptRun, report

Ends = tuple[str | None, ...]


def result(
    *states: str, ended: tuple[str | None, ...] = ("updates",) * 2, updates: int = 5
) -> ScriptResult:
    rows = [StepRow(step, state, f"evidence {step}") for step, state in enumerate(states, start=1)]
    return ScriptResult(rows, list(ended), updates)


def asked(ranks: int = 2, updates: int | None = 5, *, strict: bool = False) -> ScriptRun:
    return ScriptRun(Path("my train.py"), ("--epochs", "1"), ranks, updates, strict)


def test_steps_not_seen_are_not_reported_as_passed() -> None:
    states = [OK] * 6 + [NOT_SEEN] * 2
    shown = report(result(*states), asked())
    assert shown.text.splitlines()[-2:] == [
        "nothing failed, but this is no pass: 2 of 8 not seen (7, 8); to see more, run it to its "
        "end:",
        "  hvdtrain verify -n 2 --updates all --script 'my train.py' -- --epochs 1",
    ]
    assert (shown.exit_code, shown.data["ok"], shown.data["not_seen"]) == (0, True, [7, 8])
    strict = report(result(*states), asked(strict=True))
    assert (strict.exit_code, strict.data["ok"]) == (1, False)
    assert "2 of 8 not seen (7, 8), a failure with --strict; to see more" in strict.text
    assert "--updates all --strict --script" in strict.text


def test_a_script_that_ran_to_its_end_needs_no_further_command() -> None:
    shown = report(result(*[OK] * 7, NOT_SEEN, ended=("its own end",) * 2), asked(updates=None))
    assert shown.text.endswith("nothing failed, but this is no pass: 1 of 8 not seen (8)")
    single = report(result(*[OK] * 2, *[NOT_SEEN] * 6, ended=("its own end",)), asked(1, None))
    assert str(single.data["to_see_more"]).startswith("hvdtrain verify -n 2 --updates all ")


def test_all_seen() -> None:
    shown = report(result(*[OK] * 8), asked(strict=True))
    assert (shown.exit_code, shown.text.splitlines()[-1]) == (0, "all steps took effect")


def test_a_crash_comes_first() -> None:
    consequence = "HorovodInternalError: the other rank has gone"
    error = "AttributeError: 'Variable' object has no attribute 'ref' (train.py line 7)"
    shown = report(result(OK, *[NOT_SEEN] * 7, ended=(consequence, error), updates=0), asked())
    lines = shown.text.splitlines()
    assert lines[1] == f"crashed before update 1; nothing was checked: rank 1: {error}"
    assert lines[2] == "-> Keras 3: with model.fit use `import hvdtrain.keras as hvd`"
    assert lines[3].startswith("-> in a loop of your own pass the value of each variable: ")
    assert len(lines) == 4  # no table if no row was seen
    assert (shown.exit_code, shown.data["crash"]) == (1, "\n".join(lines[1:]))


@pytest.mark.parametrize(
    ("ended", "updates", "crash"),
    [
        (("updates", "exit code 3"), 2, "crashed after 2 updates: rank 1: exit code 3"),
        (("a hang: ended after 9 s", None), 0, "hung before update 1: rank 0: a hang: ended"),
    ],
)
def test_a_failed_row_is_reported_after_the_crash(ended: Ends, updates: int, crash: str) -> None:
    shown = report(result(*[OK] * 5, FAILED, OK, OK, ended=ended, updates=updates), asked())
    assert shown.text.splitlines()[1].startswith(crash)
    assert "failed  6 equal start" in shown.text
    assert shown.exit_code == 1


@pytest.mark.parametrize(
    ("last", "ended", "end"),
    [
        (OK, "ValueError: no loss", "no step failed, but the script crashed"),
        (OK, "a hang: ended after 9 s", "no step failed, but the script hung"),
        (NOT_SEEN, "exit code 3", "no step failed, but the script crashed, 1 of 8 not seen (8)"),
        (FAILED, "exit code 3", "1 of 8 steps failed"),
    ],
)
def test_the_last_line_of_a_crash_is_no_pass(last: str, ended: str, end: str) -> None:
    shown = report(result(*[OK] * 7, last, ended=(ended, None)), asked())
    assert (shown.exit_code, shown.text.splitlines()[-1]) == (1, end)


NO_UPDATE = Record("mpirun", 2, "node", [0])


@pytest.mark.parametrize(
    ("text", "fields", "other"),
    [
        ("import torch.distributed as dist\n", {}, ""),
        ("import torch.multiprocessing as mp\nmp.spawn(main)\n", {}, ""),
        ("mp.Process(target=run, args=(rank, size))\n", {}, "mp.Process"),
        ("mp.Process(target=write, args=(queue,))\n", {}, ""),
        ("strategy = tf.distribute.MirroredStrategy()\n", {}, "tf.distribute"),
        ("from project import main\n", {"library": "deepspeed"}, "deepspeed"),
        ("from torch.utils.data.distributed import DistributedSampler\n", {}, ""),
        ("import torch.distributed\nimport horovod.torch as hvd\n", {}, ""),
        ("import torch\n", {"judged": True, "library": "deepspeed"}, ""),
        ("import torch\n", {}, ""),
    ],
)
def test_scripts_of_other_libraries_are_told_apart(
    text: str, fields: dict[str, Any], other: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert start.other_library([NO_UPDATE, replace(NO_UPDATE, **fields)], script) == other
