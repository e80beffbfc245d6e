"""``hvdtrain doctor`` on this machine, intact and then with problems that occur on clusters."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, Outcome, begin, mounted, run
from tests.parallel.conftest import empty_library
from tests.parallel.test_bad_input import assert_no_process_left

HVDTRAIN = (sys.executable, "-m", "hvdtrain.cli")
STATES = {"ok", "warning", "error", "absent"}


def doctor(*options: str, cwd: Path = ROOT, **extra: str) -> Outcome:
    return run([*HVDTRAIN, "doctor", *options], cwd=cwd, **extra)


def findings(outcome: Outcome) -> dict[str, dict[str, str]]:
    """Return the findings of ``--json`` by name."""
    report = json.loads(outcome.out)  # nothing else is on standard output
    assert report["ok"] == (outcome.code == 0)
    return {finding["check"]: finding for finding in report["findings"]}


def test_an_intact_environment_and_the_speed_of_its_ranks() -> None:
    outcome = doctor("-n", "2", "--json")
    checks = findings(outcome)
    assert [finding for finding in checks.values() if finding["state"] == "error"] == []
    assert outcome.code == 0 and {finding["state"] for finding in checks.values()} <= STATES
    for check in ("Python", "Horovod, PyTorch", "Horovod, TensorFlow", "MPI agreement", "ranks"):
        assert checks[check]["state"] == "ok", checks[check]
    report = json.loads(outcome.out)
    assert report["ranks"]["size"] == report["ranks"]["announced"] == 2
    times = report["allreduce"]
    assert (times["ranks"], times["hosts"]) == (2, 1)
    for name in ("mpi4py", "horovod", "gloo"):
        rows = times["backends"][name]["rows"]
        assert [row["bytes"] for row in rows] == [4, 2**12, 2**16, 2**20, 2**24, 2**26]
        for row in rows:
            assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
            expected = row["bytes"] / row["seconds"] / 1e9
            assert row["algorithm_gb_per_second"] == pytest.approx(expected)
            assert row["bus_gb_per_second"] == pytest.approx(expected)  # 2 (n - 1) / n at n = 2
        assert rows[-1]["seconds"] > rows[0]["seconds"]


def test_the_reports_do_not_pass_through_mpirun(tmp_path: Path) -> None:
    """Open MPI 5 on a busy host loses the end of what a rank has written just before it ends."""
    cutting = tmp_path / "mpirun"
    keep = "{ head -c 300; cat > /dev/null; }"  # the pipe stays open: mpirun must not break
    cutting.write_text(f'#!/bin/sh\n{BIN}/mpirun "$@" | {keep}\n')
    cutting.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]])
    outcome = doctor("-n", "2", "--json", PATH=path)
    checks, report = findings(outcome), json.loads(outcome.out)
    assert (outcome.code, checks["ranks"]["state"], checks["allreduce"]["state"]) == (0, "ok", "ok")
    assert len(report["ranks"]["ranks"]) == report["allreduce"]["ranks"] == 2


def test_sigterm_ends_the_ranks_too() -> None:
    process = begin([*HVDTRAIN, "doctor", "-n", "2"], {"TEST_MARK": "doctor"})
    assert process.stdout is not None
    with process, process.stdout:
        message = next(line for line in process.stdout if "starting: " in line)
        assert "-n 2" in message
        process.terminate()
        assert process.wait(timeout=120) == 130
    assert_no_process_left("doctor")


def test_the_table_in_a_file_and_no_ranks_without_n(tmp_path: Path) -> None:
    outcome = doctor(PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", COLUMNS="80", code=0)
    lines = outcome.out.splitlines()
    assert lines[-1].startswith("no problems") or lines[-1].endswith(("warning", "warnings"))
    assert any(line.startswith("ok ") and str(BIN / "python") in line for line in lines)
    assert not any(line.split()[1:2] == ["ranks"] for line in lines if line)
    assert "\x1b" not in outcome.out


def test_another_mpirun_first_on_the_path(mpich: Path) -> None:
    path = os.pathsep.join([str(mpich / "bin"), str(BIN), os.environ["PATH"]])
    outcome = doctor("-n", "2", "--json", PATH=path, code=1)
    checks = findings(outcome)
    agreement = checks["MPI agreement"]
    assert agreement["state"] == "error"
    assert f"{mpich / 'bin' / 'mpirun'} starts ranks of MPICH" in agreement["evidence"]
    assert "hvdtrain install-horovod --rebuild" in agreement["remedy"]
    # The ranks confirm it.
    assert checks["ranks"]["state"] == "error"
    assert "worlds of 1, 1" in checks["ranks"]["evidence"]


def test_a_misconfigured_job(tmp_path: Path) -> None:
    """A nodefile with an unknown host, PBS's OMP_NUM_THREADS, a misspelt variable."""
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{socket.gethostname()}\n" * 2 + "nosuchhost.invalid\n" * 2)
    outcome = doctor(
        "--json",
        PBS_NODEFILE=str(nodes),
        PBS_JOBID="12.server",
        OMP_NUM_THREADS="64",
        HOROVOD_FUSION_TRESHOLD="0",
    )
    checks = findings(outcome)
    assert outcome.code == 1
    assert checks["other hosts"]["state"] == "error"
    assert "nosuchhost.invalid: unknown name" in checks["other hosts"]["evidence"]
    assert checks["hosts of the job"]["state"] == "ok"
    assert "64 threads per rank, 2 ranks" in checks["OMP_NUM_THREADS"]["evidence"]
    assert "HOROVOD_FUSION_TRESHOLD" in checks["HOROVOD_*"]["remedy"]
    for check in ("OMP_NUM_THREADS", "HOROVOD_*", "current directory"):
        assert checks[check]["state"] == "warning", checks[check]


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        (disk / "data").write_bytes(bytes(64 * 1024))
        outcome = doctor("--json", cwd=disk)
        assert [path.name for path in disk.iterdir()] == ["data"]  # nothing left behind
    assert outcome.code == 1
    finding = findings(outcome)["current directory"]
    assert finding["state"] == "error"
    assert f"{disk}: tmpfs" in finding["evidence"]


def test_a_library_of_horovod_that_does_not_load(tmp_path: Path) -> None:
    """A symbol is missing, as after another torch was installed."""
    empty_library(tmp_path / "libmpi.so.40")
    outcome = doctor("--json", LD_LIBRARY_PATH=str(tmp_path), code=1)
    finding = findings(outcome)["Horovod, PyTorch"]
    assert finding["state"] == "error"
    assert "it does not load" in finding["evidence"]
    assert "install-horovod --rebuild" in finding["remedy"]
