"""Names that a terminal would obey are displayed; a page does not replace its timeline."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.report.find import look
from hvdtrain.commands.report.page import render
from hvdtrain.commands.timeline.verb import TimelineOptions, run_verb
from hvdtrain.config.declare import from_namespace
from tests.timelines import straggling


def text_of(*words: str) -> str:
    return run_verb(from_namespace(TimelineOptions, cli.parser_of("timeline").read(words))).text


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
