"""The table that ends a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.training.summary import evaluated, evaluation_rows, rows

SUMMARY = Summary(
    samples_trained=12_345,
    steps_completed=1_200,
    epochs_completed=6,
    train_loss=0.12344,
    eval_loss=0.05,
    eval_accuracy=0.9912,
    eval_samples=10_000,
    images_per_second_mean=20_000.0,
    images_per_second_std=12.34,
    seconds_total=61.25,
    seconds_to_first_step=3.0,
    stopped=Stopped.FINISHED,
)


SHOWN = {"accuracy": "99.12 %"}
RATES = [0.7, 20_000.0, 20_500.0]  # one slow step: the deviation is as large as the mean


def test_the_table() -> None:
    table = dict(rows(SUMMARY, RATES, SHOWN))
    assert table["trained"] == "12,345 images in 1,200 steps, 6 whole epochs"
    assert table["training loss"] == "0.1234"
    assert table["test accuracy"] == "99.12 % of 10,000"
    assert table["images/s"] == "20,000.0 in the median step, 0.7 to 20,500.0; over all ranks"
    assert "checkpoint" not in table
    assert (
        dict(rows(replace(SUMMARY, checkpoint="/c/step-1"), RATES, SHOWN))["checkpoint"]
        == "/c/step-1"
    )
    recorded = dict(rows(replace(SUMMARY, timeline="t.json"), RATES, SHOWN))
    assert recorded["timeline"] == "t.json"
    assert recorded["images/s"].endswith(", without the steps recorded")
    nothing = replace(SUMMARY, timeline="t.json")
    assert dict(rows(nothing, [], SHOWN))["images/s"] == "- (steps recorded)"


def test_the_table_of_other_samples_and_metrics() -> None:
    table = dict(rows(SUMMARY, RATES, {"r2": "0.4512", "map": "0.2000"}, "patients"))
    assert (table["test r2"], table["test map"]) == ("0.4512 of 10,000", "0.2000 of 10,000")
    assert table["trained"].startswith("12,345 patients in")
    assert "patients/s" in table and "test accuracy" not in table


def test_the_table_without_evaluation_and_without_a_step() -> None:
    empty = Summary(
        samples_trained=0,
        steps_completed=0,
        epochs_completed=0,
        seconds_total=1.0,
        stopped=Stopped.PREEMPTED,
    )
    table = dict(rows(empty, [], {"accuracy": "-"}))
    assert table["training loss"] == table["test loss"] == table["test accuracy"] == "-"
    assert table["stopped"] == "preempted and saved: run the same command again to go on"


def test_the_table_of_a_run_that_trained_nothing() -> None:
    found = Summary(**evaluated({"loss": 0.5, "accuracy": 0.75, "samples": 8}), seconds_total=2.04)
    table = evaluation_rows(replace(found, checkpoint="c"), {"accuracy": "75.00 %"}, Path("p.csv"))
    assert table == [
        ("checkpoint", "c"),
        ("test loss", "0.5000"),
        ("test accuracy", "75.00 % of 8"),
        ("seconds", "2.0"),
        ("predictions", "p.csv"),
    ]
