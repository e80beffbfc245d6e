"""Progress of long operations, on a terminal and without one."""

from __future__ import annotations

import re
import sys

from tests.conftest import run
from tests.terminal import record, screen

PROGRAM = """
import logging, sys, time
from hvdtrain.system.output import display
logging.basicConfig(level=logging.INFO, format="%(message)s")
with display.Display() as shown:
    shown.stage("unpack")
    shown.show("compile [1/2]", 0.25)
    time.sleep(1.0)  # a bar is drawn ten times a second
    display.LINE_EVERY = 0.0
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
