"""Write, read and check the files of a checkpoint.

    model.safetensors       parameters and buffers, named as in the model: weights for inference
    training.safetensors    only for resuming: optimizer state, local buffers of the ranks
    state.json              position, counters, origin, metrics, and the digests of the two files

If a strategy shards the state, each rank writes a file of each kind with complete tensors, named as
usual for safetensors, ``model-00002-of-00003.safetensors``, with an index. Loading executes no code
(safetensors contains numbers only). The digests are XXH3, which finds any damage and costs little;
somebody who may write to the directory could replace them, too.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from xxhash import xxh3_128

from hvdtrain.errors import UsageError
from hvdtrain.steps.tensor_file import ArraySpec, Stored, stored
from hvdtrain.system.files import file_digest, read_regular
from hvdtrain.system.folder import Folder

Arrays = dict[str, np.ndarray[Any, Any]]
Tensors = Mapping[str, Any]  # arrays, or objects convertible by np.asarray: Stored
State = dict[str, Any]
"""JSON values of ``STATE_FILE``: ``step``, ``origin`` (framework, model, dataset size), position,
counters, and ``metrics`` of the last evaluation (or null)."""

FORMAT = 2  # 1, of hvdtrain 0.1.0, has SHA-256 digests
MODEL_FILE, TRAINING_FILE, STATE_FILE = "model.safetensors", "training.safetensors", "state.json"
OF_OPTIMIZER = " of the optimizer"  # follows the names of its state in messages
# Errors of reading a file that may be damaged or malicious.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    safetensors.SafetensorError,
)

# Errors for a damaged checkpoint whose file system works; None: of libraries.
DAMAGE_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint; tensors are read on demand if it is loaded from files."""

    model: Tensors  # parameters and buffers by name
    training: Tensors  # optimizer state and other tensors for resuming, by name
    state: State = field(default_factory=dict)
    path: Path | None = None  # the directory if it was read from one


@dataclass(frozen=True)
class Piece:
    """A tensor of the state of a training, as it is written to a checkpoint.

    Attributes:
        kind: ``MODEL_FILE`` or ``TRAINING_FILE``.
        name: name in that file.
        layout: layout of the whole tensor.
        fetch: function that returns the whole tensor, or an array of it, on its owner, and on
            other ranks if they have it; all ranks that have the piece call it together.
        owner: the rank that writes it.
        infinite: whether it may contain infinities.
        replicated: whether all ranks have it, equal after each update.
    """

    kind: str
    name: str
    layout: ArraySpec
    fetch: Callable[[], Any]
    owner: int = 0
    infinite: bool = False
    replicated: bool = False

    @property
    def order(self) -> tuple[str, int, str]:
        """Sort key of pieces: large elements first, so that all are aligned in the file."""
        return self.kind, -self.layout.dtype.itemsize, self.name

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.name if self.kind == MODEL_FILE else f"{self.name}{OF_OPTIMIZER}"


@dataclass(frozen=True)
class Written:
    """A tensor file of a checkpoint that is being written."""

    name: str
    digest: str
    tensors: dict[str, int]  # their sizes in bytes, by name


def file_of(kind: str, index: int, number: int) -> str:
    """Return the name of file ``index`` of ``number`` files of a kind, e.g. ``MODEL_FILE``."""
    stem, _, suffix = kind.partition(".")
    return f"{stem}-{index + 1:05d}-of-{number:05d}.{suffix}"


def kind_of(name: str) -> str:
    """Return the kind of file ``name``: ``MODEL_FILE`` or ``TRAINING_FILE``."""
    return re.sub(r"-[0-9]{5}-of-[0-9]{5}(?=\.)", "", name)


def _index(files: list[Written]) -> bytes:
    file_names = {name: file.name for file in files for name in file.tensors}
    total = sum(size for file in files for size in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}
    return json.dumps(index, indent=1).encode()


def check_keys(value: Any) -> None:
    """Raise ``TypeError`` for a key, at any depth, that JSON would turn into text."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"JSON turns the key {key!r} into text")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        check_keys(item)


def _digest_of_state(state: State) -> str:
    # Of all entries except this digest.
    digests = {name: value for name, value in state["digests"].items() if name != STATE_FILE}
    text = json.dumps({**state, "digests": digests}, sort_keys=True)
    return xxh3_128(text.encode()).hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk; flushing its files does not do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(folder: Folder, files: list[Written], state: State) -> None:
    """Complete a checkpoint with ``files``: write the index of each kind and ``STATE_FILE``."""
    for kind in (MODEL_FILE, TRAINING_FILE):
        here = [file for file in files if kind_of(file.name) == kind]
        if [file.name for file in here] != [kind]:
            folder.write(f"{kind}.index.json", _index(here))
    digests = {file.name: file.digest for file in files}
    # As it is loaded: keys that are not text would be sorted differently in the digest.
    content = {**json.loads(json.dumps(state)), "format": FORMAT, "digests": digests}
    digests[STATE_FILE] = _digest_of_state(content)
    folder.write(STATE_FILE, json.dumps(content, indent=1).encode())
    os.fsync(folder.handle)


def read(folder: Path) -> Checkpoint:
    """Check and return the checkpoint in ``folder``; its tensors are read on demand.

    Raises:
        ValueError: wrong checksum or format number.
        OSError, KeyError: a file or an entry is missing.
        DAMAGE: any other damage.
    """
    state = read_state(folder)
    for name, digest in state["digests"].items():
        if Path(name).name != name:  # any number of them could be read as the same large file
            raise ValueError(f"{name!r} is not a file name")
        if name != STATE_FILE and file_digest(folder / name, xxh3_128) != digest:
            raise ValueError(f"the checksum of {name} is wrong")
    return unchecked(folder, state)


def read_state(folder: Path) -> State:
    """Read and check the state of a checkpoint, without its tensors.

    Raises:
        UsageError: it was written by hvdtrain 0.1.0.
        DAMAGE: see ``read``.
    """
    state: State = json.loads(read_regular(folder / STATE_FILE))
    if state["format"] == 1:
        raise UsageError(
            f"{folder} was written by hvdtrain 0.1.0, whose checkpoints this version cannot read: "
            "continue with that version, or use another directory (trainers: --resume never)"
        )
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']}, this hvdtrain reads {FORMAT}")
    if _digest_of_state(state) != state["digests"][STATE_FILE]:
        raise ValueError(f"the checksum of {STATE_FILE} is wrong")
    if type(state["step"]) is not int or state["step"] < 0:
        raise ValueError(f"step {state['step']!r} is not a number of updates")
    return state


def is_file_system_error(error: BaseException) -> bool:
    """Return whether the file system failed, e.g. by ESTALE or EIO: the file may be intact."""
    return isinstance(error, OSError) and error.errno not in DAMAGE_ERRNOS


def unchecked(folder: Path, state: State) -> Checkpoint:
    """Return the checkpoint in ``folder``, which another rank has checked.

    Raises:
        LookupError, OSError, SafetensorError: a file is missing or different.
    """
    tensors: dict[str, dict[str, Stored]] = {MODEL_FILE: {}, TRAINING_FILE: {}}
    for name in state["digests"]:
        if name != STATE_FILE:
            tensors[kind_of(name)] |= stored(folder / name)
    return Checkpoint(tensors[MODEL_FILE], tensors[TRAINING_FILE], state, folder)


def score(folder: Path) -> float | None:
    """Return the score of the checkpoint in ``folder``, higher is better; None: unknown.

    Raises:
        OSError: the file system failed.
    """
    try:
        state = read_state(folder)
        name, higher_is_better = state.get("best", ("accuracy", True))
        value = (state["metrics"] or {})[name]
        good = type(value) in (int, float) and math.isfinite(value)
        return float(value if higher_is_better else -value) if good else None
    except (*DAMAGE, UsageError) as error:
        if is_file_system_error(error):
            raise
        return None
