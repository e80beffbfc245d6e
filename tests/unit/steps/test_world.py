"""Launcher and runtime must agree on the world size."""

from __future__ import annotations

import pytest

from hvdtrain.steps.world import (
    Evidence,
    World,
    check_launch,
)
from hvdtrain.system.runtime.detect import BY_HAND, SINGLE_RANK, LaunchInfo
from tests.conftest import error_of


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


HYDRA = LaunchInfo("mpiexec (Hydra)", 7, 8, 7, 8)
SLURMSTEPD = Evidence(started_by="/usr/sbin/slurmstepd")  # of srun --mpi=pmi2


@pytest.mark.parametrize(
    ("launch", "seen", "evidence", "words"),
    [
        (
            HYDRA,
            1,
            OTHER,
            "mpiexec (Hydra) started 8 processes, but Horovod sees a world of 1: its MPI (Open MPI "
            "5.0.11, /env/lib/libmpi.so.40) is not the one that started it "
            "(/opt/mpich/bin/hydra_pmi_proxy). Start with /env/bin/mpirun, or run "
            "`hvdtrain install-horovod --rebuild`",
        ),
        (
            launched(8),
            1,
            Evidence(),
            "mpirun (Open MPI) started 8 processes, but Horovod sees a world of 1: no MPI is "
            "loaded in this process. Start with the mpirun of this environment, or run `hvdtrain",
        ),
        (LaunchInfo("srun", 1, 2, 1, 2), 1, OTHER, "srun started 2 processes"),
        (HYDRA, 1, SLURMSTEPD, "mpiexec (Hydra) started 8 processes"),
        (
            LaunchInfo(BY_HAND, 1, 4, 1, 4),
            1,
            OTHER,
            "RANK and WORLD_SIZE announce 4 processes, but Horovod sees a world of 1: Horovod does "
            "not read these variables. Start with `/env/bin/mpirun -n 4`, or unset RANK and WORLD",
        ),
        (
            SINGLE_RANK,
            4,
            OTHER,
            "the command line started 1 process, but Horovod sees a world of 4: a script between",
        ),
        (launched(2), 4, OTHER, "mpirun (Open MPI) started 2 processes, but Horovod sees a world"),
    ],
)
def test_another_size_is_refused_with_its_cause_and_a_remedy(
    launch: LaunchInfo, seen: int, evidence: Evidence, words: str
) -> None:
    message = error_of(check_launch, launch, seen, "Horovod", evidence)
    assert message.startswith(words)
    by_srun = launch.launcher == "srun" or evidence is SLURMSTEPD
    assert ("`srun --mpi=pmix`" in message) == by_srun
    assert ("OMPI_*" in message and "env -i" in message) == (seen == 4)


def test_devices_are_those_of_all_ranks() -> None:
    assert World(1, 6, 1, 6, "h", 1).devices == 6
    assert World(0, 1, 0, 1, "h", 1, gpus_per_rank=4).devices == 4
