"""Findings of `hvdtrain doctor` on batch system, hosts and ranks."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.doctor.checks import hosts, ranks
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.doctor.rank_report import RankReport, WorldReport
from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.system.runtime.command import TIMED_OUT, Command, CommandResult
from tests.unit.commands.doctor.doctor import PLENTY, assert_finding, by_check


def test_no_batch_system() -> None:
    batch = hosts.BatchSystem((), "", Allocation("none"))
    findings = by_check(hosts.batch_findings(batch, {"login"}))
    assert {finding.state for finding in findings.values()} == {ABSENT}


PBS = Allocation("PBS", (Host("node1.cluster", 4), Host("node2", 4)))


@pytest.mark.parametrize(
    ("here", "state"), [("node1", OK), ("node2", OK), ("node1.cluster", OK), ("login", WARNING)]
)
def test_a_job(here: str, state: str) -> None:
    batch = hosts.BatchSystem(("/usr/bin/qsub",), "12.server", PBS)
    findings = by_check(hosts.batch_findings(batch, {here}))
    assert findings["scheduler"].evidence == "inside job 12.server (PBS)"
    assert findings["hosts of the job"].state == state
    assert "node1.cluster:4, node2:4, 8 slots" in findings["hosts of the job"].evidence
    assert hosts.local_slots(PBS, {here}) == (4 if state == OK else 1)


NAMED = Allocation("--hosts", (Host("node1", 1), Host("node2", 1)))


@pytest.mark.parametrize(
    ("planned", "allocation", "number"),
    [
        (None, Allocation("none"), 1),
        (None, PBS, 4),
        (Request(8, ()), Allocation("none"), 8),
        (Request(8, (), ppn=4), NAMED, 4),  # more than the slots, as requested
        (Request(2, ()), PBS, 2),  # fewer than the slots
        (Request(6, ()), PBS, 4),
        (Request(4, ()), Allocation("PBS", (Host("node2", 4), Host("node1", 4))), 1),  # no rank
        (Request(9, ()), PBS, 4),  # do not fit
    ],
)
def test_the_ranks_on_this_host(
    planned: Request | None, allocation: Allocation, number: int
) -> None:
    assert hosts.ranks_here(planned, allocation, {"node1"}) == number


def test_hosts_without_this_one_are_not_contacted() -> None:
    finding = hosts.other_hosts(NAMED, {"login"})
    assert_finding(finding, ABSENT, "node1, node2: not contacted, as this host is not among them")
    assert_finding(hosts.other_hosts(Allocation("none"), {"login"}), ABSENT, "none in this job")


def test_a_missing_nodefile_is_an_error(tmp_path: Path) -> None:
    batch = hosts.find_batch({"PBS_NODEFILE": str(tmp_path / "gone"), "PBS_JOBID": "12.server"})
    findings = by_check(hosts.batch_findings(batch, {"node1"}))
    assert_finding(findings["hosts of the job"], ERROR, str(tmp_path / "gone"))


def test_hosts_are_probed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert hosts.probe_host("127.0.0.1", port) == hosts.ANSWERS
    answers = hosts.probe_hosts(["127.0.0.1", "nosuchhost.invalid"], port)
    assert answers == {"127.0.0.1": hosts.NO_SSH, "nosuchhost.invalid": hosts.UNKNOWN}


@pytest.mark.parametrize(
    ("answers", "state", "words"),
    [
        ({}, ABSENT, "none in this job"),
        ({"a": hosts.ANSWERS, "b": hosts.ANSWERS}, OK, "a, b: answer"),
        ({"a": hosts.ANSWERS, "b": hosts.NO_SSH}, WARNING, "b: reachable, without ssh"),
        ({"a": hosts.SILENT, "b": hosts.NO_SSH}, ERROR, "a: does not answer"),
        ({f"n{i}": hosts.UNKNOWN for i in range(9)}, ERROR, "n3 and 5 more: unknown name"),
    ],
)
def test_answers(answers: dict[str, str], state: str, words: str) -> None:
    assert_finding(hosts.answer_finding(answers, "PBS"), state, words)


def rank(number: int, host: str, **changes: Any) -> RankReport:
    usual = RankReport(
        rank=number,
        host=host,
        machine=host,
        resources=PLENTY,
        affinity=[2 * number, 2 * number + 1],
        gpus=[],
        software={"torch": "2.13.0"},
        mpi=["Open MPI 5.0.11, /env/lib/libmpi.so.40"],
        fabric=False,
        threads="",
        sees_directory=True,
        clock_ahead=0.0,
    )
    return dataclasses.replace(usual, **changes)


def judge(*reported: RankReport) -> dict[str, Finding]:
    report = WorldReport(len(reported), len(reported), list(reported))
    return by_check(ranks.rank_findings(len(reported), [report], {"a"}))


def test_ranks_without_problems() -> None:
    findings = judge(rank(1, "a"), rank(0, "a"), rank(2, "b"), rank(3, "b"))
    assert {finding.state for finding in findings.values()} == {OK}
    assert findings["ranks"].evidence == "4: a (ranks 0-1) and b (ranks 2-3)"
    assert findings["cores of the ranks"].evidence == "2 each"


@pytest.mark.parametrize(
    ("changes", "check", "state", "words"),
    [
        ({"software": {"torch": "2.12"}}, "versions on the ranks", ERROR, "2.12 on b (rank 1)"),
        ({"affinity": []}, "cores of the ranks", WARNING, "b: 1 ranks on 0 cores"),
        ({"sees_directory": False}, "directory on the ranks", WARNING, "b (rank 1) see"),
        ({"clock_ahead": -3.0}, "clocks of the hosts", WARNING, "b is -3.000 s off"),
        ({"threads": "64"}, "OMP_NUM_THREADS on b", WARNING, "64 threads per rank"),
        ({"gpus": ["GPU-1"]}, "GPUs of the ranks", ERROR, "a (rank 0) sees no GPU"),
    ],
)
def test_a_differing_rank_is_reported(
    changes: dict[str, Any], check: str, state: str, words: str
) -> None:
    assert_finding(judge(rank(0, "a"), rank(1, "b", **changes))[check], state, words)


def test_ranks_that_share_a_gpu_are_an_error() -> None:
    single = {"gpus": ["GPU-1"]}
    assert judge(rank(0, "a", **single), rank(1, "a", **single))["GPUs of the ranks"].state == ERROR
    assert judge(rank(0, "a", **single), rank(1, "b", **single))["GPUs of the ranks"].state == OK
    two = {"gpus": ["GPU-1", "GPU-2"]}
    assert judge(rank(0, "a", **two), rank(1, "a", **two))["GPUs of the ranks"].state == OK


def test_ranks_in_separate_worlds_are_an_error() -> None:
    single = WorldReport(size=1, announced=2, ranks=[rank(0, "a")])
    (finding,) = ranks.rank_findings(2, [single, single], {"a"})
    assert finding.state == ERROR
    assert "worlds of 1, 1" in finding.evidence


def test_a_failed_start_is_an_error() -> None:
    command = Command(("mpirun", "-n", "2", "true"))
    finding = ranks.failed_start(CommandResult(command, 1, "-----\nno such host\n\n"))
    assert finding.evidence == "exit code 1; last output: no such host"
    assert "mpirun -n 2 true" in finding.remedy
    assert "timed out" in ranks.failed_start(CommandResult(command, TIMED_OUT, "")).evidence


def test_the_line_of_the_rank_that_failed_is_shown() -> None:
    """The output of a real run on two hosts, with messages of mpirun and a NUL byte at the end."""
    output = (
        "hvdtrain: rank 2 on node2: failed: RuntimeError('Timed out waiting 15000ms for recv')\n"
        "Traceback (most recent call last):\n"
        "[node1:04441] PMIX ERROR: PMIX_ERR_LOST_CONNECTION in file x.c at line 1\n\0\n"
    )
    finding = ranks.failed_start(CommandResult(Command(("mpirun",)), 1, output))
    assert finding.evidence == (
        "exit code 1; last output: hvdtrain: rank 2 on node2: failed: RuntimeError('Timed out "
        "waiting 15000ms for recv')"
    )
    finding = ranks.failed_start(CommandResult(Command(("mpirun",)), 1, "no such\0 host\n\0\n"))
    assert finding.evidence == "exit code 1; last output: no such host"


def test_reports_are_read_among_other_output() -> None:
    world = WorldReport(1, 2, [rank(0, "a")])
    line = json.dumps(dataclasses.asdict(world))
    text = f'a warning\n{line}\n{{broken\n{{"size": 2}}\n{line}\n'
    assert ranks.read_reports(text, WorldReport) == [world, world]
