"""safetensors files, written tensor by tensor and read by rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from hvdtrain.errors import UsageError
from hvdtrain.steps.tensor_file import BLOCK, ArraySpec, TensorFile, stored
from hvdtrain.system.files import file_digest
from hvdtrain.system.folder import Folder

ARRAYS = {
    "double": np.arange(12.0).reshape(3, 4),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.array([1, 2.5], np.float16),
    "flags": np.array([True, False, True]),
    "complex": np.array([1 + 2j], np.complex64),
    **{kind: np.arange(3, dtype=kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "u8")},
}


def written(path: Path, arrays: dict[str, np.ndarray]) -> str:
    layouts = {name: ArraySpec.of(value) for name, value in arrays.items()}
    file = TensorFile(Folder.named(path.parent), path.name, layouts)
    for name, value in arrays.items():
        file.write(name, value)
    return file.close()


def test_the_library_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digest = written(path, ARRAYS)
    assert digest == xxh3_128(path.read_bytes()).hexdigest() == file_digest(path, xxh3_128)
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert loaded[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("parent", [None, "/dev/shm"])  # with and without O_DIRECT
def test_tensors_larger_than_a_write_are_complete(parent: str | None, tmp_path: Path) -> None:
    sizes = (1, BLOCK - 200, 2 * BLOCK + 1, 4095, 0, 77)
    arrays = {f"{i}": np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory(dir=parent or tmp_path) as folder:
        path = Path(folder, "a")
        digest = written(path, {name: np.frombuffer(a, np.uint8) for name, a in arrays.items()})
        assert digest == file_digest(path, xxh3_128)
        loaded = safetensors.numpy.load_file(path)
    assert {name: value.tobytes() for name, value in loaded.items()} == arrays


@pytest.mark.parametrize("kind", [np.complex128, np.longdouble, "datetime64[s]"])
def test_a_type_without_a_name_in_the_format_is_refused(kind: Any, tmp_path: Path) -> None:
    """Otherwise nothing could read the file."""
    with pytest.raises(UsageError, match=r"^odd is of type \w+(\[s\])?, which safetensors cannot"):
        written(tmp_path / "a.safetensors", {"even": np.ones(2), "odd": np.zeros(2, kind)})
    assert not list(tmp_path.iterdir())


@given(rows=st.integers(0, 5), first=st.integers(0, 6), end=st.integers(0, 6))
def test_rows_equal_those_of_the_whole_tensor(
    rows: int, first: int, end: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    path = tmp_path_factory.mktemp("rows") / "a.safetensors"
    written(path, {"a": whole})
    tensor = stored(path)["a"]
    assert tensor.shape == whole.shape
    assert np.array_equal(tensor[first:end], whole[first:end])
    assert tensor[first:end].shape == whole[first:end].shape
    assert np.array_equal(np.asarray(tensor), whole)


def test_a_tensor_out_of_order_is_an_error(tmp_path: Path) -> None:
    layouts = {name: ArraySpec.of(ARRAYS[name]) for name in ("double", "half")}
    folder = Folder.named(tmp_path)
    file = TensorFile(folder, "a", layouts)
    with pytest.raises(ValueError, match=r"half.* double is due"):
        file.write("half", ARRAYS["half"])
    file = TensorFile(folder, "b", layouts)
    with pytest.raises(ValueError, match="double"):
        file.write("double", ARRAYS["double"].astype(np.float32))
    file = TensorFile(folder, "c", layouts)
    file.write("double", ARRAYS["double"])
    with pytest.raises(ValueError, match=r"half.* not written"):
        file.close()
