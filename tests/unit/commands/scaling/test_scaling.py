"""The order and commands of a sweep, and its report; no MPI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.commands.runs.command_options import value_of, without_option
from hvdtrain.commands.runs.records import read_table
from hvdtrain.commands.scaling import sweep, verb
from hvdtrain.commands.scaling.report import report, study_text
from hvdtrain.commands.scaling.study import make_study
from hvdtrain.commands.scaling.sweep import (
    Sweep,
    check_words,
    run_order,
    run_words,
    with_batch,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import number
from tests.studies import TUTORIAL, WORDS, run

SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True)
OPTIONS = st.lists(st.sampled_from(["--lr", "0.1", "--batch_size", "--batch-size=8", "x"]))


def small_sweep(folder: Path = Path("out"), **changed: Any) -> Sweep:
    fields = {"words": WORDS, "sizes": (1, 2, 4), "repeats": 2, "scaling": "weak", "folder": folder}
    return Sweep(**{**fields, **changed})


# The order


def test_ranks_increase_then_decrease() -> None:
    assert list(run_order((1, 2, 4), 3)) == [
        *((1, 1), (2, 1), (4, 1)),
        *((4, 2), (2, 2), (1, 2)),
        *((1, 3), (2, 3), (4, 3)),
    ]


@given(SIZES, st.integers(1, 6))
def test_all_sizes_run_equally_often_and_none_is_favoured(sizes: list[int], repeats: int) -> None:
    runs = list(run_order(sorted(sizes), repeats))
    assert sorted(runs) == sorted((size, 1 + k) for size in sizes for k in range(repeats))
    if repeats % 2 == 0:  # a steady drift affects the mean position of each size equally
        positions = [[i for i, (ranks, _) in enumerate(runs) if ranks == size] for size in sizes]
        assert len({sum(indices) for indices in positions}) == 1


# The commands


def test_the_words_of_a_weak_run() -> None:
    assert run_words(small_sweep(), 4, 2) == [
        *WORDS,
        "--summary=out/runs/4-2.json",
        "--metrics=out/runs/4-2.jsonl",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", "32"], ["--global-batch-size", "32"]),
        (["--batch_size=32", "--lr", "1"], ["--lr", "1", "--global-batch-size", "32"]),
        (["--global-batch-size", "96"], ["--global-batch-size", "96"]),
    ],
)
def test_strong_scaling_keeps_the_global_batch(options: list[str], expected: list[str]) -> None:
    command = ["python", "t.py", *options]
    assert with_batch(command, "strong", 1) == ["python", "t.py", *expected]
    assert with_batch(command, "weak", 1) == command


def test_the_batch_per_rank_is_that_at_the_smallest_size() -> None:
    words = with_batch(["python", "t.py", "--batch-size", "32"], "strong", 2)
    assert value_of(words, "--global-batch-size") == "64"
    with pytest.raises(UsageError, match="--batch-size x: must be a whole number"):
        with_batch(["python", "--batch-size", "x"], "strong", 2)


def test_a_run_is_a_request_to_launch() -> None:
    plan = small_sweep(ppn=4, threads=3, ranks_per_host=4, hosts="a:4,b:4")
    assert sweep.request(plan, 2, 1) == Request(
        2,
        run_words(plan, 2, 1),
        ppn=2,  # not more than the ranks
        threads=3,
        ranks_per_host=4,
        hosts="a:4,b:4",
    )


@given(OPTIONS)
def test_a_removed_option_has_no_value(words: list[str]) -> None:
    kept = without_option(words, "--batch-size")
    assert value_of(kept, "--batch-size") is None
    remaining = iter(words)
    assert all(word in remaining for word in kept)  # in the same order
    if value_of(words, "--batch-size") is None:
        assert kept == words


@pytest.mark.parametrize(
    ("words", "mode", "message"),
    [
        ([], "weak", "missing command"),
        (["p", "--summary=x"], "weak", "--summary in the command"),
        (["p", "--metrics", "x"], "weak", "--metrics in the command"),
        (["p", "--checkpoint_dir", "x"], "weak", "--checkpoint-dir .* resume"),
        (["p", "--timeline", "x"], "weak", "--timeline .* slows"),
        (["p"], "strong", "--global-batch-size 256"),
        (["p", "--global-batch-size", "8"], "weak", "needs --strong"),
    ],
)
def test_commands_that_cannot_be_measured(words: list[str], mode: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_words(words, mode, {})


def test_a_timeline_set_by_the_environment() -> None:
    check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "DYNAMIC"})  # off until started
    with pytest.raises(UsageError, match="HOROVOD_TIMELINE is set"):
        check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "t.json"})


# The report


def table(tmp_path: Path, text: str = TUTORIAL) -> str:
    file = tmp_path / "measured.csv"
    file.write_text(text)
    return str(file)


def test_the_tutorials_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scaling", "--from", table(tmp_path), "--leave-out", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Efficiency on 8 ranks: 59.6 % (4.77 times the images/s of 1 rank)"
    assert lines[4:9] == [
        "  ranks   images/s   speed-up   efficiency",
        "  1         281.22       1.00      100.0 %",
        "  2         382.01       1.36       67.9 %",
        "  4         689.22       2.45       61.3 %",
        "  8        1,341.2       4.77       59.6 %",
    ]
    left = next(line for line in lines if line.startswith("Left out of the fit: 8 ranks"))
    assert abs(float(left.rpartition(": ")[2].rstrip(" %"))) < 15
    assert any(line.startswith("  16 ") for line in lines)
    assert list(tmp_path.iterdir()) == [tmp_path / "measured.csv"]  # nothing is written


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "--from", table(tmp_path), "--json", "--predict", "16,4096"]
    assert cli.main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    efficiencies = [round(100 * size["efficiency"], 1) for size in data["sizes"]]
    assert efficiencies == [100.0, 67.9, 61.3, 59.6]
    assert [prediction["ranks"] for prediction in data["predictions"]] == [16, 4096]
    for prediction in data["predictions"]:
        efficiency = prediction["efficiency"]
        assert efficiency["low"] < efficiency["middle"] < efficiency["high"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "none.csv"], "--from none.csv cannot be read"),
        (["--from", "x", "--ranks", "1,2"], "remove --ranks and the command"),
        (["--from", "x", "--", "python"], "remove --ranks and the command"),
        (["--ranks", "1,2"], "missing command"),
        (["--dry-run"], "missing command"),
        (["--", "python"], "--ranks is required"),
        (["--ranks", "1", "--timeout", "0", "--", "python"], "--timeout 0"),
        (["--out", "nowhere"], "no results in nowhere"),
    ],
)
def test_wrong_use_is_reported(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("scaling", *words)


def test_only_a_measured_size_can_be_left_out(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "--leave-out 3: not among the sizes measured, 1, 2, 4, 8" in refused(
        "scaling", "--from", table(tmp_path), "--leave-out", "3"
    )


def test_a_report_needs_no_command_line(tmp_path: Path) -> None:
    runs = read_table(Path(table(tmp_path)))
    data = report(runs, tmp_path, folder=tmp_path / "out", ranks=(16,), leave_out=8).data
    assert [prediction["ranks"] for prediction in data["predictions"]] == [16]
    assert data["left_out"]["ranks"] == 8
    names = ["results.csv", "scaling.pdf", "scaling.png"]
    assert [Path(file).name for file in data["files"]] == names
    assert all(Path(file).stat().st_size for file in data["files"])


@pytest.mark.parametrize("words", ["1,x", "", "0,1", "1,,2"])
def test_invalid_ranks_are_rejected(words: str) -> None:
    with pytest.raises(ValueError, match="number"):
        verb._sizes(words)
    assert verb._sizes("4,1, 2,2") == (1, 2, 4)


def test_a_study_as_text() -> None:
    rates = {1: (100.0, 102.0), 2: (190.0, 194.0), 4: (200.0, 210.0)}
    runs = [
        run(ranks, 1 + k, rate, machine="a machine, 2 cores", cores=2)
        for ranks, repeats in rates.items()
        for k, rate in enumerate(repeats)
    ]
    text = study_text(make_study(runs, "weak"))
    assert text.split("\n\n")[:4] == [
        "Efficiency on 2 ranks: 95.0 % (1.90 times the images/s of 1 rank)",
        "mnist tutorial; pytorch over horovod; bf16; weak scaling, batch 64 per rank; 2 runs per "
        "size; a\nmachine, 2 cores",
        """\
  ranks   hosts   images/s      ±      95 % interval   speed-up   efficiency            95 %
  1           1     101.00   1.41    88.29 to 113.71       1.00      100.0 %               -
  2           1     192.00   2.83   166.59 to 217.41       1.90       95.0 %   89.2 to 100.9
  4*          1     205.00   7.07   141.47 to 268.53       2.03       50.7 %    41.0 to 60.5""",
        """\
  ranks     step     data   compute   communication   waiting
  1       400 ms   100 ms    300 ms            0 µs      0 µs
  2       400 ms   100 ms    300 ms            0 µs      0 µs
  4*      400 ms   100 ms    300 ms            0 µs      0 µs""",
    ]
    assert "* oversubscribed (more threads than cores)" in text
    assert "no network between hosts" in text


@pytest.mark.parametrize(
    ("sizes", "options", "predicted"),
    [((1, 2), {}, False), ((1, 2), {"ranks": (8,)}, True), ((1, 2, 4), {}, True)],
)
def test_the_headline_is_first_and_three_sizes_are_predicted(
    sizes: tuple[int, ...], options: dict[str, Any], predicted: bool, tmp_path: Path
) -> None:
    runs = [run(ranks, rate=100.0 * ranks**0.9, step_split=None) for ranks in sizes]
    result = report(runs, tmp_path, **options)
    text = " ".join(result.text.split())
    assert text.startswith(f"Efficiency on {sizes[-1]} ranks: ")
    assert ("Predicted efficiency" in text) is predicted
    assert ("No prediction from fewer than 3 sizes" in text) is not predicted
    assert ("the prediction assumes" in text) is predicted
    assert len(result.text.splitlines()) <= (60 if predicted else 12)
    assert result.data["predictions"]  # in the JSON always


def test_samples_have_the_unit_of_the_training() -> None:
    runs = [run(n, rate=100.0 * n, unit="samples", model="mnist") for n in (1, 2)]
    text = study_text(make_study(runs, "weak"))
    assert "times the samples/s of 1 rank" in text and "images" not in text
    assert "\nmnist; pytorch" in text


def test_one_size_has_no_prediction() -> None:
    assert "No prediction: at least two sizes" in study_text(make_study([run(1)], "weak"))
    shared = [run(1, cores=1), run(2, cores=1)]
    assert "two non-oversubscribed sizes" in study_text(make_study(shared, "weak"))


def test_strong_scaling_predicts_at_most_as_many_ranks_as_samples() -> None:
    strong = {"scaling": "strong", "global_batch_size": 100}
    study = make_study([run(1, rate=100, **strong), run(2, rate=180, **strong)], "strong")
    assert [prediction.ranks for prediction in study.predictions] == [16, 32, 64]


@settings(max_examples=15)  # each fits twice and draws 200 times
@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.1, 1e6), min_size=1))
def test_any_measurement_can_be_reported(rates: dict[int, float]) -> None:
    runs = [run(ranks, rate=rate, step_split=None) for ranks, rate in rates.items()]
    text = study_text(make_study(runs, "weak", ranks=(16,)))
    for rate in rates.values():
        assert number(rate) in text
