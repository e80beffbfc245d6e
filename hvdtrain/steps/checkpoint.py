"""Step 7, checkpoints: one writer; complete or absent, never half; the newest intact one resumes.

A checkpoint is a directory ``step-000000042`` that holds

    model.safetensors       parameters and buffers, names as in the model: the weights to ship
    training.safetensors    what only a resume needs: optimizer state, the ranks' own buffers
    state.json              position, counters, origin, metrics, and the SHA-256 of the two files

Where a strategy shards the state, each rank writes a file of each kind, with whole tensors in it,
in the convention of safetensors: ``model-00002-of-00003.safetensors``, and an index of all.

Loading them executes nothing (safetensors holds numbers alone). The directory is written under
another name, flushed to disk and renamed, so that a crash leaves the old ones and no half of a new.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.steps.tensor_file import Layout, Stored, TensorFile, digest_of, stored
from hvdtrain.system.files import FULL, read_regular

log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray[Any, Any]]
Tensors = Mapping[str, Any]  # arrays, or what becomes one by np.asarray: Stored

FORMAT = 1
MODEL_FILE, TRAINING_FILE, STATE_FILE = "model.safetensors", "training.safetensors", "state.json"
PREFIX, PARTIAL = "step-", ".partial-"
NAME = re.compile(PREFIX + r"([0-9]+)(?:\+([0-9]+))?")
# What reading a file can raise that anybody may have written or damaged.
DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, safetensors.SafetensorError),
)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        model: parameters and buffers by name; of one that was found, not read yet.
        training: optimizer state and other tensors that a resume needs, by name; likewise.
        state: JSON values: ``step``, ``origin`` (what made it: framework, model, dataset size),
            position and counters, and ``metrics`` of the last evaluation (or null).
        path: the directory, when it was read from one.
    """

    model: Tensors
    training: Tensors
    state: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


@dataclass(frozen=True)
class Written:
    """A file of tensors in a checkpoint that is being written.

    Attributes:
        name: of the file.
        sha256: of its content.
        tensors: size in bytes of each tensor in it, by name.
    """

    name: str
    sha256: str
    tensors: dict[str, int]


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
            _write(partial / name, {key: np.asarray(value) for key, value in tensors.items()})
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
        for kind in (MODEL_FILE, TRAINING_FILE):
            here = [file for file in files if kind_of(file.name) == kind]
            if [file.name for file in here] != [kind]:
                _write_file(partial / f"{kind}.index.json", _index(here))
        digests = {file.name: file.sha256 for file in files}
        whole = {"format": FORMAT, **state, "sha256": digests}
        digests[STATE_FILE] = _digest_of_state(whole)
        _write_file(partial / STATE_FILE, json.dumps(whole, indent=1).encode())
        _flush(partial)
        partial.rename(final)
        _flush(directory)
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


def file_of(kind: str, place: int, number: int) -> str:
    """Return the name of one of ``number`` files of a kind, such as ``MODEL_FILE``, from 0."""
    stem, _, suffix = kind.partition(".")
    return f"{stem}-{place + 1:05d}-of-{number:05d}.{suffix}"


def kind_of(name: str) -> str:
    """Return ``MODEL_FILE`` or ``TRAINING_FILE``, of which ``name`` is one of several, or it."""
    return re.sub(r"-[0-9]{5}-of-[0-9]{5}(?=\.)", "", name)


def _index(files: list[Written]) -> bytes:
    places = {name: file.name for file in files for name in file.tensors}
    total = sum(size for file in files for size in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=1).encode()


def _free_name(directory: Path, step: int) -> Path:
    # A second save of one step (after the evaluation, say) gets a name of its own that sorts
    # later: replacing the first would leave a moment without either.
    first = f"{PREFIX}{step:09d}"
    same = [_order(name)[1] for name in _names(directory) if _order(name)[0] == step]
    return directory / (f"{first}+{same[-1] + 1:02d}" if same else first)


def _write(path: Path, arrays: Arrays) -> Written:
    # Large elements first, so that all are aligned.
    ordered = dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))
    file = TensorFile(path, {name: Layout.of(value) for name, value in ordered.items()})
    for name, value in ordered.items():
        file.write(name, value)
    return Written(path.name, file.close(), {name: one.nbytes for name, one in arrays.items()})


def _digest_of_state(state: Mapping[str, Any]) -> str:
    # Of everything in it but this digest itself.
    digests = {name: value for name, value in state["sha256"].items() if name != STATE_FILE}
    text = json.dumps({**state, "sha256": digests}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    # The entries of a directory reach the disk only when the directory itself is flushed.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def read(folder: Path) -> Checkpoint:
    """Find the checkpoint in ``folder`` and check it; its tensors are read when they are used.

    Raises:
        ValueError: a checksum or the format number is wrong.
        OSError, KeyError: a file or an entry is missing.
        DAMAGE: anything else is wrong with it.
    """
    state = json.loads(read_regular(folder / STATE_FILE))
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']}, this hvdtrain reads {FORMAT}")
    if _digest_of_state(state) != state["sha256"][STATE_FILE]:
        raise ValueError(f"the checksum of {STATE_FILE} is wrong")
    if not isinstance(state["step"], int):
        raise ValueError(f"step {state['step']!r} is no number")
    for name, digest in state["sha256"].items():
        if name != STATE_FILE and digest_of(folder / Path(name).name) != digest:
            raise ValueError(f"the checksum of {name} is wrong")
    return unchecked(folder, state)


def unchecked(folder: Path, state: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint in ``folder``, which another rank has read and checked.

    Raises:
        LookupError, OSError, SafetensorError: a file is not there, or it is another one.
    """
    tensors: dict[str, dict[str, Stored]] = {MODEL_FILE: {}, TRAINING_FILE: {}}
    for name in state["sha256"]:
        if name != STATE_FILE:
            tensors[kind_of(name)] |= stored(folder / name)
    return Checkpoint(tensors[MODEL_FILE], tensors[TRAINING_FILE], state, folder)


def prune(directory: Path, keep: int, saved: str) -> None:
    """Delete all but the newest ``keep`` steps up to ``saved`` and the best evaluation."""
    names = _names(directory)
    for name, later in itertools.pairwise(names):
        if _order(later)[0] == _order(name)[0]:
            shutil.rmtree(directory / name, ignore_errors=True)
    # A later one was damaged, or this training would have gone on from it: it counts for nothing.
    names = [name for name in _names(directory) if _order(name) <= _order(saved)]
    scores = {name: _score(directory / name) for name in names}
    scored = [name for name in names if scores[name] is not None]
    best = max(scored, key=lambda name: scores[name] or 0.0, default=None)
    for name in names[: max(0, len(names) - keep)]:
        if name != best:
            shutil.rmtree(directory / name, ignore_errors=True)


def _score(folder: Path) -> float | None:
    try:
        state = json.loads(read_regular(folder / STATE_FILE))
        name, higher_is_better = state.get("best", ("accuracy", True))
        score = (state["metrics"] or {})[name]
        good = type(score) in (int, float) and math.isfinite(score)
        return float(score if higher_is_better else -score) if good else None
    except DAMAGE:
        return None


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
