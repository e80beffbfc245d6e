"""The rows of a comparison in closed form, and their table, JSON and CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from hvdtrain import cli
from hvdtrain.commands.compare import plot
from hvdtrain.commands.compare.methods import LINES, CompareOptions, Trial
from hvdtrain.commands.compare.table import (
    MethodResult,
    distance,
    figures,
    headline,
    make_rows,
    read_all_curves,
    unavailable,
)
from hvdtrain.commands.compare.verb import report
from hvdtrain.commands.study.run import encode_record, run_stem
from hvdtrain.errors import UsageError
from tests.studies import (
    DDP,
    HOROVOD,
    PACKED,
    SINGLE,
    trial,
    unavailable_trial,
)

CONTRACT = {
    *("strategy", "framework", "precision", "compression", "ranks", "available", "reason"),
    *("images_per_second", "speedup", "epoch_seconds", "peak_memory_bytes", "bytes_per_step"),
    *("loss_distance", "setup_seconds"),
}
THREE = [
    *(trial(SINGLE, repeat, rate) for repeat, rate in ((1, 90.0), (2, 110.0), (3, 100.0))),
    *(trial(DDP, repeat, rate, hosts=2) for repeat, rate in ((1, 150.0), (2, 250.0), (3, 500.0))),
]


def write(folder: Path, trials: list[Trial]) -> None:
    """Write the files of ``compare``, with a loss of 1 / step, and twice that for ddp."""
    lines = [json.dumps(encode_record(record)) + "\n" for record in trials]
    (folder / LINES).write_text("".join(lines))
    (folder / "runs").mkdir()
    for record in trials:
        stem = run_stem(folder, record.method.name, record.repeat)
        factor = 1 + (record.method == DDP)
        steps = [{"kind": "step", "step": n, "loss": factor / n} for n in (1, 2, 4)]
        text = "".join(json.dumps(step) + "\n" for step in steps)
        if record.summary:
            stem.with_name(stem.name + ".jsonl").write_text(text)


def test_medians_and_ratios() -> None:
    single, ddp = make_rows(THREE)
    assert (single.images_per_second, ddp.images_per_second) == (100.0, 250.0)
    assert (single.speedup, ddp.speedup) == (1.0, 2.5)
    assert (ddp.images_per_second_lowest, ddp.images_per_second_highest) == (150.0, 500.0)
    assert (single.epoch_seconds, ddp.epoch_seconds) == (15.0, 6.0)
    assert ddp.peak_memory_bytes == 3000  # the maximum
    assert ddp.setup_seconds == 6.0
    assert ddp.node_hours_per_epoch == pytest.approx(2 * 6 / 3600)
    assert (single.bytes_per_step, ddp.bytes_per_step) == (0, None)


def test_each_precision_has_a_baseline() -> None:
    low = [replace(method, precision="bf16") for method in (SINGLE, DDP)]
    rows = make_rows([*THREE, trial(low[0], rate=200.0), trial(low[1], rate=300.0)])
    assert [row.speedup for row in rows] == [1.0, 2.5, 1.0, 1.5]
    assert [row.speedup for row in make_rows([trial(DDP)])] == [None]  # nothing to compare with


def test_the_distance_of_two_loss_curves() -> None:
    assert distance({1: 2.0, 2: 1.0, 3: 9.0}, {1: 2.5, 2: 0.25}) == 0.75
    assert distance({1: 2.0}, {2: 2.0}) is None
    assert distance({}, {}) is None


def test_unavailable_rows() -> None:
    absent = unavailable_trial(HOROVOD, "no GPU")
    trials = [*THREE, absent, unavailable_trial(PACKED, "exit code 1", failed=True)]
    rows = make_rows(trials)
    assert [row.available for row in rows] == [True, True, False, False]
    assert (rows[2].reason, rows[3].reason) == ("no GPU", "failed: exit code 1")
    assert (rows[2].precision, rows[2].images_per_second, rows[2].speedup) == (None, None, None)
    assert unavailable(rows) == [
        "horovod (pytorch): not available: no GPU",
        "horovod + fp16 gradients (pytorch): failed: exit code 1",
    ]
    newer = make_rows([*trials, trial(HOROVOD, 2)])  # installed since
    assert newer[2].available


def test_the_table_has_no_empty_columns() -> None:
    table = figures(make_rows(THREE))
    header, cells = table.header, table.rows
    assert header == [
        *("strategy", "ranks", "images/s", "range", "speed-up", "epoch", "memory"),
        *("busy", "node-h", "sent", "set-up"),
    ]
    assert cells[1][:6] == ["ddp", "2", "250.00", "150.00 ... 500.00", "2.50", "6.00 s"]
    assert [name for name, _ in table.meanings] == [n for n in header if n not in header[:3]]
    assert dict(table.meanings)["busy"].startswith("of the GPU, or of the cores of a rank")
    assert headline(THREE) == (
        "mnist small pytorch fp32, global batch 64 in every row, 1 thread per rank, a machine"
    )
    slow = make_rows([trial(SINGLE, rate=0.1)])  # 15,000 s
    assert figures(slow).rows[0][4] == "4.2 h"
    mixed = [trial(SINGLE), trial(replace(SINGLE, framework="tensorflow"))]
    assert figures(make_rows(mixed)).header[:2] == ["strategy", "framework"]


def test_csv_and_json_have_the_same_keys(tmp_path: Path) -> None:
    write(tmp_path, THREE)
    report(CompareOptions(out=tmp_path))
    rows = list(csv.DictReader((tmp_path / "compare.csv").read_text().splitlines()))
    assert set(rows[0]) >= CONTRACT
    assert (rows[1]["strategy"], float(rows[1]["speedup"])) == ("ddp", 2.5)
    assert set(MethodResult.__dataclass_fields__) == set(rows[0])


def test_results_are_reported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [*THREE, unavailable_trial(HOROVOD, "no GPU")])
    words = ["compare", "--out", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    single, ddp, horovod = data["rows"]
    assert set(single) >= CONTRACT
    assert (single["loss_distance"], ddp["loss_distance"]) == (0.0, 1.0)  # 2 / 1 - 1 / 1
    assert (horovod["available"], horovod["reason"]) == (False, "no GPU")
    assert (tmp_path / "compare.csv").read_text().startswith("strategy,framework,")
    assert (tmp_path / "compare.pdf").read_bytes().startswith(b"%PDF")
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "loss: largest difference of the training loss" in text
    assert "horovod (pytorch): not available: no GPU" in text


def test_the_loss_of_each_repeat_counts_after_one_that_failed(tmp_path: Path) -> None:
    runs = [trial(method, repeat) for method in (SINGLE, DDP) for repeat in (1, 2, 3)]
    failed = unavailable_trial(DDP, "exit code 9", failed=True)
    trials = [failed if run.method == DDP and run.repeat == 1 else run for run in runs]
    write(tmp_path, trials)
    stem = run_stem(tmp_path, DDP.name, 3)
    step = {"kind": "step", "step": 1, "loss": 4.0}
    stem.with_name(stem.name + ".jsonl").write_text(json.dumps(step) + "\n")
    ddp = make_rows(trials, curves=read_all_curves(trials, tmp_path))[1]
    assert (ddp.repeats, ddp.loss_distance) == (2, 2.0)  # the median of 2 - 1 and 4 - 1


@pytest.mark.parametrize("successful", [[], [2, 3]])
def test_a_failed_run_is_a_failure(
    successful: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trial(SINGLE, repeat) for repeat in (1, 2, 3)]
    failed = unavailable_trial(DDP, "exit code 9", failed=True)
    trials = [*runs, failed, *(trial(DDP, repeat) for repeat in successful)]
    write(tmp_path, trials)
    for repeat in successful:
        late = {"kind": "epoch", "step": 2, "epoch": 1, "elapsed": 9.0, "eval_accuracy": 0.9}
        stem = run_stem(tmp_path, DDP.name, repeat)
        stem.with_name(stem.name + ".jsonl").write_text(json.dumps(late) + "\n")
    words = ["compare", "--out", str(tmp_path), "--target", "accuracy=0.9"]
    assert cli.main(words) == 1
    reason = "failed: run 1 of 3: exit code 9" if successful else "failed: exit code 9"
    text = " ".join(capsys.readouterr().out.split())
    assert f"ddp (pytorch{', fp32' * bool(successful)}): {reason}" in text
    assert cli.main([*words, "--json"]) == 1
    ddp = json.loads(capsys.readouterr().out)["rows"][1]
    assert (ddp["available"], ddp["repeats"]) == (bool(successful), len(successful))
    assert (ddp["reason"], ddp["target_seconds"]) == (reason, None)
    again = make_rows([*trials, trial(DDP)])[1]  # the failed run, repeated
    assert (again.reason, again.repeats) == (None, len(successful) + 1)


def test_a_comparison_without_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results in"):
        report(CompareOptions(out=tmp_path))
    write(tmp_path, [unavailable_trial(DDP, "no GPU")])
    result = report(CompareOptions(out=tmp_path))
    assert "no method could be measured" in result.text
    assert result.data["files"] == [str(tmp_path / "compare.csv")]


def test_the_page_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [*THREE, unavailable_trial(HOROVOD, "<b>no GPU</b>")])
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"] == 1
    page = (tmp_path / "report.html").read_text()
    assert "published" not in page and "1786 s" not in page
    for words in (
        *("Comparison of methods", "Throughput by method", "Memory and speed by method"),
        *("horovod (pytorch): not available: &lt;b&gt;no GPU", "global batch 64 in every row"),
    ):
        assert words in page, words


def test_no_marker_is_cut_off() -> None:
    for name, figure in plot.panel_figures(make_rows(THREE)):
        (axes,) = figure.axes
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        if name == "Memory and speed":
            points = [tuple(marks.get_offsets()[0]) for marks in axes.collections]
            assert all(x < 0.95 * right and y < 0.95 * top for x, y in points)
            assert len(points) == 2
        else:
            assert max(bar.get_width() for bar in axes.patches) < right
        plt.close(figure)


def test_the_time_to_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [trial(SINGLE), trial(SINGLE, 2), trial(DDP), trial(DDP, 2), trial(HOROVOD)])
    # A single process takes 8 s and 12 s to an accuracy of 0.9, ddp 5 s; horovod never reaches it.
    for method, repeat, seconds, accuracy in (
        *((SINGLE, 1, 8.0, 0.9), (SINGLE, 2, 12.0, 0.95), (DDP, 1, 5.0, 0.9), (DDP, 2, 5.0, 0.9)),
        (HOROVOD, 1, 5.0, 0.89),
    ):
        stem = run_stem(tmp_path, method.name, repeat)
        early = {"kind": "epoch", "step": 1, "epoch": 0, "elapsed": 1.0, "eval_accuracy": 0.1}
        late = {**early, "step": 2, "epoch": 1, "elapsed": seconds, "eval_accuracy": accuracy}
        text = f"{json.dumps(early)}\n{json.dumps(late)}\n"
        stem.with_name(stem.name + ".jsonl").write_text(text)
    words = ["compare", "--out", str(tmp_path), "--target", "accuracy=0.9"]
    assert cli.main([*words, "--json"]) == 0
    single, ddp, horovod = json.loads(capsys.readouterr().out)["rows"]
    assert (single["target_seconds"], single["target_speedup"]) == (10.0, 1.0)
    assert (ddp["target_seconds"], ddp["target_speedup"]) == (5.0, 2.0)
    assert (horovod["target_seconds"], horovod["target_speedup"]) == (None, None)
    assert cli.main(words) == 0
    assert "target accuracy 0.9" in capsys.readouterr().out
