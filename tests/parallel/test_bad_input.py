"""Bad input under the real mpirun: one clear line, the right exit code, no hang, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from hvdtrain.system.output.text import plural
from tests.conftest import BIN, LONG, ROOT, Outcome, Ranks, mounted, ranks, run, until
from tests.parallel import resident
from tests.parallel.conftest import (
    FRAMEWORKS,
    SCRIPTS,
    STRATEGIES,
    assert_one_line,
    completed,
    train,
)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--batch-size=0"], "--batch-size"),
        (["--resume=must", "--checkpoint-dir=/nonexistent"], "no checkpoint"),
        (["--checkpoint-dir=setup.cfg"], "setup.cfg is not a writable directory"),
    ],
)
def test_wrong_use(options: list[str], word: str) -> None:
    """Found by each rank before anything starts, and by all together after it.

    What else is refused: tests/unit/config/test_options.py, training/test_plan.py (models,
    precision), adapters/test_select.py (strategies); data that are not there: test_integrity.py
    and test_terminal.py.
    """
    assert_one_line(ranks(2, "-m", "hvdtrain.mnist", *options), 2, word)


@pytest.mark.parametrize("option", ["summary", *(["timeline"] if LONG else [])])
def test_a_pipe_that_nobody_reads(option: str, tmp_path: Path) -> None:
    """All options that name a file take one check; of its own: tests/unit/system/test_files.py."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = resident.ranks(
        2, "-m", "hvdtrain.mnist", "--num-steps=2", "--quiet", f"--{option}={pipe}"
    )
    assert_one_line(outcome, 2, f"--{option} {pipe} cannot be written: the pipe has no reader")
    assert pipe.is_fifo()


@pytest.mark.parametrize("options", [["--strategy=horovod"], ["--strategy=ddp", "--spawn=2"]])
def test_a_broken_framework_is_named(options: list[str], tmp_path: Path) -> None:
    """Not Horovod, which imports it."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')\n")
    command = [sys.executable, "-m", "hvdtrain.mnist", *options]
    outcome = run(command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", code=2)
    assert "Traceback" not in outcome.err
    reason = f"PyTorch cannot be imported: {tmp_path}/torch.py: libcudart.so.12: no such file"
    assert all(reason in line for line in outcome.said), outcome.err


AGENT = ("hvdtrain.commands.launch.elastic", "--nnodes=2", "--node-rank=0", "--no-python")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["hvdtrain.mnist", "--strategy=ddp"], 2, "MASTER_PORT={port}: address already in use"),
        ([*AGENT, "--master-addr=127.0.0.1", "--master-port={port}", "true"], 1, "set MASTER_PORT"),
    ],
)
def test_a_port_in_use_is_one_line(words: list[str], code: int, reason: str) -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = [sys.executable, "-m", *(word.format(port=port) for word in words)]
        outcome = run(line, **(names if code == 2 else {}))
    assert_one_line(outcome, code, reason.format(port=port))


BOUND = """
import os
import torch
from hvdtrain import adapter
hvd = adapter("pytorch", "mpi")
hvd.initialize()
device = hvd.pin_device()
print(device, "of", len(os.sched_getaffinity(0)), "cores", flush=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("number", [1, 2])
def test_ranks_that_openmp_binds_to_one_core_are_freed_and_warned(number: int) -> None:
    """Importing torch binds the thread of each rank to the first core."""
    mpirun = [str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(number)]
    outcome = run([*mpirun, sys.executable, "-c", BOUND], OMP_PROC_BIND="true", OMP_NUM_THREADS="")
    assert outcome.code == 0, outcome.err
    cores = len(os.sched_getaffinity(0))
    threads = plural(cores // number, "thread")
    assert outcome.out.count(f"cpu, {threads} of {cores} cores\n") == number, outcome.out
    warning = f"OMP_PROC_BIND binds the OpenMP threads of 2 ranks of {socket.gethostname()} to"
    assert (warning in outcome.err) == (number == 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_torchruns_agent_that_openmp_binds_leaves_its_ranks_all_cores() -> None:
    """Ranks inherit the cores of the agent, which imports torch."""
    show = "import os; print(len(os.sched_getaffinity(0)), 'cores')"
    launch = [str(BIN / "hvdtrain"), "launch", "-n", "2", "--launcher", "torchrun", "--"]
    outcome = run([*launch, sys.executable, "-c", show], OMP_PROC_BIND="true")
    cores = len(os.sched_getaffinity(0))
    assert outcome.out.count(f"{cores} cores\n") == 2, outcome.out + outcome.err


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes of eight small JPEGs, one grey and one CMYK among them; a name in Latin-1."""
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(8):
                mode = {0: "L", 1: "CMYK"}.get(number, "RGB")
                colour = tuple([60 * label + 8 * number] * len(mode))
                Image.new(mode, (48, 40), colour if len(mode) > 1 else colour[0]).save(
                    folder / f"{number}.jpg"
                )
            (folder / "7.jpg").rename(folder / os.fsdecode(b"caf\xe9.jpg"))
    return tmp_path / "pictures"


SHORT = ("--model=resnet18", "--image-size=32", "--epochs=1", "--batch-size=2")


def assert_no_process_left(mark: str) -> None:
    """No process of the run is left: its workers carry its environment."""
    deadline = time.monotonic() + 10
    while left := [p.pid for p in psutil.process_iter() if mark in environment_of(p)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def environment_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("TEST_MARK", "")
    except psutil.Error:
        return ""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_broken_jpeg_is_named_and_grey_and_cmyk_ones_are_taken(
    framework: str, pictures: Path, tmp_path: Path
) -> None:
    broken = pictures / "train" / "dog" / "5.jpg"
    os.truncate(broken, 200)
    line = ("-m", "hvdtrain.resnet", f"--framework={framework}", f"--data={pictures}", *SHORT)
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # a short name, as sockets need
    before = set(Path("/dev/shm").glob("sem.*"))
    outcome = resident.ranks(2, *line, "--quiet", TEST_MARK=str(pictures), TMPDIR=str(scratch))
    assert_one_line(outcome, 2, str(broken), "--skip-broken")
    assert_no_process_left(str(pictures))
    # PyTorch's cache is meant to stay; of worker processes and TensorFlow nothing is.
    left = {path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")}
    shutil.rmtree(scratch)
    assert not left
    new = set(Path("/dev/shm").glob("sem.*")) - before  # those of other tests vanish
    until(lambda: not any(map(Path.exists, new)), seconds=60, detail=lambda: new)
    png = broken.with_name("cut.png")
    Image.new("RGB", (40, 40)).save(png)
    os.truncate(png, png.stat().st_size - 12)  # Pillow does without the last chunk
    summary = tmp_path / "summary.json"
    shown = completed(2, *line, "--skip-broken", "--workers=0", f"--summary={summary}")
    skipped = "1 broken image," if framework == "pytorch" else "2 broken images,"
    assert f"skipped {skipped}" in shown.out and "absl" not in shown.err  # no banner of a worker
    done = json.loads(summary.read_text())
    samples = 16 if framework == "pytorch" else 15
    assert (done["samples_trained"], done["eval_samples"]) == (samples, 16)


def test_a_full_shared_memory(pictures: Path) -> None:
    """Worker processes hand their images over in /dev/shm; a container's may be small."""
    train = [sys.executable, "-m", "hvdtrain.resnet", f"--data={pictures}", "--quiet", *SHORT]
    small = 'mount -t tmpfs -o size=$0 tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", small, "8k", "true"]).returncode:
        pytest.skip("no file system can be mounted here")
    outcome = run(["unshare", "-m", "sh", "-c", small, "8k", *train], timeout=120)
    assert_one_line(outcome, 2, "/dev/shm on", "--workers 0")


FAULTY = str(SCRIPTS / "faulty_trainer.py")


def test_a_loss_that_is_nan_on_one_rank() -> None:
    """The job ends within 10 s and names the rank."""
    assert_one_line(resident.ranks(2, FAULTY, "nan", "--quiet"), 1, "rank 1", "step 4", "nan")


def test_a_rank_that_hangs_within_a_compiled_step_is_named() -> None:
    outcome = completed(2, FAULTY, "hang", "--framework=tensorflow", "--num-steps=4")
    host = socket.gethostname()
    waiting = f"the sum of the gradients: rank 0 on {host} waiting for rank 1 on {host}, which may"
    assert [line for line in outcome.said if waiting in line], outcome.err


def crash(number: int, how: str, *options: str, start: Ranks = resident.ranks) -> Outcome:
    return start(number, FAULTY, f"crash:{how}", "--quiet", *options)


def seconds_to_the_end(outcome: Outcome) -> float:
    """From the crash, as the rank told it, to now."""
    crashed = next(line for line in outcome.err.splitlines() if line.startswith("crashing"))
    return time.time() - float(crashed.split()[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_crash_on_one_rank_ends_the_job(strategy: str) -> None:
    outcome = crash(2, "raises", f"--strategy={strategy}")
    assert seconds_to_the_end(outcome) < 10  # the contract: the whole job within 10 s
    assert outcome.code == 1
    assert "rank 1" in outcome.said[0] and "step 3" in outcome.said[0]
    assert "no memory left" in outcome.err


@pytest.mark.parametrize("strategy", STRATEGIES if LONG else ["fsdp"])
def test_a_rank_that_is_killed_ends_the_job(strategy: str) -> None:
    outcome = crash(3, "killed", f"--strategy={strategy}", start=ranks)
    assert seconds_to_the_end(outcome) < 10
    assert outcome.code == 128 + signal.SIGKILL


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exits", 3, ", step 3: the program called sys.exit, exit code 3. No checkpoint was saved"),
        ("vanishes", 7, " exited unexpectedly (crashed, or killed"),
    ],
)
def test_a_rank_that_leaves_is_named(how: str, code: int, words: str, framework: str) -> None:
    # By mpirun itself, which throws away what its ranks say once one of them has left.
    start = ranks if how == "vanishes" else resident.ranks
    outcome = crash(3, how, f"--framework={framework}", start=start)
    assert outcome.code == code
    assert any(f"rank 1 on {socket.gethostname()}{words}" in line for line in outcome.said), (
        outcome.err
    )


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    options = ("--model=small", "--checkpoint-every=2")
    first = train(2, tmp_path, "mnist", *options, "--num-steps=4")
    os.truncate(first.newest / "model.safetensors", 1000)
    again = train(2, tmp_path, "mnist", *options, "--num-steps=6", "--resume=must")
    assert again.summary["steps_completed"] == 6
    assert "is damaged" not in again.outcome.err  # --quiet


@pytest.mark.parametrize("strategy", ["horovod", "fsdp"])
def test_a_full_disk_while_saving(strategy: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "16m") as disk:
        # A checkpoint of the tutorial net with its momenta takes 9.6 MB: the second is too many.
        line = ("-m", "hvdtrain.mnist", "--checkpoint-every=1", f"--checkpoint-dir={disk}")
        outcome = resident.ranks(2, *line, "--num-steps=3", "--quiet", f"--strategy={strategy}")
        assert_one_line(outcome, 1, "No space left", "step-000000001 is intact")
        assert [path.name for path in disk.iterdir()] == ["step-000000001"]
        shutil.copytree(disk / "step-000000001", tmp_path / "checkpoints" / "step-000000001")
    resumed = train(2, tmp_path, "mnist", "--num-steps=3", "--resume=must")
    assert resumed.summary["steps_completed"] == 3
