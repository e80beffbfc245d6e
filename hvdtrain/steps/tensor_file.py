"""safetensors files, written tensor by tensor and read by rows.

The format is an 8-byte length, a JSON header with type, shape and offsets of each tensor, and the
tensors' bytes (https://github.com/huggingface/safetensors). Its library writes only tensors that
are all in memory; a checkpoint may be larger than the memory of any rank.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from xxhash import xxh3_128

from hvdtrain.errors import UsageError
from hvdtrain.system.folder import Folder

BLOCK = 2**23  # bytes per write
MAX_HEADER = 2**24  # bytes, of about 200,000 tensors: reading more takes minutes and gigabytes


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of a tensor to write."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @staticmethod
    def of(array: NDArray[Any]) -> ArraySpec:
        """Return type and shape of ``array``."""
        return ArraySpec(array.dtype, array.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def code(self) -> str:
        """The type's name in the format, e.g. ``F32``."""
        kind = self.dtype.kind.upper()
        return "BOOL" if kind == "B" else f"{kind}{8 * self.dtype.itemsize}"


class DirectFile:
    """Appends to a new file without the page cache of the kernel, if its file system permits it.

    Copying to that cache takes processor time from the training, and its pages count as memory of
    the job until they are on disk.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file  # without a buffer
        self._buffer = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)  # aligned to a page
        self._filled = 0
        self._set_direct(True)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        with suppress(OSError):  # e.g. a file system in memory
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))

    def write(self, data: NDArray[np.uint8]) -> None:
        """Append bytes, of shape (n,)."""
        while len(data):
            part, data = np.split(data, [BLOCK - self._filled])
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        data = self._buffer[: self._filled].data
        while data:
            try:
                written = self._file.write(data)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._set_direct(False)  # e.g. a disk was nearly full, and wrote half a page
                written = self._file.write(data)
            data = data[written:]
        self._filled = 0

    def close(self, *, flush: bool) -> None:
        """Close the file; with ``flush`` all of it is on disk."""
        with self._file:
            if flush:
                self._set_direct(False)  # the rest is no multiple of a page
                self._flush()
                os.fsync(self._file.fileno())


class TensorFile:
    """A new file in ``folder``; write the tensors in the order of ``layouts``, then ``close``.

    Raises:
        OSError: from any method, e.g. if the disk is full.
        UsageError: the format has no name for the type of a tensor, or they are too many; there is
            no file then.
    """

    def __init__(self, folder: Folder, name: str, layouts: Mapping[str, ArraySpec]) -> None:
        header, end = {}, 0
        for tensor, layout in layouts.items():
            if layout.dtype.kind not in "biufc" or layout.dtype.itemsize > 8:
                raise UsageError(
                    f"{tensor} is of type {layout.dtype}, which safetensors cannot store: convert "
                    "it, e.g. complex128 to real and imaginary parts (torch.view_as_real)"
                )
            begin, end = end, end + layout.nbytes
            shape = list(layout.shape)
            header[tensor] = {"dtype": layout.code, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # the data begins at a multiple of 8
        if len(text) > MAX_HEADER:
            raise UsageError(f"{name}: {len(layouts):,} tensors, more than can be read again")
        self.name, self._due = name, dict(layouts)
        self._digest = xxh3_128()
        self._file = DirectFile(folder.open(name, "xb", buffering=0))
        self._put(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))

    def _put(self, data: NDArray[np.uint8]) -> None:
        self._digest.update(data.data)
        try:
            self._file.write(data)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Append the tensor ``name``, the next one."""
        due = next(iter(self._due))
        if (name, ArraySpec.of(array)) != (due, self._due.pop(due)):
            raise ValueError(f"{name}, {ArraySpec.of(array)}, is written, but {due} is due")
        self._put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def abandon(self) -> None:
        """Close the incomplete file, so that its space can be freed."""
        with suppress(OSError):
            self._file.close(flush=False)

    def close(self) -> str:
        """Flush the file to disk and return its XXH3 digest."""
        self._file.close(flush=True)
        if self._due:
            raise ValueError(f"{list(self._due)} were not written")
        return self._digest.hexdigest()


class Stored:
    """A tensor in a file, read on demand: by ``np.asarray``, or some rows."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self.shape = tuple(file.get_slice(name).get_shape())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array: NDArray[Any] = self._file.get_tensor(self._name)
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read only the rows ``[first:end]`` of the first dimension."""
        first, end, _ = rows.indices(self.shape[0])
        if first >= end:
            return np.asarray(self)[:0] if not self.shape[0] else self[:1][:0]
        values: NDArray[Any] = self._file.get_slice(self._name)[first:end]
        return values


def stored(path: Path) -> dict[str, Stored]:
    """Return the tensors in the file by name, without reading them.

    Raises:
        ValueError: it has too many tensors.
        safetensors.SafetensorError: it is not a safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb") as header:
        length = int.from_bytes(header.read(8), "little")
    if MAX_HEADER < length < path.stat().st_size:
        raise ValueError(f"{path.name}: a header of {length:,} bytes, more than {MAX_HEADER:,}")
    file = safetensors.safe_open(path, framework="numpy")
    return {name: Stored(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
