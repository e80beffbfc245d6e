"""MNIST's files: every form that is right, and one clear line for everything that is wrong."""

from __future__ import annotations

import functools
import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvdtrain.workloads.mnist.data import find, load, read_idx
from tests.conftest import error_of, flipped

U8 = NDArray[np.uint8]
NAMES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("t10k", "images"): "t10k-images-idx3-ubyte",
    ("t10k", "labels"): "t10k-labels-idx1-ubyte",
}


def idx(array: U8) -> bytes:
    """An IDX file, from its description in LeCun's page."""
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def images(count: int, seed: int = 0) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), np.uint8)


def labels(count: int) -> U8:
    return np.arange(count, dtype=np.uint8) % 10


def write(directory: Path, form: str = "") -> Path:
    """A small dataset: 13 samples to train on, 5 to test on."""
    directory.mkdir(parents=True, exist_ok=True)
    for (split, kind), name in NAMES.items():
        count = 13 if split == "train" else 5
        data = idx(images(count, count) if kind == "images" else labels(count))
        if form == "gz":
            (directory / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (directory / name).write_bytes(data)
    return directory


refusal = functools.partial(error_of, load)


@pytest.mark.parametrize("form", ["", "gz"])
@pytest.mark.parametrize("below", ["", "MNIST/raw"])
def test_the_four_files_in_each_form(tmp_path: Path, form: str, below: str) -> None:
    write(tmp_path / below, form)
    train, test = load(tmp_path)
    for samples, count in ((train, 13), (test, 5)):
        assert np.array_equal(samples.images, images(count, count))
        assert samples.images.dtype == np.uint8
        assert samples.labels.tolist() == [number % 10 for number in range(count)]
        assert samples.labels.dtype == np.int64


def test_forms_may_be_mixed_and_the_flat_file_is_preferred(tmp_path: Path) -> None:
    write(tmp_path / "MNIST" / "raw")
    name = NAMES["train", "images"]
    assert find(tmp_path, name) == tmp_path / "MNIST" / "raw" / name
    write(tmp_path)
    assert find(tmp_path, name) == tmp_path / name
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    (tmp_path / name).unlink()
    assert len(load(tmp_path)[0].labels) == 13


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")
    for name in NAMES.values():
        (write(tmp_path) / name).unlink()
        message = refusal(tmp_path)
        assert name in message and str(tmp_path) in message


@pytest.mark.parametrize("form", ["", "gz"])
@pytest.mark.parametrize("name", NAMES.values())
def test_a_truncated_file_is_named_wherever_it_ends(tmp_path: Path, form: str, name: str) -> None:
    write(tmp_path, form)
    path = tmp_path / (f"{name}.gz" if form else name)
    whole = path.read_bytes()
    offsets = {*range(0, 20), len(whole) // 2, len(whole) - 9, len(whole) - 2, len(whole) - 1}
    for length in sorted(offset for offset in offsets if 0 <= offset < len(whole)):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(tmp_path)
    path.write_bytes(whole)
    load(tmp_path)


@pytest.mark.parametrize(
    ("shape", "word"),
    [((100, 28, 28), "broken"), ((2**32 - 1,) * 4, "more than any"), ((2**28, 9), "more than any")],
    ids=["few", "endless", "many"],
)
def test_a_small_file_that_inflates_to_a_large_one_is_not_inflated(
    tmp_path: Path, shape: tuple[int, ...], word: str
) -> None:
    path = write(tmp_path, "gz") / f"{NAMES['train', 'images']}.gz"
    head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head + bytes(64_000_000))
    with path.open("ab") as file:
        file.write(bytes(3_000_000))  # large enough to inflate to that size
    tracemalloc.start()
    try:
        message = refusal(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in message and word in message
    assert peak < 2_000_000


WRONG_LABEL = labels(13)
WRONG_LABEL[7] = 10
HEADLESS = idx(images(13))[4:]


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("images", b"\x89PNG" + HEADLESS, ""),
        ("labels", idx(labels(13)) + b"\0", "more"),
        ("labels", idx(labels(4)), "13 images"),
        ("labels", idx(WRONG_LABEL), "label 10"),
        ("images", idx(np.zeros((13, 32, 32), np.uint8)), ""),
        ("labels", idx(images(13)), ""),
    ],
)
def test_a_file_of_another_form_is_named(
    tmp_path: Path, kind: str, content: bytes, words: str
) -> None:
    path = write(tmp_path) / NAMES["train", kind]
    path.write_bytes(content)
    message = refusal(tmp_path)
    assert str(path) in message and words in message


def test_a_flipped_byte_in_a_gzipped_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, "gz") / f"{NAMES['train', 'images']}.gz"
    whole = path.read_bytes()
    path.write_bytes(flipped(whole, len(whole) // 2, 0xFF))
    assert str(path) in refusal(tmp_path)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip"
    array = np.random.default_rng(len(shape)).integers(0, 256, shape, np.uint8)
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    back = read_idx(path)
    assert back.dtype == np.uint8
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_the_embedded_digits() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    train, test = load(None)
    assert train.images.shape == (1500, 28, 28)
    assert test.images.shape == (297, 28, 28)
    assert train.images.dtype == test.images.dtype == np.uint8
    assert np.array_equal(np.concatenate([train.labels, test.labels]), digits.target)
    assert train.labels.dtype == np.int64
    assert train.augmentation and test.augmentation is None
    factor, offset = train.scale
    assert test.scale == train.scale
    assert (train.images * factor + offset).mean() == pytest.approx(0, abs=1e-3)
    assert (train.images * factor + offset).std() == pytest.approx(1, abs=1e-3)
    # Resized, not tiled nor turned: the mean of each quadrant is about that of the 8x8 digit.
    for index in (0, 1499):
        small = digits.images[index] * (255 / 16)
        for rows in (0, 1):
            for columns in (0, 1):
                part = small[4 * rows : 4 * rows + 4, 4 * columns : 4 * columns + 4].mean()
                large = train.images[
                    index, 14 * rows : 14 * rows + 14, 14 * columns : 14 * columns + 14
                ].mean()
                assert abs(part - large) < 12
    assert train.images.max() > 240 and train.images.min() == 0


def test_the_real_one(mnist: Path) -> None:
    train, test = load(mnist)
    assert (len(train.labels), len(test.labels)) == (60_000, 10_000)
    assert train.augmentation is None and train.augment(seed=0, channel=1) is None
    assert train.scale == (1 / (255 * 0.3081), -0.1307 / 0.3081)
    # From LeCun's page and the literature: mean and deviation of the training pixels.
    assert train.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert train.images[:].std() / 255 == pytest.approx(0.3081, abs=1e-4)
