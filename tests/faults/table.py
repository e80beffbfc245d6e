"""The kinds of faults: how each is injected, and how the training must end or go on."""

from __future__ import annotations

import contextlib
import os
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

from hvdtrain.steps.checkpoint import newest_name
from tests.cluster.hosts import TwoHosts
from tests.conftest import BIN, executable, until
from tests.faults.job import EVERY, RESNET, STEPS, STRATEGIES, Job, make_images

GOES_ON, STOPPED = 0, 75
RANK = 1  # that has the fault
PAUSE = 20.0  # seconds for which a process is suspended
READERS = ("horovod", "ddp", "zero", "fsdp", "mpi")  # whose images are read by processes
NAMED = rf"rank {RANK}\b"
ENDED = rf"{NAMED}|@1,{RANK}\]"  # by hvdtrain or by mpirun
KILLED = 128 + signal.SIGKILL

Inject = Callable[[Job], None]
Surroundings = Callable[[Job], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    inject: Inject
    codes: Sequence[int]  # of the launcher; GOES_ON: the training goes on
    report: str = ""  # regular expression of what the output must contain
    seconds: float = 12  # maximum until the job is over or saves again
    launcher: str = "mpirun"
    strategies: Sequence[str] = tuple(STRATEGIES)
    surroundings: Surroundings = lambda job: contextlib.nullcontext()
    clean: bool = True  # whether nothing at all may be left behind; otherwise no process may
    lost: int = 0  # maximum number of saved updates that are lost


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
        time.sleep(PAUSE)
        process.resume()

    return inject


def ask(kind: str) -> Inject:
    """Return a function that makes the user's code fail on a rank."""

    def inject(job: Job) -> None:
        part = job.request.with_suffix(".part")
        part.write_text(f"{kind} {RANK}")
        part.rename(job.request)

    return inject


# Faults of the disk of the checkpoints.


@contextlib.contextmanager
def disk(job: Job, size: str = "64m") -> Iterator[None]:
    """Mount a file system for the checkpoints."""
    job.checkpoints.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(job.checkpoints)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        saved = job.folder / "saved"
        if os.path.ismount(job.checkpoints):
            shutil.copytree(job.checkpoints, saved)
            subprocess.run(["umount", "--lazy", str(job.checkpoints)], check=True)
        if saved.exists():  # for the job that resumes
            shutil.copytree(saved, job.checkpoints, dirs_exist_ok=True)


def fill(job: Job) -> None:
    """Fill the disk."""
    with contextlib.suppress(OSError), (job.checkpoints / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_read_only(job: Job) -> None:
    """Make the disk read-only, as the kernel does after errors; the files stay open meanwhile."""
    words = ["mount", "-o", "remount,ro", str(job.checkpoints)]
    while subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
        time.sleep(0.01)


def unmount(job: Job) -> None:
    """Take the disk away."""
    shutil.copytree(job.checkpoints, job.folder / "saved", ignore=lambda _, names: hidden(names))
    subprocess.run(["umount", "--lazy", str(job.checkpoints)], check=True)


def hidden(names: Sequence[str]) -> list[str]:
    """Return the names that begin with a dot."""
    return [name for name in names if name.startswith(".")]


SLOW = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#include <sys/types.h>
static void wait_for_the_disk(void) { usleep(2000); }
ssize_t write(int file, const void *bytes, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (file > 2) wait_for_the_disk();
    return real(file, bytes, size);
}
int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    wait_for_the_disk();
    return real(file);
}
int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "rename");
    wait_for_the_disk();
    return real(from, to);
}
"""


def compiled(source: str, library: Path) -> Path:
    """Compile a shared library."""
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=source, text=True, check=True)
    return library


@contextlib.contextmanager
def slow_disk(job: Job) -> Iterator[None]:
    """Make each write, fsync and rename of the ranks 2 ms slower."""
    job.extra = {**job.extra, "LD_PRELOAD": str(compiled(SLOW, job.folder / "slow.so"))}
    yield


def damage(change: Callable[[Job, Path], None]) -> Inject:
    """Return a function that kills all ranks and damages a file of the newest checkpoint."""

    def inject(job: Job) -> None:
        until(lambda: len(list(job.checkpoints.glob("step-*"))) > 1, job.process)
        for process in job.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.process.wait(10)
        checkpoint = job.checkpoints / (newest_name(job.checkpoints) or "")
        change(job, job.chance.choice(sorted(checkpoint.iterdir())))

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
    shutil.copytree(job.checkpoints, job.folder / "saved", ignore=lambda _, names: hidden(names))
    while job.checkpoints.exists():
        shutil.rmtree(job.checkpoints, ignore_errors=True)


@contextlib.contextmanager
def kept(job: Job) -> Iterator[None]:
    """Put the removed checkpoints back for the job that resumes."""
    yield
    if not newest_name(job.checkpoints):
        shutil.copytree(job.folder / "saved", job.checkpoints, dirs_exist_ok=True)


# Faults of a data loader.


@contextlib.contextmanager
def images(job: Job) -> Iterator[None]:
    """Train on images, which a process beside each rank reads."""
    job.training = (*RESNET, f"--data={make_images(job.folder / 'images')}")
    job.steps = STEPS // 4  # they take longer
    yield


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
    by_launch = job.launcher[0] == "hvdtrain"
    job.launcher = (
        ["hvdtrain", "launch", "-n", "2", "--hosts", addresses, "--"]
        if by_launch
        else ["mpirun", "-H", addresses, "-n", "2"]
    )
    job.prefix = hosts.on(1)
    job.extra = {**hosts.variables, "TMPDIR": str(job.temporary)}
    job.hosts = hosts
    try:
        yield
    finally:
        hosts.stop()


def on_hosts(what: Callable[[TwoHosts], None]) -> Inject:
    """Return a function that does something to the hosts of a job."""

    def inject(job: Job) -> None:
        assert job.hosts
        what(job.hosts)

    return inject


def impair(**how: float) -> Inject:
    """Return a function that makes the network between the hosts worse, for some seconds."""

    def inject(hosts: TwoHosts) -> None:
        with hosts.impaired(**how):
            time.sleep(5)

    return on_hosts(inject)


def cut_and_mend(hosts: TwoHosts) -> None:
    """Cut the link between the hosts for some seconds."""
    hosts.cut()
    time.sleep(5)
    hosts.mend()


# Faults of the machine.


@contextlib.contextmanager
def own_shared_memory(job: Job) -> Iterator[None]:
    """Give the job a /dev/shm of its own."""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'
    job.prefix = ["unshare", "--mount", "sh", "-c", mount]
    yield


def fill_shared_memory(job: Job) -> None:
    """Fill the job's /dev/shm."""
    fill = "dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null"
    enter = ["nsenter", "--mount", "--target", str(job.ranks()[0].pid)]
    subprocess.run([*enter, "sh", "-c", fill], check=False)


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
    job.extra = {**job.extra, "LD_PRELOAD": str(library), "CLOCK_SHIFT": str(clock)}
    yield


def set_clock(job: Job) -> None:
    """Set the clock forth and back by an hour."""
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
    other.start()
    try:
        outcome = other.finish(60)
        assert outcome.code == 2, outcome
        assert "is in use by another training" in outcome.err, outcome.err
    finally:
        other.end()
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
        executable(programs / "qstat", f"#!/bin/sh\n{script}\n")
        job.extra = {
            "PATH": os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]]),
            "PBS_JOBID": "7.server",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": str(nodes),
        }
        yield

    return surroundings


def nothing(_: Job) -> None:
    """Inject nothing: the surroundings are the fault."""


ON_HOSTS: dict[str, Any] = {"surroundings": two_hosts, "clean": False}
FAULTS: Mapping[str, Fault] = {
    "rank: SIGKILL": Fault(signal_rank(signal.SIGKILL), (1, KILLED), NAMED, clean=False),
    "rank: SIGTERM": Fault(signal_rank(signal.SIGTERM), (STOPPED,), "SIGTERM"),
    "rank: SIGINT": Fault(signal_rank(signal.SIGINT), (STOPPED,), "SIGINT|Ctrl-C"),
    "rank: SIGHUP": Fault(signal_rank(signal.SIGHUP), (GOES_ON,)),
    "rank: SIGUSR1": Fault(signal_rank(signal.SIGUSR1), (STOPPED,), "SIGUSR1"),
    "rank: SIGUSR2": Fault(signal_rank(signal.SIGUSR2), (STOPPED,), "SIGUSR2"),
    "rank: suspended for 20 s": Fault(suspend(lambda job: job.ranks()[RANK]), (GOES_ON,)),
    "rank: suspended for ever": Fault(
        signal_rank(signal.SIGSTOP), (124,), "no output", 30, "timeout", clean=False
    ),
    "mpirun: SIGKILL": Fault(
        signal_launcher("prterun", signal.SIGKILL), (-signal.SIGKILL,), clean=False
    ),
    "mpirun: SIGTERM": Fault(signal_launcher("prterun", signal.SIGTERM), range(1, 256), "SIGTERM"),
    "mpirun: SIGINT": Fault(signal_launcher("prterun", signal.SIGINT), range(1, 256), "SIGTERM"),
    "mpirun: SIGHUP": Fault(signal_launcher("prterun", signal.SIGHUP), range(1, 256)),
    "mpirun: SIGUSR1": Fault(signal_launcher("prterun", signal.SIGUSR1), (STOPPED,), "SIGUSR1"),
    "mpirun: SIGUSR2": Fault(signal_launcher("prterun", signal.SIGUSR2), (STOPPED,), "SIGUSR2"),
    "mpirun: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("prterun")[0]), (GOES_ON,)
    ),
    "launch: SIGKILL": Fault(
        signal_launcher("hvdtrain", signal.SIGKILL),
        (-signal.SIGKILL,),
        launcher="launch",
        clean=False,
    ),
    "launch: SIGTERM": Fault(
        signal_launcher("hvdtrain", signal.SIGTERM), (STOPPED,), "SIGTERM", launcher="launch"
    ),
    "launch: SIGINT": Fault(
        signal_launcher("hvdtrain", signal.SIGINT), (STOPPED,), "SIGINT|Ctrl-C", launcher="launch"
    ),
    "launch: SIGHUP": Fault(
        signal_launcher("hvdtrain", signal.SIGHUP), (STOPPED, 129), launcher="launch"
    ),
    "launch: SIGUSR1": Fault(
        signal_launcher("hvdtrain", signal.SIGUSR1), (STOPPED,), "SIGUSR1", launcher="launch"
    ),
    "launch: SIGUSR2": Fault(
        signal_launcher("hvdtrain", signal.SIGUSR2), (STOPPED,), "SIGUSR2", launcher="launch"
    ),
    "launch: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("hvdtrain")[0]), (GOES_ON,), launcher="launch"
    ),
    "daemon: SIGKILL": Fault(
        signal_launcher("prted", signal.SIGKILL), range(1, 256), "", 30, "launch", **ON_HOSTS
    ),
    "daemon: suspended for 20 s": Fault(
        suspend(lambda job: job.launchers("prted")[0]), (GOES_ON,), **ON_HOSTS
    ),
    "host: cut off": Fault(
        on_hosts(TwoHosts.cut), range(1, 256), "has not answered for 15 s", 45, **ON_HOSTS
    ),
    "host: off": Fault(
        on_hosts(TwoHosts.power_off), range(1, 256), "has not answered for 15 s", 45, **ON_HOSTS
    ),
    "host: cut off for 5 s": Fault(on_hosts(cut_and_mend), (GOES_ON,), **ON_HOSTS),
    "host: 200 ms slow": Fault(impair(delay=0.2), (GOES_ON,), **ON_HOSTS),
    "host: 5 % of packets lost": Fault(impair(loss=0.05), (GOES_ON,), **ON_HOSTS),
    "disk: full": Fault(fill, (1,), "No space left", surroundings=disk),
    "disk: read-only": Fault(make_read_only, (1,), "Read-only", surroundings=disk, clean=False),
    "disk: vanished": Fault(unmount, (0, 1), surroundings=disk, clean=False),
    "disk: slow, 2 ms per call": Fault(nothing, (GOES_ON,), surroundings=slow_disk),
    "disk: a bit flipped": Fault(damage(flip), (-signal.SIGKILL,), clean=False, lost=EVERY),
    "disk: half a file": Fault(damage(halve), (-signal.SIGKILL,), clean=False, lost=EVERY),
    "disk: another file's content": Fault(
        damage(replace), (-signal.SIGKILL,), clean=False, lost=EVERY
    ),
    "disk: directory removed": Fault(remove, (0, 1), surroundings=kept, clean=False),
    "user's code: exception": Fault(ask("exception"), (1,), NAMED),
    "user's code: hang": Fault(ask("hang"), (124,), "no output", 30, "timeout", clean=False),
    "user's code: sys.exit": Fault(ask("exit"), (3, 1), NAMED),
    "user's code: os._exit": Fault(ask("end"), (3, 1), ENDED, clean=False),
    "user's code: segmentation fault": Fault(ask("segmentation"), (1, 139), NAMED, clean=False),
    "user's code: out of memory": Fault(ask("memory"), (1,), NAMED),
    "user's code: NaN": Fault(ask("nan"), (1,), "finite"),
    "user's code: no descriptors left": Fault(ask("descriptors"), (0, 1)),
    "data loader: worker killed": Fault(
        kill_worker, (1,), NAMED, strategies=READERS, surroundings=images
    ),
    "machine: /dev/shm full": Fault(fill_shared_memory, (GOES_ON,), surroundings=own_shared_memory),
    "machine: clock set by an hour": Fault(set_clock, (GOES_ON,), surroundings=false_clock),
    "directory: another job": Fault(start_another, (GOES_ON,)),
    "batch system: qstat hangs": Fault(
        nothing, (GOES_ON,), surroundings=broken_batch_system("sleep 1000")
    ),
    "batch system: qstat answers rubbish": Fault(
        nothing,
        (GOES_ON,),
        surroundings=broken_batch_system("head -c 100000 /dev/urandom; exit 0"),
    ),
}
