"""The record of a rank: samples, files, calls; and actions after an import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.commands.verify.hooks import AfterImport, after, best_effort, replace, watch_writes
from hvdtrain.commands.verify.script.record import (
    Call,
    EnoughError,
    MetricReduction,
    ScriptRecorder,
    read_record,
    summary,
)
from hvdtrain.commands.verify.script.samples import (
    QUIET,
    SampleLog,
    SeenSamples,
    first_epoch,
    repeated,
)
from hvdtrain.steps.sharding import Shards


@pytest.fixture
def recorder(tmp_path: Path) -> ScriptRecorder:
    folder = tmp_path / "record"
    folder.mkdir()
    return ScriptRecorder(folder, 2)


def update(recorder: ScriptRecorder, value: float = 1.0) -> None:
    tensors = [np.full((2, 3), value)]
    recorder.rate(0.1)
    recorder.update(before=tensors, applied=tensors, state=[])


def test_samples_and_their_repetition(recorder: ScriptRecorder) -> None:
    seen = recorder.record.seen
    recorder.samples(np.arange(6.0).reshape(3, 2))
    recorder.samples(np.arange(6.0, 10.0).reshape(2, 2))
    assert (len(seen.marks), recorder.batch) == (5, 5)
    recorder.samples(np.arange(10.0).reshape(5, 2))  # repeated before the update
    recorder.count()
    recorder.samples(np.arange(2.0, 6.0).reshape(2, 2))  # duplicates in the data
    recorder.samples(np.arange(10.0, 14.0).reshape(2, 2))
    assert (len(seen.marks), seen.epoch) == (9, None)
    recorder.count()
    recorder.samples(np.arange(28.0).reshape(14, 2))  # a second epoch
    assert (seen.ends, seen.epoch, recorder.batch) == ([5, 9], 1, 14)


def test_samples_outside_of_the_training_are_not_recorded(recorder: ScriptRecorder) -> None:
    with recorder.waiting("broadcast_optimizer_state"):
        recorder.samples(np.ones((4, 2)))
        assert read_record(recorder.path).waiting == "broadcast_optimizer_state"
    assert (recorder.batch, recorder.record.waiting) == (0, None)
    with pytest.raises(RuntimeError), recorder.waiting("broadcast_parameters"):
        raise RuntimeError("Horovod has been shut down")
    assert recorder.record.waiting == "broadcast_parameters"  # the wait did not end
    assert recorder.ignored == 0


def test_the_record_is_on_disk_before_a_rank_may_be_ended(recorder: ScriptRecorder) -> None:
    """If a rank fails, mpirun ends the others, which can then write nothing any more."""
    recorder.metric("allreduce", [np.float64(2.0)], [np.float64(5.0)])
    assert read_record(recorder.path).metrics == [MetricReduction("allreduce", [2.0], [5.0])]
    recorder.wrote("/work/model.pt")
    assert read_record(recorder.path).written == ["/work/model.pt"]


def test_inspecting_the_data_is_no_training(recorder: ScriptRecorder) -> None:
    recorder.inspect = lambda: recorder.samples(np.ones((3, 2)))
    recorder.finish()
    assert read_record(recorder.path).seen.marks == []


def test_a_loader_s_worker_leaves_the_file_to_its_rank(recorder: ScriptRecorder) -> None:
    recorder.process = os.getppid()
    recorder.wrote("/work/cache.npy")
    assert not recorder.path.exists()


def test_a_lock_is_no_result(recorder: ScriptRecorder) -> None:
    for path in ("/work/data.lock", "/home/me/.horovod_lock", "/work/locked.csv"):
        recorder.wrote(path)
    assert recorder.record.written == ["/work/locked.csv"]


def test_broadcasts_of_single_tensors_are_added_up(recorder: ScriptRecorder) -> None:
    for values in (6, 3):
        recorder.broadcast("broadcast_", values)
    recorder.broadcast("broadcast_object", 1)
    assert recorder.record.calls == [
        Call("broadcast_", 0, values=9),
        Call("broadcast_object", 0, values=1),
    ]


def test_a_failing_listener_does_not_stop_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert best_effort(np.reshape, np.ones(3), (2, 2)) is None
    assert "reshape failed: ValueError" in capsys.readouterr().err


def test_updates_and_their_end(recorder: ScriptRecorder) -> None:
    recorder.samples(np.arange(8.0).reshape(4, 2))
    recorder.local, recorder.loss = [np.ones((2, 3))], 2.5
    update(recorder)
    recorder.end_if_enough()
    recorder.local = [np.ones(7)]  # of another model
    update(recorder, 2.0)
    with pytest.raises(EnoughError):
        recorder.end_if_enough()
    first, second = read_record(recorder.path).updates
    assert (first.samples, second.samples) == (4, 0)
    assert first.local == [1.0] * 6
    assert second.local is None
    assert (first.loss, second.loss) == (2.5, None)
    assert first.before.digest != second.before.digest
    assert recorder.record.ended == "updates"
    recorder.end_if_enough()  # the script may continue to its end


def test_summary_distinguishes_any_bit(recorder: ScriptRecorder) -> None:
    tensor = np.zeros(10_000, np.float32)
    zeros = summary([tensor])
    assert len(zeros.sample) == 64
    tensor[5000] = 1e-30
    assert summary([tensor]).digest != zeros.digest
    assert summary([]).sample == []


def test_only_files_of_the_script_are_recorded(recorder: ScriptRecorder, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    recorder.wrote(str(folder / "model.pt"))
    recorder.wrote(os.path.relpath(folder / "model.pt"))
    recorder.wrote(str(folder / "logs" / ".." / "loss.txt"))
    assert recorder.record.written == [str(folder / "model.pt"), str(folder / "loss.txt")]
    for path in (
        "/dev/null",
        str(folder),
        str(recorder.path),
        str(folder / "__pycache__" / "a.pyc"),
        f"{tempfile.gettempdir()}/tmpabc/x",
        str(Path.home() / ".keras" / "keras.json"),
    ):
        recorder.wrote(path)
    assert len(recorder.record.written) == 2


def test_a_project_below_the_folder_for_temporary_files_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    projects = [tmp_path / name for name in ("torch-mnist", "tmp-runs")]
    for project in projects:
        project.mkdir()
    monkeypatch.chdir(projects[1])
    recorder = ScriptRecorder(tmp_path / "record", 1, projects[0] / "train.py")
    monkeypatch.setattr(recorder, "write", lambda: None)
    for folder in (*projects, tmp_path / "tmpabc"):
        recorder.wrote(folder / "model.pt")
    assert recorder.record.written == [str(project / "model.pt") for project in projects]


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
        "from hvdtrain.commands.verify.script.record import ScriptRecorder\n"
        "from hvdtrain.commands.verify.hooks import on_write\n"
        f"on_write(ScriptRecorder(pathlib.Path({str(tmp_path)!r}), 1).wrote)\n"
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
    after(Number, "double", lambda result, number, *a, **k: seen.append((a, k, result)))
    replace(Number, "double", lambda original, *a, **k: original(*a, **k) + 1)
    after(Number, "absent", lambda *a: seen.append("never"))
    assert Number().double(4) == 9
    assert Number().double(value=5) == 11
    assert seen == [((4,), {}, 8), ((), {"value": 5}, 10)]
    assert Number.double.__doc__ == "Twice."


@pytest.mark.parametrize("late", [False, True])
def test_a_program_does_not_notice_a_replacement_that_fails(late: bool) -> None:
    class Owner:
        calls = 0

        def call(self, fails: bool) -> int:
            self.calls += 1
            if fails:
                raise KeyError("the program's own")
            return 5

    def broken(original: Any, owner: Owner, fails: bool) -> Any:
        if late:
            original(owner, fails)
        raise ValueError("of the watch")

    replace(Owner, "call", broken)
    owner = Owner()
    assert owner.call(fails=False) == 5
    with pytest.raises(KeyError, match="the program's own"):
        owner.call(fails=True)
    assert owner.calls == 2


@pytest.mark.parametrize("stand_in", [False, True])
def test_a_stand_in_is_no_sample(recorder: ScriptRecorder, stand_in: bool) -> None:
    """A rank without a sample in a global batch computes on one of them, with the weight 0."""
    recorder.shards = SimpleNamespace(current=SimpleNamespace(count=0 if stand_in else 1))
    recorder.samples(np.ones((1, 2)))
    update(recorder)
    assert len(recorder.record.seen.marks) == recorder.trained == 1 - stand_in
    recorder.averaged(1)  # len(part.indices), not part.count
    assert recorder.record.stand_ins_counted == stand_in
    recorder.averaged(1)  # of an evaluation
    assert recorder.record.stand_ins_counted == stand_in


def test_a_stand_in_of_keras_is_zeros(recorder: ScriptRecorder) -> None:
    recorder.samples(np.zeros((1, 2)))
    recorder.record.hvdtrain = True
    recorder.samples(np.zeros((1, 2)))
    recorder.samples(np.array([b"a", b"b"], object))
    assert len(recorder.record.seen.marks) == 3


def show(*batches: np.ndarray) -> SeenSamples:
    """Return the samples of batches, with one update for each."""
    log = SampleLog(SeenSamples())
    for batch in batches:
        log.add(batch)
        log.update()
    return log.samples


def rank_of(data: np.ndarray, rank: int, size: int, seed: int, batch: int) -> SeenSamples:
    """Return the record of a rank that trains for two epochs on its parts of the batches."""
    shards = Shards(len(data), batch * size, seed, rank, size)
    return show(
        *(data[part.indices[: part.count]] for epoch in (0, 1) for part in shards.parts(epoch))
    )


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_sample_of_the_second_epoch_counts(size: int, batch: int) -> None:
    """The first batches of the second epoch may contain no earlier sample of the rank."""
    data = np.arange(1501.0)[:, None]
    for seed in range(5):
        ranks = [rank_of(data, rank, size, seed, batch) for rank in range(size)]
        seen = first_epoch(ranks)
        assert sum(map(len, seen)) == len(set().union(*seen)) == 1501, seed


def test_duplicates_in_the_data_are_known_from_a_run_on_one_rank() -> None:
    data = np.arange(300.0)[:, None]
    data[[60, 250, 130]] = data[[10, 20, 290]]  # never in one batch
    for seed in range(5):
        ranks = [rank_of(data, rank, 2, seed, 4) for rank in range(2)]
        single_rank = first_epoch([rank_of(data, 0, 1, seed, 4)])[0]
        seen = first_epoch(ranks)
        assert (len(single_rank), len(seen[0]), len(seen[1])) == (300, 150, 150), seed
        assert len(repeated(single_rank)) == 3
        assert set(seen[0]) & set(seen[1]) <= repeated(single_rank)


def test_ranks_that_draw_all_of_the_data_share_all_samples() -> None:
    data = np.arange(200.0)[:, None]
    ranks = [rank_of(data, 0, 1, seed, 10) for seed in (1, 2)]
    assert set.intersection(*map(set, first_epoch(ranks))) == set(ranks[0].marks)


def test_a_batch_repeated_before_an_update_counts_once() -> None:
    log = SampleLog(SeenSamples())
    for _ in range(2):
        log.add(np.arange(5.0)[:, None])
    log.update()
    assert (len(log.samples.marks), log.samples.ends, log.samples.epoch) == (5, [5], None)


def test_scattered_duplicates_are_no_second_epoch() -> None:
    # Every 25th update repeats the sample of the update before.
    firsts = [number - (number % 25 == 24) for number in range(200)]
    samples = show(*(np.array([[first], [1000.0 + n]]) for n, first in enumerate(firsts)))
    assert (samples.epoch, len(repeated(samples.marks))) == (None, 8)
    assert len(first_epoch([samples])[0]) == 400


def test_a_long_training_is_not_recorded_to_its_end() -> None:
    samples = show(*(batch for _ in range(50) for batch in np.arange(40.0).reshape(10, 4, 1)))
    assert samples.epoch == 10
    assert len(samples.marks) == 40 + (QUIET + 1) * 4


def test_a_large_dataset_is_recorded_to_its_end() -> None:
    samples = show(*np.split(np.arange(60_000.0)[:, None], 60))
    assert len(samples.marks) == 60_000
