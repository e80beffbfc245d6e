"""Sentences that readers had to read twice: they say the same in the field's words now."""

from __future__ import annotations

import re

from tests.conftest import ROOT

TWICE = (
    "warms up shorter",
    "for as long as the rank that came last",
    "was blocked longer than that",
    "place in the training",
    "not needed by all is none",
    "the word is left out",
    "last but one",
    "What went on",
    "Look around",
    "<h2>Course</h2>",
)
PLACES = ("README.md", "docs/*.md", "homework/*.md", "jobs/*.md", "hvdtrain/**/*")


def test_no_sentence_that_has_to_be_read_twice() -> None:
    paths = [path for place in PLACES for path in ROOT.glob(place)]
    paths = [path for path in paths if path.suffix in (".md", ".py", ".html", ".js")]
    assert len(paths) > 200
    for path in paths:
        text = re.sub(r"\s+", " ", path.read_text())
        found = [words for words in TWICE if words in text]
        assert not found, f"{path}: {found}"
