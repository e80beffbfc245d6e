"""Files of safetensors that are written a tensor at a time, and read by rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.steps.tensor_file import CHUNK, Layout, TensorFile, digest_of, stored

ARRAYS = {
    "double": np.arange(12.0).reshape(3, 4),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "half": np.array([1, 2.5], np.float16),
    "flags": np.array([True, False, True]),
}


def written(path: Path, arrays: dict[str, np.ndarray]) -> str:
    file = TensorFile(path, {name: Layout.of(value) for name, value in arrays.items()})
    for name, value in arrays.items():
        file.write(name, value)
    return file.close()


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digest = written(path, ARRAYS)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == digest_of(path)
    found = safetensors.numpy.load_file(path)
    assert found.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes()


@given(rows=st.integers(0, 5), first=st.integers(0, 6), end=st.integers(0, 6))
def test_some_rows_are_those_of_the_whole(
    rows: int, first: int, end: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    path = tmp_path_factory.mktemp("rows") / "a.safetensors"
    written(path, {"a": whole})
    one = stored(path)["a"]
    assert one.shape == whole.shape
    assert np.array_equal(one[first:end], whole[first:end])
    assert one[first:end].shape == whole[first:end].shape
    assert np.array_equal(np.asarray(one), whole)


def test_a_tensor_out_of_turn_is_an_error(tmp_path: Path) -> None:
    layouts = {name: Layout.of(ARRAYS[name]) for name in ("double", "half")}
    file = TensorFile(tmp_path / "a", layouts)
    with pytest.raises(ValueError, match=r"half.* where double is due"):
        file.write("half", ARRAYS["half"])
    file = TensorFile(tmp_path / "b", layouts)
    with pytest.raises(ValueError, match="double"):
        file.write("double", ARRAYS["double"].astype(np.float32))
    file = TensorFile(tmp_path / "c", layouts)
    file.write("double", ARRAYS["double"])
    with pytest.raises(ValueError, match=r"half.* not written"):
        file.close()


def test_a_digest_of_more_than_is_read_at_once(tmp_path: Path) -> None:
    data = bytes(range(256)) * (CHUNK // 256) + b"rest"
    (tmp_path / "large").write_bytes(data)
    assert digest_of(tmp_path / "large") == hashlib.sha256(data).hexdigest()
