"""The training step of both frameworks on mixtures and erased parts, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

NUMBER, SIDES = 5, (6, 4)


def cases() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images of shape (n, height, width) and their boxes in pixels."""
    images = np.random.default_rng(3).normal(size=(NUMBER, *SIDES))
    boxes = np.array([[0, 6, 0, 4], [0, 0, 0, 0], [1, 3, 2, 4], [5, 6, 0, 1], [2, 2, 1, 3]])
    return images, boxes


def expected() -> np.ndarray[Any, Any]:
    """Return the erased images."""
    images, boxes = cases()
    for image, (top, bottom, left, right) in zip(images, boxes, strict=True):
        image[top:bottom, left:right] = 0
    return images


def test_pytorch_erases_the_boxes() -> None:
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.training_step_pytorch import erase

    images, boxes = cases()
    x = torch.from_numpy(np.stack([images, images], 1))
    erase(x, torch.from_numpy(boxes))
    np.testing.assert_array_equal(x.numpy(), np.stack([expected(), expected()], 1))


def test_tensorflow_erases_the_boxes() -> None:
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.tasks.training_step_tensorflow import erase

    images, boxes = cases()
    x = erase(tf.constant(np.stack([images, images], 3)), tf.constant(boxes))
    np.testing.assert_array_equal(x.numpy(), np.stack([expected(), expected()], 3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_smoothed_cross_entropy(framework: str, smoothing: float) -> None:
    """The labels q = (1 - s) onehot + s / classes: the loss is -sum q log p."""
    random = np.random.default_rng(4)
    logits, classes = random.normal(size=(7, 3)), random.integers(3, size=7)
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = (1 - smoothing) * np.eye(3)[classes] + smoothing / 3
    right = -(labels * log).sum(1)
    losses: Any
    if framework == "pytorch":
        torch = pytest.importorskip("torch")
        from hvdtrain.tasks.training_step_pytorch import cross_entropy

        losses = cross_entropy(torch.from_numpy(logits), torch.from_numpy(classes), smoothing)
    else:
        tf = pytest.importorskip("tensorflow")
        from hvdtrain.tasks.training_step_tensorflow import cross_entropy as in_tensorflow

        losses = in_tensorflow(tf.constant(logits), tf.constant(classes), smoothing)
    np.testing.assert_allclose(losses.numpy(), right, rtol=1e-12)
