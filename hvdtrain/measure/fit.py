"""Fitting the cost model to measured steps: best values, and samples of what else may be true.

The logarithms of the parameters are fitted by least squares: to the measured seconds a step, to a
table of allreduce times where there is one, and to weak priors, which decide only what the points
leave open. Two or three points cannot determine latency and bandwidth, and the answer says so by
its width: the uncertainty comes from fits to points and priors that were each moved at random
within their errors (a parametric bootstrap; with moved priors it samples the posterior: D. S.
Oliver et al., "Conditioning permeability fields to pressure data", ECMOR V, 1996). Ring and tree
are both fitted and share the samples by how well they fit.

From steps alone a hidden reduction cannot be told from a short one. So without a table ``overlap``
is 0, and latency and transfer are those that computing does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.measure.cost import LAWS, Costs, Law
from hvdtrain.measure.efficiency import Estimate
from hvdtrain.measure.problem import UNKNOWN_ERROR, Problem, Reduction, Step, Traffic

SAMPLES = 200
SEED = 20250601  # the same points give the same answer
LEAST_ERROR = 0.01  # relative: what the model itself is wrong by, at least


@dataclass(frozen=True)
class Candidate:
    """The best fit of one law."""

    law: Law
    costs: Costs
    weight: float
    """How likely it is against the others; all weights add up to 1."""


@dataclass(frozen=True)
class Fit:
    """What the measured points say about the costs."""

    strong: bool
    base: int
    """The fewest ranks fitted, to which the efficiencies of the model are relative."""
    candidates: tuple[Candidate, ...]
    """The best first."""
    samples: tuple[tuple[Law, Costs], ...]
    """Laws and costs that fit within the errors, each as likely as the other."""
    misfit: float
    """By how much the errors had to be widened so that the best law fits; 1: not at all."""
    at_base: float = 1.0
    """Measured efficiency at ``base``; less than 1 where fewer ranks were measured, but not fitted.
    """

    @property
    def best(self) -> Candidate:
        """The law that fits best."""
        return self.candidates[0]


def errors(rates: Mapping[int, Estimate]) -> dict[int, float]:
    """Relative standard errors of the points, with one deviation pooled over all sizes.

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
    """Fit the model.

    Args:
        steps: measured points, of two numbers of ranks or more.
        strong: the batch of all ranks stayed; else that of a rank.
        reductions: a table of allreduce times, on two ranks or more; needs ``traffic``.
        traffic: what a step reduces.
        samples: how many to draw.
    """
    problems = [Problem(law, steps, strong, reductions, traffic) for law in LAWS]
    bests = [problem.best() for problem in problems]
    misfit = min(problem.misfit(best) for problem, best in zip(problems, bests, strict=True))
    costs = [problem.cost(best, misfit) for problem, best in zip(problems, bests, strict=True)]
    likely = [math.exp((min(costs) - cost) / 2) for cost in costs]
    weights = [one / sum(likely) for one in likely]
    generator = np.random.default_rng(SEED)
    drawn = [
        (problem.law, problem.costs(problem.solve(best, misfit, generator)))
        for problem, best, weight in zip(problems, bests, weights, strict=True)
        for _ in range(round(weight * samples))
    ]
    candidates = [
        Candidate(problem.law, problem.costs(best), weight)
        for problem, best, weight in zip(problems, bests, weights, strict=True)
    ]
    return Fit(
        strong=strong,
        base=min(step.ranks for step in steps),
        candidates=tuple(sorted(candidates, key=lambda one: -one.weight)),
        samples=tuple(drawn),
        misfit=misfit,
    )
