"""The runs of a study: their files, ``runs/VARIANT-REPEAT`` with suffixes, and their records.

Records are JSON Lines: a line is appended as each run ends, and a crash is tolerated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.commands.study.curves import TrainingCurves, read_curves
from hvdtrain.errors import EXIT_USAGE, UsageError
from hvdtrain.steps.summary import Summary, typed
from hvdtrain.system.files import read_regular
from hvdtrain.system.folder import Folder
from hvdtrain.system.output.text import printable
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, CommandResult, run

log = logging.getLogger(__name__)

Record = TypeVar("Record")
SUMMARY, CURVES, LOG = ".json", ".jsonl", ".log"  # suffixes
SHOWN = 12  # last lines of a failed run's output
MESSAGE = re.compile(r"^hvdtrain: (?:rank \d+ on [^:]*: )?(?:error: )?(.+)$", re.MULTILINE)
NO_MEMORY = re.compile(
    r"out of memory(?!\?)|OutOfMemoryError|ResourceExhausted|can't allocate memory|std::bad_alloc"
)
INVALID = (ValueError, KeyError, TypeError, AttributeError)  # raised by parsing an invalid line


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run: a summary with a throughput, or the reason for its absence."""

    summary: Summary | None = None
    reason: str = ""
    failed: bool = False  # if not, the variant is merely unavailable
    invalid: bool = False  # the program rejected the command


def run_stem(folder: Path, name: str, repeat: int) -> Path:
    """Return the path of a run's files, without their suffixes."""
    return folder / "runs" / f"{name}-{repeat}"


def file_path(stem: Path, suffix: str) -> Path:
    """Return the path of a file of a run: ``stem`` with a suffix."""
    return stem.with_name(stem.name + suffix)


def curves_of(folder: Path, run: Any) -> TrainingCurves | None:
    """Return the training curves of a recorded run; None if no readable file has them."""
    with contextlib.suppress(OSError, ValueError):
        return read_curves(file_path(run_stem(folder, run.variant, run.repeat), CURVES))
    return None


def make_folder(folder: Path) -> None:
    """Create the directory of ``--out``.

    Raises:
        UsageError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error


def measure(command: Command, stem: Path, timeout: float | None, label: str) -> RunOutcome:
    """Run ``command`` to its end, and keep its output in the directory of its files.

    Args:
        command: the command, with the options for its files.
        stem: path of its files, without their suffixes.
        timeout: time limit in seconds.
        label: name of the run in the status line, which also shows the last line of output.

    Raises:
        UsageError: the folder cannot be created, or is not this user's.
    """
    make_folder(stem.parent)
    folder = Folder.named(stem.parent.parent).own(stem.parent.name, "--out: ")
    for suffix in (SUMMARY, CURVES, LOG):  # of an interrupted run
        folder.remove(file_path(stem, suffix).name)

    def show(line: str) -> None:
        if line[:1].isalnum():  # not the frame of a table
            terminal.status(f"{label}: {printable(line)}")

    with terminal.working(f"{label}: starting"):
        result = run(command, on_line=show, timeout=timeout)
    text = f"{result.command.show()}\n{result.output}"
    folder.replace(file_path(stem, LOG).name, text.encode(errors="replace"))
    if result.ok:
        return _measured(file_path(stem, SUMMARY))
    outcome = classify_failure(result)
    # Other programs than hvdtrain's give the reason for exit code 2 in their last lines.
    if outcome.failed or (outcome.invalid and not MESSAGE.search(result.output)):
        for line in result.output.splitlines()[-SHOWN:]:
            log.info("  %s", line)
    if not outcome.failed:
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; see its output in {file_path(stem, LOG)}")


def _measured(path: Path) -> RunOutcome:
    """Return the outcome of a run that ended well."""
    try:
        summary = Summary.read(path, needed=["images_per_second_mean"])
        rate = summary.images_per_second_mean or 0.0
        if 0 < rate < float("inf"):
            return RunOutcome(summary)
        reason = f"{rate} images/s"
    except UsageError as error:
        reason = str(error)
    return RunOutcome(
        reason=f"wrote no throughput to {path} ({reason}): the command must accept --summary FILE "
        "like hvdtrain's trainers, and run at least one step",
        failed=True,
    )


def classify_failure(result: CommandResult) -> RunOutcome:
    """Return the outcome of an unsuccessful run: it failed, or its variant is just unavailable."""
    if NO_MEMORY.search(result.output):
        return RunOutcome(
            reason="a pass does not fit in memory: use more --accumulate-steps in the command, or "
            "with --batches a smaller --batch-size"
        )
    messages = MESSAGE.findall(result.output)
    timed_out = result.exit_code == TIMED_OUT
    reason = "timed out" if timed_out else f"exit code {result.exit_code}"
    invalid = result.exit_code == EXIT_USAGE
    return RunOutcome(
        reason=messages[-1].strip() if messages else reason, failed=not invalid, invalid=invalid
    )


def encode_record(record: Any) -> dict[str, object]:
    """Return the JSON of a dataclass; its ``summary`` is that of a trainer, null for NaN."""
    content = dataclasses.asdict(record)
    return {**content, "summary": record.summary.to_json()} if content["summary"] else content


def read_records(path: Path, kind: type[Record], study: str) -> list[Record]:
    """Return the records in a file; an empty list if it does not exist.

    An incomplete last line, as after a crash, is skipped: its run is repeated.

    Args:
        path: the file.
        kind: the dataclass of a record.
        study: the kind of study, for messages.

    Raises:
        UsageError: it cannot be read, or another line is invalid.
    """
    try:
        lines = read_regular(path).decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(typed(kind, json.loads(line)))
        except INVALID as error:
            if number == len(lines) and not line.endswith("\n"):
                log.warning("%s: the last line is incomplete; its run is repeated", path)
                break
            raise UsageError(
                f"{path}, line {number}: not a run of a {study} ({error!r}); remove the line to "
                "repeat its run"
            ) from error
    return records


def append_record(path: Path, record: Any) -> None:
    """Append a record; an incomplete last line, as after a crash, is replaced.

    Raises:
        UsageError: the file cannot be opened, or is a link, which others may have put there.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): remove it, or use another directory"
        ) from error
    with os.fdopen(handle, "a+b") as file:
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        line = json.dumps(encode_record(record)).encode() + b"\n"
        if lines and not lines[-1].endswith(b"\n"):
            try:
                typed(type(record), json.loads(lines[-1]))  # as `read` counts it
                line = b"\n" + line
            except INVALID:
                file.truncate(sum(map(len, lines[:-1])))
        file.write(line)
