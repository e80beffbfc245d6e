"""Number of threads per rank: the user's, or the rank's share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.system.machine.threads import (
    RankCores,
    agreed_threads,
    batch_share,
    binding,
    equal_threads,
    launch_threads,
    local_cores,
    oversubscription,
    requested_threads,
    share_of_job,
    thread_variables,
    threads_per_rank,
)


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
        ([ALL8] * 20, [1] * 20),  # at least one
        ([cores(0, 1), cores(2, 3)], [2, 2]),  # bound by the launcher
        ([cores(0, 1, 2), cores(3)], [3, 1]),
        ([cores(0, 1, 2, 3)] * 2 + [cores(4, 5, 6, 7)] * 2, [2, 2, 2, 2]),  # bound by socket
        ([cores(7)], [1]),
    ],
)
def test_threads(affinities: list[frozenset[int]], threads: list[int]) -> None:
    assert [threads_per_rank(affinities, rank) for rank in range(len(affinities))] == threads


@pytest.mark.parametrize(
    ("value", "threads"), [(None, None), ("", None), ("3", 3), ("0", 0), ("-1", 0), ("4,2", 0)]
)
def test_threads_that_the_user_requests(value: str | None, threads: int | None) -> None:
    assert requested_threads({} if value is None else {"OMP_NUM_THREADS": value}) == threads


def test_cores_without_communication(tmp_path: Path) -> None:
    """The local ranks are found in ``/proc``: here this process and its parent."""
    cores = len(os.sched_getaffinity(0))
    mine = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "job"}
    for rank, process in enumerate((os.getpid(), os.getppid())):
        (tmp_path / str(process)).mkdir()
        text = f"PMIX_NAMESPACE=job\0OMPI_COMM_WORLD_LOCAL_RANK={rank}\0"
        (tmp_path / str(process) / "environ").write_text(text)
    assert local_cores(0, 2, mine, tmp_path) == max(1, cores // 2)
    assert local_cores(0, 2, {**mine, "OMP_NUM_THREADS": "5"}, tmp_path) == max(1, cores // 2)
    assert local_cores(0, 1, mine, tmp_path) == cores
    assert local_cores(0, 3, mine, tmp_path) == max(1, cores // 3)  # one is hidden
    assert local_cores(0, 500) == 1


def in_pbs(ncpus: int, threads: int | None = None) -> dict[str, str]:
    requested = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"PBS_JOBID": "7.pbs1", "NCPUS": str(ncpus), **requested}


@pytest.mark.parametrize("ncpus", [2, 3, 4, 8])
@pytest.mark.parametrize("ranks_here", [1, 2, 4, 16])
@pytest.mark.parametrize("requested", ["by PBS", "by the user", "unset"])
def test_mpirun_by_hand_and_launch_decide_alike_in_a_pbs_job(
    ncpus: int, ranks_here: int, requested: str
) -> None:
    """On a host with 8 cores, without binding."""
    value = {"by PBS": ncpus, "by the user": ncpus + 1, "unset": None}[requested]
    environ = in_pbs(ncpus, value)
    known = [RankCores("node1", tuple(range(8)), environ)] * ranks_here
    by_hand = [agreed_threads(known, rank) for rank in range(ranks_here)]
    share = launch_threads(ranks_here, 8, environ, known=True, fill=False)
    set_by_launch = {**environ, **thread_variables(share, environ)}
    launched = {name: str(text) for name, text in set_by_launch.items() if text is not None}
    known = [RankCores("node1", tuple(range(8)), launched)] * ranks_here
    assert [agreed_threads(known, rank) for rank in range(ranks_here)] == by_hand
    expected = value if requested == "by the user" else max(1, ncpus // ranks_here)
    assert by_hand == [expected] * ranks_here


@pytest.mark.parametrize(
    ("affinities", "environ", "threads"),
    [
        ([ALL8] * 2, in_pbs(4), [2, 2]),  # a part of the host, without binding
        ([ALL8] * 2, {"SLURM_CPUS_ON_NODE": "2"}, [1, 1]),
        ([ALL8] * 4, in_pbs(2), [1] * 4),
        ([cores(0, 1, 2), cores(3)], in_pbs(4), [3, 1]),
        ([ALL8] * 2, in_pbs(64), [4, 4]),
    ],
)
def test_the_share_of_an_allocation(
    affinities: list[frozenset[int]], environ: dict[str, str], threads: list[int]
) -> None:
    assert [share_of_job(affinities, rank, environ) for rank in range(len(threads))] == threads


def ranks(first: dict[str, str], second: dict[str, str]) -> list[RankCores]:
    """Return two ranks on each of two hosts with 8 cores."""
    hosts = {"node1": first, "node2": second}
    return [
        RankCores(host, tuple(range(8)), values) for host, values in hosts.items() for _ in "ab"
    ]


@pytest.mark.parametrize(
    ("first", "second", "threads"),
    [
        (in_pbs(2, 2), in_pbs(2, 2), [1] * 4),
        (in_pbs(2, 2), {"OMP_NUM_THREADS": "2"}, [1] * 4),  # mpirun -x OMP_NUM_THREADS
        (in_pbs(2, 2), {}, [1] * 4),  # mpirun over ssh
        (in_pbs(2, 3), {}, [3, 3, 1, 1]),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}, [3] * 4),
        ({}, {}, [4] * 4),
    ],
)
def test_a_variable_missing_on_a_host_has_the_value_of_the_first_rank_with_it(
    first: dict[str, str], second: dict[str, str], threads: list[int]
) -> None:
    known = ranks(first, second)
    assert [agreed_threads(known, rank) for rank in range(4)] == threads


def test_more_threads_than_cores_are_reported() -> None:
    known = ranks({}, {})
    assert oversubscription(known, [4, 4, 4, 4]) == ""
    assert oversubscription(known, [1, 1, 8, 8]) == (
        "16 threads share 8 cores of node2: unset OMP_NUM_THREADS, or set it to 4"
    )
    crowded = [RankCores("node1", (0,), {})] * 3
    assert oversubscription(crowded, [1, 1, 1]) == ""  # more ranks than cores: one each


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, ""),
        ({"OMP_PROC_BIND": "close"}, "OMP_PROC_BIND"),
        ({"OMP_PLACES": "cores"}, "OMP_PLACES"),
        ({"GOMP_CPU_AFFINITY": "0-7"}, "GOMP_CPU_AFFINITY"),
        ({"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"}, ""),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, "KMP_AFFINITY"),
        ({"KMP_AFFINITY": "disabled"}, ""),
        ({"KMP_AFFINITY": "verbose,None"}, ""),
    ],
)
def test_ranks_that_openmp_binds_to_the_same_cores(environ: dict[str, str], variable: str) -> None:
    assert binding(environ) == variable
    text = "binds the OpenMP threads of 2 ranks of node1 to the same cores: unset it"
    warning = f"{variable} {text}" if variable else ""
    assert oversubscription(ranks(environ, {}), [1] * 4) == warning
    bound = [RankCores("node1", (rank,), environ) for rank in range(2)]  # by the launcher
    assert oversubscription(bound, [1, 1]) == ""


def test_variables_set_by_a_launcher() -> None:
    assert thread_variables(None, {"OMP_NUM_THREADS": "2"}) == {}
    assert thread_variables(None, in_pbs(2, 2)) == {"OMP_NUM_THREADS": None}
    assert thread_variables(3, in_pbs(2, 2)) == {"OMP_NUM_THREADS": "3"}
    # Two per rank, by the user's --threads 2: must not be mistaken for the value of PBS.
    changed = {**in_pbs(2, 2), **thread_variables(2, in_pbs(2, 2))}
    assert requested_threads({name: value for name, value in changed.items() if value}) == 2


def test_the_allocation_of_the_batch_system() -> None:
    assert batch_share({}) == 0
    assert batch_share({"NCPUS": "4"}) == 4
    assert batch_share({"SLURM_CPUS_ON_NODE": "3", "NCPUS": "4"}) == 3
    assert batch_share({"NCPUS": "many"}) == 0


def test_threads_that_are_equal_at_all_sizes_of_a_study() -> None:
    no_gpus = {"CUDA_VISIBLE_DEVICES": ""}
    assert equal_threads(2, {"NCPUS": "1", **no_gpus}) == 1  # the job's part of the host
    assert equal_threads(2, {"OMP_NUM_THREADS": "3"}) == 3
    assert equal_threads(2, {"OMP_NUM_THREADS": "4,2"}) is None
    assert equal_threads(2, {"CUDA_VISIBLE_DEVICES": "0,1"}) is None  # the GPUs compute
