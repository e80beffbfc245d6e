"""Standard error: progress on a terminal and without one, and without unwanted lines."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import run
from tests.terminal import record, screen

FILTERED = """
import os, sys
from hvdtrain.system.output import stderr
{before}
with stderr.without(lambda line: line.startswith(b"banner")):
    os.write(2, b"banner of C++\\nkept\\n")
    print("banner of Python", file=sys.stderr)
    {within}
print("after", file=sys.stderr)
print("done")
"""


@pytest.mark.parametrize(
    ("before", "within", "code", "lines"),
    [
        ("", "", 0, ["kept", "after"]),
        ("", "sys.exit(3)", 3, ["banner of C++", "kept", "banner of Python"]),
        ("", "os.write(2, b'no end')", 0, ["kept", "no endafter"]),
        ("sys.stderr = open(os.devnull, 'w'); os.close(2); os.write = lambda *_: 0", "", 0, []),
    ],
    ids=["filtered", "an error shows all", "a line without end", "closed"],
)
def test_unwanted_lines_are_dropped(before: str, within: str, code: int, lines: list[str]) -> None:
    done = run([sys.executable, "-c", FILTERED.format(before=before, within=within)])
    assert (done.code, done.err.splitlines()) == (code, lines)
    assert done.out == ("" if code else "done\n")


PROGRAM = """
import logging, sys, time
from hvdtrain.system.output import stderr
logging.basicConfig(level=logging.INFO, format="%(message)s")
with stderr.Display() as shown:
    shown.stage("unpack")
    shown.show("compile [1/2]", 0.25)
    time.sleep(1.0)  # a bar is drawn ten times a second
    stderr.LINE_EVERY = 0.0
    shown.show("compile [2/2]", 0.5)
    time.sleep(1.0)
    shown.show("pack")
print("done")
"""


def test_the_bar_is_removed_at_the_end() -> None:
    seen = record([sys.executable, "-c", PROGRAM])
    assert seen.code == 0, seen.text
    assert "compile [1/2]" in seen.text
    assert "compile [2/2]" in seen.text
    shown = re.sub(r"\x1b\[\?25[lh]", "", seen.text)  # codes that hide and show the cursor
    assert [line for line in screen(shown) if line.strip()] == ["done"]


def test_lines_without_a_terminal() -> None:
    outcome = run([sys.executable, "-c", PROGRAM])
    assert outcome.out == "done\n"
    words = [line.split(" s  ")[1] for line in outcome.err.splitlines()]
    assert words == ["unpack", "compile [2/2] 50 %", "pack"]
