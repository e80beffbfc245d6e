"""Resident ranks: ``mpirun -n N`` with a framework loaded, held for the session, runs what is sent.

Most of a short test is the start of its ranks and the import of their framework. A resident rank
has done both, and forks itself for each run before MPI, Horovod or a thread has started. So a run
has all that belongs to a process for itself: environment, signal handlers, modules, threads, output
and exit code are a fresh process's, and Horovod, Open MPI and TensorFlow, of which some settings
can be made once per process, start in it for the first time.

What concerns launchers, signals to a job, and variables that a library reads while it is loaded
(``OMP_NUM_THREADS``, ``LD_LIBRARY_PATH``) needs ``tests.conftest.ranks``, which starts processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.system.runtime.detect import detect
from tests.conftest import BIN, ROOT, Outcome, end_session, environment

START = 120.0  # seconds until all ranks are there
NAME = "tests.parallel.resident"
FRAMEWORKS = {"pytorch": "torch_task", "tensorflow": "tf_task"}


@dataclass(frozen=True)
class Answer:
    """How a run ended on one rank."""

    code: int
    """Its exit code; that of a signal is negative."""
    out: str
    err: str
    """With the traceback, where there is one."""
    result: Any
    """What the function returned."""


class Job:
    """The ranks of one ``mpirun``, seen from the tests."""

    def __init__(self, framework: str, number: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))  # sockets: short names
        self.runs = 0
        mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", str(number), sys.executable]
        with socket.socket(socket.AF_UNIX) as listener, (self.folder / "log").open("wb") as log:
            listener.bind(str(self.folder / "socket"))
            listener.listen(number)
            listener.settimeout(START)
            self.process = subprocess.Popen(
                [*mpirun, "-m", NAME, framework, str(self.folder / "socket")],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                lines = [listener.accept()[0] for _ in range(number)]
                self.ranks = {read(line)["rank"]: line for line in lines}
            except (TimeoutError, KeyError):
                said = (self.folder / "log").read_text()
                self.end()
                raise RuntimeError(f"{number} ranks have not come: {said[-3000:]}") from None

    def run(
        self, function: str, *arguments: Any, cwd: Path, timeout: float, extra: dict[str, str]
    ) -> tuple[int, list[Answer]]:
        """Run ``module:function`` on every rank; when one has failed the others are ended.

        The exit code is that of the first that failed, as mpirun's is; the answers are by rank.
        """
        folder = self.folder / str(self.runs)
        folder.mkdir()
        self.runs += 1
        order = {"function": function, "arguments": arguments, "cwd": str(cwd), "extra": extra}
        for line in self.ranks.values():
            write(line, {**order, "folder": str(folder)})
        codes: dict[int, int] = {}
        first, end = 0, time.monotonic() + timeout
        while waiting := {line: rank for rank, line in self.ranks.items() if rank not in codes}:
            ready = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]
            answers = {waiting[line]: read(line).get("code") for line in ready}
            if not ready or None in answers.values():
                said = "".join(path.read_text() for path in sorted(folder.glob("err.*")))
                what = "a resident rank is gone" if ready else f"it hung for {timeout} s"
                raise TimeoutError(f"{function} {arguments}: {what}\n{said}")
            codes |= answers
            if not first and (first := next(filter(None, answers.values()), 0)):
                for rank in set(waiting.values()) - set(answers):
                    write(self.ranks[rank], {"end": True})
        return first, [_answer(folder, rank, codes[rank]) for rank in sorted(codes)]

    def end(self) -> None:
        """Let the ranks end, and see that nothing is left of them."""
        for line in getattr(self, "ranks", {}).values():
            line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        end_session(self.process.pid)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _answer(folder: Path, rank: int, code: int) -> Answer:
    out, err = ((folder / f"{name}.{rank}").read_text(errors="replace") for name in ("out", "err"))
    file = folder / f"result.{rank}"
    return Answer(code, out, err, json.loads(file.read_text()) if file.exists() else None)


_jobs: dict[tuple[str, int], Job] = {}


def run(
    framework: str,
    number: int,
    function: str,
    *arguments: Any,
    cwd: Path = ROOT,
    timeout: float = 240,
    **extra: str,
) -> tuple[int, list[Answer]]:
    """Run ``module:function`` on ``number`` ranks of a framework, started where none are.

    ``arguments`` are anything that JSON has, ``extra`` environment variables. See ``Job.run``.
    """
    job = _jobs.get((framework, number))
    if job is None or job.process.poll() is not None:
        job = _jobs[framework, number] = Job(framework, number)
    code = 1
    try:
        code, answers = job.run(function, *arguments, cwd=cwd, timeout=timeout, extra=extra)
    finally:
        if code:  # mpirun's daemon waits for what a process that failed has left unfinished
            _jobs.pop((framework, number)).end()
    return code, answers


def ranks(number: int, *words: str, framework: str = "", cwd: Path = ROOT, **more: Any) -> Outcome:
    """Run ``python WORDS`` as ``tests.conftest.ranks`` does, on resident ranks.

    ``words`` are ``-m MODULE ...`` or a script's; the framework is read off them by default.
    """
    named = {"tensorflow", "--framework=tensorflow"} & set(words)
    framework = framework or ("tensorflow" if named else "pytorch")
    code, answers = run(framework, number, f"{NAME}:program", *words, cwd=cwd, **more)
    return Outcome(code, "".join(one.out for one in answers), "".join(one.err for one in answers))


def end_all() -> None:
    """End all jobs, at the end of the session."""
    while _jobs:
        _jobs.popitem()[1].end()


# What the ranks do


def program(*words: str) -> None:
    """Run ``python WORDS`` as the main program of this process: ``-m MODULE ...`` or a script."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def load(framework: str) -> None:
    """Import what a trainer imports, and start nothing."""
    from hvdtrain.training import trainer

    with trainer._hidden("matplotlib", "sklearn"):
        for strategy in STRATEGIES.values():
            if framework in strategy.adapters:
                importlib.import_module(strategy.adapters[framework].partition(":")[0])
    for module in (FRAMEWORKS[framework], f"mnist.{framework}", f"resnet.{framework}"):
        importlib.import_module(f"hvdtrain.workloads.{module}")
    with contextlib.suppress(ImportError):
        importlib.import_module("sklearn.datasets")
    gc.freeze()  # what is here already is no garbage of a run


def serve(framework: str, address: str) -> None:
    """Run what comes, each in a process of its own, until the tests close the connection."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    load(framework)
    rank = detect(os.environ).rank
    write(line, {"rank": rank})
    while order := read(line):
        if "end" in order:  # of a run that has ended by itself
            continue
        child = os.fork()
        if child == 0:
            line.close()
            return _obey(order, rank)
        gone = os.pidfd_open(child)
        if line in select.select([line, gone], [], [])[0]:
            os.kill(child, signal.SIGKILL)  # another rank has failed, or the tests are over
        os.close(gone)
        write(line, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def _obey(order: dict[str, Any], rank: int) -> None:
    """Run a function in this process, which then ends like any other: by itself."""
    folder = Path(order["folder"])
    for handle, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    os.chdir(order["cwd"])
    os.environ.update(order["extra"])
    module, _, name = order["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(*order["arguments"])
    (folder / f"result.{rank}").write_text(json.dumps(result))


def read(line: socket.socket) -> dict[str, Any]:
    """Return the next message; an empty one after the end."""
    text = b""
    with contextlib.suppress(ConnectionError):
        while (more := line.recv(1)) and more != b"\n":
            text += more
    message: dict[str, Any] = json.loads(text) if text else {}
    return message


def write(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    with contextlib.suppress(ConnectionError):  # its end is found by who reads
        line.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    serve(*sys.argv[1:])
