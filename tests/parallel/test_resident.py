"""Resident processes: ranks forked there are as fresh ones, and nothing of them stays."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ranks
from tests.parallel import resident
from tests.parallel.conftest import WAYS, Training, assert_bit_equal, train

# What differs from run to run also where both are fresh: timings, and where the files are.
TIMINGS = ("images_per_second_mean", "images_per_second_std", "step_seconds_median", "step_split")
USAGE = ("peak_memory_bytes", "utilisation_mean", "utilisation_lowest")
OTHERS = ("seconds_total", "seconds_to_first_step", "checkpoint", "options", "environment")
OWN = {*TIMINGS, *USAGE, *OTHERS}


def compared(training: Training) -> list[dict[str, Any]]:
    summary = training.summary
    summary["options"].update(summary="", checkpoint_dir="")
    summary["environment"].update(ended="")
    parts = [{key: value for key, value in summary.items() if key not in OWN}]
    return [*parts, summary["options"], summary["environment"]]


@pytest.mark.parametrize("way", WAYS[:2])  # of each framework
def test_a_trainer_writes_what_it_writes_in_fresh_processes(
    way: tuple[str, ...], tmp_path: Path
) -> None:
    """Also the second run of a rank: the first has left nothing there."""
    options = (*way, "--model=small", "--num-steps=12")
    fresh = train(2, tmp_path / "fresh", "mnist", *options, start=ranks)
    for name in ("first", "second"):
        other = train(2, tmp_path / name, "mnist", *options)
        assert_bit_equal(fresh, other)
        assert compared(fresh) == compared(other)
        files = [{path.name for path in training.newest.iterdir()} for training in (fresh, other)]
        assert files[0] == files[1]


# Leaves marks in all that a process has one of, and writes what was there before.
SPOIL = """
import json, os, signal, sys, threading, time
from pathlib import Path
from hvdtrain.system.runtime.exit import process_status
found = {
    "environment": os.environ.get("SPOILT"),
    "extra": os.environ.get("EXTRA"),
    "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "threads": threading.active_count(),
    "hook": sys.excepthook is sys.__excepthook__,
    "stage": process_status.stage,
    "arguments": sys.argv[1:],
    "size": os.environ["OMPI_COMM_WORLD_SIZE"],
}
Path(f"found-{sys.argv[1]}-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(json.dumps(found))
os.environ["SPOILT"] = "yes"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.excepthook = lambda *_: None
process_status.stage = sys.argv[1] = "spoilt"
print("said", flush=True)
"""

END = """
import os, signal, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {end}
time.sleep(100)
"""


WAIT = """
import os, signal, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(f"ended-{rank}", "w").close()))
open(f"here-{rank}", "w").close()
time.sleep(100)
"""


def test_a_run_finds_a_fresh_process(tmp_path: Path) -> None:
    script = tmp_path / "spoil.py"
    script.write_text(SPOIL)
    for value in ("1", "2"):
        outcome = resident.ranks(2, str(script), value, cwd=tmp_path, EXTRA=value)
        assert (outcome.code, outcome.out, outcome.err) == (0, "said\n" * 2, "")
        for rank in range(2):
            found = json.loads((tmp_path / f"found-{value}-{rank}").read_text())
            expected = {"environment": None, "extra": value, "handler": True, "threads": 1}
            own = {"hook": True, "stage": "", "arguments": [value], "size": "2"}
            assert found == {**expected, **own}


ENDS = {"raise ValueError('on purpose')": 1, "os.kill(os.getpid(), signal.SIGSEGV)": 139}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_fails_ends_its_job_and_not_the_next(end: str, tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(END.format(end=end))
    (tmp_path / "go_on.py").write_text("print('done')")
    outcome = resident.ranks(2, str(tmp_path / "end.py"), timeout=60)
    assert outcome.code == ENDS[end], outcome.err
    if ENDS[end] == 1:
        assert "end.py" in outcome.err
        assert "ValueError: on purpose\n" in outcome.err
    server = psutil.Process(resident._servers["pytorch"].process.pid)
    assert psutil.wait_procs(server.children(recursive=True), timeout=10)[1] == []
    assert resident.ranks(2, str(tmp_path / "go_on.py")).out == "done\n" * 2
    assert resident._servers["pytorch"].process.pid == server.pid


def test_mpirun_hands_term_on_and_waits(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(resident.ranks, 2, str(script), cwd=tmp_path)
        while len(list(tmp_path.glob("here-*"))) < 2:
            assert not running.done(), running.result().err
            time.sleep(0.05)
        (job,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "prterun")
        job.terminate()
        assert running.result().code
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_hang_and_a_dead_server_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text("import time; time.sleep(30)")
    (tmp_path / "go_on.py").write_text("print('done')")
    with pytest.raises(pytest.fail.Exception, match="hung for 2 s"):
        resident.ranks(1, str(tmp_path / "hang.py"), timeout=2)
    first = resident._servers["pytorch"]
    server = psutil.Process(first.process.pid)
    assert psutil.wait_procs(server.children(recursive=True), timeout=10)[1] == []
    server.kill()
    first.process.wait()
    assert resident.ranks(1, str(tmp_path / "go_on.py")).out == "done\n"
    last = resident._servers.pop("pytorch")
    assert last is not first
    last.end()
    assert last.process.returncode == -signal.SIGTERM
    assert not last.folder.exists()
