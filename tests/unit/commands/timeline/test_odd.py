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
from hvdtrain.commands.report.find import look
from hvdtrain.commands.report.page import render
from hvdtrain.commands.timeline.read import LATEST
from hvdtrain.commands.timeline.verb import add_arguments, run_verb
from tests.timelines import Timeline, facts_of, straggling

TIMED = (
    '{"ph": "B", "name": "ALLREDUCE", "ts": TIME, "pid": 1}',
    '{"ph": "E", "ts": TIME, "pid": 1}',
    '{"ph": "X", "name": "1", "ts": TIME, "pid": 1, "dur": 0}',
    '{"ph": "i", "name": "CYCLE_START", "ts": TIME, "s": "g"}',
)


def text_of(*words: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_verb(parser.parse_args(list(words))).text


@pytest.mark.parametrize(
    "event",
    [
        *(event.replace("TIME", str(LATEST)) for event in TIMED),
        *(TIMED[0].replace("TIME", time) for time in ("1e400", "-1e300", "1" + 400 * "0", "NaN")),
        '{"ph": "E", "ts": 5, "pid": [1]}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": {}}',
        '{"ph": "X", "name": 1e300, "ts": 5, "pid": null}',
        '{"ph": ["B"], "ts": 5, "pid": 1}',
        '{"name": "process_name", "ph": "M", "pid": [1], "args": {"name": "a"}}',
        '{"a":' * 3000 + '{"b": "' + "x" * 3000 + '"}',
    ],
)
def test_an_odd_event_costs_only_itself(event: str, tmp_path: Path) -> None:
    timeline = straggling(4)
    plain = facts_of(timeline, tmp_path)
    timeline.pieces.insert(-20, f"{event},")
    facts = facts_of(timeline, tmp_path)
    ignored = sum(facts["file"]["unfamiliar"].values())
    assert ignored == 1 or (facts["file"]["skipped_bytes"] and facts["file"]["events"] == 164)
    for key in ("seconds", "states", "steps", "lateness", "phases"):
        assert facts[key] == plain[key]
    mended = tmp_path / "mended.json"
    text_of(str(tmp_path / "timeline.json"), "--repair", str(mended))
    assert len(json.loads(mended.read_text())) == plain["file"]["events"]


def test_without_ticks_of_two_ranks_no_rank_is_late(tmp_path: Path) -> None:
    timeline = Timeline()
    for step in range(4):
        for rank, name in enumerate("ab"):
            timeline.negotiate(name, 1_000 * step + 20 * rank, {rank: 10})
        timeline.allreduce(["a", "b"], 1_000 * step + 100, 100, (10,))
    facts = facts_of(timeline, tmp_path)
    assert facts["lateness"]["recorded"] is False
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


@pytest.mark.parametrize("odd", ["\\u001b[2J", "\\u0000", "\\u202e"])
def test_unprintable_names_are_displayed(odd: str, tmp_path: Path) -> None:
    text = straggling(4).text.replace("MEMCPY_IN_FUSION_BUFFER", f"IN{odd}")
    path, page = tmp_path / "timeline.json", tmp_path / "page.html"
    path.write_text(text.replace("gradient.0", f"tensor{odd}"))
    for words in ([], ["--diff", str(path)], ["--html", str(page)]):
        text = text_of(str(path), *words)
        assert "IN?" in text
        assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert 'class="left">IN?' in page.read_text()


def test_an_undecodable_file_name_is_displayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/t\xff\x1b[2J.json"))
    shutil.copy(straggling(4).write(tmp_path), odd)
    page = tmp_path / "page.html"
    text_of(str(odd), "--html", str(page))
    assert "t??[2J.json" in page.read_text()
    assert text_of(str(odd), "--diff", str(odd)).count("t??[2J.json") == 2
    assert "Timeline t??[2J.json" in render(look(tmp_path))
    odd.write_text("[1]")
    straggling(4).write(tmp_path)
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    assert "left out: t??[2J.json: " in capsys.readouterr().out


def test_a_page_does_not_replace_the_timeline(tmp_path: Path) -> None:
    source = straggling(4).write(tmp_path)
    (tmp_path / "link").symlink_to(source)
    before = source.read_bytes()
    for page in (source, tmp_path / "link"):
        assert cli.main(["timeline", str(source), "--html", str(page)]) == 2
    assert source.read_bytes() == before
