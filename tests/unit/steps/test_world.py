"""Launcher and runtime must agree on the world size."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.steps.world import (
    Evidence,
    World,
    check_launch,
)
from hvdtrain.system.runtime.detect import BY_HAND, SINGLE_RANK, LaunchInfo


def launched(size: int) -> LaunchInfo:
    return LaunchInfo("mpirun (Open MPI)", size - 1, size, size - 1, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_agreement_is_silent(size: int) -> None:
    check_launch(launched(size), size, "Horovod")
    check_launch(SINGLE_RANK, 1, "Horovod")


OTHER = Evidence(
    mpi="Open MPI 5.0.11, /env/lib/libmpi.so.40",
    matching_mpirun="/env/bin/mpirun",
    started_by="/opt/mpich/bin/hydra_pmi_proxy",
)


def refusal(launch: LaunchInfo, seen: int, evidence: Evidence = OTHER) -> str:
    with pytest.raises(UsageError) as caught:
        check_launch(launch, seen, "Horovod", evidence)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_worlds_of_one_under_another_mpi() -> None:
    message = refusal(LaunchInfo("mpiexec (Hydra)", 7, 8, 7, 8), 1)
    assert "mpiexec (Hydra) started 8 processes, but Horovod sees a world of 1: " in message
    assert "Open MPI 5.0.11, /env/lib/libmpi.so.40" in message
    assert "(/opt/mpich/bin/hydra_pmi_proxy). Start with /env/bin/mpirun, or run " in message
    assert "`hvdtrain install-horovod --rebuild`" in message


def test_without_evidence_there_is_a_cause_and_a_remedy() -> None:
    message = refusal(launched(8), 1, Evidence())
    assert "mpirun (Open MPI) started 8 processes, but Horovod sees a world of 1: no MPI" in message
    assert "the mpirun of this environment, or run `hvdtrain install-horovod" in message


def test_worlds_of_one_under_srun() -> None:
    message = refusal(LaunchInfo("srun", 1, 2, 1, 2), 1)
    assert "srun started 2 processes" in message
    assert "`srun --mpi=pmix`" in message
    assert "/env/bin/mpirun" in message


def test_srun_with_the_variables_of_hydra_is_still_srun() -> None:
    evidence = Evidence(started_by="/usr/sbin/slurmstepd")  # srun --mpi=pmi2
    assert "`srun --mpi=pmix`" in refusal(LaunchInfo("mpiexec (Hydra)", 1, 2, 1, 2), 1, evidence)


def test_a_world_announced_by_variables_only() -> None:
    message = refusal(LaunchInfo(BY_HAND, 1, 4, 1, 4), 1)
    assert "RANK and WORLD_SIZE announce 4 processes, but Horovod sees a world of 1: " in message
    assert "`/env/bin/mpirun -n 4`, or unset RANK and WORLD_SIZE" in message


@pytest.mark.parametrize(
    ("launch", "seen", "words"),
    [
        (SINGLE_RANK, 4, "the command line started 1 process, but Horovod sees a world of 4"),
        (launched(2), 4, "mpirun (Open MPI) started 2 processes, but Horovod sees a world of 4"),
    ],
)
def test_a_world_larger_than_that_of_the_launcher(
    launch: LaunchInfo, seen: int, words: str
) -> None:
    message = refusal(launch, seen)
    assert message.startswith(words)
    assert "env -i" in message
    assert "OMPI_*" in message


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_only_rank_zero_writes(rank: int) -> None:
    world = World(rank, 6, rank, 6, "host", 1)
    assert world.is_writer == (rank == 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_of_a_model_share_a_part_of_the_data(stages: int) -> None:
    worlds = [World(rank, 6, rank, 6, "h", 1, stages=stages) for rank in range(6)]
    pairs = [(world.data_rank, world.stage) for world in worlds]
    assert pairs == [(part, stage) for part in range(6 // stages) for stage in range(stages)]
    for world in worlds:
        assert (world.data_size, world.shares, world.devices) == (6 // stages, 6 // stages, 6)
    several = World(0, 1, 0, 1, "h", 1, gpus_per_rank=4)
    assert (several.data_size, several.shares, several.devices) == (1, 4, 4)
