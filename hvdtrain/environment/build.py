"""Building the wheel: the commands of the recipe, one after another, with a log and progress."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain.environment import recipe
from hvdtrain.environment.build_log import decisive_line, read_progress, remedy_for
from hvdtrain.environment.display import Display
from hvdtrain.environment.recipe import Target, Workshop
from hvdtrain.environment.toolchain import Toolchain
from hvdtrain.environment.wheel_cache import CachedWheel, WheelCache, file_hash
from hvdtrain.environment.wrapper import compiler_wrapper, relative_rpaths
from hvdtrain.errors import HvdtrainError
from hvdtrain.files import FULL
from hvdtrain.launch.run import Command, run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """One build: what, with what, and where."""

    target: Target
    """What is built."""
    toolchain: Toolchain
    """What it is built with."""
    cache: WheelCache
    """Where the wheel goes."""
    key: str
    """Its name in the cache."""
    facts: Mapping[str, object]
    """What that name stands for."""
    environ: Mapping[str, str]
    """The environment that it starts from."""

    @property
    def workshop(self) -> Workshop:
        """The directories of this build."""
        return Workshop(self.cache.build_root(self.key))

    def steps(self, has_archive: bool) -> list[tuple[str, Command]]:
        """Return the commands in order, each with the name of its stage."""
        python, workshop = self.toolchain.python, self.workshop
        changes = recipe.build_environment(self.target, self.toolchain, workshop, self.environ)
        steps = [("build tools", recipe.tools_command(python, workshop))]
        archive = self.cache.archive
        if not has_archive:
            fetched = workshop.scratch
            steps.append(("download", recipe.download_command(python, workshop, fetched, changes)))
        steps.append(("compile", recipe.wheel_command(python, workshop, archive, changes)))
        return steps

    def run(self, log_file: Path) -> CachedWheel:
        """Build and cache the wheel; call it under the lock of its key.

        Raises:
            HvdtrainError: a command failed; tells the log's decisive line and a remedy.
        """
        workshop = self.workshop
        shutil.rmtree(workshop.root, ignore_errors=True)  # of a build that was killed
        try:
            self._prepare()
            with Display() as display, log_file.open("a") as stream:
                for stage, command in self.steps(self.cache.has_archive()):
                    display.stage(stage)
                    stream.write(f"$ {command.show()}\n")
                    self._run_step(stage, command, _line_sink(stream, display), log_file)
            wheels = list(workshop.wheels.glob("horovod-*.whl"))
            if len(wheels) != 1:
                raise HvdtrainError(f"the build ended without a wheel; log: {log_file}")
            return self.cache.store(self.key, wheels[0], self.facts)
        except OSError as error:
            room = "with 2 GB free" if error.errno in FULL else "that you may write to"
            raise HvdtrainError(
                f"{error.filename or workshop.root}: {error.strerror}; "
                f"set HVDTRAIN_CACHE to a directory {room}"
            ) from error
        finally:
            shutil.rmtree(workshop.root, ignore_errors=True)

    def _prepare(self) -> None:
        """Make the directories, the compiler wrapper, and the name that NCCL is linked by."""
        workshop, compiler = self.workshop, self.toolchain.compiler
        for path in (workshop.scratch, workshop.nothing, workshop.wheels, workshop.nccl):
            path.mkdir(parents=True)
        assert compiler is not None
        text = compiler_wrapper(compiler.argv, relative_rpaths(self.toolchain))
        workshop.compiler.write_text(text)
        workshop.compiler.chmod(0o755)
        workshop.requirement.write_text(recipe.requirement_text())
        if self.toolchain.nccl:
            (workshop.nccl / "libnccl.so").symlink_to(self.toolchain.nccl.library.absolute())

    def _run_step(
        self, stage: str, command: Command, on_line: Callable[[str], None], log_file: Path
    ) -> None:
        """Run one command; after the download put the archive into the cache."""
        result = run(command, on_line)
        if not result.ok:
            cause = decisive_line(result.output.splitlines())
            raise HvdtrainError(
                f"the build of Horovod failed ({stage}, exit code {result.exit_code}): {cause}; "
                f"{remedy_for(cause)}; log: {log_file}"
            )
        if stage == "download":
            self._keep_archive()

    def _keep_archive(self) -> None:
        """Move the downloaded archive into the cache; pip has checked its hash, and so do we."""
        fetched = self.workshop.scratch / recipe.HOROVOD_ARCHIVE
        if file_hash(fetched) != recipe.HOROVOD_SHA256:
            raise HvdtrainError(f"{fetched.name} is not the released archive: its hash differs")
        self.cache.archive.parent.mkdir(parents=True, exist_ok=True)
        beside = self.cache.archive.with_name(f".{self.key}.tar.gz")
        shutil.copyfile(fetched, beside)
        beside.replace(self.cache.archive)


def _line_sink(stream: TextIO, display: Display) -> Callable[[str], None]:
    """Return what takes each line of a command: into the log, and its progress onto the screen."""

    def take(line: str) -> None:
        stream.write(line + "\n")
        progress = read_progress(line)
        if progress:
            stream.flush()
            display.show(progress)

    return take
