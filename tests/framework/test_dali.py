"""Images decoded by DALI: Pillow's pixels, crops and errors, whatever the batch."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
pytest.importorskip("nvidia.dali")

from PIL import Image  # noqa: E402
from sklearn.datasets import load_sample_image  # noqa: E402

from hvdtrain.commands.pack.packing import Packing  # noqa: E402
from hvdtrain.commands.pack.source import PackOptions  # noqa: E402
from hvdtrain.steps.sharding import Shards  # noqa: E402
from hvdtrain.workloads.data import dali_decoder, image_folder  # noqa: E402
from hvdtrain.workloads.data.dali_decoder import (  # noqa: E402
    Jpeg,
    JpegDecoder,
    choose_decoder,
)
from hvdtrain.workloads.data.dali_images import (  # noqa: E402
    REDUCED,
    EncodedImages,
    GpuFolder,
    dali_folder,
)
from hvdtrain.workloads.data.image_folder import ImageFolder, ImageOptions  # noqa: E402
from hvdtrain.workloads.data.torch_images import Folder, ReadAhead, View  # noqa: E402
from hvdtrain.workloads.resnet.pytorch import (  # noqa: E402
    centre_crop,
    centre_view,
    random_crop,
    random_view,
    torchvision,
)
from tests.conftest import error_of  # noqa: E402

SIZE = 96
OPTIONS = ImageOptions(image_size=SIZE, workers=0, decoder="dali")
FOLDERS = (dali_folder, GpuFolder)  # the second decodes in the rank itself, here on a CPU
EXIF = Image.Exif()
EXIF[274] = 6  # to be turned by a right angle
# Name, mode, size, and arguments of Pillow's ``save``.
PLAIN: list[tuple[str, str, tuple[int, int], dict[str, Any]]] = [
    ("china.jpg", "RGB", (500, 334), {"quality": 95}),
    ("flower.jpg", "RGB", (333, 217), {"subsampling": "4:4:4"}),
    ("restarts.jpg", "RGB", (401, 299), {"restart_marker_rows": 1}),
    ("turned.jpg", "RGB", (300, 200), {"exif": EXIF}),
    ("narrow.jpg", "RGB", (600, 20), {"subsampling": "4:2:2"}),
    ("tiny.jpg", "RGB", (3, 5), {}),
]
OTHERS: list[tuple[str, str, tuple[int, int], dict[str, Any]]] = [
    ("progressive.jpg", "RGB", (400, 300), {"progressive": True}),
    ("grey.jpg", "L", (400, 300), {}),
    ("cmyk.jpg", "CMYK", (400, 300), {}),
    ("rgb.jpg", "RGB", (300, 200), {"keep_rgb": True}),
    ("palette.png", "P", (300, 200), {}),
    ("picture.png", "RGB", (300, 200), {}),
    ("deep.png", "I;16", (300, 200), {}),
]
FIRST = "china.jpg"
PHOTOGRAPHS = (FIRST, "flower.jpg", "restarts.jpg", "turned.jpg")


def encoded(name: str, mode: str, size: tuple[int, int], how: dict[str, Any]) -> bytes:
    photograph = load_sample_image("flower.jpg" if name == "flower.jpg" else "china.jpg")
    image = Image.fromarray(photograph).resize(size)
    image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    image.save(file, "PNG" if name.endswith("png") else "JPEG", **how)
    return file.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of each kind, and one with a header that DALI does not read."""
    root = tmp_path_factory.mktemp("images")
    for label, kinds in (("plain", PLAIN), ("others", OTHERS)):
        (root / "train" / label).mkdir(parents=True)
        for name, *how in kinds:
            (root / "train" / label / name).write_bytes(encoded(name, *how))
    whole = (root / "train/plain" / FIRST).read_bytes()
    (root / "train/others/unread.jpg").write_bytes(whole[:20] + bytes(9) + whole[20:])
    return root


@pytest.fixture(scope="module")
def images(root: Path) -> ImageFolder:
    return image_folder.load(root)[0]


def number(images: ImageFolder, name: str) -> int:
    return next(i for i, path in enumerate(images.files.names) if path.endswith(f"/{name}"))


def batches(
    data: ReadAhead, epoch: int | None, size: int = 64, order: list[int] | None = None
) -> dict[int, Any]:
    """The pixels of each sample, read in batches."""
    order = list(range(data.samples)) if order is None else order
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    read = list(data._read([(part, epoch) for part in parts]))
    assert all(len(batch.x) == len(part) for batch, part in zip(read, parts, strict=True))
    pixels = torch.cat([batch.x for batch in read])
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous(memory_format=torch.channels_last)
    return dict(zip(order, pixels, strict=True))


def differences(one: Any, other: Any) -> Any:
    return (one.int() - other.int()).abs().double()


def torchvisions(image: Image.Image, size: int) -> Image.Image:
    view = random_view(image, size)
    functional = torchvision().transforms.functional
    box = (view.top, view.left, view.height, view.width)
    crop = functional.resized_crop(image.convert("RGB"), *box, [size, size])
    return functional.hflip(crop) if view.flip else crop


def test_a_training_crop_is_that_of_torchvision_and_pillow(images: ImageFolder) -> None:
    by_dali, expected, by_pillow = (
        Folder(images, crop, OPTIONS) if crop else dali_folder(images, random_view, OPTIONS)
        for crop in (None, torchvisions, random_crop)
    )
    reader = EncodedImages(images, random_view, OPTIONS)
    for epoch in range(20):
        got = batches(by_dali, epoch)
        same, near = batches(expected, epoch), batches(by_pillow, epoch)
        for name, *_ in PLAIN:
            index = number(images, name)
            assert differences(got[index], same[index]).max() <= 2, (name, epoch)
            if name not in PHOTOGRAPHS:
                continue  # Pillow also takes pixels around the crop: in small images these are many
            sample = reader.sample(index, epoch)
            assert isinstance(sample, Jpeg)
            # Pillow decodes at a half of the sides, where that suffices.
            most = 0.5 if sample.view.spare < 2 else 9
            assert differences(got[index], near[index]).mean() < most, (name, epoch)


def test_an_evaluation_is_that_of_pillow(images: ImageFolder) -> None:
    by_dali = batches(dali_folder(images, centre_view, OPTIONS), None)
    by_pillow = batches(Folder(images, centre_crop, OPTIONS), None)
    for index, pixels in by_dali.items():
        assert differences(pixels, by_pillow[index]).max() <= 2, images.files.name(index)


@pytest.mark.parametrize("folder", FOLDERS)
def test_pillow_decodes_all_other_images(folder: Any, images: ImageFolder) -> None:
    for epoch, view, crop in ((3, random_view, random_crop), (None, centre_view, centre_crop)):
        by_dali = batches(folder(images, view, OPTIONS), epoch)
        by_pillow = batches(Folder(images, crop, OPTIONS), epoch)
        for name in [*(name for name, *_ in OTHERS), "unread.jpg"]:
            index = number(images, name)
            assert torch.equal(by_dali[index], by_pillow[index]), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sample_does_not_depend_on_its_batch(folder: Any, images: ImageFolder) -> None:
    data = folder(images, random_view, OPTIONS)
    whole = batches(data, 5)
    turned = batches(data, 5, size=3, order=list(reversed(range(data.samples))))
    single = batches(data, 5, size=1)
    assert whole.keys() == turned.keys() == single.keys()
    for index, pixels in whole.items():
        assert torch.equal(pixels, turned[index]), images.files.name(index)
        assert torch.equal(pixels, single[index]), images.files.name(index)
    assert not torch.equal(whole[0], batches(data, 6)[0])


@pytest.mark.parametrize("folder", FOLDERS)
def test_workers_read_what_the_rank_itself_reads(folder: Any, images: ImageFolder) -> None:
    order = [0, 5, 2, 8, 1]
    expected = batches(folder(images, random_view, OPTIONS), 1, 2, order)
    data = folder(images, random_view, ImageOptions(image_size=SIZE, workers=1))
    try:
        assert all(
            torch.equal(pixels, expected[index])
            for index, pixels in batches(data, 1, 2, order).items()
        )
    finally:
        data.close()


def test_packed_data_is_bit_equal(root: Path, images: ImageFolder, tmp_path: Path) -> None:
    Packing(root, tmp_path / "out", PackOptions(2**16, workers=1)).run()
    packed = image_folder.load(tmp_path / "out")[0]
    one, other = (batches(dali_folder(data, random_view, OPTIONS), 2) for data in (images, packed))
    assert all(torch.equal(pixels, other[index]) for index, pixels in one.items())


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_image_and_labels(folder: Any, images: ImageFolder) -> None:
    data = folder(images, random_view, OPTIONS)
    first, empty, last = data._read([([3, 0], 0), ([], 0), ([1], 0)])
    assert empty.x.shape == (0, 3, SIZE, SIZE) and empty.y.shape == (0,)
    assert first.y.tolist() == images.labels[[3, 0]].tolist()
    assert last.y.tolist() == images.labels[[1]].tolist()


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    yield "half", whole[: len(whole) // 2]
    yield "header", whole[:300]
    yield "empty", b""
    yield "text", b"no image at all"
    yield "end", whole[:-2] + b"\xff\xc0"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_broken_image_has_pillows_error(folder: Any, root: Path, tmp_path: Path) -> None:
    whole = (root / "train/plain" / FIRST).read_bytes()
    (tmp_path / "train/c").mkdir(parents=True)
    names = []
    for name, data in damaged(whole):
        names.append(tmp_path / f"train/c/{name}.jpg")
        names[-1].write_bytes(data)
    images = image_folder.load(tmp_path)[0]
    pairs = ((folder(images, centre_view, OPTIONS), Folder(images, centre_crop, OPTIONS)),)
    refused = 0
    for (data, other), path in itertools.product(pairs, sorted(names)):
        index = number(images, path.name)
        try:
            expected = batches(other, None, order=[index])
        except Exception:
            message = error_of(batches, data, None, order=[index])
            assert message.startswith(f"{path} cannot be decoded (")
            said = error_of(batches, other, None, order=[index])
            assert message.partition(" object at ")[0] == said.partition(" object at ")[0]
            refused += 1
        else:
            got = batches(data, None, order=[index])
            assert differences(got[index], expected[index]).max() <= 2
    assert refused >= 4


def test_corrupt_files_are_read_as_by_pillow(root: Path, tmp_path: Path) -> None:
    """Bytes are changed at random: the same pixels, or the same error."""
    random = np.random.default_rng(0)
    whole = (root / "train/plain" / FIRST).read_bytes()
    (tmp_path / "train/c").mkdir(parents=True)
    for name in range(40):
        data = bytearray(whole)
        for offset in random.integers(2, (600, len(data))[name % 2], 1 + name % 7):
            data[offset] = random.integers(256)
        (tmp_path / f"train/c/{name:02}.jpg").write_bytes(data)
    images = image_folder.load(tmp_path)[0]
    by_dali, by_pillow = (
        dali_folder(images, centre_view, OPTIONS),
        Folder(images, centre_crop, OPTIONS),
    )
    for index in range(by_dali.samples):
        try:
            expected = batches(by_pillow, None, order=[index])[index]
        except Exception:
            error_of(batches, by_dali, None, order=[index])
        else:
            got = batches(by_dali, None, order=[index])[index]
            assert differences(got, expected).mean() < 0.5, images.files.name(index)


def test_a_batch_that_was_left_does_not_disturb_the_next_epoch(images: ImageFolder) -> None:
    data = GpuFolder(images, random_view, OPTIONS)
    expected = batches(data, 0, 4)
    parts = Shards(data.samples, 4).parts(0)
    reading = data.training(parts)
    next(reading)
    reading.close()
    again = batches(data, 0, 4)
    assert all(torch.equal(pixels, again[index]) for index, pixels in expected.items())


def test_what_dali_resizes_is_near(images: ImageFolder) -> None:
    """As on a GPU: the region of the square, mirrored, before resizing."""
    for view, epoch in ((random_view, 0), (centre_view, None)):
        jpegs = EncodedImages(images, view, OPTIONS).batch(range_of(PLAIN, images), epoch).jpegs
        assert len(jpegs) == len(PLAIN)
        squares = []
        for dali_resizes in (False, True):
            decoder = JpegDecoder(SIZE, files=images.files, dali_resizes=dali_resizes)
            decoder.start(jpegs)
            squares.append(decoder.finish())
        for name, difference in zip(PLAIN, differences(*squares), strict=True):
            assert difference.mean() < 0.5, (name, difference.mean())
            assert (difference > 2).double().mean() < 0.01, name


def range_of(kinds: list[Any], images: ImageFolder) -> list[int]:
    return [number(images, name) for name, *_ in kinds]


def test_large_batches_are_decoded_in_parts(
    images: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batches(dali_folder(images, centre_view, OPTIONS), None)
    monkeypatch.setattr(dali_decoder, "MAX_ON_CPU", 200_000)  # pixels: one image has more
    for folder in FOLDERS:
        data = folder(images, centre_view, OPTIONS)
        for _ in range(2):
            in_parts = batches(data, None)
            assert all(torch.equal(pixels, in_parts[index]) for index, pixels in whole.items())


def test_it_is_chosen_where_it_is_requested() -> None:
    assert choose_decoder(OPTIONS) == "dali"
    assert choose_decoder(ImageOptions(decoder="auto")) == "pillow"  # a CPU


def test_a_plain_jpeg_is_decoded_by_dali(images: ImageFolder) -> None:
    reader = EncodedImages(images, random_view, OPTIONS)
    for name, *_ in PLAIN:
        assert isinstance(reader.sample(number(images, name), 0), Jpeg), name
    for name, *_ in OTHERS:
        assert not isinstance(reader.sample(number(images, name), 0), Jpeg), name


def test_large_reductions_are_left_to_pillow_on_a_cpu(root: Path) -> None:
    """It decodes at an eighth of the sides at once."""
    images = image_folder.load(root)[0]
    small = ImageOptions(image_size=32, workers=0)
    every, few = (EncodedImages(images, random_view, small, most) for most in (np.inf, REDUCED))
    index = number(images, FIRST)
    kinds = {
        every.sample(index, epoch).view.spare >= REDUCED: type(few.sample(index, epoch))
        for epoch in range(40)
    }
    assert kinds == {True: np.ndarray, False: Jpeg}


def test_a_region_has_pillows_pixels_bit_for_bit(images: ImageFolder) -> None:
    """The square of a view that is not resized."""
    for name, *_ in PLAIN[:-1]:
        jpeg = EncodedImages(images, random_view, OPTIONS).sample(number(images, name), 0)
        assert isinstance(jpeg, Jpeg)
        with Image.open(images.files.name(jpeg.index)) as image:
            size = min(image.size) - 3
            view = View(3, 2, size, size, (size, size), size)
            decoder = JpegDecoder(size)
            decoder.start([replace(jpeg, view=view)])
            box = (3, 2, 3 + size, 2 + size)
            assert np.array_equal(decoder.finish()[0], np.asarray(image.crop(box))), name
