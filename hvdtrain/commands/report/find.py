"""Find in a directory what a report can be made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.trials import Trial, read_trials
from hvdtrain.commands.runs.comparable import check_comparable
from hvdtrain.commands.runs.course import Course, Record, read_course
from hvdtrain.commands.runs.records import LINES, TABLE, WEAK, read_folder, read_table
from hvdtrain.commands.scaling.study import Study, make_study
from hvdtrain.commands.timeline.facts import analyse
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.checkpoint import PREFIX
from hvdtrain.steps.checkpoint_files import STATE_FILE
from hvdtrain.steps.summary import MOST, Summary, typed
from hvdtrain.system.files import is_regular

PICTURES, FEW = "pictures", 24  # a folder of them, and how many are shown
DEEPEST = 3  # directories below the one that is given
SUMMARY_KEYS = {"workload", "world_size", "steps_completed", "images_per_second_mean"}

# What reading a file may lead to that has the right name and quite another content.
MEANT = (OSError, ValueError, HvdtrainError)  # with a message for users
ODD = (*MEANT, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class _Position:
    epoch: Any = None


@dataclass(frozen=True)
class _Metrics:
    accuracy: float | None = None


@dataclass(frozen=True)
class _State:
    """What a report needs of a checkpoint's state."""

    step: Any = None
    position: _Position | None = None
    metrics: _Metrics | None = None


@dataclass
class Found:
    """Everything, with paths relative to the directory."""

    folder: Path
    summaries: dict[Path, Summary] = field(default_factory=dict)
    courses: list[Course] = field(default_factory=list)
    checkpoints: dict[Path, Record] = field(default_factory=dict)
    timelines: dict[Path, Record] = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)
    study: Study | None = None
    comparison: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read, and why

    def counts(self) -> dict[str, int]:
        """Return how many there are of each, by their name in the plural."""
        return {
            "summaries": len(self.summaries),
            "courses": len(self.courses),
            "checkpoints": len(self.checkpoints),
            "timelines": len(self.timelines),
            "pictures": len(self.pictures),
            "studies": int(self.study is not None),
            "comparisons": int(bool(self.comparison)),
        }

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.counts().values())


def look(folder: Path) -> Found:
    """Return what is found in ``folder`` and the directories below it."""
    found = Found(folder)
    for path in _files(folder):
        place = path.relative_to(folder)
        if path.parent.name == PICTURES and path.suffix == ".jpg" and is_regular(path):
            found.pictures = [*found.pictures, place][:FEW]
        if not path.name.endswith((".json", ".jsonl", ".json.gz")):
            continue
        try:
            if not is_regular(path):
                raise OSError("no regular file")  # a pipe would be waited for
            if path.name == STATE_FILE and path.parent.name.startswith(PREFIX):
                found.checkpoints[place.parent] = _checkpoint(path)
            elif path.suffix == ".jsonl" and path.name != LINES:
                course = read_course(path, place)
                found.courses += [course] if course else []
            elif path.suffix != ".jsonl":
                _json(path, place, found)
        except ODD as error:
            reason = _reason(error).replace(str(path), "").removeprefix(": ").strip()
            found.notes.append(f"{place}: {reason}")
    for place, summary in found.summaries.items():
        try:
            _timeline_elsewhere(summary.timeline, place, found)
        except ODD as error:
            found.notes.append(f"{place}: its timeline: {_reason(error)}")
    readers: dict[str, Callable[[Path], Any]] = {"study": _study, "comparison": read_trials}
    for kind, read in readers.items():
        try:
            setattr(found, kind, read(folder))
        except ODD as error:
            named = isinstance(error, HvdtrainError)  # the message names the file
            found.notes.append(f"{'' if named else f'the {kind}: '}{_reason(error)}")
    return found


def _reason(error: Exception) -> str:
    """Return what was wrong: the message of an error meant for users, else the error itself."""
    return str(error) if isinstance(error, MEANT) else f"not in the form expected ({error!r})"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder``, by name, without hidden ones and what was set aside."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(
            name for name in folders if depth < DEEPEST and not name.startswith((".", "before-"))
        )
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _json(path: Path, place: Path, found: Found) -> None:
    """Add a summary or a timeline; any other file is passed over."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start.startswith((b"[", b"\x1f\x8b")):
        facts, _ = analyse(path)
        if facts["file"]["events"]:
            found.timelines[place] = facts
    elif start.startswith(b"{") and path.stat().st_size < MOST:
        content = json.loads(path.read_bytes())
        if content.keys() >= SUMMARY_KEYS:
            found.summaries[place] = Summary.from_json(content, needed=["world_size"])


def _timeline_elsewhere(name: str | None, place: Path, found: Found) -> None:
    """Add the timeline that a summary names, where it lies outside the folder."""
    if not name:
        return
    # As the training was given it: from where that was started.
    paths = [base / name for base in (Path(), found.folder, found.folder.resolve().parent)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        found.notes.append(f"{place}: its timeline {name} is not to be found from here")
    elif not any((found.folder / known).resolve() == path.resolve() for known in found.timelines):
        found.timelines[path.resolve()], _ = analyse(path)


def _checkpoint(path: Path) -> Record:
    """Return what a report shows of a checkpoint, from its ``state.json`` and its size.

    Raises:
        ValueError: it is no state of a checkpoint.
    """
    state = json.loads(path.read_bytes())
    if not isinstance(state, dict):
        raise ValueError("no object, so no state of a checkpoint")
    found = typed(_State, state)
    if found.step is None:
        raise ValueError("it has no step, so it is no state of a checkpoint")
    return {
        "step": found.step,
        "epoch": found.position and found.position.epoch,
        "accuracy": found.metrics and found.metrics.accuracy,
        "bytes": sum(file.stat().st_size for file in path.parent.iterdir()),
    }


def _study(folder: Path) -> Study | None:
    if (folder / LINES).is_file() or any(folder.glob(f"ranks-*/{LINES}")):
        runs = read_folder(folder)
    elif (folder / TABLE).is_file():
        runs = read_table(folder / TABLE)
    else:
        return None
    scaling = runs[0].scaling or WEAK
    check_comparable(runs, scaling, str(folder))
    return make_study(runs, scaling)
