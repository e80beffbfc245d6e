"""The complete texts of the report and the comparison, and the messages of the verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.timeline.verb import TimelineOptions, run_verb
from hvdtrain.config.declare import from_namespace
from tests.timelines import Timeline, straggling


def run(*words: str) -> str:
    return run_verb(from_namespace(TimelineOptions, cli.parser_of("timeline").read(words))).text


GOLDEN = Path(__file__).parent / "golden"
NOTHING = """\
timeline.json: 191 B, 2 events, unknown ranks, 0 µs

Verdict: too little to judge: no tensor was submitted to Horovod while it recorded
         -> record several training steps"""


def test_the_report_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straggling(10).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert f"{run('timeline.json')}\n" == (GOLDEN / "report.txt").read_text()


def test_the_comparison_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straggling(10).write(tmp_path, "before.json")
    straggling(10, late=10_000).write(tmp_path, "after.json")
    monkeypatch.chdir(tmp_path)
    text = run("before.json", "--diff", "after.json")
    assert f"{text}\n" == (GOLDEN / "difference.txt").read_text()


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
