"""Launcher and runtime must agree, and the threads of the ranks must fit the cores."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.steps.world import (
    Evidence,
    World,
    check_launch,
)
from hvdtrain.system.runtime.detect import ALONE, BY_HAND, LaunchInfo


def launched(size: int) -> LaunchInfo:
    return LaunchInfo("mpirun (Open MPI)", size - 1, size, size - 1, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_agreement_is_silent(size: int) -> None:
    check_launch(launched(size), size, "Horovod")
    check_launch(ALONE, 1, "Horovod")


OTHER = Evidence(
    mpi="Open MPI 5.0.11, /env/lib/libmpi.so.40",
    own_mpirun="/env/bin/mpirun",
    started_by="/opt/mpich/bin/hydra_pmi_proxy",
)


def refusal(place: LaunchInfo, seen: int, evidence: Evidence = OTHER) -> str:
    with pytest.raises(UsageError) as caught:
        check_launch(place, seen, "Horovod", evidence)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_worlds_of_one_under_another_mpi() -> None:
    assert refusal(LaunchInfo("mpiexec (Hydra)", 7, 8, 7, 8), 1) == (
        "mpiexec (Hydra) started 8 processes, but Horovod sees a world of 1: its MPI (Open MPI "
        "5.0.11, /env/lib/libmpi.so.40) is not the one that started it "
        "(/opt/mpich/bin/hydra_pmi_proxy). Start with /env/bin/mpirun, or run `hvdtrain "
        "install-horovod --rebuild` with the mpirun that you want first on the PATH"
    )


def test_without_evidence_it_still_has_cause_and_remedy() -> None:
    assert refusal(launched(8), 1, Evidence()) == (
        "mpirun (Open MPI) started 8 processes, but Horovod sees a world of 1: no MPI is loaded in "
        "this process. Start with the mpirun of this environment, or run `hvdtrain "
        "install-horovod --rebuild` with the mpirun that you want first on the PATH"
    )


def test_worlds_of_one_under_srun() -> None:
    message = refusal(LaunchInfo("srun", 1, 2, 1, 2), 1)
    assert "srun started 2 processes" in message
    assert "`srun --mpi=pmix`" in message
    assert "/env/bin/mpirun" in message


def test_srun_with_the_variables_of_hydra_is_still_srun() -> None:
    evidence = Evidence(started_by="/usr/sbin/slurmstepd")  # srun --mpi=pmi2
    assert "`srun --mpi=pmix`" in refusal(LaunchInfo("mpiexec (Hydra)", 1, 2, 1, 2), 1, evidence)


def test_a_world_that_only_variables_announce() -> None:
    assert refusal(LaunchInfo(BY_HAND, 1, 4, 1, 4), 1) == (
        "RANK and WORLD_SIZE tell of 4 processes, but Horovod sees a world of 1: Horovod does not "
        "read these variables. Start with `/env/bin/mpirun -n 4`, or unset RANK and WORLD_SIZE to "
        "train alone"
    )


@pytest.mark.parametrize(
    ("place", "seen", "words"),
    [
        (ALONE, 4, "the command line started 1 process, but Horovod sees a world of 4"),
        (launched(2), 4, "mpirun (Open MPI) started 2 processes, but Horovod sees a world of 4"),
    ],
)
def test_a_world_larger_than_the_launcher_says(place: LaunchInfo, seen: int, words: str) -> None:
    message = refusal(place, seen)
    assert message.startswith(words)
    assert "env -i" in message
    assert "OMPI_*" in message


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_rank_zero_alone_writes(rank: int) -> None:
    world = World(rank, 6, rank, 6, "host", 1)
    assert world.is_writer == (rank == 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_of_a_model_have_one_part_of_the_data(stages: int) -> None:
    worlds = [World(rank, 6, rank, 6, "h", 1, stages=stages) for rank in range(6)]
    places = [(world.data_rank, world.stage) for world in worlds]
    assert places == [(part, stage) for part in range(6 // stages) for stage in range(stages)]
    for world in worlds:
        assert (world.data_size, world.shares, world.devices) == (6 // stages, 6 // stages, 6)
    several = World(0, 1, 0, 1, "h", 1, gpus_per_rank=4)
    assert (several.data_size, several.shares, several.devices) == (1, 4, 4)
