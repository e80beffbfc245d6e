"""The contents of a report, and the escaping of text from files."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.report.find import look
from hvdtrain.commands.report.page import render
from hvdtrain.commands.scaling.batches import LINES as BATCHES
from hvdtrain.commands.scaling.batches import BatchRun, BatchSetting
from hvdtrain.commands.study.run import append_record
from hvdtrain.steps.summary import Summary
from tests.html import Page
from tests.studies import TUTORIAL, WORDS, run, summary
from tests.timelines import straggling

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


def write_run(folder: Path, **changed: Any) -> None:
    """Write the files of a training."""
    (folder / "checkpoints" / "step-000000020").mkdir(parents=True)
    state = {"step": 20, "position": {"epoch": 2}, "metrics": {"accuracy": 0.875}}
    checkpoint = folder / "checkpoints" / "step-000000020"
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / "model.safetensors").write_bytes(b"x" * 2048)
    fields = {"steps_completed": 20, "seconds_total": 61.0, "eval_accuracy": 0.875, **changed}
    (folder / "summary.json").write_text(json.dumps(summary(2, 1234.0, **fields)))
    lines = [
        {"kind": "step", "step": 10, "step_loss": 2, "learning_rate": 0.1, "images_per_second": 9},
        {"kind": "step", "step": 20, "step_loss": 1, "learning_rate": 0.2, "images_per_second": 9},
        {"kind": "epoch", "step": 20, "loss": 1.5, "eval_loss": 1.25, "eval_accuracy": 0.875},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "options": {"epochs": 2},
        "environment": {"torch": "2.13.0", "variables": {"A": "1"}},
    }
    write_run(tmp_path, **options)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}/report.html: summaries: 1, training curves: 1, checkpoints: 1\n"
    )
    page = (tmp_path / "report.html").read_text()
    for word in (
        *("Training: mnist tutorial", "1,234.0", "87.50 %", "61.0 s", "Loss by step"),
        *("Test accuracy by step", "Learning rate by step", "Throughput by step"),
        *("epochs", "2.13.0", "variables: A", "checkpoints/step-000000020", "2.1 KiB"),
    ):
        assert word in page, word
    Page(page)


def test_titles_and_units_are_those_of_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, workload="mytask", model="mytask", unit="samples")
    page = render(look(tmp_path))
    assert "<h1>Training: mytask</h1>" in page
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Result", "Training curves", "Details", "Checkpoints"]
    assert "samples/s" in tiles(tmp_path) and "images" not in page
    write_run(tmp_path / "second")
    headings = re.findall(r"<h2>(.*?)</h2>", render(look(tmp_path)))
    assert headings[:2] == ["Run summary", "Run second/summary"]


def test_the_parts_of_a_result_are_rows(tmp_path: Path) -> None:
    saves = {"count": 3, "stopped": 1.5, "waited": 0.0, "every": 20}
    write_run(tmp_path, saves=saves)
    page = render(look(tmp_path))
    rows = dict(re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', page))
    assert rows["saves: count"] == "3"
    assert rows["saves: stopped"] == "1.50 s"
    assert rows["saves: every"] == "20"
    assert not any("{" in value for value in rows.values())


def test_a_page_needs_no_network_and_its_text_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "a<b>&"
    folder.mkdir()
    write_run(folder, model=HOSTILE, options={HOSTILE: HOSTILE}, environment={"x": [HOSTILE]})
    (folder / f"{HOSTILE.replace('/', '')}.json").write_text((folder / "summary.json").read_text())
    page = Page(render(look(folder)))
    page.check_self_contained()
    assert "script" not in page.tags
    assert len(page.images) == 4


def test_a_study(tmp_path: Path) -> None:
    for record in (run(1, rate=100), run(2, rate=180), run(2, 2, rate=190), run(4, rate=350)):
        append_record(tmp_path / "results.jsonl", record)
    page = render(look(tmp_path))
    for word in ("Scaling study", "92.5 %", "Parts of a step", "Predicted efficiency"):
        assert word in page, word
    # Each panel is a separate image: a phone shows one below the other.
    assert [image["alt"] for image in Page(page).images] == [
        f"{name} by number of ranks" for name in ("Throughput", "Efficiency", "Parts of a step")
    ]


def tiles(folder: Path) -> dict[str, str]:
    """Return the values on the page by label."""
    pairs = re.findall(r"<div><b>(.*?)</b>(.*?)</div>", render(look(folder)))
    return {label: value for value, label in pairs}


def test_a_run_has_a_tile_for_its_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert tiles(tmp_path)["test accuracy"] == "87.50 %"
    stopped = summary(2, 1234.0, steps_completed=25)  # before the next evaluation
    (tmp_path / "summary.json").write_text(json.dumps(stopped))
    assert tiles(tmp_path)["test accuracy, step 20"] == "87.50 %"
    (tmp_path / "summary.json").unlink()
    assert tiles(tmp_path) == {"test accuracy, step 20": "87.50 %"}
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "summary.json").write_text(json.dumps(stopped))
    assert tiles(tmp_path)["test accuracy"] == "not evaluated"


def test_a_task_without_accuracy_has_a_tile_for_its_first_metric(tmp_path: Path) -> None:
    write_run(tmp_path, eval_accuracy=None, eval_metrics={"map": 0.25, "map50": 0.5})
    assert tiles(tmp_path)["test map"] == "0.25"
    assert "test accuracy" not in tiles(tmp_path)


def test_pictures_are_embedded_in_the_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    for folder in ("pictures", "data"):  # a dataset in the same directory is ignored
        (tmp_path / folder).mkdir()
        for number in range(30):
            (tmp_path / folder / f"{number:03}.jpg").write_bytes(b"JPEG %d" % number)
    contents = look(tmp_path)
    assert [path.name for path in contents.pictures] == [f"{number:03}.jpg" for number in range(24)]
    sources = [image["src"] or "" for image in Page(render(contents)).images]
    shown = [source for source in sources if source.startswith("data:image/jpeg;base64,")]
    assert base64.b64decode(shown[7].partition(",")[2]) == b"JPEG 7"
    assert len(shown) == 24


def test_a_timeline_outside_the_folder_is_included(tmp_path: Path) -> None:
    write_run(tmp_path / "run", timeline="traces/timeline.json")
    contents = look(tmp_path / "run")
    (note,) = contents.notes
    assert note.startswith("summary.json: its timeline traces/timeline.json does not exist")
    (tmp_path / "traces").mkdir()
    path = straggling(10).write(tmp_path / "traces")
    contents = look(tmp_path / "run")
    assert (list(contents.timelines), contents.notes) == ([path.resolve()], [])
    assert "Bound by a straggler" in render(contents)
    write_run(tmp_path / "inside", timeline="timeline.json")  # included once
    straggling(10).write(tmp_path / "inside")
    assert list(look(tmp_path / "inside").timelines) == [Path("timeline.json")]


def test_a_table_is_a_study(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(TUTORIAL)
    assert "59.6 %" in render(look(tmp_path))


def test_the_runs_of_a_batch_size_study_are_named_by_their_batch(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for batch in (16, 64):
        setting = BatchSetting("", batch)
        content = summary(1, steps_completed=7)
        study_run = BatchRun(setting, 1, 1, 16, WORDS, summary=Summary.from_json(content))
        append_record(tmp_path / BATCHES, study_run)
        (tmp_path / "runs" / f"{batch}-1.json").write_text(json.dumps(content))
    page = render(look(tmp_path))
    assert "global batch 16" in page and "global batch 64" in page
    assert "16 ranks" not in page


def test_many_runs_are_a_table(tmp_path: Path) -> None:
    for ranks in (1, 2, 4, 8):
        fields = {"steps_completed": 7, "options": {"lr": ranks, "epochs": 3}}
        text = json.dumps(summary(ranks, **fields))
        (tmp_path / f"{ranks}.json").write_text(text)
    page = render(look(tmp_path))
    options = page[page.index("Options of all runs") :]
    assert "epochs" in options and "lr" not in re.findall(r">(\w+)<", options)
    assert page.count(">8.json</th>") == 1


def test_the_curves_of_a_resumed_run_have_each_step_once(tmp_path: Path) -> None:
    lines = [
        {"kind": "step", "step": step, "loss": loss}
        for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0), (3, 5.0), (4, 4.0))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "step", "st')  # a crash
    (curves,) = look(tmp_path).curves
    assert [(record["step"], record["loss"]) for record in curves.steps] == [
        *((1, 9.0), (2, 6.0), (3, 5.0), (4, 4.0)),
    ]


def test_the_curves_are_those_of_the_last_run(tmp_path: Path) -> None:
    """It was started anew, or resumed from update 4, and made fewer updates than before."""
    runs = {
        "fresh": [("step", 2), ("epoch", 3)],
        "resumed": [("step", 4), ("epoch", 4), ("step", 6), ("epoch", 6)],
        "evaluated first": [("epoch", 4), ("step", 6)],  # with its record, update 4 was saved
    }
    before = [("step", 2), ("epoch", 3), ("step", 4), ("step", 6), ("epoch", 6), ("step", 8)]
    expected = {
        "fresh": ([2], [3]),
        "resumed": ([2, 4, 6], [3, 4, 6]),
        "evaluated first": ([2, 4, 6], [3, 4]),
    }
    for name, records in runs.items():
        lines = [{"kind": kind, "step": step} for kind, step in before + records]
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    for curves in look(tmp_path).curves:
        steps, epochs = (
            [record["step"] for record in kind] for kind in (curves.steps, curves.epochs)
        )
        assert (steps, epochs) == expected[curves.path.parent.name]


def test_lateness_is_shown_if_known_for_most_steps(tmp_path: Path) -> None:
    text = straggling(10).text
    for name, steps in (("all", 10), ("first", 2)):  # with Horovod's cache, only the first ones
        end = text.find(f'"ts": {1_000_000 + 70_000 * steps}')
        end = len(text) if end < 0 else end
        cached = re.sub(r'\{"ph": "X"[^}]*\},', "", text[end:])
        (tmp_path / name).mkdir()
        (tmp_path / name / "timeline.json").write_text(text[:end] + cached)
    assert "last in" in render(look(tmp_path / "all"))
    assert "last in" not in render(look(tmp_path / "first"))


def test_invalid_and_unknown_files_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    (tmp_path / "broken.json").write_text('{"workload": ')
    (tmp_path / "foreign.json").write_text('{"name": "package"}')
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    (tmp_path / "list.json").write_text("[1, 2, 3]")
    (tmp_path / ".hidden.json").write_text("{")
    for name, text in {"profile": '{"schemaVersion": 1, "traceEvents": []}', "cut": "[1]"}.items():
        packed = gzip.compress(text.encode())
        (tmp_path / f"{name}.json.gz").write_bytes(packed[:5] if name == "cut" else packed)
    assert cli.main(["report", str(tmp_path), "--json", "--html", str(tmp_path / "o.html")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["summaries"], data["curves"], data["timelines"]) == (1, 1, 0)
    assert any(note.startswith("broken.json: ") for note in data["left_out"])
    assert not any(re.search("hidden|foreign|profile", note) for note in data["left_out"])
    assert any(note.startswith("cut.json.gz: is empty") for note in data["left_out"])
    assert "broken.json" in (tmp_path / "o.html").read_text()


def test_runs_that_are_not_comparable_are_not_a_study(tmp_path: Path) -> None:
    write_run(tmp_path)
    for record in (run(1), run(2, model="small")):
        append_record(tmp_path / "results.jsonl", record)
    contents = look(tmp_path)
    assert contents.study is None
    assert any("the model is not the same" in note for note in contents.notes)


def test_a_directory_without_results(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused("report", str(tmp_path))
    for word in ("--summary", "--metrics", "--checkpoint-dir", "--timeline", "hvdtrain scaling"):
        assert word in message
    assert list(tmp_path.iterdir()) == []
    assert "no such directory" in refused("report", str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "file: not a directory" in refused("report", str(tmp_path / "file"))


def test_a_page_that_cannot_be_written(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_run(tmp_path)
    assert "o.html cannot be written" in refused(
        "report", str(tmp_path), "--html", str(tmp_path / "no" / "o.html")
    )
