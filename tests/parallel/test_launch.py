"""hvdtrain launch with the mpirun of this environment: exit codes, marks, silence, signals."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import Allocation, lay_out
from hvdtrain.commands.launch.launcher_choice import MpiLauncher
from hvdtrain.steps import checkpoint
from tests.conftest import BIN, LONG, Outcome, ended, environment, on_demand, run
from tests.parallel.conftest import Start, assert_gone, family, ranks_of, send, until

LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch"]
PRINT_RANK = """
import json, os, sys
from hvdtrain.system.runtime.detect import detect
info = detect(os.environ)
json.dump([info.rank, info.size, info.local_rank, sorted(os.sched_getaffinity(0))], sys.stdout)
print()
"""
HANG = """
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    for step in (1, 2, 3):
        print(f"epoch 1  step {step}/100  loss 0.5", flush=True)
time.sleep(300)
"""
# A trainer whose evaluation or save takes longer than mpirun waits for its ranks.
SLOW = """
import pathlib, sys, time
from hvdtrain import mnist
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.steps import checkpoint
from hvdtrain.training.loop import TrainingLoop
mark, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
del sys.argv[1:3]
target = {"evaluation": (TrainingLoop, "_evaluate"), "save": (checkpoint, "commit")}.get(moment)
if target:
    real = getattr(*target)
    def slow(*arguments):
        mark.write_text(str(arguments[2]["step"]) if moment == "save" else "")
        time.sleep(2)
        return real(*arguments)
    setattr(*target, slow)
run_and_exit(mnist.main)
"""
ENDLESS = ("--model=small", "--quiet", "--epochs=10000", "--checkpoint-every=5")
STUBBORN = """
import os, pathlib, signal, sys, tempfile, time
from hvdtrain.system.runtime import scratch
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
scratch.use_scratch_directory()
mark = pathlib.Path(sys.argv[1]) / os.environ["OMPI_COMM_WORLD_RANK"]
mark.write_text(tempfile.gettempdir())
time.sleep(300)
"""


def launch(*words: str, timeout: float = 120, **environ: str) -> Outcome:
    return run([*LAUNCH, *words], timeout=timeout, **environ)


def test_the_exit_code_is_the_jobs() -> None:
    for code in (0, 75):
        assert launch("-n", "1", "--", sys.executable, "-c", f"exit({code})").code == code
    killed = "import os; os.kill(os.getpid(), 9)"
    assert launch("-n", "1", "--", sys.executable, "-c", killed).code == 128 + signal.SIGKILL


def test_a_service_without_a_home() -> None:
    bare = {name: value for name, value in environment().items() if name != "HOME"}
    words = [*LAUNCH, "-n", "1", "--", "sh", "-c", "echo $HOME"]
    done = subprocess.run(words, env=bare, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"{pwd.getpwuid(os.getuid()).pw_dir}\n"


def test_a_dry_run_prints_the_command_that_runs() -> None:
    words = ("-n", "2", "--threads", "1", "--tag")
    program = ("--", sys.executable, "-c", PRINT_RANK)
    dry, real = launch(*words, "--dry-run", *program), launch(*words, *program)
    assert (dry.code, real.code) == (0, 0), real.err
    # The same words in the same order, although the program has several lines.
    assert real.err.startswith(dry.out)
    line = shlex.split(dry.out)
    assert line[:4] == ["env", "OMP_NUM_THREADS=1", "mpirun", "-n"]
    assert line[-3:] == [sys.executable, "-c", PRINT_RANK]
    pasted = run(["bash", "-c", dry.out])
    assert (pasted.code, pasted.out.count("[1,0]<stdout>")) == (0, 1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_marks_and_cores(number: int) -> None:
    outcome = launch("-n", str(number), "--tag", "--", sys.executable, "-c", PRINT_RANK, code=0)
    seen = {}
    for line in outcome.out.splitlines():
        mark, _, text = line.partition("] ")
        rank, size, local_rank, cores = json.loads(text)
        assert (mark, size, local_rank) == (f"[{rank}", number, rank)
        seen[rank] = set(cores)
    assert sorted(seen) == list(range(number))
    # Each rank has separate cores if there are enough, otherwise all of them.
    available = os.sched_getaffinity(0)
    if number <= len(available):
        assert sum(len(cores) for cores in seen.values()) == len(set.union(*seen.values()))
    else:
        assert all(cores == available for cores in seen.values())


def test_ranks_are_not_bound_to_cores_of_other_jobs() -> None:
    for words, environ in ((["--hosts", "localhost:1"], {}), ([], {"NCPUS": "1"})):
        outcome = launch("-n", "1", *words, "--dry-run", "--", "true", **environ)
        exclusive = len(os.sched_getaffinity(0)) == 1 and not words  # NCPUS covers all cores
        assert ("--bind-to none" in outcome.out) != exclusive, outcome.out + outcome.err


@pytest.mark.parametrize(("packages", "each"), [(1, 16), (2, 8), (2, 10)])
def test_mpirun_accepts_the_binding_on_larger_machines(packages: int, each: int) -> None:
    topology = f"pack:{packages} core:{each} pu:1"
    for number in (1, 2, 3, 6, packages * each):
        layout = lay_out(number, Allocation("none"))
        mpi, cores = MpiLauncher("openmpi5", "mpirun", ""), packages * each
        job = Launch(mpi, ["true"], layout, cores=cores, packages=packages, root=True)
        mpirun, *words = job.command.argv
        show = ["--display", "bind", "--runtime-options", "donotlaunch"]
        # Slots are counted on the real machine unless they are specified.
        line = [str(BIN / mpirun), "--host", f"localhost:{number}", *show, *words]
        outcome = run(line, HWLOC_SYNTHETIC=topology)
        assert "failed to map" not in outcome.out + outcome.err
        bound = re.findall(r"bound to (package\[\d\])", outcome.out + outcome.err)
        width = next((word for word in words if word.startswith("slot:PE=")), None)
        assert len(bound) == (number if width else 0), outcome.out + outcome.err


def test_silence_ends_the_job() -> None:
    outcome = launch("-n", "2", "--timeout", "8", "--", sys.executable, "-c", HANG, code=124)
    # The marks of ranks are shown only with --tag.
    assert outcome.out.splitlines() == [f"epoch 1  step {n}/100  loss 0.5" for n in (1, 2, 3)]
    assert outcome.said == [
        "hvdtrain: error: no output from any rank for 8 s, so the job was ended: last output from "
        f"rank 1 on {os.uname().nodename}, at step 3: 'epoch 1  step 3/100  loss 0.5'"
    ]


@pytest.mark.parametrize("moment", ["training", "evaluation", "save"])
def test_term_saves_and_leaves_nothing(moment: str, tmp_path: Path, started: Start) -> None:
    summary, saved, mark = tmp_path / "summary.json", tmp_path / "checkpoints", tmp_path / "mark"
    process = started(
        *LAUNCH,
        *("-n", "2", "--", sys.executable, "-c", SLOW, str(mark), moment, *ENDLESS),
        *(f"--checkpoint-dir={saved}", f"--summary={summary}"),
    )
    until(lambda: list(saved.glob("step-*")), process)
    if moment != "training":
        mark.unlink(missing_ok=True)
        until(mark.exists, process)
    processes = family(process)
    assert len(processes) >= 4  # hvdtrain launch, mpirun, two ranks
    # PBS and Slurm signal every process at once. The ranks may be faster than launch.
    send(signal.SIGTERM, processes)
    output = ended(process, 75)
    result = json.loads(summary.read_text())
    step = result["steps_completed"]
    assert result["stopped"] == "preempted"
    assert Path(result["checkpoint"]).name.partition("+")[0] == f"step-{step:09d}"
    assert Path(result["checkpoint"]).is_dir()
    assert re.findall("^hvdtrain: SIG.*: (stopped .*)", output, re.MULTILINE) == [
        f"stopped after step {step}, saved {result['checkpoint']}: run the same command again to "
        "continue"
    ]
    assert "non-zero" not in output
    assert_gone(processes)


def test_mpiruns_message_about_a_failure_is_shown() -> None:
    outcome = launch("-n", "2", "--", sys.executable, "-c", "exit(3)", code=3)
    assert outcome.err.count("non-zero status") == 1


@pytest.mark.parametrize("moment", ["of mpirun", "of the ranks", "of the framework"])
def test_term_during_the_start_reports_the_existing_checkpoint(
    moment: str, tmp_path: Path, started: Start
) -> None:
    saved = tmp_path / "step-000000012"
    saved.mkdir()
    trainer = (sys.executable, "-m", "hvdtrain.mnist", *ENDLESS, f"--checkpoint-dir={tmp_path}")
    process = started(*LAUNCH, "-n", "2", "--", *trainer)

    def has_started() -> bool:
        ranks = ranks_of(process)
        if moment == "of mpirun":
            return len(family(process)) > 1
        return len(ranks) >= 2 and (moment == "of the ranks" or any(map(has_torch, ranks)))

    until(has_started, process)
    processes = family(process)
    process.send_signal(signal.SIGTERM)
    output = ended(process, 75)
    line = re.search(r"^hvdtrain: SIG[A-Z0-9]+: stopped before .* first step.*$", output, re.M)
    assert line, output
    assert str(saved) in line[0]
    assert "run the same command again" in line[0]
    assert "non-zero" not in output
    assert "-----" not in output
    assert_gone(processes)


def has_torch(process: psutil.Process) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("moment", ["step", *(["save"] if LONG else [])])
def test_a_save_that_mpirun_interrupts_is_finished(
    moment: str, tmp_path: Path, started: Start
) -> None:
    saved, mark = tmp_path / "checkpoints", tmp_path / "mark"
    mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", "2", sys.executable]
    program = ["-c", SLOW, str(mark), "save", *ENDLESS, f"--checkpoint-dir={saved}"]
    metrics = tmp_path / "metrics"
    if moment == "step":  # the save is only that of the stop
        program += ["--checkpoint-every=9999", "--batch-size=1"]
        program += ["--log-every=1", f"--metrics={metrics}"]
    process = started(*mpirun, *program)
    if moment == "step":
        until(metrics.exists, process)
        send(signal.SIGTERM, ranks_of(process))  # the step may last longer than mpirun waits
        until(mark.exists, process)
    else:
        until(lambda: list(saved.glob("step-*")), process)
        mark.unlink(missing_ok=True)
        until(mark.exists, process)
    processes = family(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode not in (0, 75)
    assert_gone(processes)
    until(lambda: mark.exists() and (saved / f"step-{int(mark.read_text()):09d}").exists())
    assert checkpoint.load_newest(saved) is not None


def test_a_second_interrupt_kills_ranks_that_ignore_the_first(
    tmp_path: Path, started: Start
) -> None:
    process = started(*LAUNCH, "-n", "2", "--", sys.executable, "-c", STUBBORN, str(tmp_path))
    until(lambda: len(list(tmp_path.iterdir())) == 2, process)
    processes = family(process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)  # two keystrokes
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output = ended(process, 130)
    assert output.splitlines()[-1] == "hvdtrain: interrupted", output
    assert "prterun" not in output
    assert_gone(processes)
    folders = [Path(mark.read_text()) for mark in tmp_path.iterdir()]
    assert not any(folder.exists() for folder in folders)


def training(saved: Path, started: Start) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start a training; once it has saved, return launch and all of its processes."""
    trainer = (sys.executable, "-m", "hvdtrain.mnist", *ENDLESS, f"--checkpoint-dir={saved}")
    process = started(*LAUNCH, "-n", "2", "--", *trainer)
    until(lambda: list(saved.glob("step-*")), process)
    return process, family(process)


def test_ranks_end_with_a_killed_launch(tmp_path: Path, started: Start) -> None:
    process, processes = training(tmp_path, started)
    process.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_ranks_that_do_not_communicate_by_mpi_end_with_a_killed_mpirun(
    tmp_path: Path, started: Start
) -> None:
    trainer = ("python", "-m", "hvdtrain.mnist", *ENDLESS, f"--checkpoint-dir={tmp_path}")
    process = started("mpirun", "--oversubscribe", "-n", "2", *trainer, "--strategy=ddp")
    until(lambda: list(tmp_path.glob("step-*")), process)
    processes = family(process)
    next(process for process in processes if process.name() == "prterun").kill()
    assert_gone(processes)


@on_demand
def test_term_ends_the_ranks_if_one_is_suspended(tmp_path: Path, started: Start) -> None:
    process, processes = training(tmp_path, started)
    ranks = [rank for rank in ranks_of(process) if "python" in rank.name()]
    ranks[-1].suspend()
    process.send_signal(signal.SIGTERM)
    output = ended(process, 143)
    assert re.search(
        f"^hvdtrain: SIGTERM: stopped before the ranks had saved;.* {tmp_path}/", output, re.M
    )
    assert_gone(processes)
