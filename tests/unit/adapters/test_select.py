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


NOTHING = {"single"}  # all that is installed where Horovod is not


def choose(requested: str | None, launch: LaunchInfo, *, horovod: bool = True) -> str:
    installed = set(STRATEGIES) if horovod else NOTHING
    return choose_strategy(requested, "pytorch", launch, installed).name


@pytest.mark.parametrize("launch", [SINGLE_RANK, ONE_RANK, TWO_RANKS])
@pytest.mark.parametrize("requested", [None, "horovod"])
def test_horovod_if_it_is_installed(requested: str | None, launch: LaunchInfo) -> None:
    assert choose(requested, launch) == "horovod"


@pytest.mark.parametrize("launch", [SINGLE_RANK, ONE_RANK])
def test_one_process_without_horovod_is_single_with_a_warning(
    launch: LaunchInfo, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        assert choose(None, launch, horovod=False) == "single"
    assert caplog.messages == [
        "Horovod is not installed: training in one process (--strategy single)"
    ]


@pytest.mark.parametrize("horovod", [True, False])
@pytest.mark.parametrize("launch", [SINGLE_RANK, ONE_RANK])
def test_single_if_requested(
    horovod: bool, launch: LaunchInfo, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("single", launch, horovod=horovod) == "single"
    assert caplog.text == ""


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


@pytest.mark.parametrize("launch", [SINGLE_RANK, ONE_RANK, TWO_RANKS, TORCHRUN, SPAWNED])
def test_ddp_under_any_launcher_for_pytorch(launch: LaunchInfo) -> None:
    assert choose("ddp", launch) == "ddp"
    with pytest.raises(UsageError, match="--strategy ddp is for pytorch, not for --framework ten"):
        choose_strategy("ddp", "tensorflow", launch, STRATEGIES)


def test_a_framework_that_is_too_old_is_refused() -> None:
    new = Strategy("new", {}, oldest={"pytorch": "2.6"})
    check_version(new, "pytorch", "2.13.0+cpu")
    check_version(new, "tensorflow", "2.1")
    with pytest.raises(
        UsageError, match=r"--strategy new needs torch 2\.6 or newer, here is 2\.5\.1"
    ):
        check_version(new, "pytorch", "2.5.1")


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(UsageError, match="--framework jax: choose one of pytorch, tensorflow"):
        select.adapter("jax", environ={})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_framework_that_is_not_installed_is_refused_with_a_remedy(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "is_installed", lambda module: False)
    with pytest.raises(UsageError, match=f"pip install 'hvdtrain\\[{framework}\\]'"):
        select.adapter(framework, environ={})
