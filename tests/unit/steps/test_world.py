"""Launcher and runtime must agree, and the threads of the ranks must fit the cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.steps.world import (
    Evidence,
    World,
    asked_threads,
    check_launch,
    local_threads,
    threads_per_rank,
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


def cores(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


ALL8 = frozenset(range(8))


@pytest.mark.parametrize(
    ("affinities", "threads"),
    [
        ([ALL8], [8]),
        ([ALL8] * 2, [4, 4]),
        ([ALL8] * 3, [2, 2, 2]),
        ([ALL8] * 8, [1] * 8),
        ([ALL8] * 20, [1] * 20),  # never none
        ([cores(0, 1), cores(2, 3)], [2, 2]),  # bound by the launcher
        ([cores(0, 1, 2), cores(3)], [3, 1]),
        ([cores(0, 1, 2, 3)] * 2 + [cores(4, 5, 6, 7)] * 2, [2, 2, 2, 2]),  # bound by socket
        ([cores(7)], [1]),
    ],
)
def test_threads(affinities: list[frozenset[int]], threads: list[int]) -> None:
    assert [threads_per_rank(affinities, rank) for rank in range(len(affinities))] == threads


SETS = st.frozensets(st.integers(0, 7), min_size=1)


@given(st.lists(SETS, min_size=1, max_size=10))
def test_a_rank_has_a_thread_and_no_more_than_its_cores(affinities: list[frozenset[int]]) -> None:
    for rank, mine in enumerate(affinities):
        assert 1 <= threads_per_rank(affinities, rank) <= len(mine)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_ranks_bound_to_domains_of_cores_never_overfill_them(domains: list[int]) -> None:
    affinities = [frozenset(range(8 * domain, 8 * domain + 8)) for domain in domains]
    for domain in set(domains):
        threads = [
            threads_per_rank(affinities, rank)
            for rank, mine in enumerate(domains)
            if mine == domain
        ]
        assert sum(threads) <= 8
        assert threads == [8 // len(threads)] * len(threads)


@pytest.mark.parametrize(
    ("asked", "threads"), [(None, 0), ("", 0), ("3", 3), ("0", 0), ("-1", 0), ("4,2", 0)]
)
def test_threads_that_are_asked_for(asked: str | None, threads: int) -> None:
    assert asked_threads({} if asked is None else {"OMP_NUM_THREADS": asked}) == threads


def test_threads_before_any_collective(tmp_path: Path) -> None:
    """The other ranks of the host are found in ``/proc``: here this process and its parent."""
    cores = len(os.sched_getaffinity(0))
    mine = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "job"}
    for rank, process in enumerate((os.getpid(), os.getppid())):
        (tmp_path / str(process)).mkdir()
        text = f"PMIX_NAMESPACE=job\0OMPI_COMM_WORLD_LOCAL_RANK={rank}\0"
        (tmp_path / str(process) / "environ").write_text(text)
    assert local_threads(0, 2, mine, tmp_path) == max(1, cores // 2)
    assert local_threads(0, 2, {**mine, "OMP_NUM_THREADS": "5"}, tmp_path) == 5
    assert local_threads(0, 1, mine, tmp_path) == cores
    assert local_threads(0, 3, mine, tmp_path) == max(1, cores // 3)  # one is hidden


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_stages_of_a_model_have_one_part_of_the_data(stages: int) -> None:
    worlds = [World(rank, 6, rank, 6, "h", 1, stages=stages) for rank in range(6)]
    places = [(world.data_rank, world.stage) for world in worlds]
    assert places == [(part, stage) for part in range(6 // stages) for stage in range(stages)]
    for world in worlds:
        assert (world.data_size, world.shares, world.devices) == (6 // stages, 6 // stages, 6)
    several = World(0, 1, 0, 1, "h", 1, gpus_per_rank=4)
    assert (several.data_size, several.shares, several.devices) == (1, 4, 4)
