"""Selection of the adapter, by framework, strategy, launcher and installed packages."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Collection, Mapping

from packaging.version import Version

from hvdtrain.adapters.common_adapter import DEFAULTS, CommonAdapter
from hvdtrain.adapters.framework import Framework
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.config.checks import check, of_strategy
from hvdtrain.config.declare import REMOVED
from hvdtrain.config.strategies import (
    DEFAULT,
    ONE_PROCESS,
    PACKAGES,
    STRATEGIES,
    CommOptions,
    Strategy,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import find_module, is_installed
from hvdtrain.system.runtime.detect import LaunchInfo, detect

log = logging.getLogger(__name__)

TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}


def adapter(
    framework: str = "pytorch",
    strategy: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    comm_options: CommOptions = DEFAULTS,
) -> CommonAdapter:
    """Return the adapter, which implements the eight steps.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: a name of ``config/strategies.py``; None: ``horovod`` if it is installed,
            otherwise ``single`` for one process.
        environ: the environment from which the launcher is detected.
        comm_options: communication options, e.g. ``CommOptions(compression="fp16")``.

    Raises:
        UsageError: a package is not installed, or strategy, launcher and options do not fit.
    """
    if framework not in PACKAGES:
        meant = {"torch": "pytorch", "tf": "tensorflow", "keras": "tensorflow"}.get(framework)
        hint = f" (did you mean {meant}?)" if meant else ""
        raise UsageError(f"--framework {framework}: choose from {', '.join(PACKAGES)}{hint}")
    if not is_installed(PACKAGES[framework]):
        raise UsageError(
            f"--framework {framework}: {PACKAGES[framework]} is not installed; "
            f"pip install 'hvdtrain[{framework}]'"
        )
    installed = {
        name
        for name, record in STRATEGIES.items()
        if framework not in record.requires or is_installed(record.requires[framework])
    }
    launch = detect(environ)
    record = choose_strategy(strategy, framework, launch, installed)
    if framework in record.oldest:  # only then: TensorFlow's package has several names
        check_version(record, framework, importlib.metadata.version(PACKAGES[framework]))
    check(of_strategy(record, framework, launch, comm_options.compression))
    return CommonAdapter(*_load(record, framework), comm_options)


def _load(record: Strategy, framework: str) -> tuple[type[Framework], type[BaseStrategy]]:
    """Import the classes of framework and strategy, and thereby their libraries."""
    module, _, name = record.adapters[framework].partition(":")
    try:
        imported = importlib.import_module(f"hvdtrain.adapters.{framework}.framework")
    except Exception as error:
        where = f"{find_module(PACKAGES[framework])}: {' '.join(str(error).split())}"
        raise UsageError(f"{TITLES[framework]} cannot be imported: {where}") from error
    try:
        return imported.FRAMEWORK, getattr(importlib.import_module(module), name)
    except UsageError:
        raise
    except Exception as error:  # ImportError from PyTorch, a class of its own from TensorFlow
        if framework not in record.requires:
            raise
        cause = " ".join(str(error).split())
        raise UsageError(
            f"{record.library} is installed but cannot be loaded ({cause}): it was built for "
            f"another MPI, torch or TensorFlow. {record.remedy.capitalize()}; "
            "`hvdtrain doctor` shows what differs"
        ) from error


def check_version(record: Strategy, framework: str, version: str) -> None:
    """Raise ``UsageError`` if the framework's ``version`` is too old for the strategy."""
    oldest = record.oldest.get(framework, "0")
    if Version(version) < Version(oldest):
        raise UsageError(
            f"--strategy {record.name} needs {PACKAGES[framework]} {oldest} or newer, here is "
            f"{version}: upgrade it, or omit the option"
        )


def choose_strategy(
    requested: str | None, framework: str, launch: LaunchInfo, installed: Collection[str]
) -> Strategy:
    """Return the strategy for the ``requested`` name, the launcher and the installed packages.

    Raises:
        UsageError: the strategy is unknown, or impossible with this framework or launcher.
    """
    name = requested or DEFAULT.name
    if name not in STRATEGIES:
        removed = REMOVED.get(f"--strategy {name}")
        advice = f"it was removed: {removed}" if removed else f"choose from {', '.join(STRATEGIES)}"
        raise UsageError(f"--strategy {name}: {advice}")
    record = STRATEGIES[name]
    check(of_strategy(record, framework, launch))
    if name in installed:
        return record
    if requested is None and launch.size == 1:
        log.warning(
            "%s is not installed: training in one process (--strategy %s)",
            record.library,
            ONE_PROCESS.name,
        )
        return ONE_PROCESS
    raise UsageError(
        f"--strategy {name}: {record.library} is not installed for this framework; {record.remedy}"
    )
