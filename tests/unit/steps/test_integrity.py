"""Facts of all ranks must be consistent: versions, devices, options, data."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import (
    Device,
    RankFacts,
    check_devices,
    check_software,
    differences,
    rank_facts,
    rank_names,
    source_digest,
    spans,
)


def rank(host: str, machine: str = "", **software: str) -> RankFacts:
    return RankFacts(host, machine, software)


def test_the_same_software_passes() -> None:
    check_software([rank("a", torch="2.13", MPI="Open MPI 5")] * 3)
    check_software([rank("a", torch="2.13"), rank("b", tensorflow="2.21")])  # nothing in common


def test_every_difference_is_reported_with_its_ranks() -> None:
    all_ranks = [
        rank("node1", hvdtrain="0.1.0", torch="2.13.0"),
        rank("node1", hvdtrain="0.1.0", torch="2.13.0"),
        rank("node2", hvdtrain="0.2.0", torch="2.12.1"),
        rank("node3", hvdtrain="0.1.0", torch="2.12.1"),
    ]
    with pytest.raises(UsageError) as caught:
        check_software(all_ranks)
    assert (
        "the ranks do not run the same software: "
        "hvdtrain 0.1.0 on node1 (ranks 0-1) and node3 (rank 3), 0.2.0 on node2 (rank 2); "
        "torch 2.13.0 on node1 (ranks 0-1), 2.12.1 on node2 (rank 2) and node3 (rank 3). "
    ) in str(caught.value)
    assert "HVDTRAIN_ALLOW=mixed-versions" in str(caught.value)


def test_facts_contain_loaded_and_not_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torch", "tensorflow", "keras", "horovod"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = types.ModuleType("torch")
    loaded.__version__ = "9.9+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", loaded)
    facts = rank_facts({"HVDTRAIN_ALLOW": "shared-gpu, mixed-versions"}, "MPICH 4.2")
    assert facts.software == {
        "hvdtrain": facts.software["hvdtrain"],
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": "9.9+cpu",
        "MPI": "MPICH 4.2",
    }
    assert facts.software["hvdtrain"].startswith(f"{hvdtrain.__version__} (code ")
    assert facts.allow == ("shared-gpu", "mixed-versions")
    assert rank_facts({}, "").allow == ()
    assert "MPI" not in rank_facts({}, "").software


def test_the_digest_changes_with_name_and_content_of_a_source_file(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text(text)
        (tmp_path / "notes.txt").write_text(str(len(name)))  # no source file
        return source_digest(tmp_path)

    first = digest("a.py", "x = 1")
    assert len({first, digest("a.py", "x = 2"), digest("b.py", "x = 1")}) == 3
    assert digest("a.py", "x = 1") == first


GPU = Device("H200", "GPU-1", 1)


def refusal(devices: list[Device], all_ranks: list[RankFacts]) -> str:
    with pytest.raises(UsageError) as caught:
        check_devices(devices, all_ranks)
    return str(caught.value)


def test_two_ranks_on_one_gpu() -> None:
    two = [rank("node1"), rank("node1")]
    message = refusal([GPU, GPU], two)
    assert "ranks 0-1 on host node1 use the same GPU, H200 (GPU-1): they see 1 GPU" in message
    for remedy in ("--ppn", "ppr:N:node", "HVDTRAIN_ALLOW=shared-gpu", "CUDA_VISIBLE_DEVICES="):
        assert remedy in message
    assert "ranks 1,3 on host b" in refusal(
        [GPU, GPU, Device("H200", "GPU-2", 1), GPU], [rank("a"), *[rank("b")] * 3]
    )


def test_gpus_of_one_identity_on_two_hosts_are_two() -> None:
    # If only the index among the visible GPUs is known, each host has a number 0.
    check_devices([GPU, GPU], [rank("a"), rank("b")])
    check_devices([GPU, GPU], [rank("localhost", "boot 1"), rank("localhost", "boot 2")])


def test_all_on_the_cpu_or_all_on_gpus() -> None:
    cpu = Device("cpu", "", 0)
    check_devices([cpu, cpu], [rank("a")] * 2)
    check_devices([GPU, Device("H200", "GPU-2", 2)], [rank("a")] * 2)
    message = refusal([GPU, cpu, cpu], [rank("a"), rank("b"), rank("b")])
    assert message.startswith("b (ranks 1-2) see no GPU, the other ranks do: ")


def test_differences_between_ranks() -> None:
    same = {"--lr": "0.1", "--seed": "0"}
    hosts = ["node1", "node1", "node2"]
    assert not list(differences([same] * 3, hosts))
    assert list(differences([same, same, {**same, "--seed": "1"}], hosts)) == [
        ("--seed", "0 on node1 (ranks 0-1), 1 on node2 (rank 2)")
    ]
    assert not list(differences([same, {"--lr": "0.1"}, same], hosts))  # the absent


def test_places_name_few_hosts() -> None:
    hosts = [f"n{number}" for number in range(9)]
    assert rank_names([0], hosts) == "n0 (rank 0)"
    assert rank_names([0, 1], hosts) == "n0 (rank 0) and n1 (rank 1)"
    assert rank_names(range(9), hosts).endswith("n3 (rank 3) and 5 more hosts")


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_contain_exactly_the_numbers_in_few_parts(numbers: set[int]) -> None:
    expanded: list[int] = []
    parts = spans(sorted(numbers)).split(",")
    for part in parts:
        low, _, high = part.partition("-")
        expanded += range(int(low), int(high or low) + 1)
    assert expanded == sorted(numbers)
    assert len(parts) == sum(number + 1 not in numbers for number in numbers)
