"""Status line of a command: on a terminal only."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import ROOT, run
from tests.terminal import Recording, record, screen

# This sleep blocks all Python threads, as loading a library does.
PROGRAM = """
import ctypes, logging, sys
from hvdtrain.system.runtime import terminal
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[terminal.Handler()])
sleep = ctypes.PyDLL(None).sleep
with terminal.working("loading " + 9 * "a library, "):
    sleep(4)
    logging.info("a line that is longer than the screen is wide: %s", 9 * "word ")
    terminal.status("running")
    with terminal.working("within"):
        sleep(2)
print("the result")
"""
SECONDS = re.compile(r" \.\.\. (\d+) s")


def frames(seen: Recording) -> set[str]:
    """Return the numbers of seconds shown."""
    return set(SECONDS.findall(seen.text))


def test_a_command_shows_the_elapsed_time() -> None:
    seen = record([sys.executable, "-c", PROGRAM], columns=80)
    assert seen.code == 0, seen.text
    assert len(frames(seen)) >= 5, seen.text  # of seven
    assert "within ... " in seen.text
    drawn = re.findall(r"\x1b\[2K([^\x1b]+)\x1b\[2A", seen.text)
    assert all(len(frame) <= 80 and frame.endswith(" s") for frame in drawn), drawn
    message, result = (row for row in screen(seen.text) if row)
    assert message.startswith("a line that is longer") and message.endswith("word ")
    assert result == "the result"


def test_what_a_command_says_meanwhile_does_not_mix_with_its_status() -> None:
    said = "WARNING: " + 9 * "word " + 60 * "-"
    shell = ["sh", "-c", f"sleep 1; echo '{said}' >&2; sleep 1; exit 3"]
    main = [sys.executable, "-m", "hvdtrain.system.runtime.terminal", "1 of 4: pip installs"]
    seen = record([*main, *shell], columns=80)
    assert seen.code == 3
    assert f"\x1b[2K\x1b[2A\r\n{said}" in seen.text  # after an empty frame


def test_the_status_is_not_written_to_a_file() -> None:
    outcome = run([sys.executable, "-c", PROGRAM.replace("sleep(", "abs(")])
    assert outcome.out == "the result\n"
    assert "\x1b" not in outcome.err and len(outcome.err.splitlines()) == 1


def test_escape_sequences_in_a_message_are_shown_as_text() -> None:
    program = PROGRAM.partition("sleep =")[0] + r"logging.warning('%s', '\x1b]0;title\x07\n\tnext')"
    outcome = run([sys.executable, "-c", program])
    assert outcome.err == "\\x1b]0;title\\x07\n\tnext\n"


def test_a_program_runs_with_a_status_line() -> None:
    words = ["-m", "hvdtrain.system.runtime.terminal", "pip installs", "sh", "-c"]
    seen = record([sys.executable, *words, "echo a word; sleep 3; exit 3"])
    assert (seen.code, [row for row in screen(seen.text) if row]) == (3, ["a word"])
    assert len(frames(seen)) >= 3, seen.text


def test_make_setup_announces_its_steps_and_shows_progress() -> None:
    line = ["make", "--no-print-directory", "--dry-run", "--always-make", "setup"]
    recipe = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = recipe.replace("\\\n", "").splitlines()
    assert re.match(r"echo .* \(3 GB.*some minutes", steps[0])
    installs = [step for step in steps if "pip install " in step]
    assert len(installs) == 4
    assert all(re.search(r'runtime\.terminal "\d of 4: [^"]*" +python', step) for step in installs)
