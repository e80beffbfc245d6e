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
from tests.conftest import BIN, executable, until
from tests.faults.job import EVERY, FILLER, STRATEGIES, Job

GOES_ON, STOPPED = 0, 75
RANK = 1  # that has the fault
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
Surroundings = Callable[[Job], contextlib.AbstractContextManager[None]]


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


def signal_rank(number: signal.Signals) -> Inject:
    """Return a function that sends a signal to a rank."""
    return lambda job: job.ranks()[RANK].send_signal(number)


def signal_launcher(name: str, number: signal.Signals) -> Inject:
    """Return a function that sends a signal to a launcher."""
    return lambda job: job.launchers(name)[0].send_signal(number)


def suspend(find: Callable[[Job], psutil.Process]) -> Inject:
    """Return a function that suspends a process and continues it later."""

    def inject(job: Job) -> None:
        process = find(job)
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
def mounted(folder: Path) -> Iterator[None]:
    """Mount a file system of 64 MiB at a folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def disk(job: Job) -> Iterator[None]:
    """Mount a file system for the checkpoints, and copy them for the job that resumes."""
    job.options = ()  # with warnings
    saved = job.folder / "saved"
    with mounted(job.checkpoints):
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


SLOW = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>
#include <sys/types.h>
static void wait_for_the_disk(void) { usleep(2000); }
ssize_t write(int file, const void *bytes, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (file > 2) wait_for_the_disk();
    return real(file, bytes, size);
}
ssize_t read(int file, void *bytes, size_t size) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    if (file > 2) wait_for_the_disk();
    return real(file, bytes, size);
}
int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "open64");
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    wait_for_the_disk();
    return real(path, flags, mode);
}
int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    wait_for_the_disk();
    return real(file);
}
int openat64(int folder, const char *path, int flags, ...) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = dlsym(RTLD_NEXT, "openat64");
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    wait_for_the_disk();
    return real(folder, path, flags, mode);
}
int renameat(int folder, const char *from, int other, const char *to) {
    static int (*real)(int, const char *, int, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "renameat");
    wait_for_the_disk();
    return real(folder, from, other, to);
}
"""


def compiled(source: str, library: Path) -> Path:
    """Compile a shared library."""
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=source, text=True, check=True)
    return library


@contextlib.contextmanager
def slow_disk(job: Job) -> Iterator[None]:
    """Make each open, read, write, fsync and rename of the ranks 2 ms slower."""
    job.extra = {**job.extra, "LD_PRELOAD": str(compiled(SLOW, job.folder / "slow.so"))}
    yield


def check_library(job: Job, name: str = "slow.so") -> None:
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


CLOCK = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static time_t shift(void) {
    static volatile long *seconds;
    if (!seconds) {
        int file = open(getenv("CLOCK_SHIFT"), O_RDONLY);
        seconds = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    }
    return *seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += shift();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *seconds) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (seconds) *seconds = precise.tv_sec;
    return precise.tv_sec;
}
"""


@contextlib.contextmanager
def false_clock(job: Job) -> Iterator[None]:
    """Let the ranks read a time of the day that can be set.

    Not by libfaketime: with a true monotonic clock its 0.9.10 fails each sleep of Python.
    """
    clock = job.folder / "clock"
    clock.write_bytes(struct.pack("q", 0))
    library = compiled(CLOCK, job.folder / "clock.so")
    ends = {walltime.ENDS: str(time.time() + HALF_AN_HOUR)}  # half an hour before the later time
    job.extra = {**job.extra, **ends, "LD_PRELOAD": str(library), "CLOCK_SHIFT": str(clock)}
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
FAULTS: Mapping[str, Fault] = {
    "rank: SIGKILL": Fault(signal_rank(signal.SIGKILL), (1, KILLED), LOST),
    "rank: SIGHUP": Fault(signal_rank(signal.SIGHUP), (GOES_ON,)),
    **{
        f"rank: {number.name}": Fault(
            signal_rank(number), (STOPPED,), f"{number.name} on rank {RANK}: {SAVED}"
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    },
    "rank: suspended for 20 s": Fault(
        suspend(lambda job: job.ranks()[RANK]), (GOES_ON,), pace=LONG_PACE
    ),
    "rank: suspended for ever": Fault(
        signal_rank(signal.SIGSTOP), (124,), LATE, leaves=OF_RANKS, **WAITED_FOR
    ),
    # Slowly, so that a rank that continues does not end by itself.
    "mpirun: SIGKILL": Fault(
        signal_launcher("prterun", signal.SIGKILL),
        (-signal.SIGKILL,),
        leaves=OF_ALL,
        pace=LONG_PACE,
    ),
    **{
        f"mpirun: {number.name}": Fault(
            signal_launcher("prterun", number), range(1, 256), f"SIGTERM: {SAVED}"
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    },
    **{
        f"mpirun: {number.name}": Fault(
            signal_launcher("prterun", number), (STOPPED,), f"{number.name}: {SAVED}"
        )
        for number in (signal.SIGUSR1, signal.SIGUSR2)
    },
    "mpirun: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("prterun")[0]), (GOES_ON,), pace=LONG_PACE
    ),
    "mpirun: suspended for ever": Fault(
        signal_launcher("prterun", signal.SIGSTOP), (124,), "no output", leaves=OF_ALL, **WAITED_FOR
    ),
    "launch: SIGKILL": Fault(
        signal_launcher("hvdtrain", signal.SIGKILL),
        (-signal.SIGKILL,),
        launcher="launch",
        leaves=OF_ALL,
    ),
    **{
        f"launch: {number.name}": Fault(
            signal_launcher("hvdtrain", number),
            (STOPPED,),
            f"{number.name}: {SAVED}",
            launcher="launch",
        )
        for number in (
            *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
            *(signal.SIGUSR1, signal.SIGUSR2),
        )
    },
    "launch: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("hvdtrain")[0]),
        (GOES_ON,),
        launcher="launch",
        pace=LONG_PACE,
    ),
    "daemon: SIGKILL": Fault(
        signal_launcher("prted", signal.SIGKILL),
        range(1, 256),
        HOST_LOST,
        30,
        "launch",
        **ON_HOSTS,
    ),
    **{
        f"daemon: {number.name}": Fault(
            signal_launcher("prted", number),
            range(1, 256),
            f"SIGTERM on rank {RANK}: {SAVED}",  # which it sends to its ranks
            30,
            "launch",
            **ON_HOSTS,
        )
        for number in (signal.SIGTERM, signal.SIGINT)
    },
    **{
        f"daemon: {number.name}": Fault(
            signal_launcher("prted", number), range(1, 256), HOST_LOST, 30, "launch", **ON_HOSTS
        )
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # which end it
    },
    "daemon: suspended for ever": Fault(
        signal_launcher("prted", signal.SIGSTOP), (124,), "no output", 90, "timeout", **ON_HOSTS
    ),
    "daemon: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("prted")[0]), (GOES_ON,), pace=LONG_PACE, **ON_HOSTS
    ),
    "host: cut off": Fault(on_hosts(TwoHosts.cut), range(1, 256), SILENT, 45, **ON_HOSTS),
    "host: off": Fault(on_hosts(TwoHosts.power_off), range(1, 256), SILENT, 45, **ON_HOSTS),
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
        surroundings=lambda job: mounted(job.shared),
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
