"""What a training shows: plain lines in a file, JSON Lines, and nothing where nothing was asked."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.options import Options
from hvdtrain.system.runtime import terminal
from hvdtrain.training import progress
from hvdtrain.training.progress import Progress
from tests.terminal import screen

STEP = {
    "step": 20,
    "epoch": 1,
    "loss": 0.25,
    "learning_rate": 0.1,
    "images_per_second": 1234.0,
    "seconds_per_step": 0.5,
}
EPOCH: dict[str, Any] = {
    "epoch": 1,
    "step": 30,
    "loss": 0.125,
    "eval_loss": 0.0625,
    "eval_accuracy": 0.9876,
    "eval_samples": 297,
}


def play(show: Progress) -> None:
    show.begin(["the headline"], 100, 0)
    show.step(STEP)
    show.epoch(EPOCH, "accuracy 98.76 %")
    show.message("a remark")
    show.end("the end", [("label", "value")])


def test_a_slow_rate_has_a_decimal(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(Options()).step({**STEP, "images_per_second": 0.2})
    assert "  0.2 images/s  " in capsys.readouterr().out


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    play(Progress(Options()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the headline"
    # 80 steps of half a second are left.
    assert lines[1] == "epoch 2  step 20/100  loss 0.2500  1,234 images/s  0:40 left"
    assert lines[2] == "epoch 2 done: loss 0.1250  test loss 0.0625  accuracy 98.76 %"
    assert lines[3] == "a remark"
    assert any("label" in line and "value" in line for line in lines[4:])
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("changed", "loss"),
    [
        ({"eval_loss": None}, "0.1250"),
        ({"loss": None, "eval_loss": None}, "-"),
        ({"loss": 2.0610e29, "eval_loss": None}, "2.0610e+29"),
    ],
)
def test_an_epoch_without_evaluation_or_update(
    capsys: pytest.CaptureFixture[str], changed: dict[str, float | None], loss: str
) -> None:
    Progress(Options()).epoch({**EPOCH, **changed}, "accuracy -")
    assert capsys.readouterr().out == f"epoch 2 done: loss {loss}\n"


def test_a_line_every_few_seconds_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    show = Progress(Options())
    show.begin([], 100, 0)
    for tenth in range(201):  # 20 seconds
        now = 1000.0 + tenth / 10
        show.step({**STEP, "step": tenth})
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 1 + 20 / progress.PLAIN_SECONDS


def test_quiet_and_other_ranks_say_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for show in (
        Progress(Options(quiet=True, metrics=tmp_path / "m.jsonl")),
        Progress(Options(metrics=tmp_path / "n.jsonl"), writes=False),
    ):
        play(show)
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.jsonl"
    show = Progress(Options(quiet=True, metrics=path))
    show.step(STEP)
    assert json.loads(path.read_text()) == {"kind": "step", **STEP}  # while the training runs
    show.epoch(EPOCH)
    show.end("", [])
    assert json.loads(path.read_text().splitlines()[1]) == {"kind": "epoch", **EPOCH}
    play(Progress(Options(quiet=True, metrics=path)))  # a resumed run goes on in the same file
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "text", ["/scratch/[bold]/x", "/data/[/run]/x", "a:smile:b", "[1, 2]", r"\[red]"]
)
def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], text: str) -> None:
    show = Progress(Options())
    show.begin([text], 1, 0)
    show.message(text)
    show.end("the end", [("checkpoint", text)])
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [text, text]
    assert out.count(text) == 3


def test_escape_sequences_of_a_name_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(Options()).begin(["skipped 1 broken image, e.g. a\x1b]0;title\x07.jpg"], 1, 0)
    assert capsys.readouterr().out == "skipped 1 broken image, e.g. a\\x1b]0;title\\x07.jpg\n"


def test_a_long_line_and_a_long_cell_are_not_cut_in_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "/scratch/" + "a-long-name/" * 15 + "step-000000042"
    show = Progress(Options())
    show.message(long + " " + long)
    show.end("the end", [("checkpoint", long)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == long + " " + long
    assert sum(long in line for line in lines[1:]) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.6, "0:10"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3661, "1:01:01")],
)
def test_the_clock(seconds: float, text: str) -> None:
    assert progress._clock(seconds) == text


def test_a_bar_leaves_the_lines_of_others_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 70)
    others = sys.stdout  # where another rank's words come out too
    written = ""

    def drawn() -> str:
        nonlocal written
        written += capsys.readouterr().out
        return written

    show = Progress(Options())
    show.begin(["the headline"], 100, 0)
    show.step(STEP)
    assert drawn().endswith("\n")  # mpirun passes on whole lines only
    others.write("a word of rank 1\n")
    show.step({**STEP, "step": 21})
    assert drawn().endswith("\n")
    others.write("three\nmore\nwords\n")
    show.epoch(EPOCH)
    show.end("the end", [("label", "value")])
    rows = screen(drawn())
    lines = ("the headline", "a word of rank 1", "words", "epoch 2 done: loss 0.1250")
    positions = [next(at for at, row in enumerate(rows) if row.startswith(text)) for text in lines]
    assert positions == sorted(positions)
    assert {"three", "more"} <= {row.split("━")[0].split(" ")[0] for row in rows}
    bars = [row for row in rows if re.match("epoch 2 [━╸]", row)]
    assert len(bars) == 1  # what was drawn before is gone, the last one stays
    assert "step 21/100" in bars[0]
    assert all(len(row) <= 70 for row in bars)
    assert rows.index(bars[0]) < next(at for at, row in enumerate(rows) if "label" in row)
    assert "\x1b[?25l" not in drawn()  # a run that is killed leaves the cursor where it was


def test_an_evaluation_has_a_bar_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 80)
    written = ""

    def bar() -> str:
        nonlocal written
        assert show._bar
        show._bar.refresh()
        written += capsys.readouterr().out
        (row,) = (row for row in screen(written) if "━" in row)
        return row

    show = Progress(Options(), "samples")
    show.begin(["the headline"], 100, 0)
    try:
        show.step(STEP)
        show.advance(21)  # between two log intervals, of which each is several steps
        figures = r"step 21/100  loss 0\.2500  1,234 samples/s  0:0\d  0:(40|39) left$"
        assert re.match("epoch 2 ━+.* " + figures, bar())
        show.evaluating(0, 120)
        assert re.match(r"evaluating ━+ 0/120 samples  0:00  - left$", bar())
        show.evaluating(40, 120)
        assert re.match(r"evaluating ━+.* 40/120 samples  0:0\d  0:0\d left$", bar())
        show.epoch(EPOCH)
        assert re.match("epoch 2 ━+.* step 21/100", bar())
    finally:
        show.stop()


def test_a_step_that_takes_long_takes_nothing_off_those_after_it() -> None:
    now = progress.time.monotonic()
    table = progress.Bar(progress._Clock())
    task = table.add_task("", total=10, completed=4, each=2.0, stride=1, moved=now - 60)
    assert str(progress._Clock().render(table.tasks[task])) == " 0:00  0:10 left"
    table.update(task, completed=10)
    assert str(progress._Clock().render(table.tasks[task])) == " 0:00  0:00 left"


def test_a_benchmark_shows_neither_epochs_nor_losses(capsys: pytest.CaptureFixture[str]) -> None:
    play(Progress(Options(), speed_only=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["the headline", "step 20/100  1,234 images/s  0:40 left", "a remark"]


def test_an_evaluation_in_a_file_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = Progress(Options())
    for done in (0, 40, 80, 120):
        show.evaluating(done, 120)
    assert capsys.readouterr().out == "evaluating 40/120 images\n"
