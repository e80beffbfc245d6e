"""The cost model in closed form, and the fit on data with known costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.cost import ring_hops, ring_volume
from hvdtrain.commands.scaling.cost_model import (
    AllreduceTime,
    Costs,
    Fit,
    Step,
    fit,
    predict,
    read_reductions,
)
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages

TUTORIAL = {1: 281.22, 2: 382.01, 4: 689.22, 8: 1341.25}  # images/s
SIZES = (1, 2, 4, 8, 16, 32, 64)
TRUTH = Costs(compute=0.2, latency=5e-3, transfer=0.08)
STRONG = replace(TRUTH, compute=4.0, fixed=0.4, latency=4e-3, transfer=0.4)


def steps(truth: Costs, *, strong: bool = False, noise: float = 0.0) -> list[Step]:
    """Return the step times of a machine with these costs."""
    scatter = np.random.default_rng(1).standard_normal(len(SIZES))
    times = [truth.parts(p, 1 / p if strong else 1.0).total for p in SIZES]
    return [
        Step(p, time * (1 + noise * deviation), 0.01)
        for p, time, deviation in zip(SIZES, times, scatter, strict=True)
    ]


def divided(truth: Costs, *, strong: bool = False) -> list[Step]:
    """Return the step times of a machine with these costs, with separate communication times."""
    measured = []
    for p in SIZES:
        parts = truth.step(p, 1, strong=strong)
        measured.append(Step(p, parts.total, 0.01, parts.exposed))
    return measured


def exact(costs: Costs, *, strong: bool = False) -> Fit:
    """Return costs without an error."""
    return Fit(strong, 1, costs, (), 1.0)


def recovered(fitted: Fit, truth: Costs, *names: str) -> None:
    """Check these costs of the fit."""
    for name in ("compute", "latency", "transfer", *names):
        expected = pytest.approx(getattr(truth, name), rel=0.05)
        assert getattr(fitted.costs, name) == expected, name


def test_a_step_in_closed_form() -> None:
    costs = Costs(compute=1.0, latency=0.01, transfer=0.2)
    parts = costs.parts(4)
    assert (parts.compute, parts.latency, parts.transfer) == pytest.approx((1.0, 0.06, 0.3))
    slow = replace(costs, slowdown=0.5).parts(4)
    assert (slow.slowdown, slow.local, slow.total) == pytest.approx((0.5, 1.5, 1.86))
    assert costs.parts(1).total == 1.0
    assert replace(costs, overlap=0.5).parts(4).total == pytest.approx(1.18)
    # Of 3.6 s no more is hidden than the backward pass lasts.
    long = Costs(compute=1.0, latency=0.1, transfer=2.0, overlap=1.0).parts(4)
    assert long.total == pytest.approx(1.0 + 3.6 - 2 / 3)


def test_strong_scaling_shrinks_all_but_the_fixed_part() -> None:
    costs = Costs(compute=1.0, latency=0.0, transfer=0.0, fixed=0.2)
    assert costs.step(4, 1, strong=True).total == pytest.approx(0.2 + 0.8 / 4)
    assert exact(costs, strong=True).efficiency(4).middle == pytest.approx(1 / 4 / 0.4)
    assert exact(costs).efficiency(4).middle == 1


def test_the_truth_is_recovered() -> None:
    slow = replace(TRUTH, slowdown=0.4)
    for fitted, truth, names in (
        (fit(steps(TRUTH)), TRUTH, ()),
        (fit(steps(TRUTH, noise=0.002)), TRUTH, ()),
        (fit(divided(slow)), slow, ("slowdown",)),
    ):
        recovered(fitted, truth, *names)


def test_the_truth_is_recovered_with_overlap_from_a_table() -> None:
    truth, traffic = replace(TRUTH, overlap=0.6), GradientMessages(4, 100_000_000)
    table = [
        AllreduceTime(
            ranks,
            nbytes,
            truth.latency / 4 * ring_hops(ranks)
            + truth.transfer / 1e8 * nbytes * ring_volume(ranks),
        )
        for ranks in (8, 64)
        for nbytes in (4, 4096, 2**16, 2**20, 2**24, 2**26)
    ]
    fitted = fit(steps(truth), reductions=table, traffic=traffic)
    recovered(fitted, truth, "overlap")


def test_the_truth_is_recovered_in_strong_scaling() -> None:
    recovered(fit(divided(STRONG, strong=True), strong=True), STRONG, "fixed")
    costs = fit(steps(STRONG, strong=True), strong=True).costs
    assert costs.compute == pytest.approx(STRONG.compute, rel=0.05)
    assert costs.latency == pytest.approx(STRONG.latency, rel=0.05)
    # Only two ranks, which send half as much, distinguish the constant parts.
    both = costs.fixed + 2 * costs.transfer
    assert both == pytest.approx(STRONG.fixed + 2 * STRONG.transfer, rel=0.05)


def test_three_sizes_with_separate_communication_times_determine_the_limit() -> None:
    truth = Costs(compute=0.4, latency=1e-4, transfer=0.02, slowdown=0.7)
    fitted = fit(divided(truth)[:3])
    assert predict(fitted, 16).limit == "slowdown"
    assert 2 / fitted.parts(2).total == pytest.approx(2 / 0.7002, rel=0.03)


def tutorial(*sizes: int) -> Fit:
    """Return the fit to the tutorial's figures; a step is one image per rank."""
    return fit([Step(p, p / rate) for p, rate in TUTORIAL.items() if p in sizes])


def test_the_fit_to_the_tutorials_points() -> None:
    fitted = tutorial(*TUTORIAL)
    for ranks, rate in TUTORIAL.items():
        assert ranks / fitted.parts(ranks).total == pytest.approx(rate, rel=0.05)
    for ranks in (16, 256, 4096):  # in weak scaling the share of computing is the efficiency
        prediction = predict(fitted, ranks)
        parts, efficiency = prediction.parts, prediction.efficiency
        assert parts.compute / parts.total == pytest.approx(efficiency.middle)
        assert efficiency.low < efficiency.middle < efficiency.high
    ranges = [fitted.efficiency(ranks) for ranks in (8, 64, 512, 4096)]
    widths = [forecast.high - forecast.low for forecast in ranges]
    assert widths == sorted(widths)
    three = tutorial(1, 2, 4).efficiency(64)
    assert three.high - three.low > widths[1] and widths[1] < 0.4


@pytest.mark.parametrize("truth", [TRUTH, replace(TRUTH, latency=0.0)])
def test_the_range_has_the_truth_in_most_studies(truth: Costs) -> None:
    noise, ranks = 0.02, 256
    expected = exact(truth).efficiency(ranks).middle
    scatter = np.random.default_rng(1).standard_normal((100, len(SIZES)))
    inside = 0
    for drawn in scatter:
        points = [
            Step(p, truth.parts(p).total * (1 + noise * deviation), noise)
            for p, deviation in zip(SIZES, drawn, strict=True)
        ]
        forecast = fit(points).efficiency(ranks)
        inside += forecast.low <= expected <= forecast.high
    assert inside >= 80


def test_a_range_has_a_width_where_the_overlap_cannot_be_determined() -> None:
    """A reduction takes a microsecond, a step a second."""
    truth = Costs(compute=1.0, latency=3e-8, transfer=1.5e-6)
    scatter = np.random.default_rng(3).standard_normal(len(SIZES))
    points = [
        Step(p, truth.parts(p, 1.0).total * (1 + 0.02 * deviation), 0.01)
        for p, deviation in zip(SIZES, scatter, strict=True)
    ]
    rows = [AllreduceTime(p, 1000, 3e-8 * p) for p in (2, 4)]
    forecast = fit(points, reductions=rows, traffic=GradientMessages(1, 1000)).efficiency(256)
    assert forecast.low < forecast.high


def test_points_that_scatter_more_than_their_errors_widen_the_range() -> None:
    def fitted(noise: float) -> Fit:
        points = [replace(step, error=0.001) for step in steps(TRUTH, noise=noise)]
        return fit(points)

    good, bad = fitted(0.0), fitted(0.02)
    assert good.misfit == 1
    assert bad.misfit > 3
    widths = [f.high - f.low for f in (good.efficiency(256), bad.efficiency(256))]
    assert widths[1] > 3 * widths[0]


def test_the_limit_is_named() -> None:
    slow = fit(steps(Costs(0.2, 5e-3, 1e-3)))
    narrow = fit(steps(Costs(0.2, 1e-6, 0.3)))
    free = fit(steps(Costs(0.2, 1e-7, 1e-5)))
    assert predict(slow, 1024).limit == "latency"
    assert predict(narrow, 16).limit == "bandwidth"
    assert predict(free, 16).limit == ""
    shares = predict(narrow, 16).parts
    assert shares.transfer / shares.total == pytest.approx(0.5625 / 0.7625, rel=0.05)


TABLE: dict[str, Any] = {
    "ranks": 4,
    "hosts": 1,
    "backends": {
        "mpi4py": {"state": "ok", "rows": [{"bytes": 4, "seconds": 1e-5}]},
        "horovod": {"state": "ok", "rows": [{"bytes": 4, "seconds": 1e-3}]},
        "nccl": {"state": "absent", "reason": "no GPU"},
    },
}


def test_a_table_of_allreduce_times(tmp_path: Path) -> None:
    bare, doctors = tmp_path / "bare.json", tmp_path / "doctor.json"
    bare.write_text(json.dumps(TABLE))
    doctors.write_text(json.dumps({"ok": True, "allreduce": {**TABLE, "ranks": 2}}))
    expected = [AllreduceTime(4, 4, 1e-3), AllreduceTime(2, 4, 1e-3)]
    assert read_reductions([bare, doctors], "horovod") == expected
    assert read_reductions([], "horovod") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a table of allreduce times"),
        ("[]", "not a table of allreduce times"),
        (json.dumps({**TABLE, "ranks": 1}), "no allreduce times"),
        (json.dumps({**TABLE, "backends": {}}), "no allreduce times"),
    ],
)
def test_an_invalid_table_is_reported(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"--allreduce .*table.json: {message}"):
        read_reductions([file], "horovod")
    with pytest.raises(UsageError, match="No such file"):
        read_reductions([tmp_path / "none"], "horovod")
