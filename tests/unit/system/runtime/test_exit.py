"""End of a process: exit code, message, and order of the ranks. Real processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime import exit as exit_module
from hvdtrain.system.runtime.exit import FAILURE_TIMEOUT, LOSS_TIMEOUT, USAGE_TIMEOUT, agreed
from tests.conftest import Outcome, begin, run, until

HEAD = """\
import sys, time
from hvdtrain.errors import *
from hvdtrain.system.runtime.exit import *
"""
SLEEP = """\
time.sleep = lambda seconds: print("slept", seconds)
"""


def end_of(body: str, rank: int | None = None, head: str = HEAD + SLEEP) -> Outcome:
    """Run a program whose ``main`` has ``body``, as one of two ranks or without a launcher."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    program = f"{head}\ndef main():\n{indented}\nrun_and_exit(main)\nprint('still there')\n"
    launch = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
    end = run([sys.executable, "-c", program], **(launch if rank is not None else {}))
    assert "still there" not in end.out
    return end


HERE = f"on {socket.gethostname()}"
DISCONNECT = "process_status.disconnect.append(lambda: print('disconnected'))\n"
STEP_4 = "process_status.stage = 'step 4'\n"


@pytest.mark.parametrize(
    ("body", "rank", "code", "out", "err"),
    [
        ("print('result')\nreturn 0", None, 0, "result\n", ""),
        ("return 1", None, 1, "", ""),
        ("return 2", None, 2, "", ""),
        ("return 75", None, 75, "", ""),
        ("sys.exit(0)", None, 0, "", ""),
        ("sys.exit(3)", None, 3, "", ""),
        ("sys.exit()", None, 0, "", ""),
        ("raise SystemExit", None, 0, "", ""),
        ("sys.exit('no data')", None, 1, "", "no data\n"),
        (f"{DISCONNECT}return 75", 0, 75, "disconnected\n", ""),
        (f"{DISCONNECT}return 75", 1, 75, "disconnected\n", ""),
        (f"{STEP_4}sys.exit(0)", 1, 0, "", ""),
        ("sys.stdout.write('half a line')\nraise UsageError('why')", None, 2, "half a line", None),
        # MPI_Finalize would wait for ranks that have ended.
        ("import atexit\natexit.register(print, 'final')\nraise UsageError('')", 0, 2, "", None),
        ("import atexit\natexit.register(print, 'final')\nreturn 0", 0, 0, "final\n", ""),
    ],
)
def test_the_exit_code_and_the_output(
    body: str, rank: int | None, code: int, out: str, err: str | None
) -> None:
    end = end_of(body, rank)
    assert (end.code, end.out) == (code, out)
    assert err in (None, end.err)


@pytest.mark.parametrize(
    ("statement", "code", "reason"),
    [("sys.exit(3)", 3, ""), ("sys.exit('no data')", 1, " (no data)")],
)
def test_an_exit_of_one_rank_within_a_step_is_reported(
    statement: str, code: int, reason: str
) -> None:
    end = end_of(STEP_4 + statement, rank=1)
    assert end.code == code
    assert end.err.startswith(
        f"hvdtrain: rank 1 {HERE}, step 4: the program called sys.exit{reason}, exit code {code}. "
        "No checkpoint"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_all_ranks_shuts_down_the_library_first(rank: int) -> None:
    end = end_of(f"{DISCONNECT}raise agreed(UsageError('bad'))", rank)
    assert (end.code, end.out.splitlines()[0]) == (2, "disconnected")
    assert "disconnected" not in end_of(f"{DISCONNECT}raise UsageError('bad')", rank).out


def test_a_shutdown_that_hangs_is_abandoned() -> None:
    waits = "process_status.disconnect.append(threading.Event().wait)"
    body = f"import threading\n{waits}\nraise agreed(UsageError('bad'))"
    end = end_of(body, 0, head=HEAD)
    assert (end.code, end.err) == (2, "hvdtrain: error: bad\n")


KINDS = {"UsageError": (2, USAGE_TIMEOUT), "CheckpointError": (1, FAILURE_TIMEOUT)}
KINDS |= {"TrainingError": (1, FAILURE_TIMEOUT), "HvdtrainError": (1, FAILURE_TIMEOUT)}


@pytest.mark.parametrize("kind", KINDS)
def test_who_reports_an_error_and_when(kind: str) -> None:
    """A usage error on rank 0 usually occurs on all ranks; any other error on one rank."""
    code, wait = KINDS[kind]
    alone = end_of(f"raise {kind}('--lr is wrong: give another')")
    assert alone == Outcome(code, "", "hvdtrain: error: --lr is wrong: give another\n")
    for agreed_by_all in (True, False):
        error = f"agreed({kind}('why'))" if agreed_by_all else f"{kind}('why')"
        root = end_of(f"raise {error}", rank=0)
        assert (root.code, root.out) == (code, "")
        own = kind != "UsageError" and not agreed_by_all
        assert root.err == f"hvdtrain: {f'rank 0 {HERE}: ' if own else ''}error: why\n"
        other = end_of(f"process_status.stage = 'step 17'\nraise {error}", rank=1)
        assert (other.code, other.out) == (code, f"slept {wait}\n")
        reported = "" if agreed_by_all else f"hvdtrain: rank 1 {HERE}, step 17: error: why\n"
        assert other.err == reported


def test_the_wait_is_real_and_within_the_limit() -> None:
    assert 0 < FAILURE_TIMEOUT < USAGE_TIMEOUT <= 5
    shorter = "sys.modules[run_and_exit.__module__].USAGE_TIMEOUT = 0.7"
    started = time.monotonic()
    end = end_of(f"{shorter}\nraise UsageError('why')", rank=1, head=HEAD)
    assert time.monotonic() - started >= 0.7
    assert "why" in end.err


LOSS = """\
import threading
def say():
    print_error("rank 3 is lost", wait=0.0)
    leave(1)
threading.Timer(0.1, say).start()
sys.modules[run_and_exit.__module__].LOSS_TIMEOUT = 5
raise RuntimeError("Connection closed by peer")
"""


def test_a_lost_rank_is_reported_by_the_detector_and_not_by_the_failed_collective() -> None:
    """Even if the collective fails before the detector notices."""
    end = end_of(LOSS, rank=0, head=HEAD)
    assert (end.code, end.err.count("hvdtrain: ")) == (1, 1)
    assert "rank 3 is lost" in end.err
    assert "Traceback" not in end.err


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_traceback_for_unexpected_errors_only(rank: int | None) -> None:
    end = end_of("return 1 // 0", rank=rank)
    assert end.code == 1
    assert "Traceback" in end.err
    assert "ZeroDivisionError" in end.err
    assert end.err.startswith("hvdtrain: ")
    if rank is None:
        assert "rank" not in end.err.splitlines()[0]
    else:
        assert f"rank {rank} {HERE}: failed" in end.err.splitlines()[0]
        assert end.out == f"slept {FAILURE_TIMEOUT if rank else LOSS_TIMEOUT}\n"


def test_a_thread_that_never_ends_does_not_delay_a_failure() -> None:
    body = (
        "import threading\n"
        "threading.Thread(target=lambda: time.monotonic() and threading.Event().wait()).start()\n"
        "raise UsageError('why')"
    )
    assert end_of(body).code == 2


def test_an_interrupt_is_130_without_a_traceback() -> None:
    body = "    print('ready', flush=True)\n    time.sleep(60)\n"
    # A shell starts background processes with SIGINT ignored, as may a test runner.
    reset = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{HEAD}\n{reset}\ndef main():\n{body}\nrun_and_exit(main)\n"
    with begin([sys.executable, "-c", program]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "hvdtrain: interrupted\n")


def uncaught(body: str, rank: int, before: str = "") -> Outcome:
    """Run a script of a user, as one of two ranks, that ends by an exception."""
    program = f"{HEAD}{SLEEP}{before}\nend_by_exceptions()\nend_by_exceptions()\n{body}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(program)
        script.flush()
        launch = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
        end = run([sys.executable, script.name], **launch)
        line = f" ({Path(script.name).name} line {program.count(chr(10))})\n"
    return Outcome(end.code, end.out, end.err.replace(line, " (SCRIPT)\n"))


@pytest.mark.parametrize(
    ("body", "rank", "code", "message"),
    [
        ("1 // 0", 0, 1, "failed: ZeroDivisionError('integer division or modulo by zero')"),
        ("1 // 0", 1, 1, "failed: ZeroDivisionError('integer division or modulo by zero')"),
        ("raise UsageError('why')", 0, 2, "error: why"),  # perhaps of this rank only
        ("raise UsageError('why')", 1, 2, "error: why"),
        ("raise KeyboardInterrupt", 1, 130, "interrupted"),
    ],
)
def test_an_uncaught_exception_in_a_script(body: str, rank: int, code: int, message: str) -> None:
    end = uncaught(body, rank)
    assert end.code == code
    assert end.err.startswith("Traceback (most recent call last):")
    assert end.err.endswith(f"hvdtrain: rank {rank} {HERE}: {message} (SCRIPT)\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_uncaught_exception_after_another_rank_has_reported_its_own(rank: int) -> None:
    end = uncaught("process_status.reported = 3\nraise RuntimeError('closed by peer')", rank)
    assert (end.code, end.err) == (3, "")


LATER = """
import io
former = sys.excepthook
def hook(*error):
    sys.stderr, shown = io.StringIO(), sys.stderr
    former(*error)
    print("unreachable", file=shown)
sys.excepthook = hook
1 // 0"""


@pytest.mark.parametrize(
    ("before", "body", "shown"),
    [
        ("\nsys.excepthook = lambda *error: print('mine', file=sys.stderr)", "1 // 0", "mine"),
        ("", LATER, "Traceback (most recent call last):"),  # as torch.distributed does
    ],
)
def test_other_hooks_for_exceptions(before: str, body: str, shown: str) -> None:
    end = uncaught(body, 0, before)
    assert (end.code, end.err.splitlines()[0]) == (1, shown)
    assert end.err.endswith("by zero') (SCRIPT)\n")
    assert "unreachable" not in end.err


def test_agreement_is_a_mark_on_the_error() -> None:
    error = UsageError("why")
    assert not error.agreed
    assert agreed(error) is error
    assert error.agreed
    assert str(error) == "why"


READER = """
import glob, os, psutil, signal, sys, tempfile
from hvdtrain.system.runtime.outlive import STOP_SIGNALS, end_with_parent, worker_context
from hvdtrain.system.runtime.scratch import use_scratch_directory

def blocked():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])

def work(queue):
    tempfile.mkstemp()
    queue.put(blocked())
    end_with_parent()
    signal.pause()

if __name__ == "__main__":
    use_scratch_directory()
    context = worker_context()
    queue = context.Queue()
    context.Process(target=work, args=(queue,), daemon=True).start()
    tempfile.mkstemp()
    assert queue.get() == set(STOP_SIGNALS) and not blocked()
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGUSR1)
    folder = tempfile.gettempdir()
    print(folder, len(glob.glob(f"/dev/shm/sem.{os.path.basename(folder)}-*")), flush=True)
    if sys.argv[1] == "kill":
        os.killpg(0, signal.SIGKILL)
    if sys.argv[1] == "leave":
        os._exit(1)  # as a rank does after SIGTERM: multiprocessing does not clean up
"""


@pytest.mark.parametrize("ending", ["kill", "return", "leave"])
def test_nothing_is_left_behind_however_it_ends(ending: str, tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READER)
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # a short name, as needed for sockets
    try:
        result = subprocess.run(
            [sys.executable, tmp_path / "reader.py", ending],
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        folder, semaphores = result.stdout.split()
        assert Path(folder).parent == scratch and int(semaphores) >= 2
        assert not result.stderr
        semaphore = f"sem.{Path(folder).name}-*"
        until(
            lambda: not [*scratch.iterdir(), *Path("/dev/shm").glob(semaphore)],
            detail=lambda: [*scratch.iterdir(), *Path("/dev/shm").glob(semaphore)],
        )
    finally:
        shutil.rmtree(scratch)


@pytest.mark.parametrize(("permitted", "order"), [(True, "one mine two"), (False, "one two mine")])
def test_a_line_beside_the_output_of_another_process_is_not_overwritten(
    permitted: bool, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that it does not append to; if its descriptor cannot be had, after its end."""
    if not permitted:
        monkeypatch.setattr(exit_module, "PIDFD_GETFD", -1)
    log = tmp_path / "log"
    script = "echo one >&2; read go; echo two >&2"
    with log.open("w") as file:
        other = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stderr=file)
    until(lambda: log.read_text() == "one\n")
    if permitted:
        try:
            os.close(exit_module._standard_error_of(Path(f"/proc/{other.pid}")))
        except OSError as error:
            other.communicate(b"\n")
            pytest.skip(f"the descriptor cannot be had here: {error}")
    assert exit_module._write_beside(Path(f"/proc/{other.pid}"), "mine\n")
    other.communicate(b"\n")
    until(lambda: len(log.read_text().split()) == 3)
    assert log.read_text().split() == order.split()
