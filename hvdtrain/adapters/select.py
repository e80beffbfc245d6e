"""Which adapter does the eight steps: chosen by framework, strategy, launcher, and what is here."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import Place, detect

log = logging.getLogger(__name__)

PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow"}
EXTENSIONS = {"pytorch": "horovod.torch.mpi_lib_v2", "tensorflow": "horovod.tensorflow.mpi_lib"}
STRATEGIES = ("horovod", "ddp", "zero", "fsdp", "data-parallel", "mpi", "pipeline", "single")
BUILT = ("horovod", "single")


def is_installed(module: str) -> bool:
    """Whether ``module`` can be found; imports its parent packages only."""
    try:
        parent = module.rpartition(".")[0]
        root = importlib.util.find_spec(module.partition(".")[0])
        if root is None or not parent:
            return root is not None
        if root.submodule_search_locations is None:  # a script of that name
            return False
        # Importing horovod.torch would import torch and MPI: look at its files instead.
        folder = Path(root.submodule_search_locations[0], *module.split(".")[1:-1])
        return any(folder.glob(module.rpartition(".")[2] + ".*"))
    except (ImportError, ValueError):
        return False


def adapter(
    framework: str = "pytorch", strategy: str | None = None, environ: Mapping[str, str] = os.environ
) -> CommonAdapter:
    """The adapter to call the eight steps of.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: ``horovod`` or ``single``; None chooses ``horovod`` where it is installed, and
            ``single`` for one process without it.
        environ: the environment, where the launcher is read from.

    Raises:
        UsageError: something is not installed, or strategy and launcher do not fit.
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
    place = detect(environ)
    chosen = choose_strategy(strategy, place, horovod=is_installed(EXTENSIONS[framework]))
    if framework == "pytorch":
        from hvdtrain.adapters.pytorch import single as torch_single

        if chosen == "single":
            return torch_single.SingleAdapter()
        with _loading_horovod():
            from hvdtrain.adapters.pytorch import horovod as torch_horovod

        return torch_horovod.HorovodAdapter()
    from hvdtrain.adapters.tensorflow import single as tf_single

    if chosen == "single":
        return tf_single.SingleAdapter()
    with _loading_horovod():
        from hvdtrain.adapters.tensorflow import horovod as tf_horovod

    return tf_horovod.HorovodAdapter()


@contextlib.contextmanager
def _loading_horovod() -> Iterator[None]:
    """A library of Horovod that does not load is no defect of ours: say what to do."""
    try:
        yield
    except Exception as error:  # ImportError from PyTorch, an error of its own from TensorFlow
        cause = " ".join(str(error).split())
        raise UsageError(
            f"Horovod is installed but cannot be loaded ({cause}): the MPI, torch or TensorFlow "
            "here is not the one that it was built for. Run `hvdtrain install-horovod`; "
            "`hvdtrain doctor` shows what differs"
        ) from error


def choose_strategy(asked: str | None, place: Place, *, horovod: bool) -> str:
    """The strategy to use: a pure function of what was asked, the launcher, and Horovod's presence.

    Raises:
        UsageError: unknown, not built yet, or not possible under this launcher.
    """
    strategy = asked or "horovod"
    if strategy not in STRATEGIES:
        raise UsageError(f"--strategy {strategy}: choose one of {', '.join(BUILT)}")
    if strategy not in BUILT:
        raise UsageError(
            f"--strategy {strategy} is not built yet: choose one of {', '.join(BUILT)}"
        )
    if strategy == "single":
        if place.size > 1:
            raise UsageError(
                f"--strategy single trains in one process, {place.launcher} started {place.size}: "
                "leave the option out, or start one process"
            )
        return strategy
    if place.launcher == "torchrun":
        raise UsageError(
            "--strategy horovod is started by mpirun, not by torchrun: "
            "use mpirun, or --strategy ddp"
        )
    if horovod:
        return strategy
    if asked is None and place.size == 1:
        log.warning("Horovod is not installed: training in one process (--strategy single)")
        return "single"
    raise UsageError(
        "--strategy horovod: Horovod is not installed for this framework; "
        "run `hvdtrain install-horovod`"
    )
