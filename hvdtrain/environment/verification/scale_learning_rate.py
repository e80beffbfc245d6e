"""Step 4, the learning rate: the rule worked out anew, and what an update really uses."""

from __future__ import annotations

import math
from itertools import product

from hvdtrain.environment.verification.bench import Bench, Facts
from hvdtrain.environment.verification.rows import Row, by_rank, number, row, several

STEP = 4
BASE, EPOCHS, WARMUP, MILESTONES, DECAY = 0.1, 8.0, 2.0, (4.0, 6.0), 0.5
FACTORS = {"linear": lambda size: size, "sqrt": math.sqrt, "none": lambda size: 1}
SCHEDULES = ("constant", "linear", "cosine", "multistep")
PLACES = (0.0, 0.5, 1.75, 2.0, 3.5, 4.0, 5.0, 7.25)  # epochs
APPLIED = (0.0, 1.0, 2.0, 5.0)  # where an update is really made
EXACT, SINGLE = 1e-12, 1e-6  # relative; Keras keeps its learning rate in float32


def rule(scaling: str, schedule: str, place: float, size: int) -> float:
    """The learning rate as the documentation has it: climb from one rank's, then the schedule."""
    peak = BASE * FACTORS[scaling](size)
    if place < WARMUP:
        foot = BASE if peak > BASE else 0.0
        return foot * (1 - place / WARMUP) + peak * (place / WARMUP)
    done = (place - WARMUP) / (EPOCHS - WARMUP)
    return (
        peak
        * {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": math.cos(math.pi * done / 2) ** 2,
            "multistep": DECAY ** sum(place >= milestone for milestone in MILESTONES),
        }[schedule]
    )


def measure(bench: Bench) -> Facts:
    """Ask for rates of every kind, and make updates at some of them."""
    rates = {}
    for scaling, schedule in product(FACTORS, SCHEDULES):
        rates[scaling, schedule] = bench.adapter.scale_learning_rate(
            BASE,
            scaling=scaling,
            epochs=EPOCHS,
            warmup_epochs=WARMUP,
            schedule=schedule,
            milestones=MILESTONES,
            decay=DECAY,
        )
    told = [rate(place) for rate, place in product(rates.values(), PLACES)]
    wanted = [float(rates["linear", "cosine"](place)) for place in APPLIED]
    return {"told": [float(rate) for rate in told], "applied": bench.kit.applied_rates(wanted)}


def judge(everyone: list[Facts]) -> Row:
    """All ranks' rates are the rule's, and so are the updates'."""
    size = len(everyone)
    told = [rule(*kind, place, size) for kind, place in _kinds()]
    applied = [rule("linear", "cosine", place, size) for place in APPLIED]
    off = max(_off(facts["told"], told) for facts in everyone)
    off_applied = max(_off(facts["applied"], applied) for facts in everyone)
    peak = BASE * size
    place = PLACES.index(WARMUP)
    evidence = (
        f"max difference to the rule {number(off)} over {len(told)} rates on "
        f"{several(size, 'rank')}, {number(off_applied)} in {len(applied)} updates; peak "
        f"{BASE} x {size} = {peak:g}"
    )
    if off > EXACT:
        peaks = by_rank([round(facts["told"][place], 6) for facts in everyone], ", ")
        evidence = f"after the warm-up {peaks} by rank; {evidence}"
    holds = off <= EXACT and off_applied <= SINGLE
    return row(STEP, holds, evidence, difference=off, difference_in_updates=off_applied)


def _kinds() -> list[tuple[tuple[str, str], float]]:
    return list(product(product(FACTORS, SCHEDULES), PLACES))


def _off(found: list[float], expected: list[float]) -> float:
    """The largest difference relative to ``BASE``; infinite where there is a nan."""
    differences = [abs(a - b) / BASE for a, b in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)
