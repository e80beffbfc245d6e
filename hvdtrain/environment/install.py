"""``hvdtrain install-horovod``: find, plan, build or take from the cache, install, prove.

Nothing in the environment changes before the wheel is complete; what changes then is put back if
the installation or its proof does not succeed, also on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.environment import recipe
from hvdtrain.environment.build import Build
from hvdtrain.environment.fingerprint import cache_key, identity
from hvdtrain.environment.installed import (
    find_installed,
    is_complete,
    mend_torchvision,
    take_snapshot,
    wheel_hash,
)
from hvdtrain.environment.plan import FRAMEWORKS, GPU_CHOICES, InstallOptions, Plan, make_plan
from hvdtrain.environment.proof import proof_command, prove
from hvdtrain.environment.toolchain import Toolchain, find
from hvdtrain.environment.wheel_cache import CachedWheel, WheelCache, cache_root, write_atomically
from hvdtrain.errors import EXIT_USAGE, HvdtrainError
from hvdtrain.launch.run import Command, run, termination_as_interrupt
from hvdtrain.verb import Report

log = logging.getLogger(__name__)

EPILOG = """example:
  hvdtrain install-horovod                          for the frameworks that are installed
  hvdtrain install-horovod --frameworks pytorch --gpu nccl
  hvdtrain install-horovod --dry-run                only print what would be run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--frameworks",
        default="",
        metavar="NAMES",
        help=f"frameworks to build for, separated by commas: {', '.join(FRAMEWORKS)} "
        "(default: those that are installed)",
    )
    parser.add_argument(
        "--gpu",
        default="none",
        choices=GPU_CHOICES,
        help="GPU operations: none builds CPU operations only (default), nccl needs CUDA and NCCL",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="compilers at the same time (default: one a core, 2 GB of memory each)",
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if the wheel is cached")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be run and change nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the build, the installation or the proof failed.
    """
    names = InstallOptions.__dataclass_fields__
    options = InstallOptions(**{name: getattr(arguments, name) for name in names})
    environ = dict(os.environ)
    toolchain = find(environ)
    plan = make_plan(options, toolchain)
    if plan.problems:
        return _refusal(plan)
    session = Session(options, toolchain, plan, WheelCache(cache_root(environ)), environ)
    return session.dry_run() if options.dry_run else session.install()


def _refusal(plan: Plan) -> Report:
    """Say what was found and what is missing, before anything is started."""
    lines = [*_table(plan), "", "Horovod cannot be built here:"]
    lines += [f"  - {problem}" for problem in plan.problems]
    problems = [{"what": p.what, "remedy": p.remedy} for p in plan.problems]
    return Report("\n".join(lines), {"ok": False, "problems": problems}, EXIT_USAGE)


def _table(plan: Plan) -> list[str]:
    return [f"{name:<11} {finding}" for name, finding in plan.rows]


@dataclass(frozen=True)
class Session:
    """One call of the verb, after its plan was found good."""

    options: InstallOptions
    """What the user asked for."""
    toolchain: Toolchain
    """What was found."""
    plan: Plan
    """What will be built."""
    cache: WheelCache
    """Where wheels are kept."""
    environ: Mapping[str, str]
    """The environment of this process."""

    @property
    def build(self) -> Build:
        """The build that this session would do."""
        target = self.plan.target
        facts = identity(target, self.toolchain, self.environ)
        return Build(target, self.toolchain, self.cache, cache_key(facts), facts, self.environ)

    def proofs(self) -> list[tuple[str, Command]]:
        """Return the commands that prove the installation, by framework."""
        mpi, python, gpu = self.toolchain.mpi, self.toolchain.python, self.plan.target.gpu
        assert mpi is not None
        return [
            (name, proof_command(name, mpi, python, gpu, self.environ))
            for name in self.plan.target.frameworks
        ]

    def dry_run(self) -> Report:
        """Return the commands that ``install`` would run, one a line."""
        build = self.build
        cached = None if self.options.rebuild else self.cache.find(build.key)
        if cached and self._is_in_place(cached):
            return Report("", {"ok": True, "commands": []})
        steps = [] if cached else [c for _, c in build.steps(self.cache.has_archive())]
        wheel = cached.path if cached else self.cache.root / "wheels" / build.key / "horovod-*.whl"
        steps.append(recipe.install_command(self.toolchain.python, wheel))
        steps += [command for _, command in self.proofs()]
        lines = [command.show() for command in steps]
        return Report("\n".join(lines), {"ok": True, "commands": lines})

    def install(self) -> Report:
        """Do all that is not yet done."""
        start = time.monotonic()
        for line in _table(self.plan):
            log.info("%s", line)
        with _told_when_stopped():
            build = self.build
            cached = None if self.options.rebuild else self.cache.find(build.key)
            if cached and self._is_in_place(cached):
                log.info("already installed and proven here: %s", cached.path)
                mend_torchvision(self.toolchain.site_packages)
                return self._report(cached, "nothing", _read_json(self._proof_file(cached)), start)
            log_file = self.cache.log_file(build.key)
            log_file.parent.mkdir(parents=True, exist_ok=True)
            log.info("log: %s", log_file)
            wheel, built = (cached, False) if cached else self._build(build, log_file)
            answers = self._put_in_place(wheel, log_file)
        return self._report(wheel, "built" if built else "taken from the cache", answers, start)

    def _proof_file(self, wheel: CachedWheel) -> Path:
        return wheel.proof_file(self.toolchain.prefix)

    def _is_in_place(self, wheel: CachedWheel) -> bool:
        """Tell whether ``wheel`` is installed here, whole, and was proven to work."""
        installed = find_installed(self.toolchain.site_packages)
        same = wheel_hash(installed) == wheel.sha256 and is_complete(installed)
        return same and self._proof_file(wheel).is_file()

    def _build(self, build: Build, log_file: Path) -> tuple[CachedWheel, bool]:
        """Build the wheel, unless another session has while we waited for it."""
        with self.cache.lock(build.key, "builds the same wheel"):
            found = None if self.options.rebuild else self.cache.find(build.key)
            if found:
                return found, False
            log.info("building Horovod with %d jobs; this takes minutes", build.target.jobs)
            return build.run(log_file), True

    def _put_in_place(self, wheel: CachedWheel, log_file: Path) -> dict[str, Any]:
        """Install and prove ``wheel``; if either fails the environment is put back as it was."""
        place = cache_key({"prefix": str(self.toolchain.prefix)})
        with (
            self.cache.lock(place, "installs into the same environment"),
            tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory,
        ):
            snapshot = take_snapshot(self.toolchain.site_packages, Path(directory))
            try:
                result = run(recipe.install_command(self.toolchain.python, wheel.path))
                if not result.ok:
                    cause = result.output.strip().splitlines()[-1:] or ["no output"]
                    raise HvdtrainError(f"pip could not install {wheel.path}: {cause[0]}")
                mend_torchvision(self.toolchain.site_packages)
                answers = prove(self.proofs(), log_file)
            except BaseException:
                snapshot.restore()
                raise
            write_atomically(self._proof_file(wheel), json.dumps(answers))
        return answers

    def _report(
        self, wheel: CachedWheel, done: str, answers: Mapping[str, Any], start: float
    ) -> Report:
        """Say what is installed now."""
        seconds = round(time.monotonic() - start, 1)
        names = ", ".join(self.plan.target.frameworks)
        text = (
            f"Horovod {recipe.HOROVOD_VERSION} for {names} is installed and proven at two ranks "
            f"({done}, {seconds} s)\nwheel: {wheel.path}"
        )
        data = {"ok": True, "wheel": str(wheel.path), "sha256": wheel.sha256, "done": done}
        return Report(
            text, data | {"proof": dict(answers), "facts": dict(wheel.facts), "seconds": seconds}
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``; empty if it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _told_when_stopped() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does, and say what came of either."""
    try:
        with termination_as_interrupt():
            yield
    except KeyboardInterrupt:
        log.info("stopped: the environment is as it was before, and no half-built wheel is kept")
        raise
