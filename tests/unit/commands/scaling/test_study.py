"""What the runs of a study say together, where the runs are unusual."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from hvdtrain.commands.runs.records import Run
from hvdtrain.commands.scaling import plot
from hvdtrain.commands.scaling.model import efficiency_at
from hvdtrain.commands.scaling.report import study_text
from hvdtrain.commands.scaling.results import summarize
from hvdtrain.commands.scaling.study import WIDEST, Study, make_study
from hvdtrain.steps.summary import StepSplit, Summary
from hvdtrain.system.output import plots

TUTORIAL = {1: 281.22, 2: 382.01, 4: 689.22, 8: 1341.25}  # images/s


def tutorial(leave_out: int | None = None) -> Study:
    runs = [Run(ranks, 1, Summary(images_per_second_mean=rate)) for ranks, rate in TUTORIAL.items()]
    return make_study(runs, "weak", leave_out=leave_out)


# The smallest size left out


def test_model_and_measurement_are_relative_to_the_same_ranks() -> None:
    study, whole = tutorial(leave_out=1), tutorial()
    assert study.fit and whole.fit
    assert (whole.fit.at_base, study.fit.base) == (1, 2)
    for size in study.sizes[1:]:
        expected = efficiency_at(study.fit, size.ranks).middle
        assert expected == pytest.approx(size.efficiency, rel=0.1)
    # More ranks are no more efficient than the largest that were measured.
    assert study.predictions[0].efficiency.middle < study.sizes[-1].efficiency * 1.05
    best = max(one.efficiencies[0].middle for one in study.remedies)
    assert best <= study.sizes[1].efficiency
    assert "The smallest size fitted has 2 ranks; the prediction starts" in " ".join(
        study_text(study).split()
    )


def test_the_line_of_the_model_meets_the_measured_points() -> None:
    plots.style()
    axes = plot.make(tutorial(leave_out=1)).axes[1]
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    starts, percent = lines["model"][0]
    assert starts == 2
    assert percent == pytest.approx(100 * TUTORIAL[2] / 2 / TUTORIAL[1])


# Parts of a step that a table reports


def runs_of(*each: dict[str, float]) -> list[Run]:
    """Runs on 1, 2, 4 ... ranks, 10 images per rank and step, a step a tenth of a second."""
    return [
        Run(
            2**i,
            1,
            Summary(
                images_per_second_mean=100.0 * 2**i,
                global_batch_size=10 * 2**i,
                step_split=StepSplit(**parts),  # type: ignore[arg-type]
            ),
        )
        for i, parts in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ({"data": 0.001}, 0.1),
        ({"communication": 0.02}, 0.1),
        ({"data": 0.01, "compute": 0.05, "communication": 0.02}, 0.1),
        ({"data": 0.01, "compute": 0.05, "communication": 0.02, "waiting": 0.01}, 0.09),
        ({"data": 0.01, "undivided": 0.07}, 0.08),
        ({}, 0.1),
    ],
)
def test_a_step_is_the_sum_of_its_parts_where_all_are_known(
    parts: dict[str, float], seconds: float
) -> None:
    assert summarize(runs_of(parts))[0].seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "parts",
    [
        [{"communication": 0.0}, {"communication": 0.01}, {"communication": 0.02}],
        [{"communication": 0.1}, {"communication": 0.1}],  # nothing but that
        [{"communication": 0.2}, {"communication": 0.3}],  # more than the step
        [{"data": 0.0, "compute": 0.0, "communication": 0.1, "waiting": 0.0}] * 2,
    ],
)
def test_any_parts_make_a_report(parts: list[dict[str, float]]) -> None:
    study = make_study(runs_of(*parts), "weak", ranks=(16,))
    assert "Predicted efficiency" in study_text(study)
    assert 0.5 < study.predictions[0].efficiency.middle < 1.1  # all measured sizes are at 1


# What is predicted


def test_ranks_that_are_not_predicted_are_named() -> None:
    runs = tutorial().runs
    study = make_study(runs, "weak", ranks=(6, 8, 16))
    assert [one.ranks for one in study.predictions] == [16]
    assert study.passed_over == (6, 8)
    assert "Not predicted: 6, 8 ranks. The largest size measured has 8" in study_text(study)
    assert "Not predicted: 6 ranks." in study_text(make_study(runs, "weak", ranks=(6,)))
    assert "6, 8 ranks" not in study_text(tutorial())  # nobody asked for those


def test_more_ranks_than_samples_are_named() -> None:
    runs = [replace(run, scaling="strong") for run in runs_of({}, {})]
    runs = [replace(run, summary=replace(run.summary, global_batch_size=20)) for run in runs]
    study = make_study(runs, "strong", ranks=(16, 32))
    assert study.passed_over == (32,)
    text = " ".join(study_text(study).split())
    assert "Not predicted: 32 ranks." in text
    assert "more than 20 would be more ranks than samples" in text


def test_no_digit_is_printed_that_the_range_does_not_hold() -> None:
    study = tutorial()
    left = [one.ranks for one in study.predictions if one not in study.shown]
    assert left and left[-1] == 4096  # still there for programs
    text = study_text(study)
    assert f"Not predicted: {', '.join(map(str, left))} ranks." in " ".join(text.split())
    assert not any(line.startswith(f"  {ranks} ") for ranks in left for line in text.splitlines())
    for one in study.shown:
        assert one.efficiency.high - one.efficiency.low <= WIDEST
        row = next(line for line in text.splitlines() if line.startswith(f"  {one.ranks} "))
        assert f" {100 * one.efficiency.middle:.0f} % " in row  # whole per cents
    assert study.remedies_at[-1] == study.shown[-1].ranks


def test_runs_that_differ_too_much_are_no_ground_for_a_prediction() -> None:
    rates = {1: (1057.0, 3830.0, 6603.0), 2: (6800.0, 6900.0, 7000.0)}  # 3,830 ± 2,773
    runs = [
        Run(ranks, repeat, Summary(images_per_second_mean=rate))
        for ranks, some in rates.items()
        for repeat, rate in enumerate(some, 1)
    ]
    study = make_study(runs, "weak")
    assert (study.fit, study.predictions) == (None, ())
    text = " ".join(study_text(study).split())
    assert "No prediction: the runs on 1 rank differ so much" in text
    assert "± 42 % only" in text
    assert "3,830.0 2,773.0" in text


@pytest.mark.parametrize("sizes", [2, 4])
def test_no_legend_covers_a_curve(sizes: int) -> None:
    plots.style()
    parts = {"data": 0.01, "compute": 0.05, "communication": 0.02, "waiting": 0.02}
    study = make_study(runs_of(*[parts] * sizes), "weak")
    figures = [plot.make(study), *(one for _, one in plot.apart(study))]
    assert [len(one.axes) for one in figures] == [3, 1, 1, 1]
    for one in figures:
        one.draw_without_rendering()
        for axes in one.axes:
            legend = axes.get_legend().get_window_extent()
            assert not legend.overlaps(axes.get_window_extent())
            assert one.bbox.y1 >= legend.y1  # and it is not cut
        plt.close(one)
