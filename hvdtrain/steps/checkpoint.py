"""Step 7, checkpoints: one writer; complete or absent, never half; the newest intact one resumes.

A checkpoint is a directory ``step-000000042`` with the files of ``checkpoint_files``. It is written
under another name, flushed to disk and renamed, so that a crash leaves the old ones and no half of
a new.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    MODEL_FILE,
    STATE_FILE,
    TRAINING_FILE,
    Checkpoint,
    Tensors,
    Written,
    flush,
    read,
    read_state,
    score,
    seal,
    write,
)
from hvdtrain.system.files import FULL

log = logging.getLogger(__name__)

PREFIX, PARTIAL = "step-", ".partial-"
NAME = re.compile(PREFIX + r"([0-9]+)(?:\+([0-9]+))?")


def save(directory: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``checkpoint`` under ``directory`` and drop all but the newest ``keep`` and the best.

    To be called on one rank only (see ``Adapter.save_checkpoint``).

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: it cannot be written, a full disk for one; what was there before is intact.
    """
    step = int(checkpoint.state["step"])
    partial = begin(directory, step)
    with cleared(directory, step):
        files = [
            write(partial / name, {key: np.asarray(value) for key, value in tensors.items()})
            for name, tensors in (
                (MODEL_FILE, checkpoint.model),
                (TRAINING_FILE, checkpoint.training),
            )
        ]
    return commit(partial, files, checkpoint.state, keep)


def begin(directory: Path, step: int) -> Path:
    """Make the folder in which the files of a new checkpoint are written; see ``commit``.

    Raises:
        CheckpointError: it cannot be made.
    """
    final = _free_name(directory, step)
    partial = directory / f"{PARTIAL}{final.name}"
    with cleared(directory, step):
        directory.mkdir(parents=True, exist_ok=True)
        remove_partial(directory)
        partial.mkdir()
    return partial


def commit(partial: Path, files: list[Written], state: Mapping[str, Any], keep: int) -> Path:
    """Make the folder with all its ``files`` the newest checkpoint; drop those not to be kept.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: it cannot be written; what was there before is intact.
    """
    directory, final = partial.parent, partial.with_name(partial.name.removeprefix(PARTIAL))
    with cleared(directory, int(state["step"])):
        seal(partial, files, state)
        partial.rename(final)
        flush(directory)
    prune(directory, keep, final.name)
    return final


@contextmanager
def cleared(directory: Path, step: int) -> Iterator[None]:
    """Turn an error of writing into a ``CheckpointError``, and remove the half of a checkpoint."""
    try:
        yield
    except OSError as error:
        remove_partial(directory)
        raise not_written(directory, step, error) from error


def not_written(directory: Path, step: int, error: OSError) -> CheckpointError:
    """Return the error that tells why a checkpoint was not written, and what is left."""
    kept = newest_name(directory)
    remedy = "free some space" if error.errno in FULL else "make the directory writable"
    return CheckpointError(
        f"the checkpoint of step {step} cannot be written to {directory}: "
        f"{error.strerror or error}. "
        + (f"{kept} is intact: {remedy} and run again" if kept else remedy.capitalize())
    )


def _free_name(directory: Path, step: int) -> Path:
    # A second save of one step (after the evaluation, say) gets a name of its own that sorts
    # later: replacing the first would leave a moment without either.
    first = f"{PREFIX}{step:09d}"
    same = [_order(name)[1] for name in _names(directory) if _order(name)[0] == step]
    return directory / (f"{first}+{same[-1] + 1:02d}" if same else first)


def newest_name(directory: Path) -> str | None:
    """Return the name of the newest checkpoint directory, unchecked; None where there is none."""
    names = _names(directory)
    return names[-1] if names else None


def _names(directory: Path) -> list[str]:
    """Return the names of checkpoints under ``directory``, the oldest first."""
    if not directory.is_dir():
        return []
    names = (entry.name for entry in directory.iterdir())
    return sorted((name for name in names if NAME.fullmatch(name)), key=_order)


def _order(name: str) -> tuple[int, int]:
    """Return step and number of the save, from the name of a checkpoint."""
    step, _, number = name.removeprefix(PREFIX).partition("+")
    return int(step), int(number or 0)


def remove_partial(directory: Path) -> None:
    """Remove what saves that were killed have left; to be called by the one writer alone."""
    for entry in directory.glob(f"{PARTIAL}{PREFIX}*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def not_finite(tensors: Tensors, *, infinite: bool = False) -> str | None:
    """Return the first tensor, by name, that holds nan or (unless that is allowed) infinity."""
    for name, value in sorted(tensors.items()):
        array = np.asarray(value)
        good = np.isfinite(array) if not infinite else ~np.isnan(array)
        if not good.all():
            return name
    return None


ANEW = "Use --resume never or another directory to begin anew"
Check = Callable[[Checkpoint], None]


def load_newest(
    directory: Path, check: Check = lambda found: None, *, remedy: str = ANEW
) -> Checkpoint | None:
    """Return the newest checkpoint under ``directory`` whose checksums are right; None without one.

    A damaged one is named in a warning and passed over, and so is one for which ``check`` raises
    ``ValueError``.

    Raises:
        UsageError: checkpoints are there and not one of them can be read.
    """
    names = _names(directory)
    for stray in sorted(directory.glob(f"{PREFIX}*")) if directory.is_dir() else ():
        if stray.name not in names:
            log.warning("%s is not the name of a checkpoint: passed over", stray)
    reasons = []
    for name in reversed(names):
        try:
            found = read(directory / name)
            check(found)
            return found
        except DAMAGE as error:
            reason = f"{type(error).__name__}: {error}"
            reasons.append(f"{name}: {reason}")
            log.warning("checkpoint %s is damaged (%s): passed over", directory / name, reason)
    if names:
        raise UsageError(
            f"{directory}: none of its {len(names)} checkpoints can be read ({reasons[0]}). "
            f"{remedy}"
        )
    return None


def glance(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or the newest one in it, without its tensors.

    They are not looked at, so this takes no time; None where there is none, or it is damaged.
    """
    try:
        folder = path
        if not (NAME.fullmatch(path.name) or (path / STATE_FILE).exists()):
            folder /= newest_name(path) or ""
        return Checkpoint({}, {}, read_state(folder), folder)
    except DAMAGE:
        return None


def load(path: Path, check: Check = lambda found: None) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest intact one where it is a directory of them.

    Raises:
        UsageError: there is none, or it is damaged; ``check`` raises ``ValueError`` where it is.
    """
    remedy = "Give an intact checkpoint, or the directory of several"
    if not path.is_dir():
        what = "is no folder, as checkpoints are" if path.exists() else "is not there"
        raise UsageError(f"the checkpoint {path} {what}. {remedy}")
    if not (NAME.fullmatch(path.name) or (path / STATE_FILE).exists()):
        found = load_newest(path, check, remedy=remedy)
        if found is None:
            raise UsageError(f"there is no checkpoint in {path}. {remedy}")
        return found
    try:
        found = read(path)
        check(found)
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"the checkpoint {path} is damaged ({reason}). {remedy}") from error
    return found


def prune(directory: Path, keep: int, saved: str) -> None:
    """Delete all but the newest ``keep`` steps up to ``saved`` and the best evaluation."""
    names = _names(directory)
    for name, later in itertools.pairwise(names):
        if _order(later)[0] == _order(name)[0]:
            shutil.rmtree(directory / name, ignore_errors=True)
    # A later one was damaged, or this training would have gone on from it: it counts for nothing.
    names = [name for name in _names(directory) if _order(name) <= _order(saved)]
    scores = {name: score(directory / name) for name in names}
    scored = [name for name in names if scores[name] is not None]
    best = max(scored, key=lambda name: scores[name] or 0.0, default=None)
    for name in names[: max(0, len(names) - keep)]:
        if name != best:
            shutil.rmtree(directory / name, ignore_errors=True)


def set_aside(directory: Path) -> Path | None:
    """Move all checkpoints into a folder of their own, so that none of them is resumed by mistake.

    For a training that begins anew in a used directory.

    Returns:
        The folder, or None where there was nothing to move.
    """
    names = _names(directory)
    if not names:
        return None
    number = 1
    while (aside := directory / f"before-{number}").exists():
        number += 1
    aside.mkdir()
    for name in names:
        (directory / name).rename(aside / name)
    return aside


def check_origin(
    checkpoint: Checkpoint, origin: Mapping[str, Any], given: str = "--checkpoint-dir"
) -> None:
    """Refuse a checkpoint that another task made; ``given``: what the user gave it by.

    Raises:
        UsageError: naming each difference, old value and new.
    """
    made = checkpoint.state.get("origin", {})
    wrong = [
        f"{key} {made.get(key)!r} there, {value!r} here"
        for key, value in origin.items()
        if made.get(key) != value
    ]
    if wrong:
        raise UsageError(
            f"{checkpoint.path} is the checkpoint of another training ({'; '.join(wrong)}). "
            f"Use another {given}, or the options that it was made with"
        )
