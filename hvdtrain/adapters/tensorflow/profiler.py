"""TensorFlow's profiler; its file, of planes with lines of events, becomes Chrome's JSON format."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.framework import RANK, STEP, Profiler

GPU = "/device:GPU"  # beginning of the name of a plane
START = "profile_start_time"
STEP_NUMBER = "step_num"  # of an event: TensorFlow keeps no `#` in a name


class TensorFlowProfiler(Profiler):
    """Records until ``stop``; ``rank_facts``: the rank, for the trace."""

    def __init__(self, rank_facts: Mapping[str, object]) -> None:
        self._rank_facts = rank_facts
        self._folder = tempfile.TemporaryDirectory(prefix="profile-")
        tf.profiler.experimental.start(self._folder.name)

    @override
    def step(self, number: int) -> AbstractContextManager[Any]:
        trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(
            STEP, step_num=number, _r=1
        )
        return trace

    @override
    def mark(self, name: str) -> AbstractContextManager[Any]:
        trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(name)
        return trace

    @override
    def stop(self, path: Path) -> None:
        tf.profiler.experimental.stop()
        with self._folder:
            (file,) = Path(self._folder.name).rglob("*.xplane.pb")
            content = file.read_bytes()
        with gzip.open(path, "wt") as trace:
            json.dump(chrome_trace(content, self._rank_facts), trace)


def chrome_trace(content: bytes, rank_facts: Mapping[str, object]) -> dict[str, object]:
    """Return the events of a file of TensorFlow's profiler (``XSpace``) in Chrome's format."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace.FromString(content)
    planes = [plane for plane in space.planes if plane.lines]
    # The start of the profile is a value of a plane without events, to which others are relative.
    starts = [
        stat.uint64_value or stat.int64_value
        for plane in space.planes
        for stat in plane.stats
        if plane.stat_metadata[stat.metadata_id].name == START
    ]
    events: list[dict[str, object]] = []
    for number, plane in enumerate(planes, 1):
        events.append(_naming("process_name", number, 0, plane.name))
        for thread, line in enumerate(plane.lines, 1):
            events.append(_naming("thread_name", number, thread, line.display_name or line.name))
            events += _events(plane, line, number, thread)
    return {
        "schemaVersion": 1,
        RANK: rank_facts,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": next(iter(starts), 0),  # since 1970
        "traceEvents": events,
    }


def _naming(kind: str, plane: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": plane, "tid": thread, "ts": 0, "args": {"name": name}}


def _events(plane: Any, line: Any, pid: int, tid: int) -> Iterator[dict[str, object]]:
    """Yield the events of a line; times are microseconds since the start of the profile."""
    start = line.timestamp_ns * 1e-3
    for event in line.events:
        known = plane.event_metadata[event.metadata_id]
        name, kind = known.name, "kernel" if plane.name.startswith(GPU) else "cpu_op"
        if known.display_name == "" and kind == "cpu_op":
            kind = "cpu_runtime"
        if name == STEP:
            stats = {plane.stat_metadata[s.metadata_id].name: s.int64_value for s in event.stats}
            name, kind = f"{STEP}#{stats.get(STEP_NUMBER, 0)}", "user_annotation"
        yield {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": start + event.offset_ps * 1e-6,
            "dur": event.duration_ps * 1e-6,
        }
