"""A checkpoint saved by one rank alone."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.steps.checkpoint import begin, commit, prune, write_files
from hvdtrain.steps.checkpoint_files import Checkpoint


def save(directory: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``checkpoint`` under ``directory``, as ``Adapter.save_checkpoint`` does; return it."""
    partial = begin(directory, int(checkpoint.state["step"]))
    saved = commit(partial, write_files(partial, checkpoint), checkpoint.state)
    prune(directory, keep, saved.name)
    return saved
