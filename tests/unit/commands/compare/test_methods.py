"""The methods of a comparison: selection, commands, and bytes sent; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.commands.compare import methods
from hvdtrain.commands.compare.methods import (
    CompareOptions,
    Method,
    choose,
    entries,
    method_words,
    sent_bytes,
    unavailable_reason,
)
from hvdtrain.commands.study.command_options import default_batch, global_batch
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages, Summary

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
