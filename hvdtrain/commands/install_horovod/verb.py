"""``hvdtrain install-horovod``: plan, build or take from the cache, prove, install.

The environment is changed only after the wheel has been proven in a directory next to
site-packages. The final pip command, about two seconds, is not interrupted.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.install_horovod import recipe
from hvdtrain.commands.install_horovod.build import (
    Build,
    find_installed,
    is_complete,
    mend_torchvision,
    proof_command,
    prove,
    wheel_hash,
)
from hvdtrain.commands.install_horovod.plan import BuildPlan, InstallOptions, make_plan
from hvdtrain.commands.install_horovod.toolchain import Toolchain, find
from hvdtrain.commands.install_horovod.wheel_cache import CachedWheel, WheelCache
from hvdtrain.errors import EXIT_USAGE, HvdtrainError
from hvdtrain.system.files import FULL, cache_root
from hvdtrain.system.output import Report
from hvdtrain.system.output.tables import entry
from hvdtrain.system.runtime.command import Command, HeldSignals, run, termination_as_interrupt

log = logging.getLogger(__name__)

FROM_CACHE = "taken from the cache"
EPILOG = """example:
  hvdtrain install-horovod             for the frameworks that are installed
  hvdtrain install-horovod --gpu nccl --cuda-arch 80,90
                                       on a login node without a GPU
  hvdtrain install-horovod --dry-run   only print the commands
"""


def run_verb(options: InstallOptions) -> Report:
    """Install Horovod, or print the commands.

    Raises:
        UsageError: an option is invalid.
        HvdtrainError: the build, the installation or the proof failed.
    """
    environ = dict(os.environ)
    toolchain = find(environ)
    if not options.cuda_arch:
        options = replace(options, cuda_arch=environ.get("HOROVOD_BUILD_CUDA_CC_LIST", ""))
    plan = make_plan(toolchain, options)
    if plan.problems:
        lines = [*rows_of(plan), "", "Horovod cannot be built here:"]
        lines += [entry("  - ", str(problem)) for problem in plan.problems]
        problems = [{"what": p.cause, "remedy": p.remedy} for p in plan.problems]
        return Report("\n".join(lines), {"ok": False, "problems": problems}, EXIT_USAGE)
    cache = WheelCache(cache_root(environ))
    session = Session(toolchain, plan, cache, environ, rebuild=options.rebuild)
    return session.dry_run() if options.dry_run else session.install()


def rows_of(plan: BuildPlan) -> list[str]:
    """Return the rows of the plan as text."""
    return [entry(f"{name:<11} ", finding) for name, finding in plan.rows]


@dataclass(frozen=True)
class Session:
    """One run of the command, with a plan without problems."""

    toolchain: Toolchain
    plan: BuildPlan
    cache: WheelCache
    environ: Mapping[str, str]  # the environment of this process
    rebuild: bool = False  # whether to build even if the wheel is cached

    @property
    def build(self) -> Build:
        """Return the build of this session."""
        return Build(self.plan.target, self.toolchain, self.cache, self.environ)

    @property
    def trial(self) -> Path:
        """Return the trial directory, a sibling of site-packages, so that relative rpaths hold."""
        return self.toolchain.site_packages.with_name(".hvdtrain-trial")

    def proofs(self) -> list[tuple[str, Command]]:
        """Return the commands that prove the wheel in ``trial``, by framework."""
        mpi, python, gpu = self.toolchain.mpi, self.toolchain.python, self.plan.target.gpu
        assert mpi is not None
        return [
            (name, proof_command(name, mpi, python, self.trial, gpu, self.environ))
            for name in self.plan.target.frameworks
        ]

    def dry_run(self) -> Report:
        """Return the commands that ``install`` would run, one per line."""
        build = self.build
        cached = self._cached(build.key)
        if cached and self._is_installed(cached):
            return Report("", {"ok": True, "commands": []})
        steps = [] if cached else [c for _, c in build.steps(self.cache.has_archive())]
        wheel = cached.path if cached else self.cache.root / "wheels" / build.key / "horovod-*.whl"
        python = self.toolchain.python
        steps.append(recipe.install_command(python, wheel, self.trial))
        steps += [command for _, command in self.proofs()]
        steps.append(recipe.install_command(python, wheel))
        lines = [command.show() for command in steps]
        return Report("\n".join(lines), {"ok": True, "commands": lines})

    def install(self) -> Report:
        """Build, prove and install Horovod, as far as needed."""
        start = time.monotonic()
        for line in rows_of(self.plan):
            log.info("%s", line)
        try:
            with termination_as_interrupt():
                wheel, done, results = self._install()
        except KeyboardInterrupt:
            log.info("interrupted: nothing partial is left in the environment or the cache")
            raise
        except OSError as error:
            need = "with 2 GB free" if error.errno in FULL else "that is writable"
            path = Path(error.filename or self.cache.root)
            in_cache = path.is_relative_to(self.cache.root)
            remedy = "set HVDTRAIN_CACHE to a directory" if in_cache else "use an environment"
            raise HvdtrainError(f"{path}: {error.strerror}; {remedy} {need}") from error
        seconds = round(time.monotonic() - start, 1)
        names = ", ".join(self.plan.target.frameworks)
        text = (
            f"Horovod {recipe.HOROVOD_VERSION} for {names} is installed and proven on two ranks "
            f"({done}, {seconds} s)\nwheel: {wheel.path}"
        )
        data = {"ok": True, "wheel": str(wheel.path), "sha256": wheel.sha256, "done": done}
        data |= {"proof": results, "facts": dict(wheel.facts), "seconds": seconds}
        return Report(text, data)

    def _install(self) -> tuple[CachedWheel, str, dict[str, object]]:
        """Install as far as needed; return the wheel, what was done, and the proofs' results."""
        build = self.build
        cached = self._cached(build.key)
        if cached and self._is_installed(cached):
            log.info("already installed and proven: %s", cached.path)
            mend_torchvision(self.toolchain.site_packages)
            return cached, "nothing", {}
        with self.cache.session(build.key) as log_file:
            log.info("log: %s", log_file)
            wheel, done = self._cached(build.key), FROM_CACHE  # also by another session meanwhile
            if wheel is None:
                log.info("building Horovod with %d jobs; this takes minutes", build.target.jobs)
                wheel, done = build.run(log_file), "built"
            results = self._prove(wheel, log_file)
            with HeldSignals():  # an interrupted pip would leave neither the old nor the new
                self._pip(wheel)
                mend_torchvision(self.toolchain.site_packages)
        return wheel, done, results

    def _cached(self, key: str) -> CachedWheel | None:
        return None if self.rebuild else self.cache.find(key)

    def _is_installed(self, wheel: CachedWheel) -> bool:
        """Return whether ``wheel`` is completely installed here, which it is only if proven."""
        installed = find_installed(self.toolchain.site_packages)
        return wheel_hash(installed) == wheel.sha256 and is_complete(installed)

    def _prove(self, wheel: CachedWheel, log_file: Path) -> dict[str, object]:
        """Prove ``wheel`` in the trial directory, and remove it; return the proofs' results."""
        shutil.rmtree(self.trial, ignore_errors=True)  # of a session that was killed
        try:
            self._pip(wheel, self.trial)
            nvidia = self.toolchain.site_packages / "nvidia"
            if nvidia.is_dir():  # one of the relative rpaths leads to the NCCL in it
                (self.trial / "nvidia").symlink_to(nvidia)
            return prove(self.proofs(), log_file)
        finally:
            shutil.rmtree(self.trial, ignore_errors=True)

    def _pip(self, wheel: CachedWheel, target: Path | None = None) -> None:
        """Install ``wheel`` into the environment, or into the directory ``target``."""
        result = run(recipe.install_command(self.toolchain.python, wheel.path, target))
        if not result.ok:
            cause = result.output.strip().splitlines()[-1:] or ["no output"]
            raise HvdtrainError(f"pip could not install {wheel.path}: {cause[0]}")
