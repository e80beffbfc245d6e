"""One row a step: what was claimed, whether it holds, the numbers that show it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from hvdtrain.environment.findings import rendered
from hvdtrain.launch import terminal

OK, FAILED, NOT_SEEN = "ok", "failed", "not seen"
STYLES = {OK: "green", FAILED: "bold red", NOT_SEEN: "yellow"}
MANY = 4  # values or ranks that are told one by one


@dataclass(frozen=True)
class Step:
    """One of the eight steps.

    Attributes:
        number: 1 to 8.
        method: of the adapter.
        title: what has to hold after it.
        remedy: what to do where it does not.
    """

    number: int
    method: str
    title: str
    remedy: str


STEPS = (
    Step(
        1,
        "initialize",
        "one world",
        "initialize before anything else; start with the mpirun of this environment (`which "
        "mpirun`), or build Horovod for the MPI that is loaded: `hvdtrain install-horovod "
        "--rebuild`",
    ),
    Step(
        2,
        "pin_device",
        "a device of its own",
        "one rank a GPU (`hvdtrain launch --ppn`); on CPUs unset OMP_NUM_THREADS, set no threads "
        "yourself, or give each rank its share of the cores (`hvdtrain launch --threads`)",
    ),
    Step(
        3,
        "shard_data",
        "disjoint shards",
        "give every rank the same dataset size, batch and seed, and its own rank and size",
    ),
    Step(
        4,
        "scale_learning_rate",
        "learning rate by the rule",
        "multiply the rate of one rank by the world size, the same on every rank, and set it in "
        "the optimizer before each update",
    ),
    Step(
        5,
        "distribute_optimizer",
        "mean gradient",
        "let every rank reduce its gradients before each update, weighted by its samples",
    ),
    Step(
        6,
        "broadcast_state",
        "equal start",
        "broadcast parameters and optimizer state from rank 0 on every rank before the first "
        "update, and see that the line is reached",
    ),
    Step(
        7,
        "save_checkpoint",
        "one writer",
        "let rank 0 alone write what is written once",
    ),
    Step(
        8,
        "average_metrics",
        "metrics over all samples",
        "reduce sums and counts over the ranks, then divide; not the ranks' averages",
    ),
)
ALL = tuple(step.number for step in STEPS)


@dataclass(frozen=True)
class Row:
    """What was found about one step.

    Attributes:
        step: its number.
        state: ``ok``, ``failed`` or ``not seen``; the last is neither a failure nor a pass.
        evidence: the numbers behind it, for a person.
        facts: the same for a program.
    """

    step: int
    state: str
    evidence: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> Step:
        """The step."""
        return STEPS[self.step - 1]

    @property
    def remedy(self) -> str:
        """What to do; empty unless it failed."""
        return self.about.remedy if self.state == FAILED else ""

    def data(self) -> dict[str, Any]:
        """The row as JSON values."""
        return {
            "step": self.step,
            "name": self.about.method,
            "title": self.about.title,
            "state": self.state,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


def row(step: int, holds: bool, evidence: str, **facts: Any) -> Row:
    """The row of a step that could be seen."""
    return Row(step, OK if holds else FAILED, evidence, facts)


def read_row(data: Mapping[str, Any]) -> Row:
    """The row that ``Row.data`` wrote."""
    return Row(data["step"], data["state"], data["evidence"], data["facts"])


def complete(rows: Iterable[Row], reason: str) -> list[Row]:
    """All eight rows in order; those that are missing are ``not seen`` for ``reason``."""
    found = {row.step: row for row in rows}
    return [found.get(s.number, Row(s.number, NOT_SEEN, reason)) for s in STEPS]


def any_failed(rows: Iterable[Row]) -> bool:
    """Whether a row failed."""
    return any(row.state == FAILED for row in rows)


def show(headline: str, rows: Iterable[Row]) -> str:
    """The rows as a table, the remedy under the evidence; in colours on a terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in rows:
        style = STYLES[one.state]
        text = Text(one.evidence)
        if one.remedy:
            text.append(f"\n-> {one.remedy}", style)
        table.add_row(Text(one.state, style), f"{one.step} {one.about.title}", text)
    return rendered(headline, table, columns=terminal.columns())


def number(value: float) -> str:
    """A difference as a person reads it, such as ``3e-17`` or ``0``."""
    return f"{value:.1g}"


def several(count: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def by_rank(values: Sequence[Any], join: str = " + ") -> str:
    """One value a rank: ``1 + 3 + 5``, or only their range where there are many."""
    if len(values) > MANY:
        return f"{min(values)} to {max(values)} a rank"
    return join.join(map(str, values))


def listed(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    ranks = sorted(ranks)
    if len(ranks) > MANY and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
