"""A workload from a user's file: ``task(options) -> Task``, and optionally ``Options``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.config.declare import option
from hvdtrain.config.options import TASK_OPTIONS, Options
from hvdtrain.config.values import number
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import is_file
from hvdtrain.tasks.task import LearningRates, Recipe, Task, Workload

DESCRIPTION = "Train the task defined in a Python file."
MAX_LENGTH = 500  # characters of an error message
RECIPE = Recipe(
    batch_size=32,
    lr=LearningRates(sgd=0.01, adam=0.001, adamw=0.001, lars=1.0, lamb=0.002),
    epochs=10,
    warmup_epochs=0.0,
    lr_schedule="constant",
    weight_decay=0.0,
)


FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}  # by imported module
LIBRARY = {label.lower(): name for name, label in FRAMEWORKS.items()}


def _whole(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


TYPES: dict[str, Callable[[Any], Any]] = {  # of options without metadata, by annotation
    "bool": bool,
    "int": _whole,
    "float": number,
    "str": str,
    "Path": Path,
}


def workload(path: Path, *, epilog: str) -> Workload:
    """Import a Python file and return the workload that it defines.

    Raises:
        UsageError: naming the file, and the line if there is one: it cannot be imported, has no
            ``task``, or its ``Options`` do not fit.
    """
    module = _imported(path)
    imports = {name: label for name, label in FRAMEWORKS.items() if name in sys.modules}
    if not callable(getattr(module, "task", None)):
        raise UsageError(f"{path} defines no function task(options) that returns a Task")
    kind = Options
    if hasattr(module, "Options"):
        kind = joined(module.Options, str(path))
        module.Options = kind  # type: ignore[attr-defined]  # so that options can be pickled

    def build(options: Options) -> Task:
        if imports and LIBRARY[options.framework] not in imports:
            (label, *_) = imports.values()
            raise UsageError(
                f"{path} imports {label}, and --framework is {options.framework}: use "
                f"--framework {label.lower()}"
            )
        with _file_errors(path):
            task: Any = module.task(options)
        if not isinstance(task, Task):
            raise UsageError(f"{path}: task() returned {type(task).__name__}, which is not a Task")
        return task

    return Workload(
        name=path.stem,
        program=f"train {path}",
        description=DESCRIPTION,
        epilog=epilog,
        models=(),
        recipe=lambda options: RECIPE,
        build=build,
        options=kind,
        unit="samples",
        digest=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def _imported(path: Path) -> ModuleType:
    """Import ``path`` under its file name, so that worker processes can import it too."""
    if not is_file(path, str(path)):
        raise UsageError(f"{path}: no such file")
    file = path.absolute()
    sys.path.insert(0, str(file.parent))  # as Python does for a script
    taken = "." in file.stem or file.stem in sys.modules
    spec = None if taken else importlib.util.find_spec(file.stem)
    if spec is None or spec.origin != str(file):
        raise UsageError(f"{path}: Python cannot import {file.stem!r} from it: rename the file")
    with _file_errors(path):
        return importlib.import_module(file.stem)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert any error in the file to a one-line message that names file and line."""
    try:
        yield
    except HvdtrainError:
        raise
    except (Exception, SystemExit) as error:
        file = str(path.absolute())
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(error.lineno)
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        message = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_LENGTH]
        raise UsageError(f"{where}: {message}") from error


def joined(fields_class: Any, source: str) -> type[Options]:
    """Return ``Options`` extended by the fields of a user's dataclass.

    A field created by ``option`` is parsed and documented by its metadata, any other by its type. A
    subclass of ``Options`` is returned unchanged. Errors name ``source``, the file.

    Raises:
        UsageError: no dataclass, or a field is an option already, or has no default or no
            supported type.
    """
    if isinstance(fields_class, type) and issubclass(fields_class, Options):
        return fields_class
    if not (isinstance(fields_class, type) and dataclasses.is_dataclass(fields_class)):
        raise UsageError(f"{source}: Options must be a dataclass")
    taken = {field.name for field in dataclasses.fields(Options)} | {"config", "help"}
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(fields_class):
        where = f"{source}: {field.name} of Options"
        if field.name in taken:
            raise UsageError(f"{where}: --{field.name.replace('_', '-')} is an option already")
        if field.default is dataclasses.MISSING:
            raise UsageError(f"{where} needs a default that is a single value")
        metadata = field.metadata if "help" in field.metadata else _by_type(field, source, where)
        metadata = {**metadata, "group": TASK_OPTIONS}
        copied = dataclasses.field(default=field.default, metadata=metadata)
        fields.append((field.name, field.type, copied))
    whole = dataclasses.make_dataclass("Options", fields, bases=(Options,), frozen=True)
    whole.__module__ = fields_class.__module__
    return whole


def _by_type(field: dataclasses.Field[Any], source: str, where: str) -> Mapping[str, Any]:
    """Return the metadata of ``option`` for a field, from its type."""
    name = getattr(field.type, "__name__", str(field.type))  # a string if it is not evaluated
    kind = TYPES.get(name.removesuffix(" | None").rpartition(".")[2])
    if kind is None or field.default is True:
        raise UsageError(
            f"{where}: an option is a bool that is False, or an int, float, str or Path"
        )
    metadata: Mapping[str, Any] = option(field.default, f"of {source}", kind).metadata
    return metadata
