"""The kinds of faults: how each is injected, and how the training must end or go on."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.steps.checkpoint import load_newest, newest_name
from hvdtrain.system.runtime import walltime
from tests.cluster.hosts import TwoHosts
from tests.conftest import BIN, executable, mounted, until
from tests.faults.job import EVERY, FILLER, STRATEGIES, Job

GOES_ON, STOPPED = 0, 75
RANK = 1  # that has the fault
PROGRAMS = {"mpirun": "prterun", "launch": "hvdtrain", "daemon": "prted"}
DISK = "64m"  # size of a file system
SUSPENDED = 20.0  # seconds for which a process is suspended
LONG_PACE = 0.25  # seconds of a step for that
READERS = ("horovod", "ddp", "zero", "fsdp", "mpi")  # whose images are read by processes
HOST = re.escape(socket.gethostname())
NAMED = rf"rank {RANK} on {HOST}"
FAILED = rf"{NAMED}, step \d+: "
LOST = rf"rank 0 on {HOST}, step \d+: {NAMED} exited unexpectedly"
LATE = rf"waiting for {NAMED}"
HOST_LOST = r"host ht\d+-host2 was lost"
SILENT = rf"host ht\d+-host2 \(rank {RANK}\) has not answered for 15 s"
REMOVED = "the directory was removed|cannot be written"
KILLED = 128 + signal.SIGKILL
# What may be left behind: of processes that were all killed, and of those that launch killed.
OF_ALL = ("shared memory", "temporary files", "locks", "partial checkpoints")
OF_RANKS = ("locks", "partial checkpoints")

Inject = Callable[[Job], None]
Surroundings = Callable[[Job], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    inject: Inject
    codes: Sequence[int]  # of the launcher; GOES_ON: the training goes on
    report: str = ""  # regular expression of what a line of hvdtrain must contain
    seconds: float = 12  # maximum until the job is over or saves again
    launcher: str = "mpirun"
    strategies: Sequence[str] = tuple(STRATEGIES)
    surroundings: Surroundings = lambda job: contextlib.nullcontext()
    leaves: Sequence[str] = ()  # kinds of what may be left behind
    lost: int = 0  # maximum number of saved updates that are lost
    output: str = ""  # regular expression of what any line must contain
    failure: str = ""  # regular expression of what a line must contain if the job fails
    options: Sequence[str] = ("--quiet",)
    traceback: bool = False  # whether the output may contain one
    images: bool = False  # whether the training is on images
    pace: float = Job.pace  # so that the training does not end during the fault


def find(who: str) -> Callable[[Job], psutil.Process]:
    """Return a function that finds the process of a rank, or of a launcher."""
    if who == "rank":
        return lambda job: job.ranks()[RANK]
    return lambda job: job.launchers(PROGRAMS[who])[0]


def send(who: str, number: signal.Signals) -> Inject:
    """Return a function that sends a signal."""
    return lambda job: find(who)(job).send_signal(number)


def suspend(who: str) -> Inject:
    """Return a function that suspends a process and continues it later."""

    def inject(job: Job) -> None:
        process = find(who)(job)
        process.suspend()
        time.sleep(SUSPENDED)
        process.resume()

    return inject


def ask(kind: str) -> Inject:
    """Return a function that makes the user's code fail on a rank."""

    def inject(job: Job) -> None:
        part = job.request.with_suffix(".part")
        part.write_text(f"{kind} {RANK}")
        part.rename(job.request)
        until(lambda: not job.request.exists(), seconds=10, detail=lambda: job.output)

    return inject


# Faults of the disk of the checkpoints.


@contextlib.contextmanager
def disk(job: Job) -> Iterator[None]:
    """Mount a file system for the checkpoints, and copy them for the job that resumes."""
    job.options = ()  # with warnings
    saved = job.folder / "saved"
    with mounted(job.checkpoints, DISK):
        yield
        shutil.copytree(job.checkpoints, saved)
    shutil.copytree(saved, job.checkpoints, dirs_exist_ok=True)


def fill(folder: Path) -> None:
    """Fill the file system of a folder."""
    try:
        with (folder / FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error


def make_read_only(job: Job) -> None:
    """Make the disk read-only, as the kernel does after errors; the files stay open meanwhile."""
    words = ["mount", "-o", "remount,ro", str(job.checkpoints)]
    until(lambda: not subprocess.run(words, stderr=subprocess.DEVNULL).returncode, seconds=10)


def unmount(job: Job) -> None:
    """Take the disk away from the job."""
    enter = ["nsenter", "--mount", "--target", str(job.process.pid)]
    subprocess.run([*enter, "umount", "--lazy", str(job.checkpoints)], check=True)


def compiled(job: Job, name: str) -> str:
    """Compile a shared library from a C file of this folder; return its path."""
    source, library = Path(__file__).with_name(name), (job.folder / name).with_suffix(".so")
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


@contextlib.contextmanager
def slow_disk(job: Job) -> Iterator[None]:
    """Make each open, read, write, fsync and rename of the ranks 2 ms slower."""
    job.extra = {**job.extra, "LD_PRELOAD": compiled(job, "slow_disk.c")}
    yield


def check_library(job: Job, name: str = "slow_disk.so") -> None:
    """Check that all ranks have loaded the library."""
    for rank in job.ranks():
        assert any(Path(memory.path).name == name for memory in rank.memory_maps()), rank


def damage(change: Callable[[Job, Path], None]) -> Inject:
    """Return a function that kills all ranks and damages a file of the newest checkpoint."""

    def inject(job: Job) -> None:
        until(lambda: len(list(job.checkpoints.glob("step-*"))) > 1, job.process)
        job.kill()
        *_, intact, newest = sorted(job.checkpoints.glob("step-*"))
        file = job.chance.choice(sorted(newest.iterdir()))
        change(job, file)
        if not file.name.endswith(".index.json"):  # only other programs read that
            loaded = load_newest(job.checkpoints)
            assert loaded and loaded.path == intact, f"{file}: {loaded and loaded.path}"

    return inject


def flip(job: Job, file: Path) -> None:
    """Flip a bit anywhere in a file."""
    content = bytearray(file.read_bytes())
    content[job.chance.randrange(len(content))] ^= 1 << job.chance.randrange(8)
    file.write_bytes(content)


def halve(_: Job, file: Path) -> None:
    """Cut a file in two."""
    os.truncate(file, file.stat().st_size // 2)


def replace(_: Job, file: Path) -> None:
    """Give a file the content of another one of the checkpoint."""
    others = [other for other in sorted(file.parent.iterdir()) if other != file]
    shutil.copyfile(others[0], file)


def remove(job: Job) -> None:
    """Remove the directory of the checkpoints, while the training writes to it."""
    newest = job.newest
    shutil.copytree(job.checkpoints / newest, job.folder / "saved" / newest)
    while job.checkpoints.exists():
        shutil.rmtree(job.checkpoints, ignore_errors=True)


@contextlib.contextmanager
def kept(job: Job) -> Iterator[None]:
    """Put the removed checkpoint back for the job that resumes."""
    job.options = ()  # with warnings
    yield
    if not newest_name(job.checkpoints):
        shutil.copytree(job.folder / "saved", job.checkpoints, dirs_exist_ok=True)


# Faults of a data loader.


def kill_worker(job: Job) -> None:
    """Kill the process that reads the images of a rank; a server process forked it."""
    until(lambda: workers(job), job.process)
    workers(job)[0].kill()


def workers(job: Job) -> list[psutil.Process]:
    """Return the processes that read the images of a rank."""
    rank = job.ranks()[RANK]
    return [process for child in rank.children() for process in child.children()]


# Faults of the network, and of the second host.


@contextlib.contextmanager
def two_hosts(job: Job) -> Iterator[None]:
    """Run a rank on each of two hosts."""
    folder = job.folder / "hosts"
    folder.mkdir()
    hosts = TwoHosts(folder)
    hosts.start()
    addresses = ",".join(f"{hosts.address(number)}:1" for number in (1, 2))
    *launch, _ = job.launcher
    by_launch = [*launch, "--hosts", addresses, "--"]
    by_mpirun = ["mpirun", "-H", addresses, "-n", "2"]
    job.launcher = by_launch if launch[0] == "hvdtrain" else by_mpirun
    job.prefix = hosts.on(1)
    job.extra = {**hosts.variables, "TMPDIR": str(job.temporary)}
    job.hosts = hosts
    try:
        yield
    finally:
        hosts.stop()


def on_hosts(change: Callable[[TwoHosts], None]) -> Inject:
    """Return a function that changes the hosts of a job."""

    def inject(job: Job) -> None:
        assert job.hosts
        change(job.hosts)

    return inject


def impair(**how: float) -> Inject:
    """Return a function that makes the network between the hosts worse, until a later save."""

    def inject(job: Job) -> None:
        assert job.hosts
        with job.hosts.impaired(**how):
            before = job.newest
            time.sleep(5)
            until(lambda: job.newest > before, seconds=20, detail=lambda: job.output)

    return inject


def cut_and_mend(hosts: TwoHosts) -> None:
    """Cut the link between the hosts for some seconds."""
    hosts.cut()
    time.sleep(5)
    hosts.mend()


# Faults of the machine.


@contextlib.contextmanager
def false_clock(job: Job) -> Iterator[None]:
    """Let the ranks read a time of the day that can be set.

    Not by libfaketime: with a true monotonic clock its 0.9.10 fails each sleep of Python.
    """
    clock = job.folder / "clock"
    clock.write_bytes(struct.pack("q", 0))
    ends = {walltime.ENDS: str(time.time() + HALF_AN_HOUR)}  # half an hour before the later time
    preload = {"LD_PRELOAD": compiled(job, "clock.c"), "CLOCK_SHIFT": str(clock)}
    job.extra = {**job.extra, **ends, **preload}
    yield


def set_clock(job: Job) -> None:
    """Set the clock forth and back by an hour."""
    check_library(job, "clock.so")
    with (job.folder / "clock").open("r+b", buffering=0) as clock:
        for shift in (3600, -3600, 0):
            clock.seek(0)
            clock.write(struct.pack("q", shift))
            time.sleep(0.3)


def start_another(job: Job) -> None:
    """Start the same training again on the same directory, while the first one is suspended."""
    other = Job(job.folder / "other", job.strategy, training=job.training, extra=job.extra)
    other.options = (f"--checkpoint-dir={job.checkpoints}",)
    for rank in job.ranks():
        rank.suspend()
    try:
        with other.running():
            outcome = other.finish(60)
        assert outcome.code == 2, outcome
        assert "is in use by another training" in outcome.out, outcome.out
    finally:
        for rank in job.ranks():
            rank.resume()


def broken_batch_system(script: str) -> Surroundings:
    """Return the surroundings of a job whose ``qstat`` is ``script``."""

    @contextlib.contextmanager
    def surroundings(job: Job) -> Iterator[None]:
        programs = job.folder / "bin"
        programs.mkdir()
        nodes = job.folder / "nodes"
        nodes.write_text(f"{socket.gethostname()}\n" * 2)
        executable(programs / "qstat", f"#!/bin/sh\ntouch {job.folder}/called\n{script}\n")
        job.extra = {
            "PATH": os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]]),
            "PBS_JOBID": "7.server",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": str(nodes),
        }
        yield
        assert (job.folder / "called").exists(), "qstat was not called"

    return surroundings


def nothing(_: Job) -> None:
    """Inject nothing: the surroundings are the fault."""


HALF_AN_HOUR = 1800.0
ON_HOSTS: dict[str, Any] = {"surroundings": two_hosts, "leaves": OF_ALL[1:]}
WAITED_FOR: dict[str, Any] = {"seconds": 70, "launcher": "timeout", "options": ()}
SAVED = r"stopped after step \d+, saved"
BY_LAUNCH: dict[str, Any] = {"launcher": "launch"}
OF_DAEMON: dict[str, Any] = {"seconds": 30, **BY_LAUNCH, **ON_HOSTS}
ANY = range(1, 256)
# To whom, which signals, exit codes of the launcher, what hvdtrain reports ({}: the signal).
SIGNALS: Sequence[tuple[str, str, Sequence[int], str, dict[str, Any]]] = (
    ("rank", "SIGKILL", (1, KILLED), LOST, {}),
    ("rank", "SIGHUP", (GOES_ON,), "", {}),
    ("rank", "SIGTERM SIGINT SIGUSR1 SIGUSR2", (STOPPED,), f"{{}} on rank {RANK}: {SAVED}", {}),
    # Slowly, so that a rank that continues does not end by itself.
    ("mpirun", "SIGKILL", (-signal.SIGKILL,), "", {"leaves": OF_ALL, "pace": LONG_PACE}),
    ("mpirun", "SIGTERM SIGINT SIGHUP", ANY, f"SIGTERM: {SAVED}", {}),
    ("mpirun", "SIGUSR1 SIGUSR2", (STOPPED,), f"{{}}: {SAVED}", {}),
    ("launch", "SIGKILL", (-signal.SIGKILL,), "", {"leaves": OF_ALL, **BY_LAUNCH}),
    ("launch", "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2", (STOPPED,), f"{{}}: {SAVED}", BY_LAUNCH),
    ("daemon", "SIGKILL SIGHUP SIGUSR1 SIGUSR2", ANY, HOST_LOST, OF_DAEMON),  # which end it
    # It sends TERM to its ranks.
    ("daemon", "SIGTERM SIGINT", ANY, f"SIGTERM on rank {RANK}: {SAVED}", OF_DAEMON),
)
FAULTS: Mapping[str, Fault] = {
    **{
        f"{who}: {name}": Fault(
            send(who, signal.Signals[name]), codes, report.replace("{}", name), **more
        )
        for who, names, codes, report, more in SIGNALS
        for name in names.split()
    },
    **{
        f"{who}: suspended for 20 s": Fault(suspend(who), (GOES_ON,), pace=LONG_PACE, **more)
        for who, more in (
            *(("rank", {}), ("mpirun", {})),
            *(("launch", BY_LAUNCH), ("daemon", ON_HOSTS)),
        )
    },
    **{
        f"{who}: suspended for ever": Fault(send(who, signal.SIGSTOP), (124,), report, **more)
        for who, report, more in (
            ("rank", LATE, {"leaves": OF_RANKS, **WAITED_FOR}),
            ("mpirun", "no output", {"leaves": OF_ALL, **WAITED_FOR}),
            ("daemon", "no output", {"seconds": 90, "launcher": "timeout", **ON_HOSTS}),
        )
    },
    "host: cut off": Fault(on_hosts(TwoHosts.cut), ANY, SILENT, 45, **ON_HOSTS),
    "host: off": Fault(on_hosts(TwoHosts.power_off), ANY, SILENT, 45, **ON_HOSTS),
    "host: cut off for 5 s": Fault(on_hosts(cut_and_mend), (GOES_ON,), pace=0.1, **ON_HOSTS),
    "host: 200 ms slow": Fault(impair(delay=0.2), (GOES_ON,), pace=0.1, **ON_HOSTS),
    "host: 5 % of packets lost": Fault(impair(loss=0.05), (GOES_ON,), pace=0.1, **ON_HOSTS),
    "disk: full": Fault(
        lambda job: fill(job.checkpoints), (1,), "No space left", surroundings=disk
    ),
    "disk: read-only": Fault(make_read_only, (1,), "Read-only", surroundings=disk, leaves=OF_RANKS),
    "disk: vanished": Fault(unmount, (0, 1), REMOVED, surroundings=disk, leaves=OF_RANKS),
    "disk: slow, 2 ms per call": Fault(check_library, (GOES_ON,), surroundings=slow_disk),
    "disk: a bit flipped": Fault(damage(flip), (-signal.SIGKILL,), leaves=OF_ALL, lost=EVERY),
    "disk: half a file": Fault(damage(halve), (-signal.SIGKILL,), leaves=OF_ALL, lost=EVERY),
    "disk: another file's content": Fault(
        damage(replace), (-signal.SIGKILL,), leaves=OF_ALL, lost=EVERY
    ),
    "disk: directory removed": Fault(remove, (0, 1), REMOVED, surroundings=kept),
    "user's code: exception": Fault(
        ask("exception"), (1,), FAILED + "failed: RuntimeError", traceback=True
    ),
    "user's code: hang": Fault(ask("hang"), (124,), LATE, leaves=OF_RANKS, **WAITED_FOR),
    "user's code: sys.exit": Fault(ask("exit"), (3, 1), FAILED + "the program called sys.exit"),
    "user's code: os._exit": Fault(ask("end"), (3, 1), LOST),
    "user's code: segmentation fault": Fault(ask("segmentation"), (1, 139), LOST),
    "user's code: out of memory": Fault(ask("memory"), (1,), FAILED, traceback=True),
    "user's code: NaN": Fault(ask("nan"), (1,), rf"step \d+ .*finite.*{HOST} \(rank {RANK}\)"),
    "user's code: no descriptors left": Fault(
        ask("descriptors"), (0, 1), output=r"\d+ files are open", failure=FAILED, traceback=True
    ),
    "data loader: worker killed": Fault(kill_worker, (1,), FAILED, strategies=READERS, images=True),
    "machine: /dev/shm full": Fault(
        lambda job: fill(job.shared),
        (2,),
        "/dev/shm on .* is full",
        strategies=READERS,
        surroundings=lambda job: mounted(job.shared, DISK),
        leaves=("shared memory",),
        images=True,
    ),
    "machine: clock set by an hour": Fault(set_clock, (GOES_ON,), surroundings=false_clock),
    "directory: another job": Fault(start_another, (GOES_ON,)),
    "batch system: qstat hangs": Fault(
        nothing, (GOES_ON,), seconds=30, surroundings=broken_batch_system("sleep 1000")
    ),
    "batch system: qstat answers rubbish": Fault(
        nothing,
        (GOES_ON,),
        seconds=30,
        surroundings=broken_batch_system("head -c 100000 /dev/urandom; exit 0"),
    ),
}
