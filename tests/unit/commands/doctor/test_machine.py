"""Findings of `hvdtrain doctor` on cores, limits, variables and files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.doctor.checks import files, machine
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING
from hvdtrain.system.machine.limits import (
    GIB,
    cpu_quota,
    find_resources,
    memory_limit,
    process_limit,
)
from tests.unit.commands.doctor.doctor import PLENTY, assert_finding, by_check


def judged(count: int = 4, fabric: bool = False, threads: str = "", **changes: Any) -> Any:
    resources = dataclasses.replace(PLENTY, **changes)
    environ = {"OMP_NUM_THREADS": threads}
    return by_check(machine.resource_findings(resources, count, environ, fabric))


def test_ample_resources_are_ok() -> None:
    assert {finding.state for finding in judged().values()} == {OK}
    assert judged()["cores"].evidence == "8 for 4 ranks: 2 each"
    assert judged()["memory"].evidence == "64.0 GiB for 4 ranks: 16.0 GiB each"


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        ("cores", {"count": 9}, "8 for 9 ranks"),
        ("cores", {"quota": 2.0}, "2 of them by the control group's quota"),
        ("memory", {"memory": 7 * GIB}, "7.0 GiB"),
        ("OMP_NUM_THREADS", {"threads": "8"}, "8 threads per rank, 4 ranks, 8 cores"),
        ("OMP_NUM_THREADS", {"threads": "two"}, "'two' is not a number"),
        ("/dev/shm", {"shared_memory_free": GIB // 16}, "64.0 MiB free"),
        ("locked memory", {"locked_memory": 8 * 2**20, "fabric": True}, "8.0 MiB"),
        ("open files", {"open_files": 256}, "256"),
        ("processes", {"processes": 128}, "128, threads included"),
    ],
)
def test_a_shortage_is_a_warning(check: str, changes: dict[str, Any], words: str) -> None:
    findings = judged(**changes)
    assert [finding.check for finding in findings.values() if finding.state != OK] == [check]
    assert findings[check].state == WARNING
    assert words in findings[check].evidence


def test_a_variable_by_which_openmp_binds_is_a_warning() -> None:
    findings = by_check(machine.resource_findings(PLENTY, 4, {"OMP_PROC_BIND": "true"}, False))
    assert_finding(findings["OMP_PROC_BIND"], WARNING, "true: ranks that no launcher has bound")


def test_the_value_of_pbs_is_ok() -> None:
    environ = {"PBS_JOBID": "7.pbs1", "NCPUS": "8", "OMP_NUM_THREADS": "8"}
    finding = machine.threads_finding(8, 4, environ)
    assert finding.state == OK
    assert "set by PBS" in finding.evidence
    assert machine.threads_finding(8, 4, {**environ, "NCPUS": "4"}).state == WARNING


@pytest.mark.parametrize(
    "changes",
    [
        {"locked_memory": 8 * 2**20},  # no InfiniBand
        {"locked_memory": None, "fabric": True},
        {"threads": "2"},
        {"quota": 4.0},
        {"open_files": None},
    ],
)
def test_sufficient_resources_are_ok(changes: dict[str, Any]) -> None:
    assert {finding.state for finding in judged(**changes).values()} == {OK}


def test_resources_of_this_machine() -> None:
    resources = find_resources()
    assert resources.cores == len(os.sched_getaffinity(0))
    assert 0 < resources.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def control_groups(root: Path, table: str, **texts: str) -> Path:
    """Create a root with a control group table and files; ``__``: a slash, ``_0``: a dot."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(table)
    for name, text in texts.items():
        file = root / "sys" / "fs" / "cgroup" / name.replace("__", "/").replace("_0", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    root = control_groups(
        tmp_path,
        "0::/job/step\n",
        memory_0max="max",
        job__memory_0max="8000",
        job__step__memory_0max="9000",
        job__cpu_0max="150000 100000",
        job__pids_0max="12",
        job__step__cpu_0max="max 100000",
    )
    assert memory_limit(root) == 8000
    assert process_limit(root) == 12
    assert cpu_quota(root) == 1.5


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    root = control_groups(
        tmp_path,
        "8:pids:/job\n4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n",
        **{
            "memory__memory_0limit_in_bytes": str(2**63 - 4096),
            "memory__job__memory_0limit_in_bytes": "7000",
            "pids__pids_0max": "12",
            "pids__job__pids_0max": "max",
            "cpu,cpuacct__cpu_0cfs_quota_us": "-1",
            "cpu,cpuacct__cpu_0cfs_period_us": "100000",
            "cpu,cpuacct__job__cpu_0cfs_quota_us": "50000",
            "cpu,cpuacct__job__cpu_0cfs_period_us": "100000",
        },
    )
    assert memory_limit(root) == 7000
    assert process_limit(root) == 12
    assert cpu_quota(root) == 0.5


def test_no_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None
    assert memory_limit(control_groups(tmp_path, "0::/outside/the/container\n")) is None


KNOWN = ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CPU_OPERATIONS", "HOROVOD_RANK"]


@pytest.mark.parametrize(
    ("environ", "state", "words"),
    [
        ({"PATH": "/bin"}, OK, "none set"),
        ({"HOROVOD_WITH_MPI": "1", "HOROVOD_NCCL_HOME": "/x"}, OK, "none set"),  # of a build
        ({"HOROVOD_CYCLE_TIME": "0.1"}, OK, "HOROVOD_CYCLE_TIME=0.1"),
        ({"HOROVOD_FUSION_TRESHOLD": "0"}, WARNING, "HOROVOD_FUSION_TRESHOLD=0"),
        ({"HOROVOD_CPU_OPERATIONS": "GLOO"}, WARNING, "GLOO"),
        ({"HOROVOD_RANK": "0"}, WARNING, "HOROVOD_RANK=0"),
    ],
)
def test_variables_of_horovod(environ: dict[str, str], state: str, words: str) -> None:
    assert_finding(machine.horovod_variables(environ, KNOWN), state, words)


def test_without_horovod_no_name_is_unknown(tmp_path: Path) -> None:
    assert machine.known_variables(tmp_path) == []
    assert machine.horovod_variables({"HOROVOD_ANYTHING": "1"}, []).state == OK


def directory(**changes: Any) -> files.Directory:
    usual = files.Directory("current directory", Path("/work"), "nfs4", 99 * GIB, 1000, "", 0.001)
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "count", "state", "words"),
    [
        ({}, 1, OK, "/work: nfs4, shared by hosts, 99.0 GiB free"),
        ({}, 2, OK, "shared by hosts"),
        ({"kind": "ext4"}, 1, OK, "local to this host"),
        ({"kind": "ext4"}, 2, WARNING, "local to this host"),
        ({"kind": "ext4", "name": "temporary"}, 2, OK, "local to this host"),
        ({"free": 2 * GIB}, 1, WARNING, "2.0 GiB free"),
        ({"free": 0}, 1, ERROR, "full"),
        ({"free": 0, "name": "home"}, 1, WARNING, "full"),
        ({"files_free": 0}, 1, ERROR, "no more files"),
        ({"files_free": None}, 1, OK, "GiB free"),
        ({"error": "Disk quota exceeded"}, 1, ERROR, "Disk quota exceeded"),
    ],
)
def test_the_space_of_a_directory(
    changes: dict[str, Any], count: int, state: str, words: str
) -> None:
    assert_finding(next(files.directory_findings([directory(**changes)], count)), state, words)


@pytest.mark.parametrize(
    ("message", "helps"),
    [
        ("Disk quota exceeded", True),
        ("No space left on device", True),
        ("Permission denied", False),
    ],
)
def test_free_space_is_advised_only_if_it_helps(message: str, helps: bool) -> None:
    finding = next(files.directory_findings([directory(error=message)], 1))
    assert ("free space" in finding.remedy) == helps
    assert "another directory" in finding.remedy


@pytest.mark.parametrize(
    ("ahead", "state", "words"),
    [
        ({"/a": 0.004, "/b": -0.3}, OK, "within 300 ms"),
        ({"/a": 0.004, "/b": -2.5}, WARNING, "/b's is 2.5 s behind"),
        ({"/a": 7.0}, WARNING, "7.0 s ahead"),
        ({}, ABSENT, "no writable directory"),
    ],
)
def test_clock(ahead: dict[str, float], state: str, words: str) -> None:
    assert_finding(files.clock_finding(ahead), state, words)


MOUNTS = """\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:27 / /scratch rw - lustre mgs:/scratch rw
31 30 0:28 / /scratch/my\\040own rw master:3 propagate_from:2 - tmpfs tmpfs rw
32 27 0:29 / /home rw - autofs systemd rw
33 32 0:30 / /home rw - nfs4 server:/home rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp", "ext4"),
        ("/scratch", "lustre"),
        ("/scratch/my/own", "lustre"),
        ("/scratch/my own/x", "tmpfs"),
        ("/scratched", "ext4"),
        ("/home/me", "nfs4"),  # the last mount hides earlier ones
    ],
)
def test_the_kind_of_file_system(path: str, kind: str) -> None:
    assert files.kind_of(Path(path), MOUNTS) == kind


def test_a_directory_of_this_machine(tmp_path: Path) -> None:
    temporary = files.inspect_directory("temporary", tmp_path)
    assert temporary.error == ""
    assert temporary.free > 0
    assert temporary.ahead is not None and abs(temporary.ahead) < 60
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "absent")}
    directories = files.find_directories(environ, tmp_path)
    assert [directory.name for directory in directories] == ["current directory"]
