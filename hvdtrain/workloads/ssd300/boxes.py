"""Boxes of SSD300: those that it starts from, what is trained on each, and what is read off them.

Source: Liu et al., "SSD: Single Shot MultiBox Detector" (2016), sections 2.2 and 3; for COCO its
section 3.4. torchvision's box operators are compiled for CUDA and do not load beside a CPU build of
PyTorch, so these are ours, on every device.
"""

from __future__ import annotations

import itertools
import math

import torch

SIDE = 300  # of the input, in pixels
GRIDS = (38, 19, 10, 5, 3, 1)  # cells along a side of each feature map
STEPS = (8, 16, 32, 64, 100, 300)  # pixels from cell to cell
SIZES = (21, 45, 99, 153, 207, 261, 315)  # of the square box of each map, in pixels; and the next
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))  # width to height, and the other way round
VARIANCES = (0.1, 0.2)  # by which centres and the logarithms of sides are divided
MATCHED = 0.5  # the IoU from which on a default box is trained on a true one
NEGATIVES = 3  # for each of them

SCORE = 0.01  # below it nothing is detected
OVERLAP = 0.45  # the IoU from which on two detections of a class are one
CANDIDATES = 200  # best ones of a class and image that are looked at
DETECTIONS = 100  # of an image


def default_boxes() -> torch.Tensor:
    """Return the 8,732 default boxes as fractions of the image, float64.

    Returns:
        Centre x, centre y, width and height, shape (8732, 4), by map, row, column and shape; none
        reaches out of the image.
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


def iou(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of all pairs; shapes (..., a, 4), (..., b, 4), (..., a, b)."""
    low = torch.maximum(one[..., :, None, :2], other[..., None, :, :2])
    high = torch.minimum(one[..., :, None, 2:], other[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(some[..., 2:] - some[..., :2]).prod(-1) for some in (one, other)]
    return shared / (areas[0][..., :, None] + areas[1][..., None, :] - shared).clamp(min=1e-12)


def offsets(boxes: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the offsets of ``boxes`` (corners) from ``defaults`` (centres), as they are learnt."""
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    moved = (centres - defaults[..., :2]) / defaults[..., 2:] / VARIANCES[0]
    # Padding has no area; what is made of it is not used, but must be finite.
    sides = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1e-12)
    return torch.cat([moved, (sides / defaults[..., 2:]).log() / VARIANCES[1]], -1)


def decode(found: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the corners of the boxes that lie at the offsets ``found`` from ``defaults``."""
    centres = defaults[..., :2] + found[..., :2] * VARIANCES[0] * defaults[..., 2:]
    sides = defaults[..., 2:] * (found[..., 2:] * VARIANCES[1]).exp()
    return corners(torch.cat([centres, sides], -1))


def match(
    boxes: torch.Tensor, labels: torch.Tensor, defaults: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell on which true box each default box is trained: one that it overlaps, or that needs it.

    No element is asked for, so that a GPU is not waited for.

    Args:
        boxes: the true ones of an image, corners, shape (k, 4); k >= 1.
        labels: their classes, from 1, shape (k,); 0 is padding.
        defaults: corners, shape (d, 4).

    Returns:
        The class of each default box, 0 for background, shape (d,); and the place of its true box.
    """
    overlap = torch.where(labels[:, None] > 0, iou(boxes, defaults), -1.0)
    # Each true box has the default box that overlaps it most, whatever that overlaps itself.
    best = torch.nn.functional.one_hot(overlap.argmax(1), len(defaults)) * (labels[:, None] > 0)
    overlap, place = (overlap + 2 * best).max(0)
    return torch.where(overlap >= MATCHED, labels[place], 0), place


class MultiboxLoss:
    """The loss of each image: of where its boxes are, and of what they show.

    Both are sums over its matched default boxes, of background over the worst ones, three for each
    matched one, divided by the number of matched ones; 0 where there are none.

    Args:
        defaults: as ``default_boxes``.
    """

    def __init__(self, defaults: torch.Tensor) -> None:
        self.defaults = defaults

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the losses, shape (n,).

        Args:
            output: offsets and the scores of background and each class, shape (n, d, 4 + classes).
            y: of each true box its corners, as fractions, its class from 1, and more that is not
                looked at, shape (n, k, 5 or more); padded by boxes of class 0.
        """
        self.defaults = self.defaults.to(output.device)  # once: the host waits for this copy
        defaults = self.defaults.to(output.dtype)
        edges = corners(defaults)
        targets = [match(boxes[:, :4].to(output), boxes[:, 4].long(), edges) for boxes in y]
        if not targets:
            return output.sum((1, 2))
        labels = torch.stack([label for label, _ in targets])
        true = torch.stack(
            [boxes[place, :4].to(output) for boxes, (_, place) in zip(y, targets, strict=True)]
        )
        matched = labels > 0
        count = matched.sum(1)
        wrong = torch.nn.functional.smooth_l1_loss(
            output[..., :4], offsets(true, defaults), reduction="none"
        ).sum(-1)
        confused = torch.nn.functional.cross_entropy(
            output[..., 4:].transpose(1, 2), labels, reduction="none"
        )
        # The place of each default box among the background by how wrong it is; equal ones by their
        # order, so that all ranks choose alike.
        worth = confused.detach().masked_fill(matched, -1)
        rank = worth.argsort(stable=True, dim=1, descending=True).argsort(1)
        counted = matched | (rank < NEGATIVES * count[:, None]) & ~matched
        total = (wrong * matched).sum(1) + (confused * counted).sum(1)
        return total / count.clamp(min=1)


def detect(
    output: torch.Tensor, defaults: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read the detections of an image off the output for it.

    Args:
        output: shape (d, 4 + classes), as ``MultiboxLoss`` takes it.
        defaults: as ``default_boxes``.

    Returns:
        Corners within the image, as fractions, shape (n, 4); classes from 1 and scores, shape
        (n,), the best first; n is 100 at most.
    """
    boxes = decode(output[:, :4], defaults.to(output)).clamp(0, 1)
    scores = output[:, 4:].softmax(-1)[:, 1:].T  # classes, default boxes
    scores, place = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1)
    candidates = boxes[place]  # classes, candidates, 4
    kept = suppress(candidates, scores > SCORE)
    labels = torch.arange(1, len(scores) + 1, device=output.device)[:, None].expand_as(scores)
    scores, labels, candidates = scores[kept], labels[kept], candidates[kept]
    first = scores.argsort(stable=True, descending=True)[:DETECTIONS]
    return candidates[first], labels[first], scores[first]


def suppress(boxes: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Tell which boxes stay where each suppresses all later ones that it overlaps too much.

    Args:
        boxes: corners, of each class by falling score, shape (classes, n, 4).
        valid: those that are looked at, shape (classes, n).

    Returns:
        Whether each stays, shape (classes, n).
    """
    overlaps = iou(boxes, boxes) > OVERLAP
    kept = valid.clone()
    for place in range(int(valid.sum(1).max()) if valid.numel() else 0):
        kept[:, place + 1 :] &= ~(overlaps[:, place, place + 1 :] & kept[:, place, None])
    return kept
