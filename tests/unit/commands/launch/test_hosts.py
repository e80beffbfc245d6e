"""Hosts: the files and variables of PBS and Slurm, and the layout of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.launch.hosts import (
    Allocation,
    Host,
    RankLayout,
    expand_counts,
    expand_nodelist,
    find_allocation,
    lay_out,
    parse_hosts,
    read_hostfile,
)
from hvdtrain.errors import UsageError

A2B2 = (Host("a", 2), Host("b", 2))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Hostfiles


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\na\nb\nb\n", A2B2),  # PBS: a line per slot
        ("a\nb\na\nb\n", A2B2),  # alternating
        ("a slots=2\nb slots=2 max_slots=4\n", A2B2),  # Open MPI
        ("a slots = 2\nb slots= 2 max_slots =4 # Open MPI, too\n", A2B2),
        ("a:2\nb:2", A2B2),  # Hydra
        ("\n# two of them\na slots=1 # one\na\n\tb:2 \n", A2B2),
        ("node-1.cluster_x.org\n", (Host("node-1.cluster_x.org", 1),)),
    ],
)
def test_forms_of_a_hostfile(tmp_path: Path, text: str, hosts: tuple[Host, ...]) -> None:
    assert read_hostfile(write(tmp_path / "f", text), "--hostfile") == hosts


@pytest.mark.parametrize(
    "line",
    [
        *(
            "a slots=0",
            "a slots=x",
            "a:0",
            "a:",
            ":2",
            "a:2 slots=2",
            "a 4",
            "a = 4",
            "a slots =",
            "a cpus=4",
            "-o",
            "a;b",
        ),
        *("a slots=2 slots=4", "::1 slots=2"),
    ],
)
def test_an_invalid_line_is_reported(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "f", f"fine\n{line}\n")
    with pytest.raises(UsageError, match=r"line 2: .*`host slots=4`"):
        read_hostfile(file, "--hostfile")


def test_a_missing_or_empty_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^PBS_NODEFILE: .*/gone: No such file or directory"):
        find_allocation({"PBS_NODEFILE": str(tmp_path / "gone")})
    empty = write(tmp_path / "empty", "\n # nobody\n")
    with pytest.raises(UsageError, match=r"^PBS_NODEFILE: .*/empty contains no host"):
        find_allocation({"PBS_NODEFILE": str(empty)})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not a text file"):
        read_hostfile(binary, "--hostfile")


def test_hosts_of_the_option() -> None:
    assert parse_hosts("a:2, b:2") == A2B2
    assert parse_hosts("a,b,a") == (Host("a", 2), Host("b", 1))
    for text in ("", "a,,b", "a:0", "a:-1", "a:x", "-x:2", "a b"):
        with pytest.raises(UsageError, match="node1:4,node2:4"):
            parse_hosts(text)


# Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("a1,b[9-11],c", ["a1", "b9", "b10", "b11", "c"]),
        ("rack[1-2]n[01-02]-ib", ["rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib"]),
        ("nid[00098-00101]", ["nid00098", "nid00099", "nid00100", "nid00101"]),
    ],
)
def test_nodelists(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "a[", "a[3-1]", "a b", "-x"])
def test_an_invalid_nodelist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a node list"):
        expand_nodelist(text)


NUMBERS = st.lists(st.integers(0, 120), min_size=1, max_size=12, unique=True).map(sorted)


@given(st.sampled_from(["n", "gpu-a", "x3.y"]), NUMBERS, st.integers(1, 4), st.data())
def test_a_compressed_nodelist_is_expanded(
    prefix: str, numbers: list[int], width: int, data: st.DataObject
) -> None:
    names = [f"{prefix}{number:0{width}d}" for number in numbers]
    # Like scontrol: neighbours may become a range.
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1 and data.draw(st.booleans()):
            parts[-1].append(number)
        else:
            parts.append([number])
    ranges = ",".join(
        f"{part[0]:0{width}d}" + (f"-{part[-1]:0{width}d}" if len(part) > 1 else "")
        for part in parts
    )
    assert expand_nodelist(f"{prefix}[{ranges}]") == names
    several = expand_nodelist(f"first,{prefix}[{ranges}],last[1-2]")
    assert several == ["first", *names, "last1", "last2"]
    assert expand_nodelist(",".join(names)) == names


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 5)), min_size=1))
def test_counts(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "4(x2", "x2", "4,", "-1"])
def test_invalid_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="task counts of Slurm"):
        expand_counts(text)


# The origin of the hosts


def test_the_source_of_the_hosts(tmp_path: Path) -> None:
    file = str(write(tmp_path / "nodes", "a\na\nb\nb\n"))
    slurm = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert find_allocation({}) == Allocation("none")
    assert find_allocation({"PBS_NODEFILE": file}) == Allocation("PBS", A2B2)
    assert find_allocation(slurm) == Allocation("Slurm", A2B2)
    # A job script of the Torque wrappers on Slurm may have created a nodefile, or not.
    assert find_allocation({**slurm, "PBS_NODEFILE": file}).source == "PBS"
    assert find_allocation({**slurm, "PBS_JOBID": "12", "PBS_NODEFILE": ""}).source == "Slurm"


def test_a_slurm_job_that_requested_only_nodes() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}
    assert find_allocation(environ).hosts == (Host("n1", 64), Host("n2", 64))
    assert find_allocation({**environ, "SLURM_TASKS_PER_NODE": "4,3"}).hosts[1].slots == 3


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "SLURM_TASKS_PER_NODE is not set"),
        ({"SLURM_TASKS_PER_NODE": "4"}, "_NODE=4 is for 1 nodes, SLURM_JOB_NODELIST=a,b has 2"),
    ],
)
def test_inconsistent_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_allocation({"SLURM_JOB_NODELIST": "a,b", **environ})


# Ranks on hosts


def allocation(*slots: int, source: str = "PBS") -> Allocation:
    return Allocation(source, tuple(Host(f"n{i}", number) for i, number in enumerate(slots)))


def counts(layout: RankLayout) -> list[int]:
    return [host.slots for host in layout.hosts]


def test_this_machine_takes_any_number_of_ranks() -> None:
    layout = lay_out(9, Allocation("none"))
    assert layout == RankLayout(9)
    assert (layout.per_host, layout.host_of(8)) == (9, None)


def test_a_fixed_number_of_ranks_per_host() -> None:
    assert counts(lay_out(4, allocation(4, 4, 4, 4), ppn=2)) == [2, 2]
    assert lay_out(4, allocation(4, 4, 4, 4), ppn=2).idle == ("n2", "n3")
    oversubscribed = lay_out(6, allocation(2, 4), ppn=3)
    assert (counts(oversubscribed), oversubscribed.over_slots) == ([3, 3], True)
    assert not lay_out(4, allocation(2, 4), ppn=2).over_slots


@pytest.mark.parametrize(
    ("ranks", "hosts", "ppn", "message"),
    [
        (5, allocation(2, 2), None, r"-n 5 is more than the 4 slots of PBS \(n0:2,n1:2\)"),
        (3, allocation(2, 2), 2, r"-n 3 is not --ppn 2 times the 2 hosts .*2 x 2 is 4"),
        (6, allocation(2, 2), 2, r"-n 6 is not --ppn 2 times the 2 hosts"),
        (2, allocation(2, 2, source="--hosts"), 2, "-n 2 is not --ppn 2 times the 2 hosts of --ho"),
        (10**6, Allocation("none"), None, "-n 1000000: .* use --hosts localhost:1000000"),
        (4, Allocation("none"), 2, "-n 4 --ppn 2: .* outside an allocation; .* --hosts"),
    ],
)
def test_ranks_that_do_not_fit(
    ranks: int, hosts: Allocation, ppn: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        lay_out(ranks, hosts, ppn)


SLOTS = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@given(SLOTS, st.data())
def test_every_rank_has_one_host(slots: list[int], data: st.DataObject) -> None:
    available = allocation(*slots)
    ranks = data.draw(st.integers(1, available.slots))
    layout = lay_out(ranks, available)
    assert sum(counts(layout)) == ranks
    assert all(count <= limit for count, limit in zip(counts(layout), slots, strict=False))
    assert counts(layout)[:-1] == slots[: len(layout.hosts) - 1]
    names = [host.name for host in layout.hosts]
    assert [*names, *layout.idle] == [host.name for host in available.hosts]
    order = [names.index(str(layout.host_of(rank))) for rank in range(ranks)]
    assert order == sorted(order)
    assert layout.per_host == max(order.count(index) for index in order)
