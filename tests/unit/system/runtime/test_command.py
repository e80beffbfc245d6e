"""Programs run by ``command``: nothing is left of them after an interrupt at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import tests.conftest
from hvdtrain.system.runtime import command as running
from hvdtrain.system.runtime.command import (
    NOT_FOUND,
    TIMED_OUT,
    Command,
    HeldSignals,
    run,
    termination_as_interrupt,
)
from tests.conftest import unmeasured, until

# A program that is interrupted while it starts another one, which takes a minute.
STARTS = """
import sys
from hvdtrain.system.runtime.command import Command, run, termination_as_interrupt
with termination_as_interrupt():
    print("starting", flush=True)
    run(Command(("sleep", sys.argv[1])), timeout=60)
"""


def sleeping(seconds: str) -> list[int]:
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if process.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_program_is_started_ends_both(number: signal.Signals) -> None:
    seconds = f"61.{os.getpid()}"
    for delay in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", STARTS, seconds],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=unmeasured(),
        )
        assert process.stdout is not None
        with process, process.stdout:
            assert process.stdout.readline() == "starting\n"
            time.sleep(delay / 3000)
            process.send_signal(number)
            assert process.wait(timeout=40) != 0
        assert not sleeping(seconds)


def test_a_signal_during_the_start_is_deferred_until_the_program_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program runs, but Popen has not returned yet."""
    started: list[subprocess.Popen[str]] = []
    sleep = ("sleep", "60")

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *words: object, **options: object) -> None:
            super().__init__(*words, **options)  # type: ignore[call-overload]
            if words[0] == sleep:  # a thread of an earlier test may use Popen too
                started.append(self)
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(running.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.run(Command(sleep), timeout=60)
    assert started[0].poll() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_deferred_to_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        with HeldSignals():
            script = f"kill -TERM {os.getpid()}; sleep 0.3; echo whole"
            done.append(run(Command(("sh", "-c", script))).output)
        done.append("not reached")
    assert done == ["whole\n"]


def test_the_shown_command_is_equivalent(tmp_path: Path) -> None:
    program = "import os; print(os.environ.get('A'), os.environ.get('B'), os.getcwd())"
    command = Command((sys.executable, "-c", program), {"A": "x y", "B": None}, tmp_path)
    expected = f"x y None {tmp_path}\n"
    assert run(command).output == expected
    shown = tests.conftest.run(["sh", "-c", command.show()], B="b")
    assert (shown.code, shown.out) == (0, expected)


def test_the_shown_command_is_printable(tmp_path: Path) -> None:
    word = os.fsdecode(b"\xff\xfe'0\\x\x1b\n") + "é\u200b"
    command = Command(("printf", "%s", word, "é\n"))
    assert command.show() == r"printf %s $'\xff\xfe\x270\x5cx\x1b\x0a\xc3\xa9\xe2\x80\x8b' 'é" "\n'"
    output = subprocess.run(
        ["bash", "-c", command.show()], stdout=subprocess.PIPE, check=True
    ).stdout
    assert output == os.fsencode(word + "é\n")


def test_run_returns_exit_code_and_lines() -> None:
    lines: list[str] = []
    result = run(Command(("sh", "-c", "echo one; echo two >&2; exit 3")), lines.append)
    assert (result.exit_code, lines, result.ok) == (3, ["one", "two"], False)
    assert run(Command(("/no/such/program",))).exit_code == NOT_FOUND


def test_a_timeout_ends_other_process_groups_but_not_other_sessions(tmp_path: Path) -> None:
    """Like mpirun's ssh to another host, which ignores SIGTERM and keeps the output open."""
    note = tmp_path / "pids"
    deaf = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.{}; "
    deaf += "open({!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"
    programs = [deaf.format(call, str(note)) for call in ("setpgid(0, 0)", "setsid()")]
    words = " ".join(f'{sys.executable} -I -S -c "{program}" &' for program in programs)
    assert run(Command(("sh", "-c", f"{words} wait")), timeout=3).exit_code == TIMED_OUT
    living = [pid for pid in map(int, note.read_text().split()) if is_alive(pid)]
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    assert len(living) == 1  # the one in another session


def test_a_timeout_ends_the_children_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start = time.monotonic()
    script = f"echo late; sleep 60 & echo $! > {note}; wait"
    result = run(Command(("sh", "-c", script)), timeout=0.5)
    assert (result.exit_code, result.output) == (TIMED_OUT, "late\n")
    assert time.monotonic() - start < 15
    child = int(note.read_text())
    until(lambda: not is_alive(child), seconds=10)  # the kernel takes a moment


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
