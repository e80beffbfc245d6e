"""One row per step: what was claimed, whether it holds, the numbers behind it, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.commands.doctor.findings import Finding, findings_text
from hvdtrain.system.output.tables import message

OK, FAILED, NOT_SEEN = "ok", "failed", "not seen"
STYLES = {OK: "green", FAILED: "bold red", NOT_SEEN: "yellow"}
MANY = 4  # values that are told one by one


@dataclass(frozen=True)
class Step:
    """One of the eight steps."""

    number: int
    method: str
    title: str
    remedy: str


_STEPS = (  # method of the adapter, what has to hold after it, what to do where it does not
    (
        "initialize",
        "one world",
        "initialize before anything else; start with the mpirun of this environment (`which "
        "mpirun`), or build Horovod for the MPI that is loaded: `hvdtrain install-horovod "
        "--rebuild`",
    ),
    (
        "pin_device",
        "a device of its own",
        "one rank per GPU (`hvdtrain launch --ppn`); on CPUs unset OMP_NUM_THREADS, set no threads "
        "yourself, or give each rank its share of the cores (`hvdtrain launch --threads`)",
    ),
    (
        "shard_data",
        "disjoint shards",
        "give every rank the same dataset size, batch and seed, and its own rank and size",
    ),
    (
        "scale_learning_rate",
        "learning rate by the rule",
        "multiply the rate of one rank by the world size, the same on every rank, and set it in "
        "the optimizer before each update",
    ),
    (
        "distribute_optimizer",
        "mean gradient",
        "let every rank reduce its gradients before each update, weighted by its samples",
    ),
    (
        "broadcast_state",
        "equal start",
        "broadcast parameters and optimizer state from rank 0 on every rank before the first "
        "update, and see that the line is reached",
    ),
    ("save_checkpoint", "one writer", "let rank 0 alone write what is written once"),
    (
        "average_metrics",
        "metrics over all samples",
        "reduce sums and counts over the ranks, then divide; not the ranks' averages",
    ),
)
STEPS = tuple(Step(number, *about) for number, about in enumerate(_STEPS, 1))
ALL = tuple(step.number for step in STEPS)


@dataclass(frozen=True)
class Row:
    """What was found about one step."""

    step: int  # its number
    state: str  # ``ok``, ``failed``, or ``not seen``, which is neither a failure nor a pass
    evidence: str  # the numbers behind it, for a person; ``facts``: the same for a program
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
        """Return the row as JSON values."""
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
    """Return the row of a step that could be seen."""
    return Row(step, OK if holds else FAILED, evidence, facts)


def read_row(data: Mapping[str, Any]) -> Row:
    """Return the row that ``Row.data`` wrote."""
    return Row(data["step"], data["state"], data["evidence"], data["facts"])


def coming(row: Row) -> str:
    """Return what comes after a row, for who waits."""
    if row.step == len(STEPS):
        return f"{len(STEPS)} of {len(STEPS)} steps looked at, the ranks end"
    return f"step {row.step + 1} of {len(STEPS)}, {STEPS[row.step].title}"


def complete(rows: Iterable[Row], reason: str) -> list[Row]:
    """Return all eight rows in order; missing ones are ``not seen`` for ``reason``."""
    found = {row.step: row for row in rows}
    return [found.get(s.number, Row(s.number, NOT_SEEN, reason)) for s in STEPS]


def show(headline: str, rows: Iterable[Row]) -> str:
    """Return the rows as a table, the remedy under the evidence; in colours on a terminal."""
    found = [
        Finding(f"{one.step} {one.about.title}", one.state, one.evidence, one.remedy)
        for one in rows
    ]
    return f"{message(headline)}\n{findings_text(found, STYLES)}"


def number(value: float) -> str:
    """Return a difference as a person reads it, such as ``3e-17`` or ``0``."""
    return f"{value:.1g}"


def by_rank(values: Sequence[Any], join: str = " + ") -> str:
    """Return one value per rank: ``1 + 3 + 5``, or only their range where there are many."""
    if len(values) > MANY:
        return f"{min(values)} to {max(values)} per rank"
    return join.join(map(str, values))
