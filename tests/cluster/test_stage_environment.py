"""Ranks on two hosts start from copies of their environment, each in its host's own directory.

Each host mounts its directory in a mount namespace, which ends with the processes in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import TwoHosts
from tests.conftest import ended, run, until

LAUNCH = (sys.executable, "-m", "hvdtrain.cli", "launch")
SYSTEM = "/usr/bin/python3"
# Prints where a rank and a module of its environment are, and waits for a file, if there is one.
PROGRAM = """\
import os, sys, time
import module
inode = os.stat(module.__file__).st_ino
print("rank", os.uname().nodename, sys.prefix, inode, flush=True)
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""
# Mounts the local directory of a host: a small disk if it is to be full.
MOUNT = """\
if [ -e {folder}/full$1 ]
then mount -t tmpfs -o size=2m tmpfs {folder}/local
else mount --bind {folder}/disk$1 {folder}/local
fi
"""


class Hosts(TwoHosts):
    """Two hosts with a local directory each, and an environment that they share."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.local, self.environment = folder / "local", folder / "environment"
        self.disks = {number: folder / f"disk{number}" for number in self.names}

    def prepare(self) -> None:
        """Start the hosts, and create the environment."""
        self.start()
        for path in (self.local, *self.disks.values()):
            path.mkdir()
        self.set_up(MOUNT.format(folder=self.folder))
        make_environment(self.environment)
        (self.folder / "program.py").write_text(PROGRAM)

    def launch(self, *arguments: str) -> list[str]:
        """Return the command that starts two ranks on each host, with arguments of the program."""
        slots = ",".join(f"{self.address(number)}:2" for number in self.names)
        line = [*LAUNCH, "-n", "4", "--hosts", slots, "--stage-env", "--"]
        program = [str(self.environment / "bin" / "python"), str(self.folder / "program.py")]
        return self.on(1, *line, *program, *arguments)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a user."""
        cache = {"HVDTRAIN_CACHE": str(self.folder / "cache")}
        return {**super().variables, "TMPDIR": str(self.local), **cache}


def make_environment(folder: Path) -> None:
    """Create a small virtual environment: one of the system's interpreter, if possible."""
    options = ("-m", "venv", "--without-pip", str(folder))
    if not Path(SYSTEM).exists() or run([SYSTEM, *options]).code:
        assert run([sys.executable, *options]).code == 0
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "module.py").touch()
    (packages / "large.bin").write_bytes(os.urandom(2**23))


def mounts_lack() -> str | None:
    """Return the reason why no directory can be mounted here."""
    tried = run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
    return f"nothing can be mounted here: {tried.err.strip()}" if tried.code else None


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, removed at the end."""
    if reason := hosts.lacks() or mounts_lack():
        pytest.skip(reason)
    two = Hosts(tmp_path_factory.mktemp("stage"))
    try:
        two.prepare()
        yield two
    finally:
        two.stop()


@pytest.fixture(autouse=True)
def _nothing_is_left(two: Hosts) -> Iterator[None]:
    """Check after each test that no copy, archive, process or mount is left."""
    yield
    assert not list(two.folder.glob("disk*/hvdtrain-*"))
    assert not list(two.folder.glob("cache/*"))
    assert two.processes(1, 2) == []
    assert str(two.local) not in Path("/proc/self/mounts").read_text()


def test_each_host_has_its_copy(two: Hosts) -> None:
    outcome = two.run(two.launch(), code=0)
    lines = [line.split()[1:] for line in outcome.out.splitlines() if line.startswith("rank ")]
    ranks, (prefix, *others), inodes = zip(*lines, strict=True)
    assert sorted(ranks) == [two.name(1)] * 2 + [two.name(2)] * 2
    assert others == [prefix] * 3
    assert Path(prefix).parent.parent == two.local
    assert len(set(inodes)) == 2  # one per host
    assert "packing " in outcome.err
    assert f"staged in {prefix} on 2 hosts" in outcome.err


def test_the_copies_of_a_stopped_job_are_removed(two: Hosts, tmp_path: Path) -> None:
    end = tmp_path / "end"
    with two.running(two.launch(str(end))) as process:
        python = rf"python\S* {two.folder}/program.py {end}"
        until(lambda: all(len(two.programs(n, python)) == 2 for n in two.names), process)
        assert all(list(disk.glob("hvdtrain-*/env")) for disk in two.disks.values())
        stop(two)
        ended(process, 128 + signal.SIGTERM, seconds=60)


def stop(two: Hosts) -> None:
    """Send TERM to the launcher."""
    (launch,) = two.programs(1, r"python\S* -m hvdtrain.cli launch")
    os.kill(launch, signal.SIGTERM)


@pytest.mark.parametrize("number", [1, 2])
def test_a_full_disk_ends_the_job_with_one_line(number: int, two: Hosts) -> None:
    full = two.folder / f"full{number}"
    full.touch()
    try:
        outcome = two.run(two.launch())
    finally:
        full.unlink()
    assert outcome.code == 1
    assert f"rank {two.tag}" not in outcome.out
    (line,) = outcome.said
    assert line.startswith(f"hvdtrain: error: --stage-env: host {two.name(number)}: 8.")
    assert f" MiB are needed in {two.local}, " in line
    assert line.endswith(" are free")


@contextlib.contextmanager
def staging(two: Hosts) -> Iterator[subprocess.Popen[str]]:
    """Start a job, up to when its environment arrives on a host."""
    with two.slow("4mbit"), two.running(two.launch()) as process:
        until(lambda: list(two.disks[2].glob("hvdtrain-*/env/*")), process)
        yield process


def test_a_killed_process_ends_the_staging_and_nothing_is_left(two: Hosts) -> None:
    """As one that needs more memory than there is."""
    with staging(two) as process:
        (host,) = two.programs(2, r"python\S* -m hvdtrain.commands.launch.staging")
        os.kill(host, signal.SIGKILL)
        output = ended(process, 1, seconds=60)
    assert "hvdtrain: error: --stage-env: mpirun ended with code " in output
    assert f"rank {two.tag}" not in output


def test_a_signal_ends_the_staging_and_nothing_is_left(two: Hosts) -> None:
    with staging(two) as process:
        stop(two)
        output = ended(process, 128 + signal.SIGTERM, seconds=60)
    assert f"rank {two.tag}" not in output
