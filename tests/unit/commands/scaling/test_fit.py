"""The cost model in closed form, and the fit on data with known costs."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.collectives.cost import RING, TREE, Law
from hvdtrain.commands.scaling.cost_model import (
    LAWS,
    Costs,
    Fit,
    Traffic,
    efficiency_at,
    predict,
    remedies,
    step_at,
)
from hvdtrain.commands.scaling.fit import AllreduceTime, Step, fit, read_reductions
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError

TUTORIAL = {1: 281.22, 2: 382.01, 4: 689.22, 8: 1341.25}  # images/s
SIZES = (1, 2, 4, 8, 16, 32, 64)
COSTS = st.builds(
    Costs,
    compute=st.floats(1e-4, 10),
    latency=st.floats(0, 1e-2),
    transfer=st.floats(0, 1),
    overlap=st.floats(0, 1),
)
TRUTH = Costs(compute=0.2, latency=5e-3, transfer=0.08)
STRONG = replace(TRUTH, compute=4.0, fixed=0.4, latency=4e-3, transfer=0.4)


def steps(truth: Costs, law: Law, *, strong: bool = False, noise: float = 0.0) -> list[Step]:
    """Return the step times of a machine with these costs."""
    scatter = np.random.default_rng(1).standard_normal(len(SIZES))
    times = [truth.parts(law, p, 1 / p if strong else 1.0).total for p in SIZES]
    return [
        Step(p, time * (1 + noise * deviation), 0.01)
        for p, time, deviation in zip(SIZES, times, scatter, strict=True)
    ]


def divided(truth: Costs, law: Law, *, strong: bool = False) -> list[Step]:
    """Return the step times of a machine with these costs, with separate communication times."""
    measured = []
    for p in SIZES:
        costs = truth if p > 1 else truth.without_slowdown()
        parts = costs.parts(law, p, 1 / p if strong else 1.0)
        measured.append(Step(p, parts.total, 0.01, parts.exposed))
    return measured


def recovered(fitted: Fit, truth: Costs, *names: str) -> None:
    """Check these costs of the best fit."""
    for name in ("compute", "latency", "transfer", *names):
        expected = pytest.approx(getattr(truth, name), rel=0.05)
        assert getattr(fitted.best.costs, name) == expected, name


def test_ring_and_tree() -> None:
    # Thakur et al.: 2 (p - 1) and 2 log2 p messages, 2 (p - 1) / p times the data.
    assert [RING.hops(p) for p in (1, 2, 4, 8)] == [0, 2, 6, 14]
    assert [TREE.hops(p) for p in (1, 2, 3, 4, 5, 8)] == [0, 2, 4, 4, 6, 6]
    assert [law.volume(4) for law in LAWS] == [1.5, 1.5]


def test_a_step_in_closed_form() -> None:
    costs = Costs(compute=1.0, latency=0.01, transfer=0.2)
    parts = costs.parts(RING, 4)
    assert (parts.compute, parts.latency, parts.transfer) == pytest.approx((1.0, 0.06, 0.3))
    slow = replace(costs, slowdown=0.5).parts(RING, 4, passes=2)
    assert (slow.slowdown, slow.local, slow.total) == pytest.approx((1.0, 3.0, 3.36))
    assert costs.parts(RING, 1).total == 1.0
    assert replace(costs, overlap=0.5).parts(RING, 4).total == pytest.approx(1.18)
    # Of 3.6 s no more is hidden than the backward pass lasts.
    long = Costs(compute=1.0, latency=0.1, transfer=2.0, overlap=1.0).parts(RING, 4)
    assert long.total == pytest.approx(1.0 + 3.6 - 2 / 3)


def test_strong_scaling_shrinks_all_but_the_fixed_part() -> None:
    costs = Costs(compute=1.0, latency=0.0, transfer=0.0, fixed=0.2)
    assert costs.parts(RING, 4, share=0.25).total == pytest.approx(0.2 + 0.8 / 4)
    assert costs.efficiency(RING, 4, 1, strong=True) == pytest.approx(1 / 4 / 0.4)
    assert costs.efficiency(RING, 4, 1, strong=False) == 1


@given(COSTS, st.sampled_from(LAWS), st.integers(1, 4096), st.integers(1, 8))
def test_invariants_for_any_costs(costs: Costs, law: Law, ranks: int, passes: int) -> None:
    parts = costs.parts(law, ranks, 1.0, passes)
    assert parts.compute == passes * costs.compute
    assert parts.latency >= 0 and parts.transfer >= 0
    reduce = costs.latency * law.hops(ranks) + costs.transfer * law.volume(ranks)
    hidden = reduce - parts.latency - parts.transfer
    assert hidden <= costs.overlap * reduce + 1e-9
    assert hidden <= costs.compute * 2 / 3 + 1e-9
    assert costs.efficiency(law, ranks, 1, strong=False, passes=passes) <= 1 + 1e-9


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_truth_is_recovered(law: Law) -> None:
    slow = replace(TRUTH, slowdown=0.4)
    for fitted, truth, names in (
        (fit(steps(TRUTH, law), samples=0), TRUTH, ()),
        (fit(steps(TRUTH, law, noise=0.002), samples=0), TRUTH, ()),
        (fit(divided(slow, law), samples=0), slow, ("slowdown",)),
    ):
        assert fitted.best.law is law
        recovered(fitted, truth, *names)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_truth_is_recovered_with_overlap_from_a_table(law: Law) -> None:
    truth, traffic = replace(TRUTH, overlap=0.6), Traffic(messages=4, nbytes=100_000_000)
    table = [
        AllreduceTime(
            ranks,
            nbytes,
            truth.latency / 4 * law.hops(ranks) + truth.transfer / 1e8 * nbytes * law.volume(ranks),
        )
        for ranks in (8, 64)
        for nbytes in (4, 4096, 2**16, 2**20, 2**24, 2**26)
    ]
    fitted = fit(steps(truth, law), reductions=table, traffic=traffic, samples=20)
    assert fitted.best.law is law
    recovered(fitted, truth, "overlap")


def test_the_truth_is_recovered_in_strong_scaling() -> None:
    recovered(fit(divided(STRONG, RING, strong=True), strong=True, samples=0), STRONG, "fixed")
    fitted = fit(steps(STRONG, RING, strong=True), strong=True, samples=0).best
    assert fitted.law is RING
    assert fitted.costs.compute == pytest.approx(STRONG.compute, rel=0.05)
    assert fitted.costs.latency == pytest.approx(STRONG.latency, rel=0.05)
    # Only two ranks, which send half as much, distinguish the constant parts.
    both = fitted.costs.fixed + 2 * fitted.costs.transfer
    assert both == pytest.approx(STRONG.fixed + 2 * STRONG.transfer, rel=0.05)


def test_three_sizes_with_separate_communication_times_determine_the_limit() -> None:
    truth = Costs(compute=0.4, latency=1e-4, transfer=0.02, slowdown=0.7)
    fitted = fit(divided(truth, RING)[:3])
    assert predict(fitted, 16).limit == "slowdown"
    assert 2 / step_at(fitted, 2).middle == pytest.approx(2 / 0.7002, rel=0.03)
    best = remedies(fitted, None, (16,))[0]
    assert best.name == "no slowdown of computing"
    assert best.efficiencies[0].middle > efficiency_at(fitted, 16).middle + 0.2


def tutorial(*left_out: int) -> Fit:
    """Return the fit to the tutorial's figures; a step is one image per rank."""
    points = [Step(p, p / rate) for p, rate in TUTORIAL.items() if p not in left_out]
    return fit(points, samples=200)


def test_the_fit_to_the_tutorials_points() -> None:
    fitted = tutorial()
    for ranks, rate in TUTORIAL.items():
        assert ranks / step_at(fitted, ranks).middle == pytest.approx(rate, rel=0.05)
    for ranks in (16, 256, 4096):  # in weak scaling the share of computing is the efficiency
        parts, efficiency = predict(fitted, ranks).parts, efficiency_at(fitted, ranks)
        assert parts.compute / parts.total == pytest.approx(efficiency.middle)
        assert efficiency.low < efficiency.middle < efficiency.high
    ranges = [efficiency_at(fitted, ranks) for ranks in (8, 64, 512, 4096)]
    widths = [forecast.high - forecast.low for forecast in ranges]
    assert widths == sorted(widths)
    three = efficiency_at(tutorial(8), 64)
    assert three.high - three.low > widths[1] and widths[1] < 0.3
    assert efficiency_at(tutorial(), 256) == efficiency_at(fitted, 256)  # always the same answer


def test_points_that_scatter_more_than_their_errors_widen_the_range() -> None:
    def fitted(noise: float) -> Fit:
        points = [replace(step, error=0.001) for step in steps(TRUTH, RING, noise=noise)]
        return fit(points, samples=50)

    good, bad = fitted(0.0), fitted(0.02)
    assert good.misfit == 1
    assert bad.misfit > 3
    widths = [(f.high - f.low) for f in (efficiency_at(good, 256), efficiency_at(bad, 256))]
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize(
    ("strong", "seconds", "exposed"),
    [(False, (1.0, 0.01, 1.0), 0.5), (True, (0.01, 0.01, 100.0), 0.0)],
)
def test_measurements_that_contradict_the_model_are_fitted(
    strong: bool, seconds: tuple[float, ...], exposed: float
) -> None:
    """The search for the least squares ends at its limit, with a large misfit."""
    points = [Step(p, s, 0.01, exposed * s, 0.01) for p, s in zip((1, 2, 4), seconds, strict=True)]
    table = [AllreduceTime(4, nbytes, 1.0) for nbytes in (4, 10**8)]
    fitted = fit(points, strong=strong, reductions=table, traffic=Traffic(4, 10**8))
    assert fitted.misfit > 5


def test_the_limit_is_named() -> None:
    slow = fit(steps(Costs(0.2, 5e-3, 1e-3), RING), samples=10)
    narrow = fit(steps(Costs(0.2, 1e-6, 0.3), RING), samples=10)
    free = fit(steps(Costs(0.2, 1e-7, 1e-5), RING), samples=10)
    assert predict(slow, 1024).limit == "latency"
    assert predict(narrow, 16).limit == "bandwidth"
    assert predict(free, 16).limit == ""
    shares = predict(narrow, 16).parts
    assert shares.transfer / shares.total == pytest.approx(0.5625 / 0.7625, rel=0.05)


def test_remedies_help_against_the_limit() -> None:
    def gains(costs: Costs) -> dict[str, float]:
        fitted = fit(steps(costs, RING), samples=10)
        base = efficiency_at(fitted, 256).middle
        changes = remedies(fitted, Traffic(4, 10**8), (64, 256))
        return {remedy.name: remedy.efficiencies[-1].middle - base for remedy in changes}

    slow, narrow = gains(Costs(0.2, 4e-3, 1e-3)), gains(Costs(0.2, 1e-6, 0.3))
    assert slow["1 message, not 4"] > 0.1 > slow["gradients in fp16"] >= 0
    assert narrow["gradients in fp16"] > 0.1 > narrow["1 message, not 4"] >= 0
    expected = 0.2 / (0.2 + 0.15 * RING.volume(256)) - 0.2 / (0.2 + 0.3 * RING.volume(256))
    assert narrow["gradients in fp16"] == pytest.approx(expected, rel=0.03)  # half the bytes
    for gain in (slow, narrow):
        assert gain["batch per rank x 4"] > 0.1
        assert gain["accumulate 4 batches"] == pytest.approx(gain["batch per rank x 4"])


def test_no_remedy_changes_the_batch_of_strong_scaling() -> None:
    fitted = fit(steps(STRONG, RING, strong=True), strong=True, samples=10)
    names = {remedy.name for remedy in remedies(fitted, Traffic(1, 10**8), (64,))}
    assert names == {"gradients in fp16"}


def test_no_remedy_names_an_option_that_the_trainers_do_not_have() -> None:
    existing = {"--" + field.name.replace("_", "-") for field in fields(Options)}
    changes = remedies(fit(steps(TRUTH, RING), samples=10), None, (64,))
    actions = [remedy.action for remedy in changes]
    named = {option for action in actions for option in re.findall(r"--[a-z-]+", action)}
    assert "--batch-size" in named <= existing
    for action in actions:
        assert len(action) <= 70  # one line, after its name
    # For scripts that use Horovod without the trainers.
    assert any("backward_passes_per_step=4" in action for action in actions)
    assert any("Compression.fp16" in action for action in actions)


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
