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
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.exit import LOSS_POLL, WAIT_FAILURE, WAIT_USAGE, agreed, is_agreed

HEAD = """\
import sys, time
from hvdtrain.errors import *
from hvdtrain.system.runtime.exit import *
"""
SLEEP = """\
time.sleep = lambda seconds: print("slept", seconds)
"""


@dataclass
class End:
    code: int
    out: str
    err: str
    seconds: float


def environment(rank: int | None, size: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OMPI_")}
    if rank is None:
        return kept
    return {**kept, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


def end_of(body: str, rank: int | None = None, size: int = 2, head: str = HEAD + SLEEP) -> End:
    """Run a program whose ``main`` has ``body``, as a rank or without a launcher."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    program = f"{head}\ndef main():\n{indented}\nrun_and_exit(main)\nprint('still there')\n"
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(rank, size),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "still there" not in result.stdout
    return End(result.returncode, result.stdout, result.stderr, time.monotonic() - started)


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_code_of_main_is_the_exit_code_without_a_message(code: int) -> None:
    end = end_of(f"print('result')\nreturn {code}")
    assert (end.code, end.out, end.err) == (code, "result\n", "")


@pytest.mark.parametrize(
    ("statement", "code"),
    [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit()", 0), ("raise SystemExit", 0)],
)
def test_sys_exit_sets_the_exit_code(statement: str, code: int) -> None:
    end = end_of(statement)
    assert (end.code, end.err) == (code, "")


@pytest.mark.parametrize(
    ("statement", "code", "reason"),
    [("sys.exit(3)", 3, ""), ("sys.exit('no data')", 1, " (no data)"), ("sys.exit(0)", 0, None)],
)
def test_an_exit_of_one_rank_within_a_step_is_reported(
    statement: str, code: int, reason: str | None
) -> None:
    end = end_of(f"process_status.stage = 'step 4'\n{statement}", rank=1)
    assert end.code == code
    assert end.err.startswith(
        f"hvdtrain: rank 1 on {socket.gethostname()}, step 4: the program called "
        f"sys.exit{reason}, exit code {code}. No checkpoint"
        if reason is not None
        else ""
    )


def test_exit_with_a_text_is_a_failure() -> None:
    end = end_of("sys.exit('no data')")
    assert (end.code, end.err) == (1, "no data\n")


DISCONNECT = "process_status.disconnect.append(lambda: print('disconnected'))\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_all_ranks_shuts_down_the_library_first(rank: int) -> None:
    end = end_of(f"{DISCONNECT}raise agreed(UsageError('bad'))", rank)
    assert (end.code, end.out.splitlines()[0]) == (2, "disconnected")


@pytest.mark.parametrize("rank", [0, 1])
def test_preempted_ranks_shut_down_the_library_before_they_exit(rank: int) -> None:
    end = end_of(f"{DISCONNECT}return 75", rank)
    assert (end.code, end.out) == (75, "disconnected\n")


def test_an_error_of_one_rank_does_not_shut_down_the_library() -> None:
    assert "disconnected" not in end_of(f"{DISCONNECT}raise UsageError('bad')", 0).out


def test_a_shutdown_that_hangs_is_abandoned() -> None:
    head = HEAD + "import threading\n"
    body = (
        "process_status.disconnect.append(threading.Event().wait)\nraise agreed(UsageError('bad'))"
    )
    end = end_of(body, 0, head=head)
    assert (end.code, end.err) == (2, "hvdtrain: error: bad\n")


@pytest.mark.parametrize(
    ("kind", "code"),
    [("UsageError", 2), ("CheckpointError", 1), ("TrainingError", 1), ("HvdtrainError", 1)],
)
def test_a_single_process_prints_one_line_and_exits_with_the_code(kind: str, code: int) -> None:
    end = end_of(f"raise {kind}('--lr is wrong: give another')")
    assert end.code == code
    assert end.err == "hvdtrain: error: --lr is wrong: give another\n"
    assert end.out == ""


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("kind", ["UsageError", "CheckpointError"])
def test_rank_zero_prints_at_once(kind: str, agreed: bool) -> None:
    error = f"agreed({kind}('why'))" if agreed else f"{kind}('why')"
    end = end_of(f"raise {error}", rank=0)
    assert "slept" not in end.out
    assert len(end.err.splitlines()) == 1
    assert end.err.endswith("error: why\n")
    # A usage error on rank 0 usually occurs on all ranks; any other error on one rank.
    assert ("rank 0 on" in end.err) == (kind != "UsageError" and not agreed)


@pytest.mark.parametrize(
    ("kind", "code", "wait"),
    [("UsageError", 2, WAIT_USAGE), ("CheckpointError", 1, WAIT_FAILURE)],
)
def test_another_rank_is_silent_if_all_agree(kind: str, code: int, wait: float) -> None:
    end = end_of(f"raise agreed({kind}('why'))", rank=1)
    assert (end.code, end.err, end.out) == (code, "", f"slept {wait}\n")


@pytest.mark.parametrize(
    ("kind", "code", "wait"),
    [("UsageError", 2, WAIT_USAGE), ("TrainingError", 1, WAIT_FAILURE)],
)
def test_another_rank_reports_its_own_error_after_the_wait(
    kind: str, code: int, wait: float
) -> None:
    end = end_of(f"process_status.stage = 'step 17'\nraise {kind}('why')", rank=1)
    assert (end.code, end.out) == (code, f"slept {wait}\n")
    assert end.err == f"hvdtrain: rank 1 on {socket.gethostname()}, step 17: error: why\n"


def test_the_waits_are_within_the_limit() -> None:
    assert 0 < WAIT_FAILURE < WAIT_USAGE <= 5


def test_the_wait_is_real() -> None:
    end = end_of(
        "sys.modules[run_and_exit.__module__].WAIT_USAGE = 0.7\nraise UsageError('why')",
        rank=1,
        head=HEAD,
    )
    assert end.seconds >= 0.7
    assert "why" in end.err


LOSS = """\
import threading
def say():
    speak("rank 3 is lost", wait=0.0)
    leave(1)
threading.Timer(0.1, say).start()
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
        assert f"rank {rank} on {socket.gethostname()}: failed" in end.err.splitlines()[0]
        assert end.out == f"slept {WAIT_FAILURE if rank else LOSS_POLL}\n"


def test_earlier_output_is_not_lost() -> None:
    end = end_of("sys.stdout.write('half a line')\nraise UsageError('why')")
    assert end.out == "half a line"


def test_a_thread_that_never_ends_does_not_delay_a_failure() -> None:
    body = (
        "import threading\n"
        "threading.Thread(target=lambda: time.monotonic() and threading.Event().wait()).start()\n"
        "raise UsageError('why')"
    )
    assert end_of(body).code == 2


def test_finalizers_do_not_run_after_a_failure() -> None:
    # MPI_Finalize would wait for ranks that have ended.
    end = end_of("import atexit\natexit.register(print, 'finalizer')\nraise UsageError('why')")
    assert "finalizer" not in end.out


def test_finalizers_run_after_success() -> None:
    end = end_of("import atexit\natexit.register(print, 'finalizer')\nreturn 0")
    assert (end.code, end.out) == (0, "finalizer\n")


def test_an_interrupt_is_130_without_a_traceback() -> None:
    body = "    print('ready', flush=True)\n    time.sleep(60)\n"
    # A shell starts background processes with SIGINT ignored, as may a test runner.
    reset = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{HEAD}\n{reset}\ndef main():\n{body}\nrun_and_exit(main)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(None, 1),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "hvdtrain: interrupted\n"


def test_agreement_is_a_mark_on_the_error() -> None:
    error = UsageError("why")
    assert not is_agreed(error)
    assert agreed(error) is error
    assert is_agreed(error)
    assert str(error) == "why"
    assert not is_agreed(UsageError("why"))


def test_the_mark_keeps_other_notes() -> None:
    error = UsageError("why")
    error.add_note("mine")
    assert agreed(error).__notes__[0] == "mine"


READER = """
import glob, multiprocessing, os, signal, sys, tempfile
from hvdtrain.system.runtime.outlive import end_with_parent
from hvdtrain.system.runtime.scratch import use_scratch_directory

def work(queue):
    tempfile.mkstemp()
    queue.put(1)
    end_with_parent()
    signal.pause()

if __name__ == "__main__":
    use_scratch_directory()
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    context.Process(target=work, args=(queue,), daemon=True).start()
    tempfile.mkstemp()
    queue.get()
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
        deadline = time.monotonic() + 20
        semaphore = f"sem.{Path(folder).name}-*"
        while left := [*scratch.iterdir(), *Path("/dev/shm").glob(semaphore)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        shutil.rmtree(scratch)
