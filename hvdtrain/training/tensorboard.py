"""The files of ``--tensorboard``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import HvdtrainError, UsageError


class TensorBoard:
    """Writes numbers as curves to ``directory``.

    Raises:
        UsageError: TensorBoard is not installed, or the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise UsageError(
                "--tensorboard: TensorBoard is not installed; pip install tensorboard"
            ) from error
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = Writer(str(directory))
        except OSError as error:
            raise UsageError(f"--tensorboard {directory}: {error.strerror or error}") from error

    def write(self, kind: str, record: Mapping[str, object]) -> None:
        """Add the numbers of ``record`` to the curves ``kind/name``, at its ``step``."""
        with self._writing():
            for name, value in record.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"{kind}/{name}", value, record["step"])

    def close(self) -> None:
        """Write what is buffered."""
        with self._writing():
            self._writer.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorBoard writes through TensorFlow if it is installed
            raise HvdtrainError(
                f"--tensorboard {self._directory} cannot be written: {error}"
            ) from error
