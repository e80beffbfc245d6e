"""Images: what a crop decodes, and what it takes for it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

from PIL import Image  # noqa: E402
from sklearn.datasets import load_sample_image  # noqa: E402

from hvdtrain.errors import TrainingError, UsageError  # noqa: E402
from hvdtrain.tasks.training_step_pytorch import network_input  # noqa: E402
from hvdtrain.workloads.data import dali_decoder  # noqa: E402
from hvdtrain.workloads.data.dali_decoder import JpegDecoder, choose_decoder  # noqa: E402
from hvdtrain.workloads.data.dali_images import plain_jpeg  # noqa: E402
from hvdtrain.workloads.data.image_folder import ImageOptions, rgb, worker_errors  # noqa: E402
from hvdtrain.workloads.data.torch_images import _ahead, decoded  # noqa: E402
from hvdtrain.workloads.resnet.pytorch import (  # noqa: E402
    centre_crop,
    centre_view,
    random_crop,
    torchvision,
)
from tests.conftest import error_of  # noqa: E402


@pytest.fixture(scope="module", params=["china.jpg", "flower.jpg"])
def photograph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph of 640 x 427 pixels, which scikit-learn brings along."""
    path = tmp_path_factory.mktemp("photographs") / request.param
    Image.fromarray(load_sample_image(request.param)).save(path, quality=95)
    return path


def torchvisions(path: Path, size: int) -> np.ndarray:
    """The same by torchvision's own transforms: all of the image is decoded."""
    transforms = torchvision().transforms
    image = Image.open(path).convert("RGB")
    where = transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
    crop = transforms.functional.resized_crop(image, *where, [size, size])
    flip = bool(torch.rand(()) < 0.5)
    return np.asarray(transforms.functional.hflip(crop) if flip else crop)


@pytest.mark.parametrize(
    ("size", "mean", "reduced"), [(320, 1.0, False), (96, 5.0, True), (32, 9.0, True)]
)
def test_a_crop_is_that_of_torchvision(
    photograph: Path, size: int, mean: float, reduced: bool
) -> None:
    differences, smaller = [], []
    for seed in range(40):
        torch.manual_seed(seed)
        expected = torchvisions(photograph, size)
        torch.manual_seed(seed)
        with Image.open(photograph) as image:
            got = np.asarray(random_crop(image, size))
            smaller.append(image.size != (640, 427))
        assert got.shape == (size, size, 3)
        differences.append(np.abs(got.astype(int) - expected).mean())
    assert max(differences) < mean, differences
    assert any(smaller) is reduced


@pytest.mark.parametrize("shape", [(64, 4), (4, 64), (101, 5), (5, 102), (640, 427)])
def test_the_centre_crop_is_that_of_torchvision(shape: tuple[int, int]) -> None:
    """Also of an image so long that only its middle is resized."""
    width, height = shape
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    transforms = torchvision().transforms
    expected = transforms.CenterCrop(224)(transforms.Resize(256)(image))
    assert np.abs(np.asarray(centre_crop(image, 224)) - np.int16(expected)).max() <= 1


def test_a_long_image_takes_little_memory() -> None:
    """Resized as a whole, it would have 2,560,000 x 256 pixels."""
    view = centre_view(Image.new("RGB", (20_000, 2)), 224)
    assert view.resized == (4096, 256)
    assert (view.left, view.width) == (9984, 32)


@pytest.mark.parametrize("axis", [0, 1])
def test_of_a_long_image_tensorflow_resizes_the_middle(axis: int) -> None:
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.workloads.resnet import tensorflow

    pixels = np.random.default_rng(0).integers(0, 256, (2, 20_000, 3), dtype=np.uint8)
    crops = []
    for part in (pixels, pixels[:, 9984:10016]):
        encoded = tf.io.encode_png(part.swapaxes(0, axis))
        crops.append(tensorflow.centre_crop(encoded, None, 224).numpy())
    assert np.array_equal(*crops)


@pytest.mark.parametrize(
    ("spare", "factor"), [(0.3, 1), (1.9, 1), (2.0, 2), (3.99, 2), (5.0, 4), (8.0, 8), (100.0, 8)]
)
def test_a_jpeg_is_decoded_smaller(photograph: Path, spare: float, factor: int) -> None:
    with Image.open(photograph) as whole:
        file = io.BytesIO()
        whole.resize((640, 480)).save(file, "JPEG")  # sides that are multiples of 8
    _, smaller = decoded(Image.open(file), spare)
    assert smaller == factor
    with Image.open(photograph) as opened:
        image, smaller = decoded(opened, spare)
    assert smaller == factor
    assert image.size == (-(-640 // factor), -(-427 // factor))
    # Each of its pixels is about the mean of those that it stands for.
    with Image.open(photograph) as whole:
        means = whole.reduce(factor)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(means)).mean() < 4


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGB"), ("PNG", "P"), ("JPEG", "CMYK"), ("JPEG", "L")]
)
def test_all_modes_become_rgb(form: str, mode: str, photograph: Path) -> None:
    file = io.BytesIO()
    with Image.open(photograph) as image:
        image.convert(mode).save(file, form)
    image, smaller = decoded(Image.open(file), 4.0)
    assert (image.mode, smaller) == ("RGB", 4 if form == "JPEG" else 1)
    red, green, blue = image.split()
    assert mode != "L" or red.tobytes() == green.tobytes() == blue.tobytes()


def test_grey_of_16_bits_is_scaled(tmp_path: Path) -> None:
    ramp = np.arange(2**16, dtype=np.uint16)[::16].reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    with Image.open(tmp_path / "ramp.png") as image:
        pixels = np.asarray(decoded(image)[0])
    # As tf.io.decode_image does.
    assert np.array_equal(pixels, np.repeat((ramp >> 8)[:, :, None], 3, axis=2))
    for mode in ("I", "I;16", "I;16B"):  # in which versions of Pillow open it
        image = Image.new(mode, (1, 1), 0x1234)
        assert rgb(image).getpixel((0, 0)) == (0x12,) * 3


def test_a_truncated_one_is_named(photograph: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.jpg"
    path.write_bytes(photograph.read_bytes()[:20_000])
    for spare in (1.0, 4.0):
        with Image.open(path) as image, pytest.raises(UsageError, match=r"half\.jpg cannot be"):
            decoded(image, spare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_become_the_input_of_the_network(dtype: torch.dtype) -> None:
    pixels = torch.arange(2 * 5 * 7 * 3).reshape(2, 5, 7, 3).to(torch.uint8).permute(0, 3, 1, 2)
    factor, offset = (
        torch.tensor(values, dtype=dtype).view(3, 1, 1)
        for values in ((0.5, 0.25, 0.1), (-1.0, 3.0, 0.3))
    )
    for stored in (pixels, pixels.contiguous(), pixels.to(dtype)):
        before = stored.clone()
        x = network_input(stored, dtype, (factor, offset), torch.channels_last)
        assert x.dtype == dtype and x.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(x, before.to(dtype) * factor + offset, rtol=0, atol=1e-5)
        if dtype == torch.float64:
            assert torch.allclose(x, before.to(dtype) * factor + offset, rtol=1e-15, atol=1e-14)
        assert torch.equal(stored, before)  # a dataset in memory is not written to
    empty = network_input(pixels[:0], dtype, (factor, offset), torch.preserve_format)
    assert empty.shape == (0, 3, 5, 7)


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (8, 2), (9, 1), (40, 1)])
def test_batches_ahead_are_bounded(workers: int, ahead: int) -> None:
    assert _ahead(workers) == ahead
    assert _ahead(0) is None


class Dying:
    """Samples whose reader is killed."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_worker_is_one_line_with_the_remedy() -> None:
    loader = torch.utils.data.DataLoader(
        Dying(), num_workers=1, multiprocessing_context="forkserver"
    )
    one_line = pytest.raises(TrainingError, match=r"has ended \(.*\): .*use fewer --workers")
    with one_line, worker_errors():
        next(iter(loader))
    # PyTorch asks whether its workers live, which may not be known yet.
    with one_line, worker_errors():
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def test_the_choice_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # it cannot be imported
    for decoder in ("auto", "pillow"):
        assert choose_decoder(ImageOptions(decoder=decoder)) == "pillow"
    message = error_of(choose_decoder, ImageOptions(decoder="dali"))
    assert message.startswith("--decoder dali: DALI does not work here (")
    assert "pip install 'hvdtrain[dali]', or use --decoder pillow" in message
    monkeypatch.setattr(dali_decoder, "gpu_number", lambda options: 0)
    monkeypatch.setattr(dali_decoder, "is_installed", lambda name: False)
    assert choose_decoder(ImageOptions()) == "pillow"
    assert not caplog.messages
    monkeypatch.setattr(dali_decoder, "is_installed", lambda name: True)
    assert choose_decoder(ImageOptions()) == "pillow"
    [note] = caplog.messages
    assert note.startswith("DALI does not work here (") and note.endswith("decoded by pillow")
    monkeypatch.setattr(JpegDecoder, "try_out", lambda self: None)
    assert choose_decoder(ImageOptions()) == "dali"
    assert choose_decoder(ImageOptions(decoder="pillow")) == "pillow"


def test_a_jpeg_is_plain_by_its_markers(photograph: Path) -> None:
    whole = photograph.read_bytes()
    for data, plain in (
        (whole, True),
        (whole[:-2], False),
        (whole[:20_000] + whole[-2:], True),  # as far as can be seen, and Pillow decodes it
        (whole + b"more", False),
        (whole[:-500] + b"\xff\xda" + whole[-498:], False),
        (whole[:-500] + b"\xff\xd3" + whole[-498:], True),
    ):
        with Image.open(io.BytesIO(data)) as image:
            bytes_ = plain_jpeg(image)
            assert (bytes_ is not None) is plain
            assert bytes_ is None or bytes_.tobytes() == data
