"""A ladder's order and commands, and what is reported; no MPI."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.commands.runs.records import read_table
from hvdtrain.commands.runs.words import value_of, without
from hvdtrain.commands.scaling import ladder, verb
from hvdtrain.commands.scaling.ladder import (
    Ladder,
    check_words,
    order,
    run_words,
    with_batch,
)
from hvdtrain.commands.scaling.report import report, study_text
from hvdtrain.commands.scaling.study import make_study
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import number
from tests.studies import TUTORIAL, WORDS, run

SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True)
OPTIONS = st.lists(st.sampled_from(["--lr", "0.1", "--batch_size", "--batch-size=8", "x"]))


def plan(folder: Path = Path("out"), **other: Any) -> Ladder:
    some = {"words": WORDS, "sizes": (1, 2, 4), "repeats": 2, "scaling": "weak", "folder": folder}
    return Ladder(**{**some, **other})


# The order


def test_up_the_ladder_then_down() -> None:
    assert list(order((1, 2, 4), 3)) == [
        *((1, 1), (2, 1), (4, 1)),
        *((4, 2), (2, 2), (1, 2)),
        *((1, 3), (2, 3), (4, 3)),
    ]


@given(SIZES, st.integers(1, 6))
def test_every_size_is_run_as_often_and_none_is_favoured(sizes: list[int], repeats: int) -> None:
    runs = list(order(sorted(sizes), repeats))
    assert sorted(runs) == sorted((size, 1 + k) for size in sizes for k in range(repeats))
    if repeats % 2 == 0:  # a steady drift hits the mean place of each size alike
        places = {size: [i for i, (ranks, _) in enumerate(runs) if ranks == size] for size in sizes}
        assert len({sum(some) for some in places.values()}) == 1


# The commands


def test_the_words_of_a_weak_run() -> None:
    assert run_words(plan(), 4, 2) == [
        *WORDS,
        "--summary=out/runs/4-2.json",
        "--metrics=out/runs/4-2.jsonl",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--batch-size", "32"], ["--global-batch-size", "32"]),
        (["--batch_size=32", "--lr", "1"], ["--lr", "1", "--global-batch-size", "32"]),
        (["--global-batch-size", "96"], ["--global-batch-size", "96"]),
    ],
)
def test_strong_scaling_keeps_the_batch_of_all_ranks(given: list[str], expected: list[str]) -> None:
    assert with_batch(["python", "t.py", *given], "strong", 1) == ["python", "t.py", *expected]
    assert with_batch(["python", "t.py", *given], "weak", 1) == ["python", "t.py", *given]


def test_the_batch_of_a_rank_is_that_at_the_smallest_size() -> None:
    words = with_batch(["python", "t.py", "--batch-size", "32"], "strong", 2)
    assert value_of(words, "--global-batch-size") == "64"
    with pytest.raises(UsageError, match="--batch-size x: give a whole number"):
        with_batch(["python", "--batch-size", "x"], "strong", 2)


def test_what_is_run_is_what_launch_would_run() -> None:
    some = plan(ppn=4, threads=3, ranks_per_host=4, hosts="a:4,b:4")
    two_fill_no_host = 2
    assert ladder.request(some, 2, 1) == Request(
        2,
        run_words(some, 2, 1),
        ppn=two_fill_no_host,
        threads=3,
        ranks_per_host=4,
        hosts="a:4,b:4",
    )


@given(OPTIONS)
def test_an_option_that_is_taken_out_is_gone(words: list[str]) -> None:
    left = without(words, "--batch-size")
    assert value_of(left, "--batch-size") is None
    rest = iter(words)
    assert all(word in rest for word in left)  # in the same order
    if value_of(words, "--batch-size") is None:
        assert left == words


@pytest.mark.parametrize(
    ("words", "mode", "message"),
    [
        ([], "weak", "what should be measured"),
        (["p", "--summary=x"], "weak", "--summary in the command: the study gives"),
        (["p", "--metrics", "x"], "weak", "--metrics in the command"),
        (["p", "--checkpoint_dir", "x"], "weak", "--checkpoint-dir .* go on from"),
        (["p", "--timeline", "x"], "weak", "--timeline .* slows"),
        (["p"], "strong", "--global-batch-size 256"),
        (["p", "--global-batch-size", "8"], "weak", "say --strong"),
    ],
)
def test_commands_that_cannot_be_measured(words: list[str], mode: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_words(words, mode, {})


def test_a_timeline_from_outside() -> None:
    check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "DYNAMIC"})  # off until asked for
    with pytest.raises(UsageError, match="HOROVOD_TIMELINE is set"):
        check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "t.json"})


# What is reported


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
    assert [one["ranks"] for one in data["predictions"]] == [16, 4096]
    for one in data["predictions"]:
        assert one["efficiency"]["low"] < one["efficiency"]["middle"] < one["efficiency"]["high"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "none.csv"], "--from none.csv cannot be read"),
        (["--from", "x", "--ranks", "1,2"], "leave --ranks and the command out"),
        (["--from", "x", "--", "python"], "leave --ranks and the command out"),
        (["--ranks", "1,2"], "what should be run?"),
        (["--dry-run"], "what should be run?"),
        (["--", "python"], "--ranks: on how many ranks?"),
        (["--ranks", "1", "--timeout", "0", "--", "python"], "--timeout 0: give seconds"),
        (["--out", "nowhere"], "no results in nowhere"),
    ],
)
def test_wrong_use(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("scaling", *words)


def test_a_size_that_was_not_measured_cannot_be_left_out(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert "--leave-out 3: not among the sizes measured, 1, 2, 4, 8" in refused(
        "scaling", "--from", table(tmp_path), "--leave-out", "3"
    )


def test_a_report_needs_no_command_line(tmp_path: Path) -> None:
    runs = read_table(Path(table(tmp_path)))
    found = report(runs, tmp_path, folder=tmp_path / "out", ranks=(16,), leave_out=8)
    assert [one["ranks"] for one in found.data["predictions"]] == [16]
    assert found.data["left_out"]["ranks"] == 8
    assert [Path(file).name for file in found.data["files"]] == [
        *("results.csv", "scaling.pdf", "scaling.png")
    ]
    assert all(Path(file).stat().st_size for file in found.data["files"])


@pytest.mark.parametrize("words", ["1,x", "", "0,1", "1,,2"])
def test_ranks_that_are_none(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of 1 or more"):
        verb._sizes(words)
    assert verb._sizes("4,1, 2,2") == (1, 2, 4)


def test_a_whole_study_as_text() -> None:
    rates = {1: (100.0, 102.0), 2: (190.0, 194.0), 4: (200.0, 210.0)}
    runs = [
        run(ranks, 1 + k, rate, machine="a machine, 2 cores", cores=2)
        for ranks, some in rates.items()
        for k, rate in enumerate(some)
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
    assert "no network between hosts is in it" in text


@pytest.mark.parametrize(
    ("sizes", "asked", "predicted"),
    [((1, 2), {}, False), ((1, 2), {"ranks": (8,)}, True), ((1, 2, 4), {}, True)],
)
def test_the_answer_comes_first_and_a_prediction_where_points_are_enough(
    sizes: tuple[int, ...], asked: dict[str, Any], predicted: bool, tmp_path: Path
) -> None:
    runs = [run(ranks, rate=100.0 * ranks**0.9, step_split=None) for ranks in sizes]
    found = report(runs, tmp_path, **asked)
    text = " ".join(found.text.split())
    assert text.startswith(f"Efficiency on {sizes[-1]} ranks: ")
    assert ("Predicted efficiency" in text) is predicted
    assert ("No prediction from fewer than 3 sizes" in text) is not predicted
    assert ("the prediction assumes" in text) is predicted
    assert len(found.text.splitlines()) <= (60 if predicted else 12)
    assert found.data["predictions"]  # for programs, as ever


def test_samples_are_called_what_the_training_calls_them() -> None:
    runs = [run(n, rate=100.0 * n, unit="samples", model="mnist") for n in (1, 2)]
    text = study_text(make_study(runs, "weak"))
    assert "times the samples/s of 1 rank" in text and "images" not in text
    assert "\nmnist; pytorch" in text


def test_one_size_predicts_nothing() -> None:
    assert "No prediction: it takes two numbers of ranks" in study_text(
        make_study([run(1)], "weak")
    )
    shared = [run(1, cores=1), run(2, cores=1)]
    assert "that do not share cores" in study_text(make_study(shared, "weak"))


def test_strong_scaling_predicts_no_more_ranks_than_samples() -> None:
    strong = {"scaling": "strong", "global_batch_size": 100}
    found = make_study([run(1, rate=100, **strong), run(2, rate=180, **strong)], "strong")
    assert [one.ranks for one in found.predictions] == [16, 32, 64]


@settings(max_examples=15)  # each fits twice and draws 200 times
@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.1, 1e6), min_size=1))
def test_any_measurement_makes_a_report(rates: dict[int, float]) -> None:
    runs = [run(ranks, rate=rate, step_split=None) for ranks, rate in rates.items()]
    text = study_text(make_study(runs, "weak", ranks=(16,)))
    for rate in rates.values():
        assert number(rate) in text
