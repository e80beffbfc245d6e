"""A private Slurm of one node that reads #PBS lines: no systemd, no cgroups, loopback only."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import Outcome, run, until

PACKAGES = ("slurm-wlm", "slurm-wlm-torque", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "qsub")
CPUS = 8  # more than real ones, so that jobs of four ranks run concurrently
START = 120.0  # seconds


def lacks() -> str | None:
    """Return the reason why there can be no Slurm; install missing packages if possible."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if not missing:
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{missing[0]} is missing: apt-get install {' '.join(PACKAGES)}"
    with _no_services():
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends"]):
            more = list(PACKAGES) if words[0] == "install" else []
            result = run(["apt-get", *words, *more], DEBIAN_FRONTEND="noninteractive")
            if result.code != 0:
                return f"apt-get {words[0]} failed: {result.err.strip()[-300:]}"
    return None


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Prevent the start of the packages' daemons for the whole machine."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def configuration(directory: Path, host: str, ports: tuple[int, int]) -> str:
    """Return the text of slurm.conf."""
    settings = {
        "ClusterName": "hvdtrain",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthInfo": f"socket={directory}/munge/socket",
        "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "slurmd.pid",
        "SlurmctldLogFile": directory / "slurmctld.log",
        "SlurmdLogFile": directory / "slurmd.log",
        "PlugStackConfig": directory / "plugstack.conf",  # spank_pbs.so sets PBS_JOBID and others
        "JobSubmitPlugins": "pbs",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "bf_interval=1,sched_interval=2",
        "KillWait": 5,
        "MinJobAge": 3600,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={CPUS} State=UNKNOWN",
        f"PartitionName=batch Nodes={host} Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


@dataclass
class Cluster:
    """A running Slurm."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which commands find this Slurm."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def command(self, *words: str, cwd: Path, timeout: float = 480, **extra: str) -> Outcome:
        """Run a command as a user of this cluster."""
        return run(list(words), cwd=cwd, timeout=timeout, **self.environment, **extra)

    def start(self) -> None:
        """Start the three daemons and wait until the node accepts jobs."""
        for name in ("state", "spool", "munge"):
            (self.directory / name).mkdir()
        (self.directory / "munge" / "key").write_bytes(os.urandom(128))
        (self.directory / "munge" / "key").chmod(0o600)
        (self.directory / "plugstack.conf").write_text("optional spank_pbs.so\n")
        host = socket.gethostname().partition(".")[0]
        config = self.directory / "slurm.conf"
        config.write_text(configuration(self.directory, host, _free_ports()))
        munge = self.directory / "munge"
        options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        words = [f"--{option}={munge / name}" for option, name in options.items()]
        for daemon in (
            ["munged", *words, f"--log-file={munge / 'log'}", "--force"],
            ["slurmctld", "-f", str(config), "-i"],
            ["slurmd", "-f", str(config)],
        ):
            self._daemon(daemon)
        state = ("sinfo", "-h", "-o", "%t")
        until(
            lambda: self.command(*state, cwd=self.directory).out.strip() == "idle",
            seconds=START,
            detail=(self.directory / "slurmctld.log").read_text,
        )

    def _daemon(self, words: list[str]) -> None:
        # Its output goes to a file: a pipe would stay open until the daemon ends.
        with (self.directory / "start.log").open("a") as log:
            subprocess.run(
                words,
                check=True,
                timeout=START,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _path(), **self.environment},
            )

    def stop(self) -> None:
        """Delete all jobs, stop the daemons by id, and check that no process remains."""
        self.command("scancel", "--user=root", cwd=self.directory)
        with contextlib.suppress(AssertionError):
            until(lambda: not self.command("squeue", "-h", cwd=self.directory).out, seconds=START)
        for file in ("slurmd.pid", "slurmctld.pid", "munge/pid"):
            if (self.directory / file).is_file():
                _end(int((self.directory / file).read_text()))
        remaining = self.processes()
        for process in remaining:
            process.kill()
        assert not remaining, f"processes remain: {remaining}"

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this cluster."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marks = [*process.cmdline(), process.cwd(), process.environ().get("SLURM_CONF", "")]
                ours = any(str(self.directory) in mark for mark in marks)
                if ours and process.pid != os.getpid():
                    processes.append(process)
        return processes


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def _end(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.terminate()
        try:  # in a container there may be no process to reap it
            until(lambda: process.status() == psutil.STATUS_ZOMBIE, seconds=START)
        except AssertionError:
            process.kill()
