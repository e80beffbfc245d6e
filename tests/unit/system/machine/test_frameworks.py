"""Installed packages are found without importing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.system.machine import frameworks
from hvdtrain.system.machine.frameworks import find_module, is_installed


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory on ``sys.path`` whose packages raise when imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def package(root: Path, *names: str) -> Path:
    folder = root.joinpath(*names)
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    return folder


def test_an_extension_is_found_by_its_file_without_an_import(packages: Path) -> None:
    package(packages, "hvd_fake")
    folder = package(packages, "hvd_fake", "torch")
    assert is_installed("hvd_fake")
    assert not is_installed("hvd_fake.torch.mpi_lib_v2")
    (folder / "mpi_lib_v2_other.so").write_text("")
    assert not is_installed("hvd_fake.torch.mpi_lib_v2")
    (folder / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").write_text("")
    assert is_installed("hvd_fake.torch.mpi_lib_v2")
    assert not is_installed("hvd_fake.tensorflow.mpi_lib")


def test_a_package_in_a_namespace_is_found_in_each_of_its_directories(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's packages share one, and another of them may come first."""
    package(packages, "first", "hvd_shared", "blas")
    dali = package(packages, "second", "hvd_shared", "dali")
    for name in ("second", "first"):
        monkeypatch.syspath_prepend(packages / name)
    assert is_installed("hvd_shared.blas")
    assert find_module("hvd_shared.dali") == dali
    assert not is_installed("hvd_shared.dal")


def test_a_missing_module_is_not_installed() -> None:
    assert not is_installed("hvd_absent")
    assert not is_installed("hvd_absent.torch.mpi_lib")


def test_a_script_of_the_same_name_is_not_the_package(packages: Path) -> None:
    (packages / "hvd_script.py").write_text("raise AssertionError('imported')")
    assert is_installed("hvd_script")
    assert not is_installed("hvd_script.torch.mpi_lib_v2")


def test_torch_version_is_read_without_importing_it() -> None:
    source = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\ngit_version = 'abc'\nx = f()"
    facts = {"__version__": "2.13.0+cpu", "cuda": None, "git_version": "abc"}
    assert frameworks.literals(source) == facts
    for annotation in ("Optional[str]", "str | None", "Final"):
        assert frameworks.literals(f"cuda: {annotation} = '13.0'  # x\n") == {"cuda": "13.0"}
