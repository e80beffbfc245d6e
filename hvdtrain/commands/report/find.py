"""Find the results in a directory that a report can show."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.methods import Trial, read_trials
from hvdtrain.commands.scaling.batches import BatchRun
from hvdtrain.commands.scaling.batches import read_runs as read_batches
from hvdtrain.commands.scaling.results import Study, make_study
from hvdtrain.commands.scaling.runs import (
    LINES,
    TABLE,
    WEAK,
    check_comparable,
    read_folder,
    read_table,
)
from hvdtrain.commands.study.curves import TrainingCurves, read_curves
from hvdtrain.commands.timeline.facts import TimelineFacts
from hvdtrain.commands.timeline.read import GZIP, Reading, blocks
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.checkpoint import PREFIX
from hvdtrain.steps.checkpoint_files import STATE_FILE
from hvdtrain.steps.summary import MAX_BYTES, Summary
from hvdtrain.system.files import read_regular

PICTURES, MAX_PICTURES = "pictures", 24  # their folder; maximum number shown
DEEPEST = 3  # maximum depth of subdirectories
SUMMARY_KEYS = {"workload", "world_size", "steps_completed", "images_per_second_mean"}

# Errors from reading a file that has a known name, but unexpected content.
READABLE = (OSError, ValueError, HvdtrainError)  # with a message for users
UNREADABLE = (*READABLE, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint, from its ``state.json`` and its size."""

    step: Any
    epoch: Any
    accuracy: float | None
    bytes: int


@dataclass
class DirectoryResults:
    """The results in a directory, with paths relative to it."""

    folder: Path
    summaries: dict[Path, Summary] = field(default_factory=dict)
    curves: list[TrainingCurves] = field(default_factory=list)
    checkpoints: dict[Path, CheckpointSummary] = field(default_factory=dict)
    timelines: dict[Path, TimelineFacts] = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)
    study: Study | None = None
    comparison: list[Trial] = field(default_factory=list)
    batches: list[BatchRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # unreadable files, with the reasons

    def counts(self) -> dict[str, int]:
        """Return the number of results of each kind, with the keys of ``--json``."""
        return {
            "summaries": len(self.summaries),
            "curves": len(self.curves),
            "checkpoints": len(self.checkpoints),
            "timelines": len(self.timelines),
            "pictures": len(self.pictures),
            "studies": int(self.study is not None),
            "comparisons": int(bool(self.comparison)),
        }


def look(folder: Path) -> DirectoryResults:
    """Return the results in ``folder`` and its subdirectories."""
    contents = DirectoryResults(folder)
    for path in _files(folder):
        relative = path.relative_to(folder)
        is_picture = path.parent.name == PICTURES and path.suffix == ".jpg"
        if not (is_picture or path.name.endswith((".json", ".jsonl", ".json.gz"))):
            continue
        try:
            if is_picture:
                contents.pictures = [*contents.pictures, relative][:MAX_PICTURES]
            elif path.name == STATE_FILE and path.parent.name.startswith(PREFIX):
                contents.checkpoints[relative.parent] = _checkpoint(path)
            elif path.suffix == ".jsonl" and path.name != LINES:
                curves = read_curves(path, relative)
                contents.curves += [curves] if curves else []
            elif path.suffix != ".jsonl":
                _json(path, relative, contents)
        except UNREADABLE as error:
            reason = _reason(error).replace(str(path), "").removeprefix(": ").strip()
            contents.notes.append(f"{relative}: {reason}")
    for relative, summary in contents.summaries.items():
        try:
            _outside_timeline(summary.timeline, relative, contents)
        except UNREADABLE as error:
            contents.notes.append(f"{relative}: its timeline: {_reason(error)}")
    readers: dict[str, Callable[[Path], Any]] = {
        "study": _study,
        "comparison": read_trials,
        "batches": read_batches,
    }
    for kind, read in readers.items():
        try:
            setattr(contents, kind, read(folder))
        except UNREADABLE as error:
            named = isinstance(error, HvdtrainError)  # the message names the file
            contents.notes.append(f"{'' if named else f'the {kind}: '}{_reason(error)}")
    return contents


def _reason(error: Exception) -> str:
    """Return the message of an error for users, or a description of another error."""
    if isinstance(error, READABLE):
        return getattr(error, "strerror", None) or str(error)
    return f"unexpected format ({error!r})"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder``, by name, without hidden and set-aside (before-) ones."""
    for directory, folders, names in os.walk(folder):
        depth = len(Path(directory).relative_to(folder).parts)
        folders[:] = sorted(
            name for name in folders if depth < DEEPEST and not name.startswith((".", "before-"))
        )
        yield from (Path(directory, name) for name in sorted(names) if not name.startswith("."))


def _json(path: Path, relative: Path, contents: DirectoryResults) -> None:
    """Add a summary or a timeline; other files are ignored, e.g. traces of torch.profiler."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if gzipped := start.startswith(GZIP):
        start = next(blocks(Reading(path)))[0].lstrip()
    if start.startswith(b"["):
        facts, _ = analyse(path)
        if facts.file.events:
            contents.timelines[relative] = facts
    elif start.startswith(b"{") and not gzipped and path.stat().st_size < MAX_BYTES:
        content = json.loads(path.read_bytes())
        if content.keys() >= SUMMARY_KEYS:
            contents.summaries[relative] = Summary.from_json(content, needed=["world_size"])


def _outside_timeline(name: str | None, summary: Path, contents: DirectoryResults) -> None:
    """Add the timeline that a summary names, if it is outside the folder."""
    if not name:
        return
    # The name is relative to the directory in which the training was started.
    folder, timelines = contents.folder, contents.timelines
    paths = [base / name for base in (Path(), folder, folder.resolve().parent)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        contents.notes.append(f"{summary}: its timeline {name} does not exist relative to here")
    elif not any((folder / timeline).resolve() == path.resolve() for timeline in timelines):
        timelines[path.resolve()], _ = analyse(path)


def _checkpoint(path: Path) -> CheckpointSummary:
    """Return the summary of a checkpoint, whose state is at ``path``."""
    state = json.loads(read_regular(path))
    return CheckpointSummary(
        state["step"],
        (state.get("position") or {}).get("epoch"),
        (state.get("metrics") or {}).get("accuracy"),
        sum(file.stat().st_size for file in path.parent.iterdir()),
    )


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
