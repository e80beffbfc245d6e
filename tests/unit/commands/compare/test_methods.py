"""The methods of a comparison, and the records of its runs; nothing is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.compare import methods
from hvdtrain.commands.compare.methods import (
    LINES,
    CompareOptions,
    Comparison,
    Method,
    choose,
    entries,
    method_words,
    read_trials,
    sent_bytes,
    unavailable_reason,
)
from hvdtrain.commands.study.command_options import default_batch, global_batch
from hvdtrain.commands.study.engine import HostShare
from hvdtrain.commands.study.run import RunOutcome, append_record
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages, Summary
from tests.studies import DDP, SINGLE, WORDS, trial, unavailable_trial

PROGRAM = ("python", "-m", "hvdtrain.mnist")


def test_all_is_the_registry_with_the_baseline_first() -> None:
    chosen = choose(CompareOptions(ranks=3), PROGRAM)
    names = [method.strategy for method in chosen]
    assert names == sorted(STRATEGIES, key=lambda name: name != "single")
    assert {method.compression for method in chosen} == {"none"}
    assert {method.framework for method in chosen} == {"pytorch"}
    assert {method.precision for method in chosen} == {"auto"}
    for method in chosen:
        assert method.ranks == (3 if STRATEGIES[method.strategy].launchers else 1)


def test_the_requested_methods_are_chosen() -> None:
    choice = CompareOptions(
        strategies=("ddp", "single", "ddp"),
        frameworks=("pytorch", "tensorflow"),
        precision=("fp32", "bf16"),
    )
    command = [*PROGRAM, "--precision", "fp64"]
    assert [method.name for method in choose(choice, command)] == [
        *("single-pytorch-fp32-n1", "ddp-pytorch-fp32-n2"),
        *("single-pytorch-bf16-n1", "ddp-pytorch-bf16-n2"),
        *("single-tensorflow-fp32-n1", "ddp-tensorflow-fp32-n2"),
        *("single-tensorflow-bf16-n1", "ddp-tensorflow-bf16-n2"),
    ]
    assert Method("ddp", "pytorch", "fp32", "fp16", 3).name == "ddp-pytorch-fp32-packed-fp16-n3"


def test_the_default_is_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("precision: fp64\ncompression: fp16\n")
    command = [*PROGRAM, "--framework=tensorflow", "--config", str(file)]
    assert choose(CompareOptions(strategies=("single", "horovod")), command) == [
        Method("single", "tensorflow", "fp64"),
        Method("horovod", "tensorflow", "fp64", "fp16", 2),
    ]


def test_options_of_one_strategy() -> None:
    passes = "ddp --accumulate-steps 2"
    choice = CompareOptions(strategies=(passes, "ddp --compression bf16 --lr=1", "ddp", "single"))
    single, slow, compressed, ddp = choose(choice, PROGRAM)
    assert [method.label for method in (single, slow, ddp)] == ["single", passes, "ddp"]
    assert slow.name == "ddp-pytorch-accumulate-steps-2-n2"
    assert method_words([*PROGRAM, "--accumulate-steps=9"], slow, 8)[-2:] == passes.split()[1:]
    assert (compressed.compression, compressed.options) == ("bf16", "--lr=1")
    first, second = choose(CompareOptions(strategies=("single --lr=1", "single")), PROGRAM)
    assert (first.is_baseline, second.is_baseline) == (True, False)  # in any order


def test_values_of_options_may_contain_commas() -> None:
    words = "single, ddp --lr-milestones 1,2,mpi"
    assert entries(words) == ("single", "ddp --lr-milestones 1,2", "mpi")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("dpd", "--strategies dpd: choose from all, "),
        ("ddp 'x", "--strategies .*: No closing quotation"),
        ("ddp --batch-size=3", "--batch-size is not allowed"),
        ("ddp --config x", "--config is not allowed"),
        ("ddp --summary x", "--summary is not allowed"),
    ],
)
def test_invalid_choices_are_reported(strategy: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(CompareOptions(strategies=(strategy,)), PROGRAM)
    with pytest.raises(UsageError, match="--precision fp8: choose from auto, fp64"):
        choose(CompareOptions(precision=("fp8",)), PROGRAM)
    with pytest.raises(UsageError, match="--frameworks jax: choose from pytorch, tensorflow"):
        choose(CompareOptions(frameworks=("jax",)), PROGRAM)


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ((), 16 * 3),  # the recipe of the embedded digits
        (("--data", "mnist"), 64 * 3),
        (("--batch-size", "5"), 15),
        (("--batch_size=5", "--accumulate-steps", "2"), 30),
        (("--global-batch-size", "5", "--accumulate-steps", "2"), 5),
    ],
)
def test_every_row_has_the_global_batch_of_three_ranks(words: tuple[str, ...], batch: int) -> None:
    assert global_batch([*PROGRAM, *words], 3) == batch


def test_the_default_batch_of_each_program() -> None:
    assert default_batch(["python", "-m", "hvdtrain.resnet"]) == 32
    assert default_batch(["python", "-m", "hvdtrain.train", "own.py"]) == 32
    for words in (["python", "train.py"], ["python", "-m", "my.thing"], ["python", "-m"]):
        assert default_batch(words) is None
    with pytest.raises(UsageError, match=r"missing batch size .* --batch-size 32"):
        global_batch(["python", "train.py"], 2)
    with pytest.raises(UsageError, match="--batchsize: no such option; did you mean --batch-size"):
        global_batch([*PROGRAM, "--batchsize", "3"], 2)
    with pytest.raises(UsageError, match=r"batch size .* 0: must be a whole number"):
        global_batch([*PROGRAM, "--batch-size", "0"], 2)


def test_the_options_of_a_method_replace_those_of_the_command() -> None:
    command = [*PROGRAM, "--strategy", "mpi", "--batch-size=5", "--lr", "0.1"]
    compressed = Method("horovod", "tensorflow", "bf16", "fp16", 2)
    assert method_words(command, compressed, 10) == [
        *(*PROGRAM, "--lr", "0.1", "--strategy", "horovod", "--framework", "tensorflow"),
        *("--precision", "bf16", "--compression", "fp16", "--global-batch-size", "10"),
    ]
    assert method_words(command, Method("single", "pytorch"), 10) == [
        *(*PROGRAM, "--lr", "0.1", "--strategy", "single", "--framework", "pytorch"),
        *("--global-batch-size", "10"),
    ]


def test_the_default_overrides_the_command(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("compression: fp16\n")
    words = method_words([*PROGRAM, "--config", str(file)], Method("single", "pytorch"), 4)
    assert words[words.index("--compression") + 1] == "none"


def test_the_reason_for_an_unavailable_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable_reason(Method("ddp", "tensorflow")) == "supports only pytorch"
    monkeypatch.setattr(methods, "is_installed", lambda name: name == "torch")
    assert unavailable_reason(Method("single", "pytorch")) == ""
    assert unavailable_reason(Method("horovod", "pytorch")) == (
        "Horovod is not installed for pytorch: run `hvdtrain install-horovod`"
    )
    assert unavailable_reason(Method("single", "tensorflow")) == (
        "tensorflow is not installed: pip install 'hvdtrain[tensorflow]'"
    )
    monkeypatch.setattr(methods.importlib.metadata, "version", lambda name: "2.3.1")
    assert "needs torch 2.4 or newer, here is 2.3.1" in unavailable_reason(Method("ddp", "pytorch"))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_of_an_allreduce(ranks: int) -> None:
    summary = Summary(gradient_messages=GradientMessages(count=3, bytes=1200))
    # Each rank of a ring sends 1/p of the gradients 2 (p - 1) times.
    sent = sent_bytes(Method("horovod", "pytorch", ranks=ranks), summary)
    assert sent == 2 * (ranks - 1) * 1200 // ranks
    for sharded in ("zero", "fsdp"):  # the parameters are sent, too
        sent = sent_bytes(Method(sharded, "pytorch", ranks=ranks), summary)
        assert sent == 3 * (ranks - 1) * 1200 // ranks
    assert sent_bytes(Method("ddp", "pytorch", ranks=ranks), Summary()) is None
    assert sent_bytes(Method("single", "pytorch"), Summary()) == 0


def comparison(folder: Path, *, repeats: int = 2, batch: int = 64) -> Comparison:
    options = CompareOptions(repeat=repeats, out=folder)
    return Comparison(options, WORDS, HostShare("a machine", 4, 1, 2), (SINGLE, DDP), batch)


def missing(plan: Comparison) -> list[tuple[str, int]]:
    return [(variant.name, repeat) for variant, repeat in plan.missing()]


def test_complete_runs_are_not_repeated(tmp_path: Path) -> None:
    for record in (trial(SINGLE), unavailable_trial(DDP, "no MPI"), trial(SINGLE, 2)):
        append_record(tmp_path / LINES, record)
    assert read_trials(tmp_path)[0] == trial(SINGLE)
    # MPI may be available now.
    assert missing(comparison(tmp_path)) == [(DDP.name, 1), (DDP.name, 2)]
    assert missing(comparison(tmp_path, repeats=3))[-2:] == [(SINGLE.name, 3), (DDP.name, 3)]
    with (tmp_path / LINES).open("a") as file:
        file.write('{"method": ')  # a crash
    assert len(read_trials(tmp_path)) == 3
    with pytest.raises(UsageError, match=r"has runs of another global batch: 64 .* now 32"):
        missing(comparison(tmp_path, batch=32))
    with pytest.raises(UsageError, match="has runs of another command: --lr was not set, now 1"):
        missing(replace(comparison(tmp_path), words=(*WORDS, "--lr=1")))


def test_methods_of_the_same_files_are_rejected(tmp_path: Path) -> None:
    """Spellings of one option, or ``1e-3`` and ``1e+3``."""
    first, second = (replace(DDP, options=f"--lr{separator}1") for separator in " =")
    plan = comparison(tmp_path)
    with pytest.raises(UsageError, match="'ddp --lr 1': the names of its files are those of"):
        replace(plan, methods=(SINGLE, first, second)).missing()
    append_record(tmp_path / LINES, trial(first))
    with pytest.raises(UsageError, match=r"'ddp --lr=1': .* 'ddp --lr 1'; .* or use another --out"):
        replace(plan, methods=(second,)).missing()
    assert missing(replace(plan, methods=(first,))) == [(first.name, 2)]


def test_each_outcome_is_recorded(tmp_path: Path) -> None:
    plan = comparison(tmp_path)
    single, ddp = plan.variants
    plan.record(single, 1, RunOutcome(trial(SINGLE).summary))
    plan.record(ddp, 1, RunOutcome(reason="exit code 9", failed=True))
    failed = unavailable_trial(DDP, "exit code 9", failed=True)
    assert read_trials(tmp_path) == [trial(SINGLE), failed]
    plan.record(ddp, 2, RunOutcome(reason="--foo: no such option", invalid=True))
    with pytest.raises(UsageError, match="cannot be run, even in a single process: --foo"):
        plan.record(single, 2, RunOutcome(reason="--foo", invalid=True))
    assert len(read_trials(tmp_path)) == 3


def test_dry_run_shows_the_command_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("hvdtrain.commands.compare.methods.is_installed", lambda name: True)
    words = ("--strategies", "single,mpi", "--repeat", "2", "--dry-run", "--out", str(tmp_path))
    command = ("python", "-m", "hvdtrain.mnist", "--batch-size", "8")
    assert cli.main(["compare", *words, "--", *command]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition("--summary=")[2].split()[0] for line in shown] == [
        f"{tmp_path}/runs/{name}.json"
        for name in (
            "single-pytorch-n1-1",
            "mpi-pytorch-n2-1",
            "single-pytorch-n1-2",
            "mpi-pytorch-n2-2",
        )
    ]
    assert " -n 1 " in shown[0] and " -n 2 " in shown[1]
    assert all("--global-batch-size 16" in line for line in shown)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeat", "2"], "missing command"),
        (["--", "python", "-m", "hvdtrain.mnist", "--summary=x"], "--summary in the command"),
        (["--", "python", "-m", "hvdtrain.mnist", "--foo"], "--foo: no such option"),
        (
            ["--", "python", "-m", "hvdtrain.mnist", "--strategy", "ddp"],
            "--strategies ddp,single -- ...",
        ),
    ],
)
def test_wrong_use_is_reported(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused("compare", *words)
