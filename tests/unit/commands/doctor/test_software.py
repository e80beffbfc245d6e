"""Findings of `hvdtrain doctor` on Python, frameworks, Horovod and MPI."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.doctor.checks import loading, machine, software
from hvdtrain.commands.doctor.checks.loading import Loaded
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.install_horovod.toolchain import Cuda, Nccl, Toolchain
from hvdtrain.commands.launch.launcher_choice import MpiLauncher, find_mpi
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import TensorFlow, Torch
from hvdtrain.system.machine.gpus import Driver, Gpu
from hvdtrain.system.machine.limits import GIB
from hvdtrain.system.runtime.command import CommandResult
from tests.unit.commands.doctor.doctor import assert_finding, by_check

OPEN = Loaded("", (("/env/lib/libmpi.so.40", "Open MPI 5.0.11"),))
MPICH = Loaded("", (("/opt/lib/libmpi.so.12", "MPICH 5.0.2"),))
COPY = Loaded("", (("/usr/lib/libmpi.so.40", "Open MPI 4.1.4"),))


def mpirun(dialect: str) -> MpiLauncher:
    return MpiLauncher(dialect, "/env/bin/mpirun", "5.0.11")


def mpi_facts(**changes: Any) -> software.MpiFacts:
    usual = software.MpiFacts(
        launcher=mpirun("openmpi5"),
        error="",
        environment_mpirun="/env/bin/mpirun",
        mpi4py=OPEN,
        horovod={"pytorch": OPEN, "tensorflow": OPEN},
    )
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, OK, "mpirun, mpi4py, Horovod (PyTorch), Horovod (TensorFlow): Open MPI 5.0.11"),
        ({"launcher": mpirun("mpich")}, ERROR, "starts ranks of MPICH, each in a world of 1"),
        ({"launcher": mpirun("intel"), "mpi4py": MPICH}, ERROR, "Horovod (PyTorch), Horovod (Tens"),
        ({"launcher": mpirun("srun"), "horovod": {}}, OK, "mpi4py: Open MPI 5.0.11"),  # any kind
        ({"launcher": None, "error": "none"}, ABSENT, "no mpirun to compare with; mpi4py, Horovod"),
        ({"launcher": None, "error": "none", "mpi4py": MPICH}, ERROR, "two MPIs in one process"),
        ({"launcher": mpirun("srun"), "mpi4py": MPICH}, ERROR, "two MPIs in one process"),
        ({"launcher": mpirun("mpich"), "mpi4py": MPICH, "horovod": {}}, OK, "mpirun, mpi4py: "),
        ({"mpi4py": COPY}, WARNING, "two copies of one MPI"),
        ({"mpi4py": COPY, "horovod": {}}, WARNING, "mpirun is 5.0.11, the library 4.1.4"),
        ({"mpi4py": Loaded("no libmpi"), "horovod": {}}, ABSENT, "no library uses MPI"),
    ],
)
def test_the_three_mpis_must_agree(changes: dict[str, Any], state: str, words: str) -> None:
    finding = by_check(software.mpi_findings(mpi_facts(**changes)))["MPI agreement"]
    assert_finding(finding, state, words)
    assert state != OK or finding.evidence.startswith(words)


def test_a_missing_mpirun_and_a_failing_mpi4py_are_errors() -> None:
    facts = mpi_facts(launcher=None, error="no mpirun on the PATH", mpi4py=Loaded("no libmpi"))
    findings = by_check(software.mpi_findings(facts))
    assert (findings["mpirun"].state, findings["mpi4py"].state) == (ERROR, ERROR)
    assert "put /env/bin/mpirun on the PATH" in findings["mpirun"].remedy


def test_the_remedy_for_a_missing_mpirun_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        find_mpi({"PATH": str(tmp_path)})
    facts = mpi_facts(launcher=None, error=str(error.value), environment_mpirun="")
    finding = by_check(software.mpi_findings(facts))["mpirun"]
    assert "hvdtrain[mpi]" not in finding.evidence
    assert "hvdtrain[mpi]" in finding.remedy


def horovod(**changes: Any) -> software.HorovodFacts:
    usual = software.HorovodFacts(
        version="0.28.1",
        built_for={"pytorch": "2.13.0+cpu", "tensorflow": "2.21.0"},
        installed={"pytorch": "2.13.0+cpu", "tensorflow": "2.21.0"},
        loaded={"pytorch": OPEN, "tensorflow": OPEN},
        build={"mpi": "Open MPI 5.0.11", "cpu": ["-mavx", "-mfma"]},
        cpu_flags=("-mf16c", "-mavx", "-mfma"),
    )
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "check", "state", "words"),
    [
        ({}, "Horovod", OK, "0.28.1, built with Open MPI 5.0.11"),
        ({}, "Horovod, PyTorch", OK, "loads, for 2.13.0+cpu"),
        ({"build": {}}, "Horovod", OK, "0.28.1"),
        ({"version": ""}, "Horovod", ABSENT, "not installed"),
        ({"cpu_flags": ("-mavx",)}, "Horovod", ERROR, "a processor with fma"),
        (
            {"loaded": {"pytorch": Loaded("undefined symbol: x"), "tensorflow": OPEN}},
            "Horovod, PyTorch",
            ERROR,
            "it does not load (for 2.13.0+cpu): undefined symbol: x",
        ),
        (
            {"installed": {"pytorch": "2.14.0", "tensorflow": "2.21.0"}},
            "Horovod, PyTorch",
            WARNING,
            "built for PyTorch 2.13.0+cpu, 2.14.0 is installed",
        ),
        ({"installed": {"pytorch": "2.13.0+cpu"}}, "Horovod, TensorFlow", ABSENT, "not installed"),
        ({"loaded": {"pytorch": OPEN}}, "Horovod, TensorFlow", WARNING, "was not built for Tens"),
    ],
)
def test_horovod(changes: dict[str, Any], check: str, state: str, words: str) -> None:
    assert_finding(by_check(software.horovod_findings(horovod(**changes)))[check], state, words)


def test_the_build_facts_of_a_cached_wheel_are_read(tmp_path: Path) -> None:
    for name, text in (("a", "no json"), ("b", '{"sha256": "1f", "facts": {"mpi": "MPICH 5"}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "build.json").write_text(text)
    assert software.build_facts(tmp_path, "1f") == {"mpi": "MPICH 5"}
    assert software.build_facts(tmp_path, "2f") == {}
    assert software.build_facts(tmp_path, None) == {}
    assert software.build_facts(tmp_path / "none", "1f") == {}


def tools(**changes: Any) -> Toolchain:
    nothing = dict.fromkeys(("make", "compiler", "mpi", "cuda", "nccl"))
    usual: dict[str, Any] = {
        **nothing,
        "python": Path("/env/bin/python"),
        "python_tag": "",
        "prefix": Path("/env"),
        "site_packages": Path("/env/lib"),
        "headers": Path("/usr/include"),
        "has_headers": False,
        "has_pip": True,
        "torch": Torch("2.13.0", None, "", Path("/env/torch")),
        "tensorflow": None,
        "cpu_flags": (),
    }
    return Toolchain(**{**usual, **changes})


def test_at_least_one_framework_is_required() -> None:
    findings = by_check(software.framework_findings(tools()))
    assert [finding.state for finding in findings.values()] == [OK, ABSENT]
    findings = by_check(software.framework_findings(tools(torch=None)))
    assert [finding.state for finding in findings.values()] == [ERROR, ERROR]
    tensorflow = TensorFlow("2.21.0", "12.5.1", Path("/env/tensorflow"))
    findings = by_check(software.framework_findings(tools(torch=None, tensorflow=tensorflow)))
    assert [finding.state for finding in findings.values()] == [ABSENT, OK]


def test_a_torchvision_that_cannot_be_imported_is_reported() -> None:
    whole, broken = Loaded(""), Loaded("libc10_cuda.so: cannot open shared object file")
    findings = [
        software.torchvision_finding("0.28.0", loaded, mended=mended)
        for loaded, mended in ((whole, False), (broken, True), (broken, False))
    ]
    assert [finding.state for finding in findings] == [OK, ABSENT, WARNING]
    assert all("libc10_cuda.so" in finding.evidence for finding in findings[1:])
    assert "image decoders and box operators" in findings[1].evidence
    assert "hvdtrain install-horovod" in findings[2].remedy


def test_build_tools_may_be_absent() -> None:
    assert {finding.state for finding in machine.tool_findings(tools())} == {ABSENT}


CARD = Gpu("H200", "GPU-1", 141 * GIB, 90)
CUDA_TORCH = Torch("2.13.0", "13.0", "", Path("/env/torch"))


@pytest.mark.parametrize(
    ("driver", "torch", "state", "words"),
    [
        (None, CUDA_TORCH, ABSENT, "no NVIDIA GPU"),
        (Driver("13.0", ()), CUDA_TORCH, ABSENT, "no NVIDIA GPU"),
        (Driver("13.2", (CARD,) * 4), CUDA_TORCH, OK, "4 x H200, 141 GiB"),
        (Driver("12.8", (CARD,)), CUDA_TORCH, ERROR, "PyTorch is for CUDA 13.0"),
        (Driver("13.0", (CARD,)), None, WARNING, "built for the CPU"),
    ],
)
def test_gpus(driver: Driver | None, torch: Torch | None, state: str, words: str) -> None:
    assert_finding(machine.gpu_finding(driver, tools(torch=torch)), state, words)


def test_the_reduction_of_gpu_tensors() -> None:
    facts = software.HorovodFacts("0.28.1", {}, {}, {"pytorch": Loaded("")})
    cuda = tools(torch=CUDA_TORCH)

    def judge(toolchain: Toolchain, gpus: int = 0, *, has_nccl: bool = False) -> list[Finding]:
        findings = software.gpu_tensor_findings(facts, toolchain, has_nccl=has_nccl, gpus=gpus)
        return list(findings)

    (nccl,) = judge(cuda, has_nccl=True)
    assert nccl.state == OK
    assert "NCCL" in nccl.evidence
    (host,) = judge(cuda)
    assert host.state == ABSENT
    assert "no NCCL: no nvcc" in host.evidence
    assert "module load cuda" in host.remedy
    whole = dataclasses.replace(
        cuda, cuda=Cuda(Path("/cuda"), "13.0"), nccl=Nccl(Path("/n"), Path("/n.so"), "2.28.9")
    )
    (host,) = judge(whole, gpus=4)
    assert host.state == WARNING
    assert host.remedy == "hvdtrain install-horovod --rebuild builds it with NCCL"
    assert judge(tools()) == []
    facts = software.HorovodFacts("", {}, {}, {})
    assert judge(cuda) == []


def test_a_library_that_crashes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loading, "run", lambda command, timeout: CommandResult(command, -11, "Segmentation fault\n")
    )
    assert loading.try_loading("pytorch").error == (
        "loading it crashed, exit code -11: Segmentation fault"
    )


def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"commands": [], "ok": True}
