"""Which adapter: by strategy, launcher, and what is installed."""

from __future__ import annotations

import logging

import pytest

from hvdtrain.adapters import select
from hvdtrain.adapters.select import check_version, choose_strategy
from hvdtrain.config.strategies import STRATEGIES, Strategy
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import SINGLE_RANK, LaunchInfo

ONE_RANK = LaunchInfo("mpirun (Open MPI)", 0, 1, 0, 1)
TWO_RANKS = LaunchInfo("mpirun (Open MPI)", 1, 2, 1, 2)
TORCHRUN = LaunchInfo("torchrun", 0, 2, 0, 2)
SPAWNED = LaunchInfo("--spawn", 0, 2, 0, 2)
GLOO = LaunchInfo("horovodrun --gloo", 0, 2, 0, 2)


NOTHING = {"single"}  # all that is installed where Horovod is not


def choose(requested: str | None, launch: LaunchInfo, *, horovod: bool = True) -> str:
    installed = set(STRATEGIES) if horovod else NOTHING
    return choose_strategy(requested, "pytorch", launch, installed).name


@pytest.mark.parametrize(
    ("requested", "launches", "horovod", "name"),
    [
        (None, (SINGLE_RANK, ONE_RANK, TWO_RANKS), True, "horovod"),
        ("horovod", (SINGLE_RANK, ONE_RANK, TWO_RANKS), True, "horovod"),
        (None, (SINGLE_RANK, ONE_RANK), False, "single"),
        ("single", (SINGLE_RANK, ONE_RANK), False, "single"),
        ("single", (SINGLE_RANK, ONE_RANK), True, "single"),
        ("ddp", (SINGLE_RANK, ONE_RANK, TWO_RANKS, TORCHRUN, SPAWNED), True, "ddp"),
    ],
)
def test_the_requested_strategy_or_one_that_is_installed(
    requested: str | None,
    launches: tuple[LaunchInfo, ...],
    horovod: bool,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "Horovod is not installed: training in one process (--strategy single)"
    for launch in launches:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hvdtrain"):
            assert choose(requested, launch, horovod=horovod) == name
        assert caplog.messages == ([] if horovod or requested else [text])


@pytest.mark.parametrize(
    ("requested", "launch", "horovod", "words"),
    [
        (None, TWO_RANKS, False, ["not installed", "hvdtrain install-horovod"]),
        ("horovod", TWO_RANKS, False, ["not installed", "hvdtrain install-horovod"]),
        ("horovod", SINGLE_RANK, False, ["not installed", "hvdtrain install-horovod"]),
        ("single", TWO_RANKS, True, ["--strategy single", "mpirun (Open MPI) started 2"]),
        (None, TORCHRUN, True, ["not by torchrun: use mpirun, or --strategy ddp"]),
        ("horovod", TORCHRUN, True, ["not by torchrun: use mpirun, or --strategy ddp"]),
        ("horovod", TORCHRUN, False, ["not by torchrun: use mpirun, or --strategy ddp"]),
        (None, SPAWNED, True, ["not by --spawn: use mpirun, or --strategy ddp"]),
        ("mpi", SPAWNED, True, ["not by --spawn: use mpirun, or --strategy ddp"]),
        ("pipeline", SINGLE_RANK, True, ["it was removed: use --strategy fsdp"]),
        *((name, GLOO, True, ["not by horovodrun --gloo: use mpirun"]) for name in (None, "ddp")),
        ("magic", SINGLE_RANK, True, ["--strategy magic: choose", ", ".join(STRATEGIES)]),
    ],
)
def test_impossible_strategies_are_refused(
    requested: str | None, launch: LaunchInfo, horovod: bool, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        choose(requested, launch, horovod=horovod)
    for word in words:
        assert word in str(caught.value)


def test_a_strategy_for_another_framework_is_refused() -> None:
    with pytest.raises(UsageError, match="--strategy ddp is for pytorch, not for --framework ten"):
        choose_strategy("ddp", "tensorflow", TWO_RANKS, STRATEGIES)


def test_a_framework_that_is_too_old_is_refused() -> None:
    new = Strategy("new", {}, oldest={"pytorch": "2.6"})
    check_version(new, "pytorch", "2.13.0+cpu")
    check_version(new, "tensorflow", "2.1")
    with pytest.raises(
        UsageError, match=r"--strategy new needs torch 2\.6 or newer, here is 2\.5\.1"
    ):
        check_version(new, "pytorch", "2.5.1")


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(UsageError, match="--framework jax: choose from pytorch, tensorflow"):
        select.adapter("jax", environ={})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_framework_that_is_not_installed_is_refused_with_a_remedy(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "is_installed", lambda module: False)
    with pytest.raises(UsageError, match=f"pip install 'hvdtrain\\[{framework}\\]'"):
        select.adapter(framework, environ={})
