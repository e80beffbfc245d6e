"""What each verb prints, at any width: no line is wider than the terminal, and no figure is cut."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from homework import grade
from hvdtrain.collectives.cost import bandwidths
from hvdtrain.commands.collectives import lesson, program
from hvdtrain.commands.compare.table import MethodResult
from hvdtrain.commands.compare.table import report_text as comparison_text
from hvdtrain.commands.doctor import diagnosis
from hvdtrain.commands.doctor.checks.ranks import AllreduceTimes
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.install_horovod.plan import BuildPlan
from hvdtrain.commands.install_horovod.verb import rows_of
from hvdtrain.commands.scaling.report import study_text
from hvdtrain.commands.scaling.results import make_study
from hvdtrain.commands.study.curves import TargetResult, read_target, target_text
from hvdtrain.commands.timeline import report as timeline
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.commands.verify import verb as verify
from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, StepRow
from hvdtrain.steps.summary import StepSplit
from hvdtrain.system.output.tables import summary_table, width
from hvdtrain.training.summary import rows
from tests.studies import run
from tests.terminal import record, screen
from tests.timelines import straggling
from tests.unit.commands.collectives import test_program
from tests.unit.commands.install_horovod.conftest import BOTH
from tests.unit.training import test_summary

FIGURE = re.compile(r"[-+±]?\d[\d,.]*\d|\d|[µm]?s\b|\b[KMGk]?i?B(?:/s)?\b|%")
LONG = "a path /home/somebody/of/some/length and 12.5 GiB of 1,024 that are free, at 98.7 % of it"


def allreduce(ranks: int) -> dict[str, object]:
    """A report of ``collectives --time`` with three back ends, as the newcomer had it."""
    sizes = [4**power for power in range(1, 14)]
    rows = []
    for size in sizes:
        seconds = 2.0712e-6 + size / 1.937e9
        algorithm, bus = bandwidths(size, seconds, ranks)
        row = {"bytes": size, "seconds": seconds}
        rows.append({**row, "algorithm_gb_per_second": algorithm, "bus_gb_per_second": bus})
    backends = {name: {"state": "ok", "rows": rows} for name in ("mpi4py", "horovod", "gloo")}
    return {"ranks": ranks, "hosts": 1, "backends": backends}


def doctor(ranks: int) -> str:
    checks = (("torch", OK), ("current directory", WARNING), ("MPI agreement", ERROR))
    found = [Finding(name, state, LONG, f"do {LONG}" * (state != OK)) for name, state in checks]
    found.append(Finding("allreduce, torch.distributed, Gloo", ABSENT, LONG))
    return diagnosis.report(found, None, AllreduceTimes(**allreduce(ranks))).text


def verified() -> str:
    states = (OK, FAILED, NOT_SEEN) * 3
    return verify.report(
        [StepRow(step, states[step], f"step {step}: {LONG}", {"hosts": 2}) for step in range(1, 9)],
        "pytorch",
        None,
        4,
    ).text


def graded() -> str:
    return "\n".join(
        grade.line(StepRow(step, state, LONG), LONG) for step, state in ((1, OK), (2, FAILED))
    )


def compared() -> str:
    """Every column there is, in two frameworks."""
    numbers = (1234.5, 1200.25, 1300.75, 1.93, 4123.5, 3 * 2**30, 0.934, 0.0123)
    more = (2**28, 0.0123, 61.25, 1.87, 4.75)
    found = [
        MethodResult(
            name,
            framework,
            "bf16",
            "none",
            2,
            True,
            None,
            *numbers,
            *more,
            options="--accumulate-steps 2" * (name == "horovod"),
            repeats=3,
        )
        for name in ("single", "horovod")
        for framework in ("pytorch", "tensorflow")
    ]
    found.append(MethodResult("mpi", "pytorch", None, "none", 2, False, reason=f"no {LONG}"))
    return comparison_text(LONG, found, [Path("compare/compare.csv")])


def scaled() -> str:
    split = StepSplit(8, 0.01, 0.05, 0.02, 0.0021, None, 1, 0.875).__dict__
    runs = [
        run(ranks, repeat, 1000.0 * ranks**0.9 + repeat, step_split=split if ranks > 1 else None)
        for ranks in (1, 2, 4, 8)
        for repeat in (1, 2, 3)
    ]
    found = [TargetResult(ranks, [], 100.25 / ranks, 1.0 * ranks) for ranks in (1, 2, 4)]
    target = target_text(found, read_target("accuracy=0.985"))
    return study_text(make_study(runs, "weak")) + "\n\n" + target


def timelines(folder: Path) -> str:
    one, other = (straggling(10, late=late) for late in (50_000, 10_000))
    facts = [
        analyse(timeline.write(folder, name), None)[0]
        for timeline, name in ((one, "one.json"), (other, "other.json"))
    ]
    difference = replace(timeline.compare(*facts), before="one.json", after="other.json")
    first = replace(facts[0], file=replace(facts[0].file, path="one.json"))
    return f"{timeline.text(first)}\n\n{timeline.comparison(difference)}"


def collectives() -> str:
    size = 8
    outcomes = [
        lesson.Outcome(one, before, before)
        for one in lesson.COLLECTIVES
        for before in [[one.before(rank, size) for rank in range(size)]]
    ]
    return f"{lesson.text(outcomes)}\n\n{program.time_output(test_program.TIMES).text}"


def trained() -> str:
    """The table at the end of a training, as rich draws it."""
    table = rows(test_summary.SUMMARY, test_summary.RATES, test_summary.SHOWN)
    console = Console(file=io.StringIO(), width=width())
    with console.capture() as shown:
        console.print(summary_table("hvdtrain mnist", [*table, ("checkpoint", "ck/step-0000012")]))
    return shown.get().replace("│", " ")


def planned() -> str:
    return "\n".join(rows_of(BuildPlan(BOTH, (("PyTorch", LONG), ("build", LONG)), ())))


VERBS: dict[str, Callable[[Path], str]] = {
    "doctor": lambda _: f"{doctor(2)}\n\n{doctor(4)}",
    "verify": lambda _: verified(),
    "grade.py": lambda _: graded(),
    "compare": lambda _: compared(),
    "scaling": lambda _: scaled(),
    "timeline": timelines,
    "collectives": lambda _: collectives(),
    "a training": lambda _: trained(),
    "install-horovod": lambda _: planned(),
}


def test_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """Read on a real one, where a line that is too long goes on in the next row."""
    straggling(10).write(tmp_path, "timeline.json")
    path = tmp_path / "timeline.json"
    shown = record([sys.executable, "-m", "hvdtrain.cli", "timeline", str(path)], columns=80)
    assert shown.code == 0
    lines = screen(shown.text)
    assert all(len(line) <= 80 for line in lines), lines
    assert "  last in  steps  by median     mean    cost  tensors  by median     mean" in lines


def figures(text: str) -> Counter[str]:
    """Numbers and units, however often the names of rows are repeated."""
    return Counter(FIGURE.findall(text))


@pytest.mark.parametrize("verb", VERBS)
def test_each_table_can_be_read_at_any_width(
    verb: str, tmp_path: Path, terminal_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written = re.sub(r"\x1b\[[\d;]*m", "", VERBS[verb](tmp_path))  # to a file
    texts = {100: written}
    for columns in (60, 80, 120, 1000):
        terminal_of(columns)
        texts[columns] = re.sub(r"\x1b\[[\d;]*m", "", VERBS[verb](tmp_path))
    whole = figures(texts[1000])
    assert len(whole) > 4
    for columns, text in texts.items():
        wide = [line for line in text.splitlines() if len(line) > columns]
        if columns == 100:  # in a file a message stays one line, to be searched for
            wide = [line for line in wide if line.startswith("  ")]
        assert not wide, (columns, wide)
        assert "…" not in text
        assert not whole - figures(text), columns
