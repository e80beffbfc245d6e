"""Model the cost of a training step on p ranks, fit the model to measured steps, and predict.

    step(p)    = compute * (1 + slowdown) + exposed(p)
    reduce(p)  = latency * hops(p) + transfer * volume(p)
    exposed(p) = reduce(p) - min(overlap * reduce(p), 2/3 compute)

The gradients are summed in n messages with M bytes in total. With the latency a of a message and
the time b per byte, ``latency`` is a * n and ``transfer`` is b * M. Hops and volume are those of a
ring; see ``collectives/cost.py`` for the formulas and their source.

The gradients of the last layers are summed while those of the first are computed, so a fraction of
the reduction, ``overlap``, is hidden, but at most the time of the backward pass: two thirds of the
compute time, because it takes twice the work of the forward pass.

``slowdown`` is the relative increase of the compute time on several ranks, which share memory and
caches or wait for the last rank; it is assumed constant beyond the measured numbers of ranks. Not
modelled: links shared by ranks.

The fit is by ``scipy.optimize.least_squares``. Its data are the measured seconds per step, or its
parts if known, and optionally a table of allreduce times. It takes three numbers of ranks to
distinguish computing, latency and bandwidth. The ranges come from the covariance of the fit.

Step times without a table cannot distinguish a hidden reduction from a short one. Then ``overlap``
is 0, and latency and transfer are those that computing does not hide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hvdtrain.collectives.cost import ring_hops, ring_volume
from hvdtrain.commands.study.run import INVALID
from hvdtrain.config.strategies import DEFAULT, ONE_PROCESS, STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages
from hvdtrain.system.files import read_regular

BACKWARD = 2 / 3  # of the compute time
RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096: predicted by default
MIN_LIMIT = 0.05  # fraction of a step: a smaller cost is not a limit
LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % range

TOLERANCE = 1e-5  # relative, of a fit
DRAWN, SAMPLES = 10_000, 200  # parameters drawn for the ranges, and how many are kept at most
MIN_SAMPLES = 50  # with fewer a range would be too narrow
AT_BOUND = 1e-2  # of its scale: a smaller parameter is at its bound
SEED = 20250601  # the same points give the same answer
MIN_SIZES = 3  # numbers of ranks that a fit needs

# Relative standard errors.
UNKNOWN_ERROR = 0.03  # of a point that was measured once
MIN_ERROR = 0.01  # of the model itself, at least
PART_ERROR = 0.03  # of a part of a step, at least: the last rank to arrive is an estimate
MIN_PART = 1e-3  # of a step: smaller parts cannot be measured
TABLE_ERROR = 0.2  # latency plus bytes over bandwidth is a crude model of an allreduce

# Scales of the parameters: seconds in units of the longest step, and fractions.
SECONDS = {"compute": 1.0, "latency": 0.01, "transfer": 0.1, "fixed": 0.1}
FRACTIONS = {"slowdown": 0.1, "overlap": 0.5}
OVERLAP_STARTS = (0.1, 0.5, 0.9)  # the hidden time is bounded: there may be several minima

# Preferred tables of allreduce times: those of the training's own library, then the fastest.
ALLREDUCE = "allreduce"
FASTEST = ("nccl", "gloo", "horovod", "mpi4py")


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part; latency and transfer exclude what computing hides."""

    compute: float
    slowdown: float
    latency: float
    transfer: float

    @property
    def local(self) -> float:
        """Seconds of computing, slowdown included."""
        return self.compute + self.slowdown

    @property
    def exposed(self) -> float:
        """Seconds of the reduction that computing does not hide."""
        return self.latency + self.transfer

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.local + self.exposed


@dataclass(frozen=True)
class Costs:
    """The parameters of the model; seconds per step."""

    compute: float  # of one rank on its batch: data, forward, backward, update
    latency: float  # of all messages of a step, per hop
    transfer: float  # to send the gradients of one rank once
    overlap: float = 0.0  # fraction of the reduction that computing can hide
    fixed: float = 0.0  # part of ``compute`` that does not depend on the batch per rank
    slowdown: float = 0.0  # relative increase of the compute time on several ranks

    def parts(self, ranks: int, share: float = 1.0) -> Parts:
        """Return the seconds of one update.

        ``share``: the batch per rank, relative to the batch of ``compute``.
        """
        compute = self.fixed + (self.compute - self.fixed) * share
        slowdown = compute * self.slowdown
        latency, transfer = self.latency * ring_hops(ranks), self.transfer * ring_volume(ranks)
        reduction = latency + transfer
        if not reduction:
            return Parts(compute, slowdown, 0.0, 0.0)
        exposed = 1 - min(self.overlap, BACKWARD * compute / reduction)
        return Parts(compute, slowdown, latency * exposed, transfer * exposed)

    def step(self, ranks: int, base: int, *, strong: bool) -> Parts:
        """Return the seconds of one update in a study whose ``compute`` is for ``base`` ranks.

        ``strong``: the global batch is constant, so the batch per rank shrinks with more ranks.
        """
        costs = self if ranks > base else replace(self, slowdown=0.0)
        return costs.parts(ranks, base / ranks if strong else 1.0)


@dataclass(frozen=True)
class Fit:
    """The costs fitted to the measured points."""

    strong: bool  # strong scaling: constant global batch
    base: int  # smallest number of ranks; the model's efficiencies are relative to it
    costs: Costs
    samples: tuple[Costs, ...]  # drawn from the covariance of the fit
    misfit: float  # factor by which the errors had to be widened for the model to fit; 1: none

    def parts(self, ranks: int) -> Parts:
        """Return the seconds of a step at ``ranks``."""
        return self.costs.step(ranks, self.base, strong=self.strong)

    def efficiency(self, ranks: int) -> Forecast:
        """Return the efficiency at ``ranks``, relative to that at ``base``."""
        share = self.base / ranks if self.strong else 1.0

        def of(costs: Costs) -> float:
            at_base = costs.step(self.base, self.base, strong=self.strong).total
            return at_base * share / costs.step(ranks, self.base, strong=self.strong).total

        middle, *drawn = map(of, (self.costs, *self.samples))
        low, high = np.percentile(drawn or [middle], [LOW, HIGH]).tolist()
        return Forecast(middle, min(low, middle), max(high, middle))


@dataclass(frozen=True)
class Forecast:
    """A number with its 95 % range, if the model holds."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of ranks; the parts are seconds of a step.

    ``limit`` is the largest cost besides useful computing: ``latency``, ``bandwidth``,
    ``slowdown`` or ``fixed`` (the part of computing that does not shrink with more ranks); empty
    if it is less than ``MIN_LIMIT`` of the step.
    """

    ranks: int
    efficiency: Forecast
    parts: Parts
    limit: str


def predict(fitted: Fit, ranks: int) -> Prediction:
    """Return the prediction for ``ranks``."""
    parts = fitted.parts(ranks)
    costs = {
        "latency": parts.latency,
        "bandwidth": parts.transfer,
        "slowdown": parts.slowdown,
        "fixed": min(fitted.costs.fixed, parts.compute),
    }
    limit = max(costs, key=lambda name: costs[name])
    notable = costs[limit] >= MIN_LIMIT * parts.total
    return Prediction(ranks, fitted.efficiency(ranks), parts, limit if notable else "")


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
    traffic: GradientMessages | None = None,
) -> Fit:
    """Fit the model.

    Args:
        steps: measured points, of at least ``MIN_SIZES`` numbers of ranks.
        strong: strong scaling (constant global batch), else weak (constant batch per rank).
        reductions: a table of allreduce times, on two or more ranks; needs ``traffic``.
        traffic: the gradient messages of a step.
    """
    steps = sorted(steps, key=lambda step: step.ranks)
    rows = _rows(steps, strong)
    rows += [_table_row(row, traffic) for row in reductions if traffic]
    divided = all(step.exposed is not None for step in steps)
    names = ["compute", "latency", "transfer"]
    if strong and (divided or len(steps) > MIN_SIZES):
        names.append("fixed")
    if divided and not strong:
        names.append("slowdown")
    if reductions:
        names.append("overlap")
    problem = _Problem(rows, names)
    solution = problem.solve()
    free = len(rows) - len(names)
    misfit = max(1.0, math.sqrt(2 * solution.cost / free)) if free > 0 else 1.0
    samples = problem.draw(solution, misfit)
    return Fit(strong, steps[0].ranks, problem.costs(solution.x), samples, misfit)


@dataclass(frozen=True)
class _Row:
    """A measured value, and the model for it; seconds."""

    seconds: float
    error: float  # relative standard error of ``seconds``
    model: Callable[[Costs], float]


def _rows(steps: Sequence[Step], strong: bool) -> list[_Row]:
    """Return the measured steps, or parts of steps, by increasing number of ranks."""

    def part(name: str, step: Step, seconds: float, error: float) -> _Row:
        def model(costs: Costs) -> float:
            return float(getattr(costs.step(step.ranks, steps[0].ranks, strong=strong), name))

        return _Row(seconds, error, model)

    if any(step.exposed is None for step in steps):
        return [part("total", step, step.seconds, step.error) for step in steps]
    rows = []
    for step in steps:
        exposed, least = step.exposed or 0.0, MIN_PART * step.seconds
        # In weak scaling the slowdown of computing depends on the ranks per host; for more ranks
        # the slowdown at the largest size counts.
        if strong or step in (steps[0], steps[-1]):
            rows.append(part("local", step, step.seconds - exposed, step.error))
        if step.ranks > 1:
            measured = max(exposed, least)
            error = max(step.exposed_error, PART_ERROR, least / measured)
            rows.append(part("exposed", step, measured, error))
    return rows


def _table_row(row: AllreduceTime, traffic: GradientMessages) -> _Row:
    def model(costs: Costs) -> float:
        latency = costs.latency / traffic.count * ring_hops(row.ranks)
        return latency + costs.transfer * ring_volume(row.ranks) * row.nbytes / traffic.bytes

    return _Row(row.seconds, TABLE_ERROR, model)


class _Problem:
    """The least squares; a vector has the parameters in the order of ``names``."""

    def __init__(self, rows: Sequence[_Row], names: Sequence[str]) -> None:
        self.rows, self.names = rows, names
        longest = max(row.seconds for row in rows)
        self.scale = np.array([FRACTIONS.get(name) or SECONDS[name] * longest for name in names])
        self.least = 1e-9 * self.scale * (np.arange(len(names)) == 0)
        self.most = np.array([1.0 if name == "overlap" else np.inf for name in names])

    def costs(self, values: Sequence[float]) -> Costs:
        """Return the costs of a vector, in which ``compute`` excludes the fixed part."""
        costs = dict(zip(self.names, map(float, values), strict=True))
        costs["compute"] += costs.get("fixed", 0.0)
        return Costs(**costs)

    def solve(self) -> Any:
        """Return the best solution of ``least_squares``."""
        starts = [[self.rows[0].seconds, *self.scale[1:]]]
        if "overlap" in self.names:
            starts = [[*starts[0][:-1], overlap] for overlap in OVERLAP_STARTS]
        solutions = [
            least_squares(
                self._residuals,
                start,
                bounds=(self.least, self.most),
                x_scale=self.scale,
                ftol=TOLERANCE,
                xtol=TOLERANCE,
                gtol=TOLERANCE,
            )
            for start in starts
        ]
        return min(solutions, key=lambda solution: solution.cost)

    def draw(self, solution: Any, misfit: float) -> tuple[Costs, ...]:
        """Return costs drawn from the covariance of a solution, for errors ``misfit`` as large.

        Half of them are drawn with all parameters, half with the parameters at their bounds fixed;
        those outside of the bounds are excluded, or moved to them if too few would remain.
        """
        jacobian, margin = solution.jac * self.scale, AT_BOUND * self.scale
        free = (solution.x > self.least + margin) & (solution.x < self.most - margin)
        scatter = np.random.default_rng(SEED).standard_normal((DRAWN, len(self.rows)))
        kept: list[Costs] = []
        for varied in (np.full_like(free, True), free):
            drawn = np.tile(solution.x, (DRAWN, 1))
            errors = misfit * scatter @ np.linalg.pinv(jacobian[:, varied]).T
            drawn[:, varied] += errors * self.scale[varied]
            within = drawn[((drawn >= self.least) & (drawn <= self.most)).all(axis=1)]
            if len(within) < MIN_SAMPLES:
                within = np.clip(drawn, self.least, self.most)
            kept += map(self.costs, within[:SAMPLES])
        return tuple(kept)

    def _residuals(self, values: Sequence[float]) -> Any:
        """Return the relative differences of model and measurement, in standard errors."""
        costs = self.costs(values)
        return np.array([(row.model(costs) / row.seconds - 1) / row.error for row in self.rows])


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
