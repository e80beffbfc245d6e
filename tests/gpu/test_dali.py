"""Images decoded by the JPEG engine of a GPU: near Pillow's, whatever the batch and the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import error_of
from tests.gpu.conftest import DEVICE, needs_cuda

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
pytest.importorskip("nvidia.dali")

from PIL import Image  # noqa: E402

from hvdtrain.workloads.data import dali_decoder, image_folder  # noqa: E402
from hvdtrain.workloads.data.dali_decoder import choose_decoder, gpu_number  # noqa: E402
from hvdtrain.workloads.data.dali_images import GpuFolder  # noqa: E402
from hvdtrain.workloads.data.image_folder import ImageOptions  # noqa: E402
from hvdtrain.workloads.data.torch_images import Folder  # noqa: E402
from hvdtrain.workloads.resnet.pytorch import (  # noqa: E402
    centre_crop,
    centre_view,
    random_crop,
    random_view,
)

NUMBER = 96  # of images


def options(workers: int = 0) -> ImageOptions:
    return ImageOptions(image_size=160, workers=workers, device=DEVICE)


def pixels(data: Any, epoch: int | None, size: int, number: int = NUMBER) -> Any:
    """The pixels of the first samples, read in batches; in order, on the CPU."""
    parts = [list(range(at, min(at + size, number))) for at in range(0, number, size)]
    read = [batch.x.cpu() for batch in data._read([(part, epoch) for part in parts])]
    data.close()
    return torch.cat(read)


@needs_cuda
def test_it_is_chosen_by_itself() -> None:
    assert choose_decoder(ImageOptions(device=DEVICE)) == "dali"
    assert gpu_number(ImageOptions(device=DEVICE)) == torch.cuda.current_device()


@pytest.mark.parametrize("epoch", [0, None])
def test_pixels_are_near_pillows_and_do_not_depend_on_the_batch(
    epoch: int | None, imagenette: Path
) -> None:
    images = image_folder.load(imagenette)[0]
    view, crop = (random_view, random_crop) if epoch == 0 else (centre_view, centre_crop)
    whole = pixels(GpuFolder(images, view, options()), epoch, NUMBER)
    for workers, size in ((0, 7), (2, 16), (0, 1)):
        parts = pixels(GpuFolder(images, view, options(workers)), epoch, size)
        assert torch.equal(parts, whole), (workers, size)
    by_pillow = pixels(Folder(images, crop, options()), epoch, NUMBER)
    difference = (whole.int() - by_pillow.int()).abs().double()
    print(f"mean {difference.mean():.3f}, worst image {difference.mean((1, 2, 3)).max():.3f}")
    assert difference.mean() < 1 and difference.mean((1, 2, 3)).max() < 3


def test_large_batches_are_decoded_in_parts(
    imagenette: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = image_folder.load(imagenette)[0]
    whole = pixels(GpuFolder(images, centre_view, options()), None, 32)
    for limit in ("MAX_ON_CPU", "MAX_ON_GPU"):
        monkeypatch.setattr(dali_decoder, limit, 200_000)
    assert torch.equal(pixels(GpuFolder(images, centre_view, options()), None, 32), whole)


def test_other_images_are_decoded_by_pillow(imagenette: Path, tmp_path: Path) -> None:
    """Images that are not plain, with headers that DALI may not read, and broken, among others."""
    files = image_folder.load(imagenette)[0].files
    folder = tmp_path / "train/c"
    folder.mkdir(parents=True)
    with Image.open(files.name(0)) as image:
        plain = image.convert("RGB").resize((300, 200))
    for name, kind, more in (
        ("0", plain, {}),
        ("1", plain.convert("L"), {}),
        ("2", plain.convert("CMYK"), {}),
        ("3", plain, {"progressive": True}),
        ("5", plain, {"subsampling": "4:4:4"}),
    ):
        kind.save(folder / f"{name}.jpg", **more)
    whole = (folder / "0.jpg").read_bytes()
    (folder / "4.jpg").write_bytes(whole[:20] + bytes(9) + whole[20:])
    images = image_folder.load(tmp_path)[0]
    together = pixels(GpuFolder(images, centre_view, options()), None, 6, 6)
    single = pixels(GpuFolder(images, centre_view, options()), None, 1, 6)
    by_pillow = pixels(Folder(images, centre_crop, options()), None, 6, 6)
    assert torch.equal(together, single)
    assert torch.equal(together[1:4], by_pillow[1:4])
    assert (together.int() - by_pillow.int()).abs().double().mean() < 1
    (folder / "5.jpg").write_bytes(whole[: len(whole) // 2])
    message = error_of(pixels, GpuFolder(images, centre_view, options()), None, 6, 6)
    assert message.startswith(f"{folder}/5.jpg cannot be decoded (")
