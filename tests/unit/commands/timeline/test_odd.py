"""Events that Horovod does not write are counted or displayed, and do not stop the analysis."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.report import page as report_page
from hvdtrain.commands.report.find import look
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.facts import analyse
from hvdtrain.commands.timeline.read import LATEST
from hvdtrain.commands.timeline.trace_page import write
from hvdtrain.commands.timeline.verb import add_arguments, run_verb
from tests.timelines import Timeline, straggling

Facts = dict[str, Any]


def facts_of(text: str, folder: Path) -> Facts:
    path = folder / "timeline.json"
    path.write_text(text)
    return analyse(path)[0]


def text_of(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_verb(parser.parse_args(list(words))).text


@pytest.mark.parametrize("time", ["1e400", "-1e400", "1e300", "1" + 400 * "0", "NaN", str(LATEST)])
@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "B", "name": "ALLREDUCE", "ts": TIME, "pid": 1}',
        '{"ph": "E", "ts": TIME, "pid": 1}',
        '{"ph": "X", "name": "1", "ts": TIME, "pid": 1, "dur": 0}',
        '{"ph": "i", "name": "CYCLE_START", "ts": TIME, "s": "g"}',
    ],
)
def test_an_invalid_time_is_counted(event: str, time: str, tmp_path: Path) -> None:
    timeline = straggling(4)
    plain = facts_of(timeline.text, tmp_path)
    timeline.pieces.append(event.replace("TIME", time))
    facts = facts_of(timeline.text, tmp_path)
    assert sum(facts["file"]["unfamiliar"].values()) == 1
    for key in ("seconds", "states", "steps", "lateness", "phases"):
        assert facts[key] == plain[key]
    mended = tmp_path / "mended.json"
    text_of(str(tmp_path / "timeline.json"), "--repair", str(mended))
    assert len(json.loads(mended.read_text())) == plain["file"]["events"]


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "E", "ts": 5, "pid": [1]}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": {}}',
        '{"ph": "X", "name": 1e400, "ts": 5, "pid": null}',
        '{"ph": ["B"], "ts": 5, "pid": 1}',
        '{"name": "process_name", "ph": "M", "pid": [1], "args": {"name": "a"}}',
    ],
)
def test_an_invalid_tensor_or_kind_is_counted(event: str, tmp_path: Path) -> None:
    timeline = straggling(4)
    timeline.pieces.append(event)
    facts = facts_of(timeline.text, tmp_path)
    assert sum(facts["file"]["unfamiliar"].values()) == 1
    assert facts["steps"]["whole"] == 3


def test_without_ticks_of_two_ranks_no_rank_is_late(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(4):
        for rank, name in enumerate("ab"):
            timeline.negotiate(name, 1_000 * step + 20 * rank, {rank: 10})
        timeline.allreduce(["a", "b"], 1_000 * step + 100, 100, (10,))
    facts = facts_of(timeline.text, tmp_path)
    assert facts["lateness"]["told"] is False
    assert "straggler" not in [finding["kind"] for finding in facts["verdict"]]


@pytest.mark.parametrize("clock", [lambda time: 5, lambda time: 10**9 - time])
def test_a_clock_that_stops_or_goes_backwards_yields_no_steps(clock: Any, tmp_path: Path) -> None:
    text = re.sub(r'"ts": (\d+)', lambda match: f'"ts": {clock(int(match[1]))}', straggling(4).text)
    assert facts_of(text, tmp_path)["steps"] is None


def test_an_implausibly_large_tensor_has_no_size(tmp_path: Path) -> None:
    text = straggling(4).text.replace("[100, 100]", f"[{400 * '9'}]")
    facts = facts_of(text, tmp_path)
    assert {row["bytes"] for row in facts["operations"]} == {0}
    assert "gradient.0" in text_of(str(tmp_path / "timeline.json"))


@pytest.mark.parametrize("odd", ["\\ud800", "\\u001b[2J", "\\u0000", "\\u202e"])
def test_unprintable_names_are_displayed(odd: str, tmp_path: Path) -> None:
    text = straggling(4).text.replace("MEMCPY_IN_FUSION_BUFFER", f"IN{odd}")
    path, page = tmp_path / "timeline.json", tmp_path / "page.html"
    path.write_text(text.replace("gradient.0", f"tensor{odd}"))
    for words in ([], ["--diff", str(path)], ["--html", str(page)]):
        text = text_of(str(path), *words)
        assert "IN?" in text
        assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert '<td class="left">IN?' in page.read_text()


def test_an_undecodable_file_name_is_displayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/t\xff\x1b[2J.json"))
    shutil.copy(straggling(4).write(tmp_path), odd)
    recorder = Recorder()
    write(tmp_path / "page.html", *analyse(odd, recorder=recorder), recorder)
    assert "t??[2J.json" in (tmp_path / "page.html").read_text()
    assert text_of(str(odd), "--diff", str(odd)).count("t??[2J.json") == 2
    report_page.write(tmp_path / "report.html", look(tmp_path))
    assert "Timeline t??[2J.json" in (tmp_path / "report.html").read_text()
    odd.write_text("[1]")
    straggling(4).write(tmp_path)
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert "left out: t??[2J.json: " in capsys.readouterr().out
