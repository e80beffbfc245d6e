"""Stages the Python environment of a job on its hosts before the ranks start, and removes it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdtrain.commands.install_horovod.wheel_cache import cache_root
from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.environment import BASE, Archive, environment_of, pack
from hvdtrain.commands.launch.environment_host import copy_folder, lock_file
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.output.text import duration, plural, size
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import run

log = logging.getLogger(__name__)

MUST, TRY = "must", "try"  # values of --stage-env
PROGRAM = "hvdtrain.commands.launch.environment_host"
HOLD = ("flock", "--shared", "--no-fork")  # of util-linux: the rank holds the lock on the copy
PATIENCE = 120.0  # seconds to remove the copies


class StagedEnvironment:
    """The copies of a job's environment on its hosts."""

    def __init__(self, launch: Launch, environ: Mapping[str, str] = os.environ) -> None:
        """Pack the environment of the program of ``launch``, if it has changed.

        Raises:
            UsageError: it cannot be copied.
        """
        self._launch = launch
        self._prefix = environment_of(launch.words, environ)
        self._archive: Archive = pack(self._prefix, cache_root(environ))
        self._directory = Path(environ.get("TMPDIR") or tempfile.gettempdir())
        self.folder = copy_folder(self._archive.manifest.digest, self._directory)

    def stage(self) -> None:
        """Make the copies.

        Raises:
            HvdtrainError: that failed on a host.
        """
        began = time.monotonic()
        hosts = plural(len(self._launch.layout.hosts) or 1, "host")
        with terminal.working(f"sending the environment to {hosts}"):
            result = run(self._per_host("stage").command)
        if not result.ok:
            lines = result.output.strip().splitlines()
            reason = next((line for line in lines if line.startswith("host ")), "")
            raise HvdtrainError(f"--stage-env: {reason or ' '.join(lines)[-300:]}")
        text = "hvdtrain: environment of %s staged in %s on %s, in %s"
        total = size(self._archive.manifest.bytes)
        log.info(text, total, self.folder, hosts, duration(time.monotonic() - began))

    def remove(self) -> None:
        """Remove the copies that no other job uses."""
        result = run(self._per_host("remove").command, timeout=PATIENCE)
        if not result.ok:
            log.warning("hvdtrain: %s was not removed on all hosts", self.folder)

    def _per_host(self, verb: str) -> Launch:
        """Return the job that runs one process of ``environment_host`` per host."""
        words = [sys.executable, "-m", PROGRAM, verb, str(self._archive.path), str(self._directory)]
        words += [self._archive.seal] if verb == "stage" else []
        hosts = tuple(Host(host.name, 1) for host in self._launch.layout.hosts)
        layout = RankLayout(len(hosts) or 1, hosts)
        return replace(self._launch, words=words, layout=layout, bind=False, tag=False)

    @property
    def launch(self) -> Launch:
        """The job whose ranks start from the copies."""
        program, *arguments = self._launch.words
        path = Path(program)
        if path.is_absolute() and path.is_relative_to(self._prefix):
            program = str(self.folder / path.relative_to(self._prefix))
        environ = self._launch.environ
        variables = {"PATH": f"{self.folder / 'bin'}:{environ.get('PATH', os.defpath)}"}
        if "VIRTUAL_ENV" in environ:
            variables["VIRTUAL_ENV"] = str(self.folder)
        libraries = [str(self.folder / BASE / "lib"), environ.get("LD_LIBRARY_PATH")]
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        words = (*HOLD, str(lock_file(self.folder)), program, *arguments)
        return replace(self._launch, words=words, variables=variables)
