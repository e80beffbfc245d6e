"""Images decoded by the JPEG engine of a GPU: near Pillow's, whatever the batch and the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import DEVICE, needs_cuda

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
pytest.importorskip("nvidia.dali")

from hvdtrain.workloads.data import image_folder  # noqa: E402
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


def pixels(data: Any, epoch: int | None, size: int) -> Any:
    """The pixels of the samples, read in batches; in order, on the CPU."""
    parts = [list(range(at, min(at + size, NUMBER))) for at in range(0, NUMBER, size)]
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
    assert difference.mean() < 1 and difference.mean((1, 2, 3)).max() < 3
