"""Standard error without unwanted lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, within=within)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr.splitlines()) == (code, lines)
    assert done.stdout == ("" if code else "done\n")
