"""The record of a rank: samples, files, calls; and actions after an import."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.commands.verify.hooks import AfterImport, after, best_effort, replace, watch_writes
from hvdtrain.commands.verify.script.record import EnoughError, Record, summary


@pytest.fixture
def record(tmp_path: Path) -> Record:
    folder = tmp_path / "record"
    folder.mkdir()
    return Record(folder, 2)


def update(record: Record, value: float = 1.0) -> None:
    tensors = [np.full((2, 3), value)]
    record.rate(0.1)
    record.update(before=tensors, applied=tensors, after=tensors, state=[])


def test_samples_and_their_repetition(record: Record) -> None:
    record.samples(np.arange(6.0).reshape(3, 2))
    record.samples(np.arange(6.0, 10.0).reshape(2, 2))
    assert (len(record.data["rows"]), record.batch) == (5, 5)
    record.samples(np.arange(10.0).reshape(5, 2))  # repeated before the update
    record.count()
    record.samples(np.arange(2.0, 6.0).reshape(2, 2))  # duplicates in the data
    record.samples(np.arange(10.0, 14.0).reshape(2, 2))
    assert (len(record.data["rows"]), record.data["epoch"]) == (9, None)
    record.count()
    record.samples(np.arange(28.0).reshape(14, 2))  # a second epoch
    assert (record.data["ends"], record.data["epoch"], record.batch) == ([5, 9], 1, 14)


def test_samples_outside_of_the_training_are_not_recorded(record: Record) -> None:
    with record.waiting("broadcast_optimizer_state"):
        record.samples(np.ones((4, 2)))
        assert json.loads(record.path.read_text())["waiting"] == "broadcast_optimizer_state"
    assert (record.batch, record.data["waiting"]) == (0, None)
    with pytest.raises(RuntimeError), record.waiting("broadcast_parameters"):
        raise RuntimeError("Horovod has been shut down")
    assert record.data["waiting"] == "broadcast_parameters"  # the wait did not end
    assert record.ignored == 0


def test_the_record_is_on_disk_before_a_rank_may_be_ended(record: Record) -> None:
    """If a rank fails, mpirun ends the others, which can then write nothing any more."""
    record.metric("allreduce", [np.float64(2.0)], [np.float64(5.0)])
    assert json.loads(record.path.read_text())["metrics"] == [["allreduce", [2.0], [5.0]]]
    record.wrote("/work/model.pt")
    assert json.loads(record.path.read_text())["written"] == ["/work/model.pt"]


def test_inspecting_the_data_is_no_training(record: Record) -> None:
    record.inspect = lambda: record.samples(np.ones((3, 2)))
    record.finish()
    assert json.loads(record.path.read_text())["rows"] == []


def test_a_loader_s_worker_leaves_the_file_to_its_rank(record: Record) -> None:
    record.data["process"] = os.getppid()
    record.wrote("/work/cache.npy")
    assert not record.path.exists()


def test_a_lock_is_no_result(record: Record) -> None:
    for path in ("/work/data.lock", "/home/me/.horovod_lock", "/work/locked.csv"):
        record.wrote(path)
    assert record.data["written"] == ["/work/locked.csv"]


def test_broadcasts_of_single_tensors_are_added_up(record: Record) -> None:
    for values in (6, 3):
        record.broadcast("broadcast_", values)
    record.broadcast("broadcast_object", 1)
    assert record.data["calls"] == [
        {"name": "broadcast_", "update": 0, "values": 9},
        {"name": "broadcast_object", "update": 0, "values": 1},
    ]


def test_a_failing_listener_does_not_stop_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert best_effort(np.reshape, np.ones(3), (2, 2)) is None
    assert "reshape failed: ValueError" in capsys.readouterr().err


def test_updates_and_their_end(record: Record) -> None:
    record.samples(np.arange(8.0).reshape(4, 2))
    record.local = [np.ones((2, 3))]
    update(record)
    record.end_if_enough()
    record.local = [np.ones(7)]  # of another model
    update(record, 2.0)
    with pytest.raises(EnoughError):
        record.end_if_enough()
    first, second = json.loads(record.path.read_text())["updates"]
    assert (first["rows"], second["rows"]) == (4, 0)
    assert first["local"]["sample"] == [1.0] * 6
    assert second["local"] is None
    assert first["before"]["digest"] != second["before"]["digest"]
    assert record.data["ended"] == "updates"
    record.end_if_enough()  # the script may continue to its end


def test_summary_distinguishes_any_bit(record: Record) -> None:
    tensor = np.zeros(10_000, np.float32)
    zeros = summary([tensor])
    assert len(zeros["sample"]) == 64
    tensor[5000] = 1e-30
    assert summary([tensor])["digest"] != zeros["digest"]
    assert summary([]) == {"digest": summary([])["digest"], "sample": []}


def test_only_files_of_the_script_are_recorded(record: Record, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    record.wrote(str(folder / "model.pt"))
    record.wrote(os.path.relpath(folder / "model.pt"))
    record.wrote(str(folder / "logs" / ".." / "loss.txt"))
    assert record.data["written"] == [str(folder / "model.pt"), str(folder / "loss.txt")]
    for path in (
        "/dev/null",
        str(folder),
        str(record.path),
        str(folder / "__pycache__" / "a.pyc"),
        f"{tempfile.gettempdir()}/tmpabc/x",
        str(Path.home() / ".keras" / "keras.json"),
    ):
        record.wrote(path)
    assert len(record.data["written"]) == 2


def test_writes_are_seen_for_all_ways_to_open(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    with watch_writes() as paths:
        (tmp_path / "a").write_text("x")
        os.close(os.open(tmp_path / "b", os.O_CREAT | os.O_WRONLY))
        np.save(tmp_path / "c.npy", np.ones(2))
        with (tmp_path / "old").open("ab"):
            pass
        (tmp_path / "old").read_text()
    (tmp_path / "later").write_text("x")
    assert paths == [str(tmp_path / name) for name in ("a", "b", "c.npy", "old")]


def test_opening_within_tempfile_does_not_deadlock(tmp_path: Path) -> None:
    # tempfile calls the listener while it holds a lock and tests its folder.
    program = (
        "import pathlib, tempfile\n"
        "from hvdtrain.commands.verify.script.record import Record\n"
        "from hvdtrain.commands.verify.hooks import on_write\n"
        f"on_write(Record(pathlib.Path({str(tmp_path)!r}), 1).wrote)\n"
        "tempfile.tempdir = None\n"
        "tempfile.gettempdir()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "early_module.py").write_text("value = 1\n")
    (tmp_path / "late_module.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import early_module  # type: ignore[import-not-found]

    seen: list[Any] = []
    finder = AfterImport(dict.fromkeys(("early_module", "late_module"), seen.append))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    finder.install()
    assert seen == [early_module]
    assert importlib.util.find_spec("late_module") is not None  # no import yet
    assert seen == [early_module]
    import late_module  # type: ignore[import-not-found]

    assert seen == [early_module, late_module]
    assert late_module.value == 2
    for name in ("early_module", "late_module"):
        monkeypatch.delitem(sys.modules, name)


def test_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    class Number:
        def double(self, value: int) -> int:
            """Twice."""
            return 2 * value

    seen: list[Any] = []
    after(Number, "double", lambda a, k, result: seen.append((a[1:], k, result)))
    replace(Number, "double", lambda original, *a, **k: original(*a, **k) + 1)
    after(Number, "absent", lambda a, k, r: seen.append("never"))
    assert Number().double(4) == 9
    assert Number().double(value=5) == 11
    assert seen == [((4,), {}, 8), ((), {"value": 5}, 10)]
    assert Number.double.__doc__ == "Twice."
