"""Stages the Python environment of a job on its hosts before the ranks start, and removes it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.environment import (
    ERROR,
    editable_installs,
    environment_of,
    find_program,
    pack,
)
from hvdtrain.commands.launch.environment_copy import HOLD, copy_folder, reservation
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.files import cache_root
from hvdtrain.system.output.text import duration, plural, size
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import run
from hvdtrain.system.runtime.spawn import StopSignals

log = logging.getLogger(__name__)

MUST, TRY = "must", "try"  # values of --stage-env
PROGRAM = "hvdtrain.commands.launch.environment_host"
# Variables with paths of files that are read; others may name a directory to write to.
PATHS = (
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)
PATIENCE = 120.0  # seconds to remove the copies
FAILED = 5.0  # seconds after a failure: a host may be lost
KILLED = 20.0  # seconds after the death of a process that made a copy


class StagedEnvironment:
    """The copies of a job's environment on its hosts."""

    def __init__(self, launch: Launch) -> None:
        """Pack the environment of the program of ``launch``, if it has changed.

        Raises:
            UsageError: it cannot be packed.
        """
        self._launch, environ = launch, launch.environ
        self._program = find_program(launch.words, environ)
        self._prefix = environment_of(self._program)
        for project in editable_installs(self._prefix):
            log.info("hvdtrain: --stage-env: %s is editable: ranks import it from there", project)
        self._archive = pack(self._prefix, cache_root(environ))
        self._directory = Path(environ.get("TMPDIR") or tempfile.gettempdir()).absolute()
        self._job = secrets.token_hex(8)
        self.folder = copy_folder(self._archive.digest, self._directory)

    def stage(self) -> None:
        """Make the copies.

        Raises:
            HvdtrainError: that failed on a host, and none is left.
        """
        began = time.monotonic()
        hosts = plural(len(self._launch.layout.hosts) or 1, "host")
        with terminal.working(f"sending the environment to {hosts}"):
            result = run(self._per_host("stage", str(self._archive.size)).command)
        if not result.ok:
            lines = result.output.strip().splitlines()
            reason = next((line for line in lines if line.startswith(ERROR)), "")
            if not reason:  # mpirun has failed, or a process has died and it has killed the others
                sys.stderr.write(result.output)
                self.remove(KILLED)
                launcher = Path(result.command.argv[0]).name
                reason = f"{launcher} ended with code {result.exit_code}; its output is above"
            raise HvdtrainError(f"--stage-env: {reason.removeprefix(ERROR)}")
        text = "hvdtrain: environment of %s staged in %s on %s, in %s"
        total = size(self._archive.size)
        log.info(text, total, self.folder, hosts, duration(time.monotonic() - began))

    def remove(self, patience: float = PATIENCE) -> None:
        """Remove the copies that no other job uses."""
        result = run(self._per_host("remove").command, timeout=patience)
        if not result.ok:
            text = "hvdtrain: %s may be left on a host; the next job there removes it"
            log.warning(text, self.folder)

    def _per_host(self, verb: str, *more: str) -> Launch:
        """Return the job that runs one process of ``environment_host`` per host."""
        program = (sys.executable, "-m", PROGRAM, verb)
        words = (*program, str(self._archive.path), str(self._directory), self._job, *more)
        hosts = tuple(Host(host.name, 1) for host in self._launch.layout.hosts)
        layout = RankLayout(len(hosts) or 1, hosts)
        return replace(self._launch, words=words, layout=layout, bind=False, tag=False)

    @property
    def launch(self) -> Launch:
        """The job whose ranks start from the copies."""
        environ = self._launch.environ
        variables = {name: self._moved(environ[name]) for name in PATHS if name in environ}
        variables = {n: value for n, value in variables.items() if value != environ[n]}
        program = str(self.folder / self._program.relative_to(self._prefix))
        # The first line of a script names the original interpreter.
        python = (str(self.folder / "bin" / "python"),) if _is_python(self._program) else ()
        held = (str(self.folder), str(reservation(self.folder, self._job)))
        words = (*HOLD, *held, *python, program, *self._launch.words[1:])
        return replace(self._launch, words=words, variables={**self._launch.variables, **variables})

    def _moved(self, value: str) -> str:
        """Return the value of a variable, with the paths of the environment in the copy."""
        for prefix in {str(self._prefix), os.path.realpath(self._prefix)}:
            pattern = rf"(?<![^:]){re.escape(prefix)}(?=[/:]|$)"
            value = re.sub(pattern, lambda _: str(self.folder), value)
        return value


def _is_python(program: Path) -> bool:
    """Return whether a program is a script in Python, by its first lines.

    If the path is long, the first one names the shell, which starts Python by ``'''exec'`` in the
    second one.
    """
    with program.open("rb") as file:
        first, second = (*os.fsdecode(file.read(1024)).splitlines(), "", "")[:2]
    if not first.startswith("#!"):
        return False
    words = [*first[2:].split(), *(second.split() if second.startswith("'''exec'") else ())]
    return any(Path(word.strip('"')).name.startswith("python") for word in words)


@contextlib.contextmanager
def staged(launch: Launch, mode: str | None, signals: StopSignals) -> Iterator[Launch]:
    """Return the job whose ranks start from copies of their environment, if requested.

    Raises:
        UsageError: the environment cannot be copied.
        HvdtrainError: on a host; neither is raised if ``mode`` is ``try``.
        KeyboardInterrupt: meanwhile a signal has requested a stop.
    """
    environment = None
    patience = FAILED
    try:
        if mode:
            try:
                with signals.interrupting():
                    environment = StagedEnvironment(launch)
                    environment.stage()
                launch = environment.launch
            except HvdtrainError as error:
                environment = None
                if mode == MUST:
                    raise
                text = "hvdtrain: %s; the ranks start from the shared environment"
                log.warning(text, error)
        yield launch
        patience = PATIENCE
    finally:
        if environment:
            environment.remove(patience)
