"""Step 7, checkpoints: written by one rank, complete or absent; the newest intact one is resumed.

A checkpoint is a directory ``step-000000042`` with the files of ``checkpoint_files``. It is written
under a temporary name, flushed to disk and renamed, so that a crash leaves earlier checkpoints
intact and no incomplete one.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import CheckpointError, HvdtrainError, TrainingError, UsageError, escaped
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    STATE_FILE,
    Checkpoint,
    Piece,
    State,
    Tensors,
    Written,
    is_file_system_error,
    read,
    read_state,
    score,
    seal,
)
from hvdtrain.steps.tensor_file import ArraySpec, TensorFile
from hvdtrain.system.files import FULL
from hvdtrain.system.folder import Folder

log = logging.getLogger(__name__)

PREFIX, PARTIAL, REMOVED = "step-", ".partial-", "~"
NAME = re.compile(PREFIX + r"([0-9]+)(?:\+([0-9]+))?")


def begin(directory: Path, step: int) -> Path:
    """Create the directory for the files of a new checkpoint; see ``commit``.

    Raises:
        CheckpointError: it cannot be created.
    """
    with cleared(directory, step):
        partial = f"{PARTIAL}{_free_name(directory, step).name}"
        folder = Folder.named(directory)
        remove_partial(directory)
        folder.enter(partial)
    return directory / partial


def _opened(partial: Path) -> Folder:
    return Folder.named(partial.parent, create=False).enter(partial.name, create=False)


class Writer:
    """Writes one rank's files of a checkpoint into ``partial``, which ``begin`` has created.

    After an error nothing more is written, but the rank continues to gather tensors with the
    others, which wait for it; ``close`` raises the error.

    Args:
        partial: directory of the new checkpoint.
        step: number of its step.
        files: names of the files by kind; none: nothing is written.
        pieces: pieces that will be written, in this order.
    """

    def __init__(
        self, partial: Path, step: int, files: Mapping[str, str], pieces: Sequence[Piece]
    ) -> None:
        self._directory, self._step = partial.parent, step
        self._error: HvdtrainError | None = None
        self._files: dict[str, TensorFile] = {}
        self._layouts: dict[str, dict[str, ArraySpec]] = {kind: {} for kind in files}
        for piece in pieces:
            self._layouts[piece.kind][piece.name] = piece.layout
        with self._noted():
            for kind, name in files.items():
                self._files[kind] = TensorFile(_opened(partial), name, self._layouts[kind])

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = not_written(self._directory, self._step, error)
        except HvdtrainError as error:
            self._error = error

    def write(self, piece: Piece, array: np.ndarray[Any, Any]) -> None:
        """Append a tensor to the file of its kind."""
        if self._error:
            return
        with self._noted():
            if not_finite({piece.name: array}, infinite=piece.infinite):
                raise TrainingError(
                    f"{piece.name} is not finite after step {self._step}: nothing was saved; the "
                    "checkpoints on disk are older"
                )
            self._files[piece.kind].write(piece.name, array)

    def close(self) -> list[Written]:
        """Flush the files to disk, and return their contents' names and sizes.

        Raises:
            CheckpointError: they cannot be written, e.g. the disk is full.
            TrainingError: a tensor is not finite.
        """
        written = []
        for kind, file in self._files.items():
            if self._error:
                file.abandon()
                continue
            with self._noted():
                sizes = {name: layout.nbytes for name, layout in self._layouts[kind].items()}
                written.append(Written(file.name, file.close(), sizes))
        if self._error:
            raise self._error
        return written


def final_path(partial: Path) -> Path:
    """Return the path that ``commit`` gives the checkpoint in ``partial``."""
    return partial.with_name(partial.name.removeprefix(PARTIAL))


def commit(partial: Path, files: list[Written], state: State) -> Path:
    """Complete the checkpoint in ``partial`` with its ``files``, rename it, and return it.

    Raises:
        CheckpointError: it cannot be written; earlier checkpoints are intact.
    """
    directory, final = partial.parent, final_path(partial)
    with cleared(directory, int(state["step"])):
        seal(_opened(partial), files, state)
        folder = Folder.named(directory, create=False)
        folder.rename(partial.name, final.name)
        os.fsync(folder.handle)
    return final


@contextmanager
def cleared(directory: Path, step: int) -> Iterator[None]:
    """Turn an ``OSError`` into a ``CheckpointError``, and remove the incomplete checkpoint."""
    try:
        yield
    except OSError as error:
        remove_partial(directory)
        raise not_written(directory, step, error) from error


def not_written(directory: Path, step: int, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that cannot be written, naming the newest intact one."""
    kept = None
    with suppress(OSError):  # the directory cannot be listed either
        kept = newest_name(directory)
    remedy = "Free some space" if error.errno in FULL else "Check the directory and its file system"
    return CheckpointError(
        f"the checkpoint of step {step} cannot be written to {directory}: "
        f"{error.strerror or error}. {remedy}" + (f"; {kept} is intact" if kept else "")
    )


def _free_name(directory: Path, step: int) -> Path:
    # A second save of a step, e.g. after an evaluation, gets a different name that sorts later:
    # replacing the first would leave an interval without either.
    first = f"{PREFIX}{step:09d}"
    same = [_order(name)[1] for name in _names(directory) if _order(name)[0] == step]
    return directory / (f"{first}+{same[-1] + 1:02d}" if same else first)


def newest_name(directory: Path) -> str | None:
    """Return the name of the newest checkpoint, unchecked, or None."""
    names = _names(directory)
    return names[-1] if names else None


def _names(directory: Path) -> list[str]:
    """Return the names of checkpoints under ``directory``, oldest first."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):  # another process may have just removed it
        return []
    return sorted((name for name in names if NAME.fullmatch(name)), key=_order)


def _order(name: str) -> tuple[int, int]:
    """Return step and number of the save from the name of a checkpoint."""
    step, _, number = name.removeprefix(PREFIX).partition("+")
    return int(step), int(number or 0)


def remove_partial(directory: Path) -> None:
    """Remove leftovers of killed saves; call it on the writing rank only.

    A thread may be about to give one its final name. So each is renamed before it is removed, if
    possible (a full disk may prevent it): the thread either comes first, and the checkpoint is
    complete, or fails. What cannot be removed now remains for the next save.
    """
    with suppress(OSError):
        folder = Folder.named(directory, create=False)
        for name in folder.names():
            if name.startswith(PARTIAL + PREFIX):
                removed = name.removesuffix(REMOVED) + REMOVED
                with suppress(OSError):
                    folder.rename(name, removed)
                for left in (removed, name):
                    with suppress(OSError):
                        folder.remove(left)


def not_finite(tensors: Tensors, *, infinite: bool = False) -> str | None:
    """Return the first tensor by name with NaN or, unless ``infinite`` is allowed, infinity."""
    for name, value in sorted(tensors.items()):
        array = np.asarray(value)
        good = np.isfinite(array) if not infinite else ~np.isnan(array)
        if not good.all():
            return name
    return None


RESTART = "Use another directory, or move its checkpoints away (trainers: --resume never)"
Check = Callable[[Checkpoint], None]
RETRY_PAUSES = (1.0, 4.0)  # seconds before a checkpoint is read again


def load_newest(
    directory: Path, check: Check = lambda checkpoint: None, *, remedy: str = RESTART
) -> Checkpoint | None:
    """Return the newest checkpoint under ``directory`` with correct checksums, or None.

    Damaged ones, and those for which ``check`` raises ``ValueError``, are skipped with a warning.

    Raises:
        UsageError: there are checkpoints, but none can be read; or the directory cannot be listed.
        HvdtrainError: the file system fails, so that one may be intact and newer.
    """
    try:
        names = _names(directory)
    except OSError as error:  # not "no checkpoint": the training would start anew
        raise UsageError(f"{directory} cannot be listed ({error.strerror}). {remedy}") from error
    for stray in sorted(directory.glob(f"{PREFIX}*")) if directory.is_dir() else ():
        if stray.name not in names:
            log.warning("%s is not the name of a checkpoint: skipped", escaped(str(stray)))
    reasons = []
    for name in reversed(names):
        try:
            return _intact(directory / name, check)
        except DAMAGE as error:
            reason = escaped(f"{type(error).__name__}: {error}")
            reasons.append(f"{name}: {reason}")
            log.warning("checkpoint %s is damaged (%s): skipped", directory / name, reason)
    if names:
        raise UsageError(
            f"{directory}: none of its {len(names)} checkpoints can be read ({reasons[0]}). "
            f"{remedy}"
        )
    return None


def _intact(path: Path, check: Check, pauses: tuple[float, ...] = RETRY_PAUSES) -> Checkpoint:
    """Read and check a checkpoint; if its file system fails, e.g. by ESTALE, try again."""
    try:
        checkpoint = read(path)
        check(checkpoint)
    except OSError as error:
        if not is_file_system_error(error):
            raise
        if not pauses:
            raise HvdtrainError(
                f"the checkpoint {path} cannot be read ({error.strerror}): run it again "
                "when its file system works, or move the checkpoint away to use an older one"
            ) from error
        time.sleep(pauses[0])
        return _intact(path, check, pauses[1:])
    return checkpoint


def read_newest_state(path: Path) -> Checkpoint | None:
    """Return the checkpoint at ``path``, or the newest one in it, without reading its tensors.

    Returns None if there is none, or its state file is damaged.
    """
    try:
        folder = path
        if not (NAME.fullmatch(path.name) or (path / STATE_FILE).exists()):
            folder /= newest_name(path) or ""
        return Checkpoint({}, {}, read_state(folder), folder)
    except DAMAGE:
        return None


def load(path: Path, check: Check = lambda checkpoint: None) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest intact one if it is a directory of several.

    Raises:
        UsageError: there is none, or it is damaged, or ``check`` raises ``ValueError``.
    """
    remedy = "Use an intact checkpoint, or a directory of checkpoints"
    try:
        os.scandir(path).close()
    except OSError as error:
        raise UsageError(f"the checkpoint {path}: {error.strerror}. {remedy}") from error
    if not (NAME.fullmatch(path.name) or (path / STATE_FILE).exists()):
        newest = load_newest(path, check, remedy=remedy)
        if newest is None:
            raise UsageError(f"there is no checkpoint in {path}. {remedy}")
        return newest
    try:
        return _intact(path, check)
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"the checkpoint {path} is damaged ({reason}). {remedy}") from error


def prune(directory: Path, keep: int, saved: str) -> None:
    """Delete all but the newest ``keep`` steps up to ``saved`` and the best checkpoint.

    What cannot be deleted now remains for the next save.
    """
    with suppress(OSError):
        _prune(directory, keep, saved)


def _prune(directory: Path, keep: int, saved: str) -> None:
    folder, names = Folder.named(directory, create=False), _names(directory)
    for name, later in itertools.pairwise(names):
        if _order(later)[0] == _order(name)[0]:
            folder.remove(name)
    # A later one is damaged, as otherwise this training would have resumed from it: ignore it.
    names = [name for name in _names(directory) if _order(name) <= _order(saved)]
    scores = {name: score(directory / name) for name in names}
    scored = [name for name in names if scores[name] is not None]
    best = max(scored, key=lambda name: scores[name] or 0.0, default=None)
    for name in names[: max(0, len(names) - keep)]:
        if name != best:
            folder.remove(name)


def set_aside(directory: Path) -> Path | None:
    """Move all checkpoints into a new subdirectory, so that a new training does not resume them.

    Returns the subdirectory, or None if there was nothing to move.
    """
    names = _names(directory)
    if not names:
        return None
    number = 1
    while (aside := directory / f"before-{number}").exists():
        number += 1
    folder = Folder.named(directory)
    for name in names:
        folder.rename(name, name, into=folder.enter(aside.name))
    return aside


def check_origin(
    checkpoint: Checkpoint, origin: Mapping[str, Any], option: str = "--checkpoint-dir"
) -> None:
    """Raise if the checkpoint is of another training; ``option``: how the user specified it.

    Raises:
        UsageError: naming each difference with both values.
    """
    saved = checkpoint.state.get("origin")
    saved = saved if isinstance(saved, dict) else {}
    wrong = [
        f"{key.replace('_', ' ')} {saved.get(key)!r} there, {value!r} here"
        for key, value in origin.items()
        if saved.get(key) != value
    ]
    if wrong:
        raise UsageError(
            f"{checkpoint.path} is the checkpoint of another training ({'; '.join(wrong)}). "
            f"Use another {option}, or the options and data of that training"
        )
