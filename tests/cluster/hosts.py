"""Two hosts on one machine: network namespaces joined by a third one, which is their switch.

Each has its own network card, address, loopback and hostname; files and processors are common, as
with a shared file system. Links can be cut, restored and slowed down; a host can be switched off.
Nothing is changed outside the namespaces, which are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.conftest import BIN, ROOT, Outcome, begin, executable, run

NET = "10.99.0"
SLOTS = 2  # per host
NAMES = Path("/etc/netns")
DELIVERY = 10.0  # seconds for a killed process to exit

# A replacement of ssh for mpirun: it runs a command on another host. It does not notice that the
# host is lost; if only the command is killed it ends with 255, but with 0 if that is Open MPI's
# daemon, as observed with a real ssh, whose daemon is in a separate session; TERM ends it, unless
# it is started to ignore it. Here the daemon stays in the session of mpirun: the two hosts share
# their cores, and on Linux 6.18 a session whose processes call sched_yield all the time starves
# another session on the same core for minutes.
AGENT = """\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$(getent ahostsv4 "$1" | head -n 1 | cut -d ' ' -f 1)
number=${{address##*.}}
shift
command=$(echo "$*" | sed 's/prted /prted --leave-session-attached /')
setup="[ ! -x {folder}/setup ] || {folder}/setup $number"
ip netns exec {tag}-$number unshare -u sh -c "hostname {tag}-host$number; $setup; $command"
code=$?
while [ -e {folder}/cut ]; do sleep 0.2; done
case $code:$command in
    1[2-9][0-9]:*prted*) exit 0 ;;
    1[2-9][0-9]:*) exit 255 ;;
esac
exit $code
"""


def lacks() -> str | None:
    """Return the reason why there can be no such hosts; install missing packages if possible."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None and shutil.which("apt-get"):
        run(["apt-get", "update", "-qq"])
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "iproute2"])
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{missing[0]} is missing: apt-get install iproute2 util-linux"
    probe = f"probe{os.getpid()}"
    tried = run(["ip", "netns", "add", probe])
    if tried.code == 0:
        tried = run(["ip", "netns", "exec", probe, "unshare", "-u", "hostname", probe])
        run(["ip", "netns", "del", probe])
    return f"no namespaces can be made here: {tried.err.strip()}" if tried.code else None


class TwoHosts:
    """Hosts 1 and 2; mpirun is started on host 1."""

    def __init__(self, folder: Path, names: Sequence[str] = ("", "")) -> None:
        """Prepare the hosts; ``start`` creates them.

        Args:
            folder: for the files of mpirun and of the agent.
            names: host names by which each host finds the others, besides addresses; "" for none.
        """
        self.folder, self.tag = folder, f"ht{os.getpid()}"
        self.names = dict(enumerate(names, 1))
        self.switch = f"{self.tag}-switch"
        self.agent = folder / "bin" / "ssh"

    def start(self) -> None:
        """Create the hosts and their links, after removing those of a killed run."""
        _take_down_the_forgotten()
        self.agent.parent.mkdir()
        executable(self.agent, AGENT.format(tag=self.tag, folder=self.folder))
        self._do(f"ip netns add {self.switch}")
        self._do(f"ip -n {self.switch} link add bridge type bridge")
        self._do(f"ip -n {self.switch} link set bridge up")
        for number in self.names:
            host, port = self.namespace(number), f"port{number}"
            self._do(f"ip netns add {host}")
            pair = f"type veth peer name {port} netns {self.switch}"
            self._do(f"ip link add eth0 netns {host} {pair}")
            self._do(f"ip -n {self.switch} link set {port} master bridge up")
            self._do(f"ip -n {host} addr add {self.address(number)}/24 dev eth0")
            self._do(f"ip -n {host} link set lo up")
            self._do(f"ip -n {host} link set eth0 up")
            if any(self.names.values()):  # shown as /etc/hosts by `ip netns exec`
                hosts = NAMES / host / "hosts"
                hosts.parent.mkdir(parents=True)
                lines = [f"{self.address(n)} {name}" for n, name in self.names.items()]
                local = f"{self.address(number)} {self.name(number)}"  # as Kubernetes does
                hosts.write_text("\n".join(["127.0.0.1 localhost", local, *lines, ""]))

    def stop(self) -> None:
        """Kill the processes on the hosts, by id, and remove the hosts."""
        self.kill(*self.names)
        for name in (*map(self.namespace, self.names), self.switch):
            run(["ip", "netns", "del", name])
            shutil.rmtree(NAMES / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # it has hosts of another run, or does not exist
            NAMES.rmdir()
        for file in Path("/dev/shm").glob(f"*{self.tag}-host*"):  # of killed ranks
            file.unlink(missing_ok=True)

    def set_up(self, script: str) -> None:
        """Let each process on a host begin with a script, whose argument is the host's number.

        What it mounts is seen by this process and those that it starts.
        """
        executable(self.folder / "setup", f"#!/bin/sh\n{script}")

    def namespace(self, number: int) -> str:
        """Return the network namespace of a host."""
        return f"{self.tag}-{number}"

    def name(self, number: int) -> str:
        """Return the hostname of a host."""
        return f"{self.tag}-host{number}"

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"{NET}.{number}"

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which mpirun reaches the hosts, for any command that starts it."""
        return {
            "PATH": os.pathsep.join([str(self.folder / "bin"), str(BIN), os.environ["PATH"]]),
            "PRTE_MCA_prte_if_include": f"{NET}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{NET}.0/24",
            "TMPDIR": str(self.folder),
        }

    def nodefile(self) -> Path:
        """Write a nodefile as PBS does, with a line per slot; return its path."""
        file = self.folder / "nodefile"
        lines = [self.address(number) for number in (1, 2) for _ in range(SLOTS)]
        file.write_text("\n".join(lines) + "\n")
        return file

    def on(self, number: int, *words: str) -> list[str]:
        """Return the command that runs ``words`` on a host."""
        setup = f"[ ! -x {self.folder}/setup ] || {self.folder}/setup {number}"
        line = f'hostname "$0" && {{ {setup}; }} && exec "$@"'
        host = ["ip", "netns", "exec", self.namespace(number), "unshare", "-u"]
        return [*host, "sh", "-c", line, self.name(number), *words]

    def mpirun(self, *words: str) -> list[str]:
        """Return the command on host 1 that starts two ranks on each host."""
        slots = ",".join(f"{self.address(number)}:{SLOTS}" for number in (1, 2))
        return self.on(1, "mpirun", "-H", slots, "-n", str(2 * SLOTS), *words)

    def run(self, command: list[str], timeout: float = 120, **extra: str) -> Outcome:
        """Run a command of ``on`` or ``mpirun`` to its end."""
        return run(command, timeout=timeout, **self.variables, **extra)

    @contextlib.contextmanager
    def running(self, command: list[str], **extra: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background, with standard error in standard output."""
        with begin(command, {**self.variables, **extra}) as process:
            try:
                yield process
            finally:
                self.mend()
                self.kill(*self.names)

    def processes(self, *numbers: int) -> list[int]:
        """Return the ids of the processes on these hosts."""
        listed = [run(["ip", "netns", "pids", self.namespace(number)]) for number in numbers]
        return [int(word) for outcome in listed for word in outcome.out.split()]

    def ranks(self) -> list[int]:
        """Return the ids of the running ranks on both hosts."""
        return [pid for pid in self.processes(1, 2) if _is_rank(pid)]

    def programs(self, number: int, pattern: str) -> list[int]:
        """Return the ids of the processes on a host whose program and arguments begin so."""
        return [pid for pid in self.processes(number) if re.match(pattern, _program(pid))]

    def kill(self, *numbers: int) -> None:
        """Kill all processes on these hosts at once."""
        deadline = time.monotonic() + DELIVERY
        while (left := self.processes(*numbers)) and time.monotonic() < deadline:
            send(signal.SIGKILL, left)
            time.sleep(0.02)

    def cut(self) -> None:
        """Cut the link between the hosts; their network cards stay up."""
        (self.folder / "cut").touch()
        self._do(f"bridge -n {self.switch} link set dev port2 state 0")

    def power_off(self) -> None:
        """Switch host 2 off, without closing its connections."""
        self.cut()
        self.kill(2)

    def mend(self) -> None:
        """Join the hosts again."""
        self._do(f"bridge -n {self.switch} link set dev port2 state 3")
        (self.folder / "cut").unlink(missing_ok=True)

    @contextlib.contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Limit both directions to ``rate``, in the format of tc; packets are queued."""
        for number in (1, 2):
            limit = f"tbf rate {rate} burst 16kb latency 400ms"
            self._do(f"tc -n {self.namespace(number)} qdisc add dev eth0 root {limit}")
        try:
            yield
        finally:
            for number in (1, 2):
                self._do(f"tc -n {self.namespace(number)} qdisc del dev eth0 root")

    @contextlib.contextmanager
    def impaired(self, *, delay: float = 0.0, loss: float = 0.0) -> Iterator[None]:
        """Delay each packet by so many seconds, and lose a fraction of them."""
        if shutil.which("ethtool") is None:
            run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "ethtool"])
        for number in self.names:
            self._do(
                f"ip netns exec {self.namespace(number)} "
                "ethtool --offload eth0 tx off tso off gso off gro off"
            )
            self._do(f"ip -n {self.switch} link set port{number} nomaster")
        words = ["ip", "netns", "exec", self.switch, sys.executable, "-m", "tests.cluster.relay"]
        cable = subprocess.Popen([*words, str(delay), str(loss)], cwd=ROOT)
        try:
            yield
            assert cable.poll() is None, "the cable has ended"
        finally:
            cable.kill()
            cable.wait()
            for number in self.names:
                self._do(f"ip -n {self.switch} link set port{number} master bridge")

    def _do(self, command: str) -> None:
        run(command.split(), code=0)


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _take_down_the_forgotten() -> None:
    for name in {line.split()[0] for line in run(["ip", "netns"]).out.splitlines() if line}:
        maker = name.partition("-")[0].removeprefix("ht")
        if maker.isdecimal() and not Path(f"/proc/{maker}").exists():
            send(signal.SIGKILL, map(int, run(["ip", "netns", "pids", name]).out.split()))
            run(["ip", "netns", "del", name])
            shutil.rmtree(NAMES / name, ignore_errors=True)


def _program(pid: int) -> str:
    """Return the name of a program and its arguments."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join([Path(words[0]).name, *words[1:]])
    return ""


def _is_rank(pid: int) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"OMPI_COMM_WORLD_RANK=" in variables or b"TORCHELASTIC_RUN_ID=" in variables
