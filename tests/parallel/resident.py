"""Resident processes: the ranks that mpirun starts are forked where a framework is loaded already.

Most of a short test is the import of a framework. Here ``mpirun -n N`` starts ``rank.py``, a Python
without any library, once per rank; it hands its environment, streams, folder and cores to a process
that has imported a framework and started nothing: neither MPI nor Horovod nor a thread. That one
forks itself into the rank. So a rank has what a fresh process has for itself (environment, signal
handlers, modules, threads), belongs to a job of its own, and ends as any rank of that job does:
mpirun sees its exit code, and hands signals on to it.

What concerns launchers, a rank's place among the processes, and variables that a library reads
while it is loaded (``OMP_NUM_THREADS``, ``LD_LIBRARY_PATH``) needs ``tests.conftest.ranks``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.config.strategies import STRATEGIES
from tests.conftest import BIN, ROOT, Outcome, end_session, environment, executable, run

START = 120.0  # seconds to load a framework
RANK = Path(__file__).with_name("rank.py")


class Server:
    """A process with a framework loaded, which listens at ``address``."""

    def __init__(self, framework: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))  # sockets: short names
        self.address = str(self.folder / "socket")
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, framework, self.address],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(START) or not self.process.stdout.readline():
                said = (self.folder / "log").read_text()
                self.end()
                raise RuntimeError(f"{framework} was not loaded: {said[-3000:]}")

    def end(self) -> None:
        """End it, and see that nothing is left of it."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=5)
        end_session(self.process.pid)
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


_servers: dict[str, Server] = {}


def address(framework: str) -> str:
    """Where a process listens that has ``framework`` loaded; starts it the first time."""
    server = _servers.get(framework)
    if server is None or server.process.poll() is not None:
        server = _servers[framework] = Server(framework)
    return server.address


def command(*words: str, framework: str = "") -> list[str]:
    """Return the command by which a rank becomes ``python WORDS``, forked from a resident process.

    ``words`` are ``-m MODULE ...`` or a script's; the framework is read off them by default.
    """
    named = {"tensorflow", "--framework=tensorflow"} & set(words)
    framework = framework or ("tensorflow" if named else "pytorch")
    return [sys.executable, "-SE", str(RANK), address(framework), *words]


def ranks(number: int, *words: str, framework: str = "", **more: Any) -> Outcome:
    """Run ``python WORDS`` as ``tests.conftest.ranks`` does, by ``command``."""
    mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", str(number)]
    return run([*mpirun, *command(*words, framework=framework)], **more)


# The mpirun of a command that starts ranks itself: their Python is that of ``command``.
MPIRUN = """\
#!/bin/sh
ranks=
for word; do
    shift
    case "$ranks$word" in
        python | {python}) set -- "$@" {python} -SE {rank} {address}; ranks=resident ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec {mpirun} "$@"
"""


def path(framework: str) -> str:
    """Return a PATH with an mpirun that starts resident ranks, of a command that starts some."""
    resident = {"address": address(framework), "rank": RANK}
    programs = _servers[framework].folder / "bin"
    programs.mkdir(exist_ok=True)
    text = MPIRUN.format(python=sys.executable, mpirun=BIN / "mpirun", **resident)
    executable(programs / "mpirun", text)
    return os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]])


def end_all() -> None:
    """End what has been kept, at the end of the session."""
    while _servers:
        _servers.popitem()[1].end()


# What the resident process does


def load(framework: str) -> None:
    """Import what a trainer imports, and start nothing."""
    from hvdtrain.training import trainer

    with trainer._hidden("matplotlib", "sklearn"):
        for strategy in STRATEGIES.values():
            if framework in strategy.adapters:
                importlib.import_module(strategy.adapters[framework].partition(":")[0])
    for module in ("workloads.mnist.", "workloads.resnet."):
        importlib.import_module(f"hvdtrain.{module}{framework}")
    if framework == "pytorch":
        importlib.import_module("torch._dynamo")  # a second; the first optimizer imports it
    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.datasets")
    gc.freeze()  # what is here already is no garbage of a run


def serve(framework: str, address: str) -> None:
    """Fork a rank for each connection, and tell it how the rank ended."""
    load(framework)
    ready = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        ready.register(listener, selectors.EVENT_READ)
        print("loaded", flush=True)
        while True:
            key, _ = ready.select()[0]  # one by one: what follows may be of a rank that has ended
            if key.fileobj is not listener:
                attend(ready, *key.data, ended=key.fd == key.data[2])
                continue
            line = listener.accept()[0]
            order, streams = receive(line)
            child = os.fork()
            if child == 0:
                ready.close()
                return become(order, streams)
            for stream in streams:
                os.close(stream)
            gone = os.pidfd_open(child)
            for end in (line, gone):
                ready.register(end, selectors.EVENT_READ, (child, line, gone))


def attend(
    ready: selectors.BaseSelector, child: int, line: socket.socket, gone: int, *, ended: bool
) -> None:
    """Hand a signal on to a rank, kill it if its connection is gone, or tell how it ended."""
    if not ended:
        (number,) = line.recv(1) or (signal.SIGKILL,)
        signal.pidfd_send_signal(gone, number)
        if number != signal.SIGKILL:
            return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ready.unregister(line)
    ready.unregister(gone)
    os.close(gone)
    with contextlib.suppress(ConnectionError), line:
        line.sendall(b"%d\n" % code)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what ``rank.py`` says, and its standard streams."""
    length, streams, _, _ = socket.recv_fds(line, 4, 3)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += line.recv(65536)
    order: dict[str, Any] = json.loads(data)
    return order, streams


def become(order: dict[str, Any], streams: list[int]) -> None:
    """Be ``python WORDS`` as mpirun would have started it: ``-m MODULE ...`` or a script."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    os.sched_setaffinity(0, order["cores"])
    os.environ.clear()
    os.environ.update(order["environment"])
    words = order["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
