"""Boxes of SSD300: default boxes, training targets, loss, and detections.

Source: Liu et al., "SSD: Single Shot MultiBox Detector" (2016), sections 2.2 and 3; for COCO its
section 3.4. torchvision's box operators are compiled for CUDA and do not load with a CPU build of
PyTorch, so they are implemented here, for every device.
"""

from __future__ import annotations

import itertools
import math

import torch

SIDE = 300  # of the input, in pixels
GRIDS = (38, 19, 10, 5, 3, 1)  # cells along a side of each feature map
STEPS = (8, 16, 32, 64, 100, 300)  # pixels from cell to cell
SIZES = (21, 45, 99, 153, 207, 261, 315)  # of the square box of each map, and of a next one; pixels
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))  # width to height, and height to width
VARIANCES = (0.1, 0.2)  # divisors of centres and of the logarithms of sides
MATCHED = 0.5  # IoU threshold for matching a default box to a true box
NEGATIVES = 3  # background boxes per matched box

SCORE = 0.01  # score threshold of detections
OVERLAP = 0.45  # IoU threshold for suppressing detections of the same class
CANDIDATES = 200  # best boxes considered per class and image
DETECTIONS = 100  # maximum number per image


def default_boxes() -> torch.Tensor:
    """Return the default boxes as fractions of the image, float64, shape (8732, 4).

    They are centre x, centre y, width and height, by map, row, column and shape, clipped to the
    image.
    """
    boxes = []
    for level, (cells, step) in enumerate(zip(GRIDS, STEPS, strict=True)):
        size, larger = SIZES[level] / SIDE, math.sqrt(SIZES[level] * SIZES[level + 1]) / SIDE
        shapes = [(size, size), (larger, larger)]
        for ratio in map(math.sqrt, RATIOS[level]):
            shapes += [(size * ratio, size / ratio), (size / ratio, size * ratio)]
        for row, column in itertools.product(range(cells), repeat=2):
            centre = (column + 0.5) * step / SIDE, (row + 0.5) * step / SIDE
            boxes += [(*centre, *shape) for shape in shapes]
    return torch.tensor(boxes, dtype=torch.float64).clamp(0, 1)


def corners(boxes: torch.Tensor) -> torch.Tensor:
    """Return left, top, right, bottom for centre x, centre y, width, height; shape (..., 4)."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of all pairs; shapes (..., a, 4), (..., b, 4), (..., a, b)."""
    low = torch.maximum(first[..., :, None, :2], second[..., None, :, :2])
    high = torch.minimum(first[..., :, None, 2:], second[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    return shared / (areas[0][..., :, None] + areas[1][..., None, :] - shared).clamp(min=1e-12)


def offsets(boxes: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the encoded offsets of ``boxes`` (corners) from ``defaults`` (centres)."""
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    moved = (centres - defaults[..., :2]) / defaults[..., 2:] / VARIANCES[0]
    # Padding has no area; its offsets are not used, but must be finite.
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1e-12)
    return torch.cat([moved, (sides / defaults[..., 2:]).log() / VARIANCES[1]], -1)


def decode(predicted: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the corners of the boxes at the offsets ``predicted`` from ``defaults``."""
    centres = defaults[..., :2] + predicted[..., :2] * VARIANCES[0] * defaults[..., 2:]
    sides = defaults[..., 2:] * (predicted[..., 2:] * VARIANCES[1]).exp()
    return corners(torch.cat([centres, sides], -1))


def match(
    boxes: torch.Tensor, labels: torch.Tensor, defaults: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Match each default box to the true box that it overlaps, or for which it is the best.

    No element is read, so there is no synchronization with a GPU.

    Args:
        boxes: true boxes of an image, corners, shape (k, 4); k >= 1.
        labels: their classes, from 1, shape (k,); 0: padding.
        defaults: default boxes, corners, shape (d, 4).

    Returns:
        The class of each default box, 0 for background, shape (d,); and the index of its true box.
    """
    overlap = torch.where(labels[:, None] > 0, iou(boxes, defaults), -1.0)
    # Each true box is matched to the default box that overlaps it most.
    best = torch.nn.functional.one_hot(overlap.argmax(1), len(defaults)) * (labels[:, None] > 0)
    overlap, index = (overlap + 2 * best).max(0)
    return torch.where(overlap >= MATCHED, labels[index], 0), index


class MultiboxLoss:
    """The loss of each image: localization and classification.

    Both are sums over its matched default boxes, and the classification also over the worst
    background boxes, three per matched one, divided by the number of matched ones; 0 if there are
    none. ``defaults`` are the ``default_boxes``.
    """

    def __init__(self, defaults: torch.Tensor) -> None:
        self.defaults = defaults

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the losses, shape (n,).

        Args:
            output: offsets and the scores of background and each class, shape (n, d, 4 + classes).
            y: corners as fractions, class from 1, and unused columns of each true box, shape
                (n, k, 5 or more); padded by boxes of class 0.
        """
        self.defaults = self.defaults.to(output.device)  # once: the copy synchronizes
        defaults = self.defaults.to(output.dtype)
        edges = corners(defaults)
        targets = [match(boxes[:, :4].to(output), boxes[:, 4].long(), edges) for boxes in y]
        if not targets:
            return output.sum((1, 2))
        labels = torch.stack([label for label, _ in targets])
        true = torch.stack(
            [boxes[index, :4].to(output) for boxes, (_, index) in zip(y, targets, strict=True)]
        )
        matched = labels > 0
        count = matched.sum(1)
        wrong = torch.nn.functional.smooth_l1_loss(
            output[..., :4], offsets(true, defaults), reduction="none"
        ).sum(-1)
        confused = torch.nn.functional.cross_entropy(
            output[..., 4:].transpose(1, 2), labels, reduction="none"
        )
        # Rank of each default box among the background by loss; equal ones by order, so that the
        # choice is deterministic.
        worth = confused.detach().masked_fill(matched, -1)
        rank = worth.argsort(stable=True, dim=1, descending=True).argsort(1)
        counted = matched | (rank < NEGATIVES * count[:, None]) & ~matched
        total = (wrong * matched).sum(1) + (confused * counted).sum(1)
        return total / count.clamp(min=1)


def detect(
    output: torch.Tensor, defaults: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the detections of an image: their corners, classes and scores, the best first.

    Corners are within the image, as fractions, shape (n, 4); classes are from 1, shape (n,); n is
    at most 100. The shape of ``output`` is (d, 4 + classes), see ``MultiboxLoss``.
    """
    boxes = decode(output[:, :4], defaults.to(output)).clamp(0, 1)
    scores = output[:, 4:].softmax(-1)[:, 1:].T  # classes, default boxes
    scores, index = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1)
    candidates = boxes[index]  # classes, candidates, 4
    kept = suppress(candidates, scores > SCORE)
    labels = torch.arange(1, len(scores) + 1, device=output.device)[:, None].expand_as(scores)
    scores, labels, candidates = scores[kept], labels[kept], candidates[kept]
    first = scores.argsort(stable=True, descending=True)[:DETECTIONS]
    return candidates[first], labels[first], scores[first]


def suppress(boxes: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return which ``valid`` boxes remain after non-maximum suppression, shape (classes, n).

    The ``boxes`` are corners, of each class by decreasing score, shape (classes, n, 4).
    """
    overlaps = iou(boxes, boxes) > OVERLAP
    kept = valid.clone()
    for index in range(int(valid.sum(1).max()) if valid.numel() else 0):
        kept[:, index + 1 :] &= ~(overlaps[:, index, index + 1 :] & kept[:, index, None])
    return kept
