"""Fit the cost model to measured steps, by least squares; the covariance gives the uncertainty.

The data are the measured seconds per step, or its parts if known, and optionally a table of
allreduce times. Two or three points cannot determine latency and bandwidth, so each parameter has
a weak prior, a half-Cauchy distribution, which decides only what the points leave undetermined (A.
Gelman, "Prior distributions for variance parameters in hierarchical models", Bayesian Analysis 1,
2006). Other costs that fit within the errors are sampled from the normal distribution of the least
squares; a sample with a negative cost is replaced by the nearest one without. Ring and tree are
both fitted; each gets a number of samples in proportion to its likelihood.

Step times without a table cannot distinguish a hidden reduction from a short one. Then ``overlap``
is 0, and latency and transfer are those that computing does not hide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from hvdtrain.collectives.cost import Law
from hvdtrain.commands.scaling.cost_model import LAWS, Candidate, Costs, Fit, Traffic
from hvdtrain.commands.scaling.results import Estimate
from hvdtrain.config.strategies import DEFAULT, ONE_PROCESS, STRATEGIES
from hvdtrain.errors import UsageError

SAMPLES = 200
SEED = 20250601  # the same points give the same answer

# Relative standard errors.
UNKNOWN_ERROR = 0.03  # of a point that was measured once
LEAST_ERROR = 0.01  # of the model itself, at least
PART_ERROR = 0.03  # of a part of a step, at least: the last rank to arrive is an estimate
LEAST_PART = 1e-3  # of a step: smaller parts cannot be measured
TABLE_ERROR = 0.2  # latency plus bytes over bandwidth is a crude model of an allreduce

# Scales of the priors: seconds in units of the longest step, the overlap as a fraction.
PRIORS = {"compute": 10.0, "latency": 0.008}
PRIORS |= dict.fromkeys(("transfer", "fixed", "slowdown", "overlap"), 1.0)
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
class Reduction:
    """A row of a table of allreduce times."""

    ranks: int
    nbytes: int
    seconds: float


def errors(rates: Mapping[int, Estimate]) -> dict[int, float]:
    """Return relative standard errors of the points, with one deviation pooled over all sizes.

    A few repeats of one size estimate its deviation poorly; all sizes together do better.
    """
    repeated = [rate for rate in rates.values() if rate.deviation is not None]
    if not repeated:
        return dict.fromkeys(rates, UNKNOWN_ERROR)
    degrees = sum(rate.count - 1 for rate in repeated)
    squares = sum((r.count - 1) * (r.deviation or 0.0) ** 2 / r.mean**2 for r in repeated)
    pooled = math.sqrt(squares / degrees)
    return {ranks: max(LEAST_ERROR, pooled / math.sqrt(r.count)) for ranks, r in rates.items()}


def fit(
    steps: Sequence[Step],
    *,
    strong: bool = False,
    reductions: Sequence[Reduction] = (),
    traffic: Traffic | None = None,
    samples: int = SAMPLES,
) -> Fit:
    """Fit the model with each law.

    Args:
        steps: measured points, of two or more numbers of ranks.
        strong: strong scaling (constant global batch), else weak (constant batch per rank).
        reductions: a table of allreduce times, on two or more ranks; needs ``traffic``.
        traffic: the gradient messages of a step.
        samples: number of samples.
    """
    steps = sorted(steps, key=lambda step: step.ranks)
    solutions = [_LeastSquares(law, steps, strong, reductions, traffic) for law in LAWS]
    misfit = min(solution.misfit() for solution in solutions)
    squares = [solution.squares(misfit) for solution in solutions]
    likelihoods = [math.exp((min(squares) - value) / 2) for value in squares]
    generator = np.random.default_rng(SEED)
    drawn: list[tuple[Law, Costs]] = []
    candidates = []
    for solution, likelihood in zip(solutions, likelihoods, strict=True):
        weight = likelihood / sum(likelihoods)
        candidates.append(Candidate(solution.law, solution.costs(solution.best), weight))
        draws = solution.draw(round(weight * samples), misfit, generator)
        drawn += [(solution.law, costs) for costs in draws]
    candidates.sort(key=lambda candidate: -candidate.weight)
    return Fit(strong, steps[0].ranks, tuple(candidates), tuple(drawn), misfit)


@dataclass(frozen=True)
class _Row:
    """A measured value, and the model for it; seconds."""

    seconds: float
    error: float  # standard error of ``seconds``
    model: Callable[[Costs], float]


def _rows(law: Law, steps: Sequence[Step], strong: bool) -> list[_Row]:
    """Return the measured steps, or parts of steps, by increasing number of ranks."""

    def part(name: str, step: Step, seconds: float, error: float) -> _Row:
        def model(costs: Costs) -> float:
            parts = costs.step(law, step.ranks, steps[0].ranks, strong=strong)
            return float(getattr(parts, name))

        return _Row(seconds, error, model)

    if any(step.exposed is None for step in steps):
        return [part("total", step, step.seconds, step.error * step.seconds) for step in steps]
    rows = []
    for step in steps:
        exposed = step.exposed or 0.0
        # In weak scaling the slowdown of computing depends on the ranks per host; for more ranks
        # the slowdown at the largest size counts.
        if strong or step in (steps[0], steps[-1]):
            local = step.seconds - exposed
            rows.append(part("local", step, local, step.error * local))
        if step.ranks > 1:
            error = max(step.exposed_error, PART_ERROR) * exposed
            rows.append(part("exposed", step, exposed, max(error, LEAST_PART * step.seconds)))
    return rows


def _table_row(law: Law, row: Reduction, traffic: Traffic) -> _Row:
    latency = law.hops(row.ranks) / traffic.messages
    transfer = law.volume(row.ranks) * row.nbytes / traffic.nbytes
    return _Row(
        row.seconds,
        TABLE_ERROR * row.seconds,
        lambda costs: costs.latency * latency + costs.transfer * transfer,
    )


class _LeastSquares:
    """The least squares of one law; a vector x has the parameters, in units of their priors."""

    def __init__(
        self,
        law: Law,
        steps: Sequence[Step],
        strong: bool,
        reductions: Sequence[Reduction],
        traffic: Traffic | None,
    ) -> None:
        self.law, self.rows = law, _rows(law, steps, strong)
        self.rows += [_table_row(law, row, traffic) for row in reductions if traffic]
        self.names = names = ["compute", "latency", "transfer"]
        names += ["fixed"] if strong else []
        divided = all(step.exposed is not None for step in steps)
        names += ["slowdown"] if divided and not strong else []
        names += ["overlap"] if reductions else []
        longest = max(step.seconds for step in steps)
        self.unit = np.array([PRIORS[n] * (1.0 if n == "overlap" else longest) for n in names])
        self.least = np.array([1e-9 if name == "compute" else 0.0 for name in names])
        self.most = np.array([1.0 if name == "overlap" else np.inf for name in names])
        starts = OVERLAP_STARTS if "overlap" in names else (0.0,)
        best = min((self._solve(overlap) for overlap in starts), key=lambda result: result.cost)
        self.best, self.jacobian, self.residuals = best.x, best.jac, best.fun

    def costs(self, x: Any) -> Costs:
        """Return the costs of the parameters ``x``."""
        values = dict(zip(self.names, (x * self.unit).tolist(), strict=True))
        values["compute"] += values.get("fixed", 0.0)  # in x the part that shrinks with the batch
        if "slowdown" in values:  # in x seconds
            values["slowdown"] /= values["compute"]
        return Costs(**values)

    def _solve(self, overlap: float) -> Any:
        """Return scipy's solution starting from this ``overlap``."""
        start = np.array([overlap if name == "overlap" else 0.01 for name in self.names])
        start[0] = self.rows[0].seconds / self.unit[0]

        def residuals(x: Any) -> Any:
            costs = self.costs(x)
            data = [(row.model(costs) - row.seconds) / row.error for row in self.rows]
            return np.concatenate([data, np.sqrt(2 * np.log1p(x**2))])

        return least_squares(residuals, start, bounds=(self.least, self.most))

    def misfit(self) -> float:
        """Return the factor by which to widen the errors to match the scatter; at least 1."""
        free = len(self.rows) - len(self.names)
        squares = float(np.sum(self.residuals[: len(self.rows)] ** 2))
        return max(1.0, math.sqrt(squares / free)) if free > 0 else 1.0

    def squares(self, misfit: float) -> float:
        """Return the sum of squares, including priors, with errors widened by ``misfit``."""
        return float(np.sum((self.residuals / self._widening(misfit)) ** 2))

    def draw(self, count: int, misfit: float, generator: np.random.Generator) -> list[Costs]:
        """Return costs sampled from the covariance, with errors widened by ``misfit``."""
        # R of the Jacobian: the inverse of RᵀR is the covariance, |R (x - y)| the distance of y.
        factor = np.linalg.qr(self.jacobian / self._widening(misfit)[:, None], mode="r")
        draws = factor @ self.best + generator.standard_normal((count, len(factor)))
        positive = [nnls(factor, draw)[0] for draw in draws]
        return [self.costs(np.clip(x, self.least, self.most)) for x in positive]

    def _widening(self, misfit: float) -> Any:
        """Return the divisors of the residuals: ``misfit`` for data, 1 for priors."""
        return np.where(np.arange(len(self.residuals)) < len(self.rows), misfit, 1.0)


def read_reductions(paths: Sequence[Path], strategy: str | None) -> list[Reduction]:
    """Read tables of allreduce times: the rows of the library that ``strategy`` trains with.

    A file has the output of ``hvdtrain doctor -n N --json``, or of
    ``python -m hvdtrain.collectives --time --json`` (``commands/collectives/timing.py``):
    {"ranks": N, "backends": {NAME: {"state": "ok", "rows": [{"bytes", "seconds"}]}}}.

    Raises:
        UsageError: a file has neither format, or has no rows of any library.
    """
    reductions: list[Reduction] = []
    libraries = STRATEGIES.get(strategy or DEFAULT.name, ONE_PROCESS).gradient_libraries
    for path in paths:
        try:
            content = json.loads(path.read_text())
            times = content.get("allreduce", content)
            ranks = int(times["ranks"])
            tables = {name: backend.get("rows") for name, backend in times["backends"].items()}
            rows = next((tables[name] for name in (*libraries, *FASTEST) if tables.get(name)), ())
            rows = [row for row in rows if row.get("collective", ALLREDUCE) == ALLREDUCE]
            table = [Reduction(ranks, int(row["bytes"]), float(row["seconds"])) for row in rows]
        except OSError as error:
            raise UsageError(f"--allreduce {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--allreduce {path}: not a table of allreduce times ({error!r}); create one with "
                "`hvdtrain doctor -n N --json`"
            ) from error
        table = [row for row in table if row.nbytes > 0 and row.seconds > 0]
        if ranks < 2 or not table:
            raise UsageError(f"--allreduce {path}: no allreduce times on 2 or more ranks")
        reductions += table
    return reductions
