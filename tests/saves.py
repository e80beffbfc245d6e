"""A checkpoint saved by one rank alone."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np

from hvdtrain.errors import CheckpointError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Checkpoint, Piece, Written
from hvdtrain.steps.tensor_file import ArraySpec


def save(directory: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``checkpoint`` under ``directory``, as ``Adapter.save_checkpoint`` does; return it."""
    partial = checkpoints.begin(directory, int(checkpoint.state["step"]))
    try:
        files = write(partial, checkpoint)
    except CheckpointError:
        checkpoints.remove_partial(directory)
        raise
    saved = checkpoints.commit(partial, files, checkpoint.state)
    checkpoints.prune(directory, keep, saved.name)
    return saved


def write(partial: Path, checkpoint: Checkpoint) -> list[Written]:
    """Write the tensors of ``checkpoint``, also what is not finite, to a file of each kind."""
    kinds = {MODEL_FILE: checkpoint.model, TRAINING_FILE: checkpoint.training}
    pieces = []
    for kind, tensors in kinds.items():
        for name, value in tensors.items():
            array = np.asarray(value)
            pieces.append(Piece(kind, name, ArraySpec.of(array), lambda array=array: array))  # type: ignore[misc]
    pieces.sort(key=lambda piece: piece.order)
    step = int(checkpoint.state["step"])
    writer = checkpoints.Writer(partial, step, {kind: kind for kind in kinds}, pieces)
    with patch.object(checkpoints, "not_finite", return_value=None):
        for piece in pieces:
            writer.write(piece, piece.fetch())
    return writer.close()
