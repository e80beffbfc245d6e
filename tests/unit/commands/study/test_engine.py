"""The engine of a study: order, missing runs, outcomes and the share of a host; no MPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.compare import methods
from hvdtrain.commands.compare.methods import CompareOptions, Comparison
from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.commands.scaling.sweep import ScalingOptions, Sweep
from hvdtrain.commands.study import engine
from hvdtrain.commands.study.command_options import check_measurable
from hvdtrain.commands.study.engine import (
    HostShare,
    Plan,
    StudyOptions,
    find_share,
    fullest_host,
    time_left,
)
from hvdtrain.commands.study.run import RunOutcome, classify_failure, measure
from hvdtrain.config.command_line import effective_value, value_of, without_option
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Summary
from hvdtrain.system.machine import limits
from hvdtrain.system.runtime.command import Command, CommandResult
from tests.studies import DDP, HOROVOD, SINGLE

OPTIONS = st.lists(st.sampled_from(["--lr", "0.1", "--batch_size", "--batch-size=8", "x"]))
FOUR = tuple(Host(name, 4) for name in "ab")
RAN = RunOutcome(Summary(images_per_second_mean=5.0))


@given(st.lists(st.integers(1, 64), min_size=1, unique=True), st.integers(1, 6))
def test_all_variants_run_equally_often_and_none_is_favoured(
    ranks: list[int], repeats: int
) -> None:
    options = ScalingOptions(ranks=tuple(ranks), repeat=repeats)
    runs = [variant.name for variant, _ in Sweep(options, (), HostShare("a machine")).runs()]
    assert sorted(runs) == sorted([str(number) for number in ranks] * repeats)
    if repeats % 2 == 0:  # a steady drift affects the mean position of each equally
        sums = {sum(i for i, run in enumerate(runs) if run == str(number)) for number in ranks}
        assert len(sums) == 1


def order(runs: list[engine.Planned]) -> str:
    """Return the runs of a comparison: the first letter of a strategy, and the repeat."""
    return " ".join(f"{variant.name[0]}{repeat}" for variant, repeat in runs)


def test_a_variant_without_a_result_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        methods, "unavailable_reason", lambda method: "no GPU" * (method == HOROVOD)
    )
    monkeypatch.setattr(Plan, "command", lambda self, variant, repeat: variant.name)
    failed = RunOutcome(reason="exit code 1", failed=True)
    monkeypatch.setattr(engine, "measure", lambda n, *_: {SINGLE.name: RAN, DDP.name: failed}[n])
    caplog.set_level("INFO")
    options = CompareOptions(repeat=3, out=tmp_path)
    plan = Comparison(options, (), HostShare("a machine"), (SINGLE, DDP, HOROVOD), 64)
    assert order(plan.missing()) == "s1 d1 h1 s2 d2 h2 s3 d3 h3"
    plan.record(plan.variants[0], 1, RAN)
    assert order(plan.missing()) == "d1 h1 s2 d2 h2 s3 d3 h3"
    plan.carry_out(plan.missing())
    outcomes = [(run.method, run.repeat, run.reason) for run in plan.read()]
    reasons = (DDP, 1, failed.reason), (HOROVOD, 1, "no GPU")
    assert outcomes == [(SINGLE, 1, ""), *reasons, (SINGLE, 2, ""), (SINGLE, 3, "")]
    assert "[2/9] ddp pytorch, 2 ranks, run 1 of 3: failed: exit code 1" in caplog.text
    assert "[3/9] horovod pytorch, 2 ranks, run 1 of 3: not available: no GPU" in caplog.text
    assert "[7/9] single pytorch, 1 rank, run 3 of 3 (about" in caplog.text

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "check", stop)
    with pytest.raises(KeyboardInterrupt):
        plan.carry_out(plan.runs())
    assert f"completed runs are kept in {tmp_path}: run the same command again" in caplog.text


def test_a_run_is_a_request_to_launch() -> None:
    share = HostShare("a machine", 4, threads=3, ranks_per_host=4)
    options = StudyOptions(ppn=4, hosts="a:4,b:4")
    expected = {"ppn": 2, "hosts": "a:4"}  # not more than the ranks, no host without a rank
    assert share.request(options, 2, ("x",)) == Request(
        2, ("x",), threads=3, ranks_per_host=4, **expected
    )
    assert share.request(options, 2, ("x",), bind=False) == Request(
        2, ("x",), bind=False, **expected
    )


@pytest.mark.parametrize(
    ("code", "output", "reason", "failed"),
    [
        (2, "hello\nhvdtrain: --precision fp16 needs a GPU\n--\nmpirun\n", "--precision", False),
        (1, "hvdtrain: rank 1 on a: error: no luck\n", "no luck", True),
        (1, "Traceback\n", "exit code 1", True),
        (124, "", "timed out", True),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "a pass does not fit", False),
        (1, "hvdtrain: ResourceExhaustedError: OOM", "a pass does not fit", False),
    ],
)
def test_failed_runs_are_classified(code: int, output: str, reason: str, failed: bool) -> None:
    outcome = classify_failure(CommandResult(Command(("mpirun",)), code, output))
    assert reason in outcome.reason
    assert (outcome.failed, outcome.invalid) == (failed, code == 2)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (None, "No such file"),
        ({"images_per_second_mean": None}, "no images_per_second_mean"),
        ({"images_per_second_mean": 0}, "0 images/s"),
        ({"images_per_second_mean": float("inf")}, "inf images/s"),
        ({"images_per_second_mean": 5.0}, ""),
    ],
)
def test_a_run_needs_a_throughput(
    summary: dict[str, Any] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = tmp_path / "runs" / "a-1"

    def execute(command: Command, **_: Any) -> CommandResult:
        if summary is not None:
            stem.with_name("a-1.json").write_text(json.dumps(summary))
        return CommandResult(command, 0, "the output")

    monkeypatch.setattr("hvdtrain.commands.study.run.run", execute)
    outcome = measure(Command(("mpirun", "-n", "1")), stem, None, "a")
    assert stem.with_name("a-1.log").read_text() == "mpirun -n 1\nthe output"
    assert outcome.failed is bool(message)
    assert message in outcome.reason
    assert outcome == RAN or "the command must accept --summary FILE" in outcome.reason


def test_a_run_does_not_follow_a_link_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a-1.log").write_text("kept")
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"--out: .*runs is not a directory of yours"):
        measure(Command(("true",)), tmp_path / "runs" / "a-1", None, "a")
    assert (tmp_path / "runs" / "a-1.log").read_text() == "kept"


@pytest.mark.parametrize(
    ("code", "output", "shown"),
    [
        (1, "hvdtrain: no luck", True),
        (2, "usage: train.py [-h]", True),  # by argparse
        (2, "hvdtrain: --lr x: not a number", False),  # the reason
        (1, "CUDA out of memory", False),
    ],
)
def test_the_output_of_a_failed_run_is_shown(
    code: int,
    output: str,
    shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(
        "hvdtrain.commands.study.run.run", lambda command, **_: CommandResult(command, code, output)
    )
    measure(Command(("mpirun",)), tmp_path / "runs" / "a-1", None, "a")
    assert (output in caplog.text) is shown


@pytest.mark.parametrize(
    ("durations", "remaining", "text"),
    [
        ({}, "ab", ""),
        ({"a": 10.0}, "abc", " (about 30 s to go)"),  # the mean for new kinds
        ({"a": 10.0, "b": 30.0}, "abc", " (about 60 s to go)"),
        ({"a": 14.0}, "a" * 39, " (about 9 min to go)"),
        ({"a": 86_400.0}, "aaa", " (about 3 days to go)"),
    ],
)
def test_the_time_left_is_estimated_from_completed_runs(
    durations: dict[str, float], remaining: str, text: str
) -> None:
    assert time_left(durations, remaining) == text


@pytest.mark.parametrize(
    ("sizes", "ppn", "hosts", "ranks_per_host"),
    [
        ((1, 2, 4), None, (), 4),
        ((1, 8), 4, FOUR, 4),
        ((1, 2), 4, FOUR, 4),  # as one of several jobs
        ((1, 2), None, FOUR, 2),
        ((1, 8), None, FOUR, 4),
        ((2, 6), None, FOUR, 4),  # the first host is filled, so it has 4 ranks, not 3
    ],
)
def test_the_fullest_host_determines_the_ranks_per_host(
    sizes: tuple[int, ...], ppn: int | None, hosts: tuple[Host, ...], ranks_per_host: int
) -> None:
    assert fullest_host(sizes, ppn, Allocation("PBS", hosts)) == ranks_per_host
    if hosts:  # named hosts may be used in part
        assert fullest_host(sizes, ppn, Allocation("--hosts", hosts)) == ranks_per_host


def test_named_hosts_are_used_in_part(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a:4\nb slots=4\n")
    share = HostShare("a machine", 4, threads=1, ranks_per_host=4)
    for options in (StudyOptions(ppn=4, hosts="a:4,b:4"), StudyOptions(ppn=4, hostfile=file)):
        hosts = [share.request(options, ranks, ("x",)).hosts for ranks in (2, 4, 8)]
        assert hosts == ["a:4", "a:4", "a:4,b:4"]
    assert share.request(StudyOptions(hosts="a:4,b:4"), 2, ("x",)).hosts == "a:4,b:4"


@pytest.mark.parametrize(
    ("sizes", "ppn", "hosts", "message"),
    [
        ((1, 2, 4), 2, Allocation("none"), "-n 4 --ppn 2: only this machine"),
        ((4, 6), 4, Allocation("PBS", FOUR), "-n 6 is not --ppn 4 times"),
        ((8, 12), 4, Allocation("--hosts", FOUR), "-n 12 is not --ppn 4 times the 2 hosts"),
    ],
)
def test_a_size_that_does_not_fit_is_reported_before_the_first_run(
    sizes: tuple[int, ...], ppn: int, hosts: Allocation, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fullest_host(sizes, ppn, hosts)


def test_jobs_with_unequal_parts_of_a_host_are_on_the_same_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch system may confine each job of a study to the cores that it requested."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(limits, "_topology", lambda _, cpu, file: str(cpu))  # a core per CPU
    shares = []
    for ranks in (1, 2):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, count=ranks: set(range(count)))
        shares.append(find_share(StudyOptions(ppn=2), (ranks,)))
    assert [share.cores for share in shares] == [1, 2]
    assert shares[0].machine == shares[1].machine


def test_the_last_of_several_values_counts(tmp_path: Path) -> None:
    words = ["p", "--batch-size", "8", "--lr=1", "--batch_size=16"]
    assert value_of(words, "--batch-size") == "16"
    assert without_option(words, "--batch-size") == ["p", "--lr=1"]
    for name, text in (("a", "lr: 1\nseed: 3\n"), ("b", "lr: 2\n")):
        (tmp_path / name).write_text(text)
    words = ["p", *(f"--config={tmp_path / name}" for name in "ab")]
    assert [effective_value(words, option) for option in ("--lr", "--seed")] == ["2", "3"]


@given(OPTIONS)
def test_a_removed_option_has_no_value(words: list[str]) -> None:
    kept = without_option(words, "--batch-size")
    assert value_of(kept, "--batch-size") is None
    remaining = iter(words)
    assert all(word in remaining for word in kept)  # in the same order
    if value_of(words, "--batch-size") is None:
        assert kept == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing command"),
        (["2", "--", "p"], "'2' is not a command: separate numbers by commas"),
        (["p", "--summary=x"], "--summary in the command"),
        (["p", "--metrics", "x"], "--metrics in the command"),
        (["p", "--checkpoint_dir", "x"], "--checkpoint-dir .* resume"),
        (["p", "--timeline", "x"], "--timeline .* slows"),
        (["p", "--config={}"], "--checkpoint-dir in .*/options.yaml: .*: omit it"),
    ],
)
def test_commands_that_cannot_be_measured(words: list[str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("num-steps: 50\ncheckpoint_dir: x\n")
    with pytest.raises(UsageError, match=message):
        check_measurable([word.format(file) for word in words], {})


def test_a_timeline_set_by_the_environment() -> None:
    check_measurable(["p"], {"HOROVOD_TIMELINE": "DYNAMIC"})  # off until started
    with pytest.raises(UsageError, match="HOROVOD_TIMELINE is set"):
        check_measurable(["p"], {"HOROVOD_TIMELINE": "t.json"})


@pytest.mark.parametrize("text", ["", "a list", "[1, 2]", "{", "timeline:\n", "\0"])
def test_config_may_have_another_meaning_in_other_programs(text: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    for words in ([f"--config={file}"], ["--config", str(tmp_path / "none")], ["--config"]):
        check_measurable(["p", *words], {})
