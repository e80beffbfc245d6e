"""The evaluation of studies with unusual runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from hvdtrain.commands.runs.records import Run
from hvdtrain.commands.scaling import plot
from hvdtrain.commands.scaling.cost_model import efficiency_at
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
    study, complete = tutorial(leave_out=1), tutorial()
    assert study.fit and complete.fit
    assert (complete.fit.at_base, study.fit.base) == (1, 2)
    for size in study.sizes[1:]:
        expected = efficiency_at(study.fit, size.ranks).middle
        assert expected == pytest.approx(size.efficiency, rel=0.1)
    # More ranks are not more efficient than the largest measured size.
    assert study.predictions[0].efficiency.middle < study.sizes[-1].efficiency * 1.05
    best = max(remedy.efficiencies[0].middle for remedy in study.remedies)
    assert best <= study.sizes[1].efficiency
    assert "The smallest size fitted has 2 ranks; the prediction starts" in " ".join(
        study_text(study).split()
    )


def test_the_line_of_the_model_meets_the_measured_points() -> None:
    plots.style()
    axes = plot.make_figure(tutorial(leave_out=1)).axes[1]
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    starts, percent = lines["model"][0]
    assert starts == 2
    assert percent == pytest.approx(100 * TUTORIAL[2] / 2 / TUTORIAL[1])


# Parts of a step that a table reports


def runs_of(*each: dict[str, float]) -> list[Run]:
    """Return runs on 1, 2, 4 ... ranks, 10 images per rank and step, 0.1 seconds per step."""
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
def test_a_step_is_the_sum_of_its_parts_if_all_are_known(
    parts: dict[str, float], seconds: float
) -> None:
    assert summarize(runs_of(parts))[0].seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "parts",
    [
        [{"communication": 0.0}, {"communication": 0.01}, {"communication": 0.02}],
        [{"communication": 0.1}, {"communication": 0.1}],  # nothing else
        [{"communication": 0.2}, {"communication": 0.3}],  # more than the step
        [{"data": 0.0, "compute": 0.0, "communication": 0.1, "waiting": 0.0}] * 2,
    ],
)
def test_any_parts_can_be_reported(parts: list[dict[str, float]]) -> None:
    study = make_study(runs_of(*parts), "weak", ranks=(16,))
    assert "Predicted efficiency" in study_text(study)
    assert 0.5 < study.predictions[0].efficiency.middle < 1.1  # all measured sizes are at 1


# The prediction


def test_ranks_that_are_not_predicted_are_named() -> None:
    runs = tutorial().runs
    study = make_study(runs, "weak", ranks=(6, 8, 16))
    assert [prediction.ranks for prediction in study.predictions] == [16]
    assert study.not_predicted == (6, 8)
    assert "Not predicted: 6, 8 ranks. The largest size measured has 8" in study_text(study)
    assert "Not predicted: 6 ranks." in study_text(make_study(runs, "weak", ranks=(6,)))
    assert "6, 8 ranks" not in study_text(tutorial())  # not requested


def test_more_ranks_than_samples_are_named() -> None:
    runs = [replace(run, scaling="strong") for run in runs_of({}, {})]
    runs = [replace(run, summary=replace(run.summary, global_batch_size=20)) for run in runs]
    study = make_study(runs, "strong", ranks=(16, 32))
    assert study.not_predicted == (32,)
    text = " ".join(study_text(study).split())
    assert "Not predicted: 32 ranks." in text
    assert "more than 20 would be more ranks than samples" in text


def test_only_significant_digits_are_printed() -> None:
    study = tutorial()
    hidden = [p.ranks for p in study.predictions if p not in study.shown]
    assert hidden and hidden[-1] == 4096  # still in the JSON
    text = study_text(study)
    assert f"Not predicted: {', '.join(map(str, hidden))} ranks." in " ".join(text.split())
    lines = text.splitlines()
    assert not any(line.startswith(f"  {ranks} ") for ranks in hidden for line in lines)
    for prediction in study.shown:
        efficiency = prediction.efficiency
        assert efficiency.high - efficiency.low <= WIDEST
        row = next(line for line in lines if line.startswith(f"  {prediction.ranks} "))
        assert f" {100 * efficiency.middle:.0f} % " in row  # without decimals
    assert study.remedies_at[-1] == study.shown[-1].ranks


def test_runs_that_vary_too_much_have_no_prediction() -> None:
    rates = {1: (1057.0, 3830.0, 6603.0), 2: (6800.0, 6900.0, 7000.0)}  # 3,830 ± 2,773
    runs = [
        Run(ranks, repeat, Summary(images_per_second_mean=rate))
        for ranks, repeats in rates.items()
        for repeat, rate in enumerate(repeats, 1)
    ]
    study = make_study(runs, "weak")
    assert (study.fit, study.predictions) == (None, ())
    text = " ".join(study_text(study).split())
    assert "No prediction: the runs on 1 rank vary too much" in text
    assert "± 42 %" in text
    assert "3,830.0 2,773.0" in text


@pytest.mark.parametrize("sizes", [2, 4])
def test_no_legend_covers_a_curve(sizes: int) -> None:
    plots.style()
    parts = {"data": 0.01, "compute": 0.05, "communication": 0.02, "waiting": 0.02}
    study = make_study(runs_of(*[parts] * sizes), "weak")
    figures = [plot.make_figure(study), *(figure for _, figure in plot.panel_figures(study))]
    assert [len(figure.axes) for figure in figures] == [3, 1, 1, 1]
    for figure in figures:
        figure.draw_without_rendering()
        for axes in figure.axes:
            legend = axes.get_legend().get_window_extent()
            assert not legend.overlaps(axes.get_window_extent())
            assert figure.bbox.y1 >= legend.y1  # not cut off
        plt.close(figure)
