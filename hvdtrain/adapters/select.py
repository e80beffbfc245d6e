"""Which adapter does the eight steps: chosen by framework, strategy, launcher, and what is here."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Collection, Mapping

from packaging.version import Version

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.config.levers import Levers, check_levers
from hvdtrain.config.strategies import DEFAULT, ONE_PROCESS, PACKAGES, STRATEGIES, Strategy
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.system.runtime.detect import LaunchInfo, detect

log = logging.getLogger(__name__)

DEFAULT_LEVERS = Levers()


def adapter(
    framework: str = "pytorch",
    strategy: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    levers: Levers = DEFAULT_LEVERS,
) -> CommonAdapter:
    """Return the adapter to call the eight steps of.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: a name of ``config/strategies.py``; None chooses ``horovod`` where it is
            installed, and ``single`` for one process without it.
        environ: the environment, where the launcher is read from.
        levers: how gradients travel, such as ``Levers(compression="fp16")``.

    Raises:
        UsageError: something is not installed, or strategy, launcher and levers do not fit.
    """
    if framework not in PACKAGES:
        meant = {"torch": "pytorch", "tf": "tensorflow", "keras": "tensorflow"}.get(framework)
        hint = f" (did you mean {meant}?)" if meant else ""
        raise UsageError(f"--framework {framework}: choose one of {', '.join(PACKAGES)}{hint}")
    if not is_installed(PACKAGES[framework]):
        raise UsageError(
            f"--framework {framework}: {PACKAGES[framework]} is not installed here; "
            f"pip install 'hvdtrain[{framework}]'"
        )
    installed = {
        name
        for name, record in STRATEGIES.items()
        if framework not in record.requires or is_installed(record.requires[framework])
    }
    record = choose_strategy(strategy, framework, detect(environ), installed)
    if framework in record.oldest:  # only then: TensorFlow's package has several names
        check_version(record, framework, importlib.metadata.version(PACKAGES[framework]))
    check_levers(levers, record, framework, environ)
    made = _load(record, framework)
    made.levers = levers
    return made


def _load(record: Strategy, framework: str) -> CommonAdapter:
    """Import the adapter of a strategy, and with it the strategy's library."""
    module, _, name = record.adapters[framework].partition(":")
    try:
        made: CommonAdapter = getattr(importlib.import_module(module), name)()
    except UsageError:
        raise
    except Exception as error:  # ImportError from PyTorch, an error of its own from TensorFlow
        if framework not in record.requires:
            raise
        cause = " ".join(str(error).split())
        raise UsageError(
            f"{record.library} is installed but cannot be loaded ({cause}): the MPI, torch or "
            f"TensorFlow here is not the one that it was built for. {record.remedy.capitalize()}; "
            "`hvdtrain doctor` shows what differs"
        ) from error
    return made


def check_version(record: Strategy, framework: str, version: str) -> None:
    """Raise ``UsageError`` where the framework's ``version`` is too old for the strategy."""
    oldest = record.oldest.get(framework, "0")
    if Version(version) < Version(oldest):
        raise UsageError(
            f"--strategy {record.name} needs {PACKAGES[framework]} {oldest} or newer, here is "
            f"{version}: install a newer one, or leave the option out"
        )


def choose_strategy(
    asked: str | None, framework: str, launch: LaunchInfo, installed: Collection[str]
) -> Strategy:
    """Return the strategy to use: a pure function of what was asked, launcher and what is here.

    Raises:
        UsageError: unknown, or not possible with this framework or launcher.
    """
    name = asked or DEFAULT.name
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name}: choose one of {', '.join(STRATEGIES)}")
    record = STRATEGIES[name]
    check_fit(record, framework, launch)
    if name in installed:
        return record
    if asked is None and launch.size == 1:
        log.warning(
            "%s is not installed: training in one process (--strategy %s)",
            *(record.library, ONE_PROCESS.name),
        )
        return ONE_PROCESS
    raise UsageError(
        f"--strategy {name}: {record.library} is not installed for this framework; {record.remedy}"
    )


def check_fit(record: Strategy, framework: str, launch: LaunchInfo) -> None:
    """Raise ``UsageError`` where a strategy is not for this framework or this launcher."""
    name = record.name
    if framework not in record.adapters:
        raise UsageError(
            f"--strategy {name} is for {', '.join(record.adapters)}, not for --framework "
            f"{framework}: leave the option out"
        )
    if launch.size > 1 and not record.launchers:
        raise UsageError(
            f"--strategy {name} trains in one process, {launch.launcher} started {launch.size}: "
            "leave the option out, or start one process"
        )
    if launch.launcher and record.launchers and launch.launcher not in record.launchers:
        others = [
            f" or --strategy {other.name}"
            for other in STRATEGIES.values()
            if launch.launcher in other.launchers and framework in other.adapters
        ]
        raise UsageError(
            f"--strategy {name} is started by mpirun, not by {launch.launcher}: use mpirun"
            f"{','.join(['', *others])}"
        )
