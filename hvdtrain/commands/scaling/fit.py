"""Fit the cost model to measured steps with ``scipy.optimize.least_squares``, once per law.

The data are the measured seconds per step, or its parts if known, and optionally a table of
allreduce times; at least three numbers of ranks are needed to distinguish computing, latency and
bandwidth. The ranges come from a bootstrap: the model is fitted again to measurements drawn anew
from the errors of the repeats (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993,
section 6.5).

Step times without a table cannot distinguish a hidden reduction from a short one. Then ``overlap``
is 0, and latency and transfer are those that computing does not hide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hvdtrain.collectives.cost import Law
from hvdtrain.commands.scaling.cost_model import LAWS, Candidate, Costs, Fit, Traffic
from hvdtrain.commands.study.records import INVALID
from hvdtrain.config.strategies import DEFAULT, ONE_PROCESS, STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular

SAMPLES = 100
SEED = 20250601  # the same points give the same answer
TOLERANCE = 1e-5  # relative, of a fit
ENOUGH = 3  # numbers of ranks that a fit needs

# Relative standard errors.
UNKNOWN_ERROR = 0.03  # of a point that was measured once
LEAST_ERROR = 0.01  # of the model itself, at least
PART_ERROR = 0.03  # of a part of a step, at least: the last rank to arrive is an estimate
LEAST_PART = 1e-3  # of a step: smaller parts cannot be measured
TABLE_ERROR = 0.2  # latency plus bytes over bandwidth is a crude model of an allreduce

# Scales of the parameters: seconds in units of the longest step, and fractions.
SECONDS = {"compute": 1.0, "latency": 0.01, "transfer": 0.1, "fixed": 0.1}
FRACTIONS = {"slowdown": 0.1, "overlap": 0.5}
OVERLAP_STARTS = (0.1, 0.5, 0.9)  # the hidden time is bounded: there may be several minima

# Preferred tables of allreduce times: those of the training's own library, then the fastest.
ALLREDUCE = "allreduce"
FASTEST = ("nccl", "gloo", "horovod", "mpi4py")


@dataclass(frozen=True)
class Step:
    """A measured point."""

    ranks: int
    seconds: float  # per step; mean over the repeats
    error: float = UNKNOWN_ERROR  # relative standard error of ``seconds``
    exposed: float | None = None  # seconds of communication not hidden by computing, if known
    exposed_error: float = UNKNOWN_ERROR  # relative standard error of ``exposed``


@dataclass(frozen=True)
class AllreduceTime:
    """A row of a table of allreduce times."""

    ranks: int
    nbytes: int
    seconds: float


def fit(
    steps: Sequence[Step],
    *,
    strong: bool = False,
    reductions: Sequence[AllreduceTime] = (),
    traffic: Traffic | None = None,
    samples: int = SAMPLES,
) -> Fit:
    """Fit the model with each law.

    Args:
        steps: measured points, of at least ``ENOUGH`` numbers of ranks.
        strong: strong scaling (constant global batch), else weak (constant batch per rank).
        reductions: a table of allreduce times, on two or more ranks; needs ``traffic``.
        traffic: the gradient messages of a step.
        samples: number of fits for the ranges.
    """
    steps = sorted(steps, key=lambda step: step.ranks)
    rows = _rows(steps, strong)
    rows += [_table_row(row, traffic) for row in reductions if traffic]
    divided = all(step.exposed is not None for step in steps)
    names = ["compute", "latency", "transfer"]
    if strong and (divided or len(steps) > ENOUGH):
        names.append("fixed")
    if divided and not strong:
        names.append("slowdown")
    if reductions:
        names.append("overlap")
    problems = [_Problem(law, rows, names) for law in LAWS]
    least, free = min(problem.squares for problem in problems), len(rows) - len(names)
    misfit = max(1.0, math.sqrt(least / free)) if free > 0 else 1.0
    scatter = np.random.default_rng(SEED).standard_normal((samples, len(rows)))
    ratios = np.abs(1 + misfit * scatter * problems[0].errors)
    likelihoods = [math.exp((least - problem.squares) / 2 / misfit**2) for problem in problems]
    candidates = [
        Candidate(
            problem.law,
            problem.costs(problem.best),
            likelihood / sum(likelihoods),
            tuple(problem.costs(problem.solve(problem.best, drawn)) for drawn in ratios),
        )
        for problem, likelihood in zip(problems, likelihoods, strict=True)
    ]
    candidates.sort(key=lambda candidate: -round(candidate.weight, 2))  # equal: in order
    return Fit(strong, steps[0].ranks, tuple(candidates), misfit)


@dataclass(frozen=True)
class _Row:
    """A measured value, and the model for it; seconds."""

    seconds: float
    error: float  # relative standard error of ``seconds``
    model: Callable[[Law, Costs], float]


def _rows(steps: Sequence[Step], strong: bool) -> list[_Row]:
    """Return the measured steps, or parts of steps, by increasing number of ranks."""

    def part(name: str, step: Step, seconds: float, error: float) -> _Row:
        def model(law: Law, costs: Costs) -> float:
            parts = costs.step(law, step.ranks, steps[0].ranks, strong=strong)
            return float(getattr(parts, name))

        return _Row(seconds, error, model)

    if any(step.exposed is None for step in steps):
        return [part("total", step, step.seconds, step.error) for step in steps]
    rows = []
    for step in steps:
        exposed, least = step.exposed or 0.0, LEAST_PART * step.seconds
        # In weak scaling the slowdown of computing depends on the ranks per host; for more ranks
        # the slowdown at the largest size counts.
        if strong or step in (steps[0], steps[-1]):
            rows.append(part("local", step, step.seconds - exposed, step.error))
        if step.ranks > 1:
            measured = max(exposed, least)
            error = max(step.exposed_error, PART_ERROR, least / measured)
            rows.append(part("exposed", step, measured, error))
    return rows


def _table_row(row: AllreduceTime, traffic: Traffic) -> _Row:
    def model(law: Law, costs: Costs) -> float:
        latency = costs.latency / traffic.messages * law.hops(row.ranks)
        return latency + costs.transfer * law.volume(row.ranks) * row.nbytes / traffic.nbytes

    return _Row(row.seconds, TABLE_ERROR, model)


class _Problem:
    """The least squares of one law; a vector has the parameters in the order of ``names``."""

    def __init__(self, law: Law, rows: Sequence[_Row], names: Sequence[str]) -> None:
        self.law, self.rows, self.names = law, rows, names
        self.errors = np.array([row.error for row in rows])
        longest = max(row.seconds for row in rows)
        self.scale = np.array([FRACTIONS.get(name) or SECONDS[name] * longest for name in names])
        self.most = np.array([1.0 if name == "overlap" else np.inf for name in names])
        starts = [[rows[0].seconds, *self.scale[1:]]]
        if "overlap" in names:
            starts = [[*starts[0][:-1], overlap] for overlap in OVERLAP_STARTS]
        solutions = [self.solve(start, np.ones(len(rows))) for start in starts]
        self.squares, self.best = min(
            ((self._squares(solution), solution) for solution in solutions),
            key=lambda pair: pair[0],
        )

    def costs(self, values: Sequence[float]) -> Costs:
        """Return the costs of a vector, in which ``compute`` excludes the fixed part."""
        costs = dict(zip(self.names, map(float, values), strict=True))
        costs["compute"] += costs.get("fixed", 0.0)
        return Costs(**costs)

    def solve(self, start: Any, ratios: Any) -> Any:
        """Return the vector that fits the measured seconds times ``ratios`` best."""
        weights, least = 1.0 / self.errors, 1e-9 * self.scale * (np.arange(len(start)) == 0)
        return least_squares(
            lambda values: weights * (self._modelled(values) - ratios),
            np.clip(start, least, self.most),  # a solution may be at a bound, but for rounding
            bounds=(least, self.most),
            x_scale=self.scale,
            ftol=TOLERANCE,
            xtol=TOLERANCE,
            gtol=TOLERANCE,
        ).x

    def _modelled(self, values: Sequence[float]) -> Any:
        """Return the modelled seconds over the measured ones."""
        costs = self.costs(values)
        return np.array([row.model(self.law, costs) / row.seconds for row in self.rows])

    def _squares(self, values: Sequence[float]) -> float:
        return float(np.sum(((self._modelled(values) - 1) / self.errors) ** 2))


def read_reductions(paths: Sequence[Path], strategy: str | None) -> list[AllreduceTime]:
    """Read tables of allreduce times: the rows of the library that ``strategy`` trains with.

    A file has the output of ``hvdtrain doctor -n N --json``, or of
    ``python -m hvdtrain.collectives --time --json`` (``commands/collectives/timing.py``):
    {"ranks": N, "backends": {NAME: {"state": "ok", "rows": [{"bytes", "seconds"}]}}}.

    Raises:
        UsageError: a file has neither format, or has no rows of any library.
    """
    reductions: list[AllreduceTime] = []
    libraries = STRATEGIES.get(strategy or DEFAULT.name, ONE_PROCESS).gradient_libraries
    for path in paths:
        try:
            content = json.loads(read_regular(path))
            times = content.get("allreduce", content)
            ranks = int(times["ranks"])
            tables = {name: backend.get("rows") for name, backend in times["backends"].items()}
            rows = next((tables[name] for name in (*libraries, *FASTEST) if tables.get(name)), ())
            rows = [row for row in rows if row.get("collective", ALLREDUCE) == ALLREDUCE]
            table = [AllreduceTime(ranks, int(row["bytes"]), float(row["seconds"])) for row in rows]
        except OSError as error:
            raise UsageError(f"--allreduce {path}: {error.strerror}") from error
        except INVALID as error:
            raise UsageError(
                f"--allreduce {path}: not a table of allreduce times ({type(error).__name__}: "
                f"{error}); create one with `hvdtrain doctor -n N --json`"
            ) from error
        table = [row for row in table if row.nbytes > 0 and row.seconds > 0]
        if ranks < 2 or not table:
            raise UsageError(f"--allreduce {path}: no allreduce times on 2 or more ranks")
        reductions += table
    return reductions
