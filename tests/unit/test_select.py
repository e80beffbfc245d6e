"""Which adapter: by strategy, launcher, and what is installed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hvdtrain.adapters import select
from hvdtrain.adapters.select import BUILT, choose_strategy, is_installed
from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import ALONE, Place

ONE = Place("mpirun (Open MPI)", 0, 1, 0, 1)
TWO = Place("mpirun (Open MPI)", 1, 2, 1, 2)
TORCHRUN = Place("torchrun", 0, 2, 0, 2)


@pytest.mark.parametrize("place", [ALONE, ONE, TWO])
@pytest.mark.parametrize("asked", [None, "horovod"])
def test_horovod_where_it_is_installed(asked: str | None, place: Place) -> None:
    assert choose_strategy(asked, place, horovod=True) == "horovod"


@pytest.mark.parametrize("place", [ALONE, ONE])
def test_alone_without_horovod_it_is_single_and_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        assert choose_strategy(None, place, horovod=False) == "single"
    assert "single" in caplog.text


@pytest.mark.parametrize("horovod", [True, False])
@pytest.mark.parametrize("place", [ALONE, ONE])
def test_single_when_asked_for(
    horovod: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_strategy("single", place, horovod=horovod) == "single"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("asked", "place", "horovod", "words"),
    [
        (None, TWO, False, ["not installed", "hvdtrain install-horovod"]),
        ("horovod", TWO, False, ["not installed", "hvdtrain install-horovod"]),
        ("horovod", ALONE, False, ["not installed", "hvdtrain install-horovod"]),
        ("single", TWO, True, ["--strategy single", "mpirun (Open MPI) started 2"]),
        (None, TORCHRUN, True, ["torchrun", "ddp"]),
        ("horovod", TORCHRUN, True, ["torchrun", "ddp"]),
        ("horovod", TORCHRUN, False, ["torchrun", "ddp"]),
        ("magic", ALONE, True, ["--strategy magic", ", ".join(BUILT)]),
        *(
            (name, ALONE, True, [f"--strategy {name} is not built yet"])
            for name in ("ddp", "zero", "fsdp", "data-parallel")
        ),
    ],
)
def test_what_cannot_be(asked: str | None, place: Place, horovod: bool, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        choose_strategy(asked, place, horovod=horovod)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place on the path of modules, where anything imported would raise."""
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


def test_what_is_absent_is_not_installed() -> None:
    assert not is_installed("hvd_absent")
    assert not is_installed("hvd_absent.torch.mpi_lib")


def test_a_script_of_the_same_name_is_not_the_package(packages: Path) -> None:
    (packages / "hvd_script.py").write_text("raise AssertionError('imported')")
    assert is_installed("hvd_script")
    assert not is_installed("hvd_script.torch.mpi_lib_v2")


def test_an_unknown_framework_is_told() -> None:
    with pytest.raises(UsageError, match="--framework jax: choose one of pytorch, tensorflow"):
        select.adapter("jax", environ={})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_framework_that_is_not_installed_is_told_with_the_remedy(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "is_installed", lambda module: False)
    with pytest.raises(UsageError, match=f"pip install 'hvdtrain\\[{framework}\\]'"):
        select.adapter(framework, environ={})
