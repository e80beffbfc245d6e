"""Fit the cost model to measured steps, by least squares; the covariance gives the uncertainty.

Fitted are the measured seconds per step, or its parts where they are known, and a table of
allreduce times where there is one. Two or three points cannot determine latency and bandwidth, so
each parameter has a weak prior, a half-Cauchy distribution, which decides only what the points
leave open (A. Gelman, "Prior distributions for variance parameters in hierarchical models",
Bayesian Analysis 1, 2006). What else fits within the errors is drawn from the normal distribution
of the least squares; in place of a draw with a negative cost the one without that fits it best is
taken. Ring and tree are both fitted and share the draws by how well they fit.

From steps alone a hidden reduction cannot be told from a short one. So without a table ``overlap``
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

from hvdtrain.collectives.model import Law
from hvdtrain.commands.scaling.model import LAWS, Candidate, Costs, Fit, Traffic
from hvdtrain.commands.scaling.results import Estimate
from hvdtrain.config.strategies import DEFAULT, ONE_PROCESS, STRATEGIES
from hvdtrain.errors import UsageError

SAMPLES = 200
SEED = 20250601  # the same points give the same answer

# Relative standard errors.
UNKNOWN_ERROR = 0.03  # of a point that was measured once
LEAST_ERROR = 0.01  # what the model itself is wrong by, at least
PART_ERROR = 0.03  # of a part of a step, at least: who came last is an estimate
LEAST_PART = 1e-3  # of a step: less of it cannot be told
TABLE_ERROR = 0.2  # latency plus bytes over bandwidth is a crude picture of an allreduce

# Scales of the priors: seconds in units of the longest step, the overlap as a share.
PRIORS = {"compute": 10.0, "latency": 0.008}
PRIORS |= dict.fromkeys(("transfer", "fixed", "slowdown", "overlap"), 1.0)
OVERLAP_STARTS = (0.1, 0.5, 0.9)  # what can be hidden is bounded: there may be several minima

# Whose table says what a training waits for: its own library's, else the fastest there is.
ALLREDUCE = "allreduce"
FASTEST = ("nccl", "gloo", "horovod", "mpi4py")


@dataclass(frozen=True)
class Step:
    """A measured point."""

    ranks: int
    seconds: float  # per step; mean over the repeats
    error: float = UNKNOWN_ERROR  # relative standard error of ``seconds``
    exposed: float | None = None  # those that communicate and do not compute; None: not known
    exposed_error: float = UNKNOWN_ERROR  # relative standard error of ``exposed``


@dataclass(frozen=True)
class Reduction:
    """A row of a table of allreduce times."""

    ranks: int
    nbytes: int
    seconds: float


def errors(rates: Mapping[int, Estimate]) -> dict[int, float]:
    """Return relative standard errors of the points, with one deviation pooled over all sizes.

    A few repeats of one size tell its deviation badly; all sizes together do better.
    """
    repeated = [one for one in rates.values() if one.deviation is not None]
    if not repeated:
        return dict.fromkeys(rates, UNKNOWN_ERROR)
    degrees = sum(one.count - 1 for one in repeated)
    squares = sum((one.count - 1) * (one.deviation or 0.0) ** 2 / one.mean**2 for one in repeated)
    pooled = math.sqrt(squares / degrees)
    return {ranks: max(LEAST_ERROR, pooled / math.sqrt(one.count)) for ranks, one in rates.items()}


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
        steps: measured points, of two numbers of ranks or more.
        strong: the global batch stayed; else the batch per rank.
        reductions: a table of allreduce times, on two ranks or more; needs ``traffic``.
        traffic: what a step reduces.
        samples: how many to draw.
    """
    steps = sorted(steps, key=lambda step: step.ranks)
    solved = [_LeastSquares(law, steps, strong, reductions, traffic) for law in LAWS]
    misfit = min(one.misfit() for one in solved)
    squares = [one.squares(misfit) for one in solved]
    likely = [math.exp((min(squares) - one) / 2) for one in squares]
    generator = np.random.default_rng(SEED)
    drawn: list[tuple[Law, Costs]] = []
    candidates = []
    for one, chance in zip(solved, likely, strict=True):
        weight = chance / sum(likely)
        candidates.append(Candidate(one.law, one.costs(one.best), weight))
        costs = one.draw(round(weight * samples), misfit, generator)
        drawn += [(one.law, some) for some in costs]
    candidates.sort(key=lambda one: -one.weight)
    return Fit(strong, steps[0].ranks, tuple(candidates), tuple(drawn), misfit)


@dataclass(frozen=True)
class _Row:
    """Something that was measured, and what the model says instead; seconds."""

    seconds: float
    error: float  # standard error of ``seconds``
    model: Callable[[Costs], float]


def _rows(law: Law, steps: Sequence[Step], strong: bool) -> list[_Row]:
    """Return what was measured of the steps, by rising number of ranks: parts or whole."""

    def part(name: str, step: Step, seconds: float, error: float) -> _Row:
        def model(costs: Costs) -> float:
            parts = costs.step(law, step.ranks, steps[0].ranks, strong=strong)
            return float(getattr(parts, name))

        return _Row(seconds, error, model)

    if any(step.exposed is None for step in steps):
        return [part("total", one, one.seconds, one.error * one.seconds) for one in steps]
    rows = []
    for step in steps:
        exposed = step.exposed or 0.0
        # In weak scaling computing slows down with the ranks of a host in a way of its own; what
        # counts for more ranks is how slow it is at last.
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
    """The least squares of one law; a vector x holds the parameters, in units of their priors."""

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
        found = min((self._solve(overlap) for overlap in starts), key=lambda one: one.cost)
        self.best, self.jacobian, self.residuals = found.x, found.jac, found.fun

    def costs(self, x: Any) -> Costs:
        """Return the costs that ``x`` stands for."""
        value = dict(zip(self.names, (x * self.unit).tolist(), strict=True))
        value["compute"] += value.get("fixed", 0.0)  # in x the part that shrinks with the batch
        if "slowdown" in value:  # in x seconds
            value["slowdown"] /= value["compute"]
        return Costs(**value)

    def _solve(self, overlap: float) -> Any:
        """Return scipy's solution from a start with this ``overlap``."""
        start = np.array([overlap if name == "overlap" else 0.01 for name in self.names])
        start[0] = self.rows[0].seconds / self.unit[0]

        def residuals(x: Any) -> Any:
            costs = self.costs(x)
            data = [(row.model(costs) - row.seconds) / row.error for row in self.rows]
            return np.concatenate([data, np.sqrt(2 * np.log1p(x**2))])

        return least_squares(residuals, start, bounds=(self.least, self.most))

    def misfit(self) -> float:
        """Return the factor on the errors with which the rows scatter as they should; 1 or more."""
        free = len(self.rows) - len(self.names)
        squares = float(np.sum(self.residuals[: len(self.rows)] ** 2))
        return max(1.0, math.sqrt(squares / free)) if free > 0 else 1.0

    def squares(self, misfit: float) -> float:
        """Return the sum of squares, priors included, with errors that ``misfit`` widens."""
        return float(np.sum((self.residuals / self._widening(misfit)) ** 2))

    def draw(self, count: int, misfit: float, generator: np.random.Generator) -> list[Costs]:
        """Return costs drawn from the covariance; errors that ``misfit`` widens."""
        # R of the Jacobian: the inverse of RᵀR is the covariance, and |R (x - y)| how far y is.
        factor = np.linalg.qr(self.jacobian / self._widening(misfit)[:, None], mode="r")
        draws = factor @ self.best + generator.standard_normal((count, len(factor)))
        inside = [nnls(factor, draw)[0] for draw in draws]
        return [self.costs(np.clip(x, self.least, self.most)) for x in inside]

    def _widening(self, misfit: float) -> Any:
        """Return what the residuals are divided by: the priors keep their widths."""
        return np.where(np.arange(len(self.residuals)) < len(self.rows), misfit, 1.0)


def read_reductions(paths: Sequence[Path], strategy: str | None) -> list[Reduction]:
    """Read tables of allreduce times: the rows of the library that ``strategy`` trains with.

    A file holds what ``hvdtrain doctor -n N --json`` prints, or the object of
    ``python -m hvdtrain.collectives --time --json`` itself (``collectives/bench.py``):
    {"ranks": N, "backends": {NAME: {"state": "ok", "rows": [{"bytes", "seconds"}]}}}.

    Raises:
        UsageError: a file is none of these, or no library has rows in it.
    """
    found: list[Reduction] = []
    own = STRATEGIES.get(strategy or DEFAULT.name, ONE_PROCESS).gradient_libraries
    for path in paths:
        try:
            content = json.loads(path.read_text())
            times = content.get("allreduce", content)
            ranks = int(times["ranks"])
            tables = {name: one.get("rows") for name, one in times["backends"].items()}
            rows = next((tables[name] for name in (*own, *FASTEST) if tables.get(name)), ())
            rows = [row for row in rows if row.get("collective", ALLREDUCE) == ALLREDUCE]
            read = [Reduction(ranks, int(row["bytes"]), float(row["seconds"])) for row in rows]
        except OSError as error:
            raise UsageError(f"--allreduce {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--allreduce {path}: not a table of allreduce times ({error!r}); make one by "
                "`hvdtrain doctor -n N --json`"
            ) from error
        read = [row for row in read if row.nbytes > 0 and row.seconds > 0]
        if ranks < 2 or not read:
            raise UsageError(f"--allreduce {path}: no times of an allreduce over 2 ranks or more")
        found += read
    return found
