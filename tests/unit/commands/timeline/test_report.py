"""The complete texts of the report and the comparison, and the messages of the verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.timeline.verb import Options, run_verb
from hvdtrain.config.declare import from_namespace
from tests.timelines import Timeline, straggling


def run(*words: str) -> str:
    return run_verb(from_namespace(Options, cli.parser_of("timeline").read(words))).text


REPORT = """\
timeline.json: 22.7 KiB, 398 events, 3 ranks, 682 ms, from 2023-11-14T22:13:21.000+00:00
10 steps, 9 of them whole: 70.0 ms in the median, 70.0 ms in the mean

Verdict: bound by a straggler: rank 2 was ready last in 9 of 9 steps (100 %), by 50.0 ms in the
         median, 50.0 ms in the mean; that cost 450 ms of 630 ms (71 %)
         -> check how rank 2 differs from the others: its host (clock, temperature, other programs),
         its data (larger files, slower disk), its part of the batch, work of this rank only
         (logging, checkpoints)

Time of the 9 whole steps, seen from rank 0
                                 median step     total       share
  communicating                      2.20 ms   19.8 ms       3.1 %
    hidden by computing                           0 µs   0 % of it
  waiting for a rank                 50.2 ms    452 ms        72 %
  neither: computing, data ...       17.6 ms    158 ms        25 %

Lateness: 30 of 30 negotiations record when each rank was ready
  last in   steps   by median      mean     cost   tensors   by median      mean   behind first
  rank 2        9     50.0 ms   50.0 ms   450 ms        30     50.0 ms   50.0 ms        50.0 ms
  rank 0        -           -         -        -         -           -         -           0 µs
  rank 1        -           -         -        -         -           -         -           1 µs

Slowest steps: 5 (70.0 ms, rank 2 late by 50.0 ms), 4 (70.0 ms, rank 2 late by 50.0 ms), 3 (70.0 ms,
  rank 2 late by 50.0 ms), 2 (70.0 ms, rank 2 late by 50.0 ms), 1 (70.0 ms, rank 2 late by 50.0 ms)

Phases, whole file
                                                bars      time   summed over tensors   time per step
  negotiate          NEGOTIATE_ALLREDUCE          30    502 ms                1.50 s         50.2 ms
  operation, whole   ALLREDUCE                    30   22.0 ms               66.0 ms         2.20 ms
  memcpy in          MEMCPY_IN_FUSION_BUFFER      30   1.00 ms               3.00 ms          100 µs
  collective         MPI_ALLREDUCE                30   20.0 ms               60.0 ms         2.00 ms
  memcpy out         MEMCPY_OUT_FUSION_BUFFER     30   1.00 ms               3.00 ms          100 µs

Collectives, in tensors: ALLREDUCE 30 negotiated, 30 carried out

Fusion: operations carried out
                  operations   tensors each   bytes each    median     total   bytes/time
  MPI_ALLREDUCE           10            3.0    117.2 KiB   2.00 ms   20.0 ms   57.2 MiB/s

Cycles: not marked in this file, so the share of the cycle time is unknown
(HOROVOD_TIMELINE_MARK_CYCLES=1 marks them)

Tensors that took the most time (3 of 3)
               times      bytes   negotiate   memcpy in   collective   memcpy out
  gradient.0      10   39.1 KiB      500 ms     1.00 ms      20.0 ms      1.00 ms
  gradient.1      10   39.1 KiB      500 ms     1.00 ms      20.0 ms      1.00 ms
  gradient.2      10   39.1 KiB      500 ms     1.00 ms      20.0 ms      1.00 ms

Limits: the file is written by rank 0 and records Horovod's work there. Computing, data loading and
the other ranks' work are not in it, only the time at which each rank submitted a tensor, to within
a cycle. Communication counts as hidden while some rank still had a tensor of the step to submit."""

DIFFERENCE = """\
before: before.json
after: after.json

Times per step
                                           before     after   after/before
  step                                    70.0 ms   70.0 ms           1.00
  step         communicating              2.20 ms   2.20 ms           1.00
  step         waiting                    50.2 ms   10.2 ms           0.20
  step         neither                    17.6 ms   57.6 ms           3.27
  step         lateness                   50.0 ms   10.0 ms           0.20
  negotiate    NEGOTIATE_ALLREDUCE        50.2 ms   10.2 ms           0.20
  operation    ALLREDUCE                  2.20 ms   2.20 ms           1.00
  memcpy in    MEMCPY_IN_FUSION_BUFFER     100 µs    100 µs           1.00
  collective   MPI_ALLREDUCE              2.00 ms   2.00 ms           1.00
  memcpy out   MEMCPY_OUT_FUSION_BUFFER    100 µs    100 µs           1.00"""

NOTHING = """\
timeline.json: 191 B, 2 events, unknown ranks, 0 µs

Verdict: too little to judge: no tensor was submitted to Horovod while it recorded
         -> record several training steps"""


def test_the_report_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straggling(10).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("timeline.json") == REPORT


def test_the_comparison_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straggling(10).write(tmp_path, "before.json")
    straggling(10, late=10_000).write(tmp_path, "after.json")
    monkeypatch.chdir(tmp_path)
    assert run("before.json", "--diff", "after.json") == DIFFERENCE


def test_the_report_on_an_empty_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Timeline().write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("timeline.json") == NOTHING


def test_json_is_printed_without_other_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = straggling(10).write(tmp_path)
    page, mended = tmp_path / "page.html", tmp_path / "mended.json"
    words = ["timeline", str(path), "--json", "--html", str(page), "--repair", str(mended)]
    assert cli.main([*words, "--diff", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"][0]["rank"] == 2
    assert data["repaired"]["events"] == 398
    assert {row["ratio"] for row in data["diff"]["rows"]} <= {1.0, None}
    assert page.exists()
    assert mended.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.json"], "missing.json cannot be read: No such file or directory"),
        (["empty.json"], "empty.json is empty"),
        (["good.json", "--slice", "3:1"], "--slice 3:1: must be FROM:TO"),
        (["good.json", "--slice", "x:1"], "--slice x:1: must be FROM:TO"),
        (["good.json", "--slice", "5"], "--slice 5: must be FROM:TO"),
        (["good.json", "--slice", "9:10"], "--slice 9:10: good.json ends after 192 ms"),
        (["good.json", "--slice", "9:"], "--slice 9:: good.json ends after 192 ms"),
        (["good.json", "--diff", "missing.json"], "missing.json cannot be read"),
        (["good.json", "--html", "no/page.html"], "no/page.html cannot be written"),
        (["good.json", "--repair", "no/out.json"], "no/out.json cannot be written"),
        (["trace.json"], "trace.json is not a Horovod timeline"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    straggling(3).write(tmp_path, "good.json")
    (tmp_path / "empty.json").touch()
    (tmp_path / "trace.json").write_text(
        json.dumps([{"ph": "X", "name": "aten::add", "ts": 5, "dur": 7, "pid": 3, "tid": 3}])
    )
    assert message in refused("timeline", *words)
    assert {path.name for path in tmp_path.iterdir()} == {"good.json", "empty.json", "trace.json"}


@pytest.mark.parametrize("words", ["0.07:0.2", ":0.2", "0.07:"])
def test_the_slice_is_reported(words: str, tmp_path: Path) -> None:
    path = straggling(5).write(tmp_path)
    low, _, high = words.partition(":")
    end = f"{high} s" if high else "the end"
    assert f"between {low or 0} s after the first event and {end}" in run(
        str(path), "--slice", words
    )
