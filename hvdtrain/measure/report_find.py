"""What lies in a directory that a report can be made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain.files import is_regular
from hvdtrain.measure import records
from hvdtrain.measure.alike import check_alike
from hvdtrain.measure.conduct import TABLE, read_folder
from hvdtrain.measure.records import LINES, Run
from hvdtrain.measure.report_check import check_record, check_summary, checkpoint
from hvdtrain.measure.study import Study, make_study
from hvdtrain.steps.checkpoint import PREFIX, STATE_FILE
from hvdtrain.timeline.verb import analyse

DEEPEST = 3  # directories below the one that is given
SUMMARY_BYTES = 2**20  # a summary is far smaller; a timeline may be gigabytes
SUMMARY_KEYS = {"workload", "world_size", "steps_completed", "images_per_second_mean"}

Record = dict[str, Any]

# What reading a file may lead to that has the right name and quite another content.
ODD = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    HvdtrainError,
)


@dataclass(frozen=True)
class Course:
    """A file of ``--metrics``: one object a log interval, one an epoch."""

    path: Path
    steps: list[Record]
    epochs: list[Record]


@dataclass
class Found:
    """Everything, with paths relative to the directory."""

    folder: Path
    summaries: dict[Path, Record] = field(default_factory=dict)
    courses: list[Course] = field(default_factory=list)
    checkpoints: dict[Path, Record] = field(default_factory=dict)
    timelines: dict[Path, Record] = field(default_factory=dict)
    study: Study | None = None
    notes: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    def counts(self) -> dict[str, int]:
        """How many of each, by their name in the plural."""
        return {
            "summaries": len(self.summaries),
            "courses": len(self.courses),
            "checkpoints": len(self.checkpoints),
            "timelines": len(self.timelines),
            "studies": int(self.study is not None),
        }

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.counts().values())


def look(folder: Path) -> Found:
    """Look through ``folder`` and the directories below it."""
    found = Found(folder)
    for path in _files(folder):
        place = path.relative_to(folder)
        if not path.name.endswith((".json", ".jsonl", ".json.gz")):
            continue
        try:
            if not is_regular(path):
                raise OSError("no regular file")  # a pipe would be waited for
            if path.name == STATE_FILE and path.parent.name.startswith(PREFIX):
                found.checkpoints[place.parent] = _checkpoint(path)
            elif path.suffix == ".jsonl" and path.name != LINES:
                found.courses += _course(path, place)
            elif path.suffix != ".jsonl":
                _json(path, place, found)
        except ODD as error:
            reason = _reason(error).replace(str(path), "").removeprefix(": ").strip()
            found.notes.append(f"{place}: {reason}")
    for place, summary in found.summaries.items():
        try:
            _timeline_elsewhere(summary.get("timeline"), place, found)
        except ODD as error:
            found.notes.append(f"{place}: its timeline: {_reason(error)}")
    try:
        found.study = _study(folder)
    except ODD as error:
        told = isinstance(error, HvdtrainError)
        found.notes.append(f"{'' if told else 'the study: '}{_reason(error)}")
    return found


def _reason(error: Exception) -> str:
    """What was wrong: the words of an error that was meant to be read, the kind of any other."""
    meant = isinstance(error, OSError | ValueError | HvdtrainError)
    return str(error) if meant else f"not in the form expected ({error!r})"


def _files(folder: Path) -> Iterator[Path]:
    """The files below ``folder``, by name; hidden ones and what was set aside not."""
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(
            name for name in folders if depth < DEEPEST and not name.startswith((".", "before-"))
        )
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _json(path: Path, place: Path, found: Found) -> None:
    """Take in a summary or a timeline; any other file is nothing to us."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if start.startswith((b"[", b"\x1f\x8b")):
        facts, _ = analyse(path)
        if facts["file"]["events"]:
            found.timelines[place] = facts
    elif start.startswith(b"{") and path.stat().st_size < SUMMARY_BYTES:
        content = json.loads(path.read_bytes())
        if content.keys() >= SUMMARY_KEYS:
            check_summary(content)
            found.summaries[place] = content


def _timeline_elsewhere(name: object, place: Path, found: Found) -> None:
    """Take in the timeline that a summary names, where it lies outside the folder."""
    if not isinstance(name, str) or not name:
        return
    # As the training was given it: from where that was started.
    paths = [base / name for base in (Path(), found.folder, found.folder.resolve().parent)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        found.notes.append(f"{place}: its timeline {name} is not to be found from here")
    elif not any((found.folder / known).resolve() == path.resolve() for known in found.timelines):
        found.timelines[path.resolve()], _ = analyse(path)


def _course(path: Path, place: Path) -> list[Course]:
    """The course in a file of lines; none where no line of it is a record of ours.

    Raises:
        ValueError: some are, and another one is not; the last one may have been cut.
    """
    kinds: dict[str, dict[int, Record]] = {"step": {}, "epoch": {}}
    lines, wrong = path.read_text().splitlines(), ""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            check_record(record)
            # A run that was resumed repeats steps: what came later counts.
            kinds[record["kind"]][int(record["step"])] = record
        except (ValueError, OverflowError, RecursionError) as error:
            if number < len(lines):
                wrong = wrong or f"line {number}: {error}"
    steps, epochs = ([some[step] for step in sorted(some)] for some in kinds.values())
    if wrong and (steps or epochs):
        raise ValueError(wrong)
    return [Course(place, steps, epochs)] if steps or epochs else []


def _checkpoint(path: Path) -> Record:
    nbytes = sum(file.stat().st_size for file in path.parent.iterdir())
    return checkpoint(json.loads(path.read_bytes()), nbytes)


def _study(folder: Path) -> Study | None:
    if (folder / LINES).is_file() or any(folder.glob(f"ranks-*/{LINES}")):
        runs = read_folder(folder)
    elif (folder / TABLE).is_file():
        runs = records.read_table(folder / TABLE)
    else:
        return None
    for run in runs:
        _check_run(run)
    scaling = runs[0].scaling or records.WEAK
    check_alike(runs, scaling, str(folder))
    return make_study(runs, scaling)


def _check_run(run: Run) -> None:
    try:
        check_summary(run.summary)
    except ValueError as error:
        raise ValueError(f"run {run.name}: {error}") from error
