"""One row per step: its title, whether it took effect, the evidence, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.commands.doctor.findings import Finding, findings_text
from hvdtrain.system.output.tables import message

OK, FAILED, NOT_SEEN = "ok", "failed", "not seen"
STYLES = {OK: "green", FAILED: "bold red", NOT_SEEN: "yellow"}
MAX_SHOWN = 4  # values that are shown individually


@dataclass(frozen=True)
class StepDescription:
    """One of the eight steps, for the table."""

    number: int
    method: str
    title: str
    remedy: str


_STEPS = (  # method of the adapter, its effect, and the remedy if it failed
    (
        "initialize",
        "one world",
        "initialize before anything else; start with the mpirun of this environment (`which "
        "mpirun`), or build Horovod for the loaded MPI: `hvdtrain install-horovod "
        "--rebuild`",
    ),
    (
        "pin_device",
        "a device of its own",
        "use one rank per GPU (`hvdtrain launch --ppn`); on CPUs unset OMP_NUM_THREADS and do not "
        "set threads, or give each rank its share of the cores (`hvdtrain launch --threads`)",
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
        "update, and check that the call is executed",
    ),
    ("save_checkpoint", "one writer", "write files on rank 0 only"),
    (
        "average_metrics",
        "metrics over all samples",
        "reduce sums and counts over the ranks, then divide; do not average the ranks' averages",
    ),
)
STEPS = tuple(StepDescription(number, *texts) for number, texts in enumerate(_STEPS, 1))
ALL = tuple(step.number for step in STEPS)
REPLAY = StepDescription(  # a row of its own, of a script that can be replayed
    len(STEPS) + 1,
    "replay",
    "N ranks = one process",
    "let each sample of the global batch count alike, on every rank: divide sums over all ranks' "
    "samples (tokens, pixels) by their number, and draw augmentations by sample, not by rank",
)


@dataclass(frozen=True)
class StepRow:
    """The result of one step."""

    step: int  # its number
    state: str  # ``ok``, ``failed``, or ``not seen`` (neither failed nor passed)
    evidence: str  # the numbers, for a person; ``facts``: the same for a program
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> StepDescription:
        """Name, title and remedy of the step."""
        return (*STEPS, REPLAY)[self.step - 1]

    @property
    def remedy(self) -> str:
        """How to repair the step; empty unless it failed."""
        return self.description.remedy if self.state == FAILED else ""

    def data(self) -> dict[str, object]:
        """Return the row as JSON values."""
        return {
            "step": self.step,
            "name": self.description.method,
            "title": self.description.title,
            "state": self.state,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "facts": dict(self.facts),
        }


def row(step: int, holds: bool, evidence: str, **facts: Any) -> StepRow:
    """Return the row of a step whose effect could be checked."""
    return StepRow(step, OK if holds else FAILED, evidence, facts)


def not_seen(step: int, reason: str) -> StepRow:
    """Return the row of a step whose effect could not be checked."""
    return StepRow(step, NOT_SEEN, reason)


def read_row(data: Mapping[str, Any]) -> StepRow:
    """Return the row that ``StepRow.data`` wrote."""
    return StepRow(data["step"], data["state"], data["evidence"], data["facts"])


def progress(row: StepRow) -> str:
    """Return the status line after ``row``: the step that follows."""
    if row.step == len(STEPS):
        return f"{len(STEPS)} of {len(STEPS)} steps checked, waiting for the ranks to exit"
    return f"step {row.step + 1} of {len(STEPS)}, {STEPS[row.step].title}"


def complete(rows: Iterable[StepRow], reason: str) -> list[StepRow]:
    """Return all eight rows in order; missing ones are ``not seen`` for ``reason``."""
    by_step = {row.step: row for row in rows}
    return [by_step.get(number, not_seen(number, reason)) for number in ALL]


def show(headline: str, rows: Iterable[StepRow]) -> str:
    """Return the rows as a table, the remedy below the evidence; with colours on a terminal."""
    findings = [
        Finding(f"{row.step} {row.description.title}", row.state, row.evidence, row.remedy)
        for row in rows
    ]
    return f"{message(headline)}\n{findings_text(findings, STYLES)}"


def number(value: float) -> str:
    """Return a difference with one significant digit, for example ``3e-17`` or ``0``."""
    return f"{value:.1g}"


def by_rank(values: Sequence[Any], join: str = " + ") -> str:
    """Return one value per rank: ``1 + 3 + 5``, or their range for more than ``MAX_SHOWN``."""
    if len(values) > MAX_SHOWN:
        return f"{min(values)} to {max(values)} per rank"
    return join.join(map(str, values))
