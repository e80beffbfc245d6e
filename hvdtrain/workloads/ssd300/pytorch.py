"""SSD300 for PyTorch: a ResNet up to conv4, five more feature maps, and a head on each.

Sources: Liu et al. (2016), see ``boxes.py``; He et al., "Deep Residual Learning for Image
Recognition" (2016), for the backbone, whose conv4 keeps its stride at 1, so that it sees 38 x 38.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.tasks.training_step_pytorch import TorchTask
from hvdtrain.workloads.data.coco import Coco
from hvdtrain.workloads.data.torch_images import ReadAhead
from hvdtrain.workloads.resnet.pytorch import normalization, torchvision
from hvdtrain.workloads.ssd300.boxes import RATIOS, MultiboxLoss, default_boxes
from hvdtrain.workloads.ssd300.data import BoxReader, Drawn
from hvdtrain.workloads.ssd300.metric import MeanAveragePrecision, columns, pycocotools
from hvdtrain.workloads.ssd300.task import DetectorOptions

LAYERS = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")  # of torchvision's
WITHIN = (256, 256, 128, 128, 128)  # channels between the feature maps
SMALL = {"resnet18": (256, 512, 512, 256, 256, 128), "resnet34": (256, 512, 512, 256, 256, 256)}
LARGE = (1024, 512, 512, 256, 256, 256)  # channels of the feature maps


class SSD300(nn.Module):
    """The network, for images of shape (n, 3, 300, 300), by the ResNet ``model``.

    Background is a class in addition to ``classes``.
    """

    def __init__(self, model: str, classes: int) -> None:
        super().__init__()
        whole = torchvision().models.get_model(model, weights=None)
        first = whole.layer3[0]
        for convolution in (first.conv1, first.conv2, first.downsample[0]):
            convolution.stride = (1, 1)
        self.backbone = nn.Sequential(OrderedDict((name, getattr(whole, name)) for name in LAYERS))
        channels, self.outputs = SMALL.get(model, LARGE), 4 + 1 + classes
        self.extras = nn.ModuleList(
            _extra(before, within, after, halves=level < 3)
            for level, ((before, after), within) in enumerate(
                zip(itertools.pairwise(channels), WITHIN, strict=True)
            )
        )
        # For each default box of a cell, one after the other, its offsets and its scores.
        self.heads = nn.ModuleList(
            nn.Conv2d(number, (2 + 2 * len(ratios)) * self.outputs, 3, padding=1)
            for number, ratios in zip(channels, RATIOS, strict=True)
        )
        for module in itertools.chain(self.extras.modules(), self.heads.modules()):
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return offsets and scores of all default boxes, shape (n, 8732, 4 + 1 + classes)."""
        maps = [self.backbone(images)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        # By row, column and shape, as the default boxes; also for an empty batch.
        outputs = [
            head(feature_map)
            .permute(0, 2, 3, 1)
            .reshape(len(images), -1 if len(images) else 0, self.outputs)
            for head, feature_map in zip(self.heads, maps, strict=True)
        ]
        return torch.cat(outputs, 1)


def _extra(before: int, within: int, after: int, *, halves: bool) -> nn.Sequential:
    """Return the layers between two feature maps: half as many cells per side, or two fewer."""
    stride, padding = (2, 1) if halves else (1, 0)
    return nn.Sequential(
        nn.Conv2d(before, within, 1, bias=False),
        nn.BatchNorm2d(within),
        nn.ReLU(inplace=True),
        nn.Conv2d(within, after, 3, stride, padding, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


def load_backbone(model: SSD300, path: Path) -> None:
    """Load the weights of a ResNet, as safetensors or as a state dictionary of ``torch.save``.

    Names are torchvision's, as in a checkpoint of ``hvdtrain.resnet``. Weights that the detector
    does not use, conv5 and the classifier, are ignored.

    Raises:
        UsageError: the file cannot be read, lacks a weight, or has one of another shape; this torch
            may execute code in it.
    """
    option = f"--backbone-path {path}"
    if path.suffix != ".safetensors" and Version(torch.__version__) < Version("2.10"):
        raise UsageError(
            f"{option}: torch {torch.__version__} may execute code in a state dictionary "
            "(CVE-2025-32434, CVE-2026-24747): use a safetensors file, or torch 2.10 or newer"
        )
    try:
        if path.suffix == ".safetensors":
            weights: Any = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        weights_by_name = dict(weights)
    except Exception as error:  # of many kinds, for other formats
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{option} cannot be read ({reason}): use a safetensors file, or a state dictionary"
        ) from error
    wanted = model.backbone.state_dict()
    for name, value in wanted.items():
        loaded = weights_by_name.setdefault(
            name, value if name.endswith("num_batches_tracked") else None
        )
        if getattr(loaded, "shape", None) != value.shape:
            raise UsageError(f"{option}: its {name} does not match this network; see --model")
    model.backbone.load_state_dict({name: weights_by_name[name] for name in wanted})


def task(options: DetectorOptions, train: Coco, test: Coco | None) -> TorchTask:
    """Return the detector as a task."""
    if test:
        pycocotools()  # raises now, not after an epoch, if it is missing
    torch.manual_seed(options.seed)
    model = SSD300(options.model, len(train.categories))
    if options.backbone_path:
        load_backbone(model, options.backbone_path)
    reader = BoxReader if options.data else Drawn
    evaluated = test or train
    for_test = reader(evaluated, options.seed)
    return TorchTask(
        model,
        options,
        ReadAhead(reader(train, options.seed), options),
        ReadAhead(for_test, options) if test else None,
        scale=normalization(),
        losses=MultiboxLoss(default_boxes()),
        metrics=(MeanAveragePrecision(evaluated, options.pictures, for_test),),
        columns=columns(evaluated),
        channels_last=True,
    )
