"""The command line of the trainers: accepted and refused options, and messages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdtrain.config.checks import check, of_device
from hvdtrain.config.command_line import parse
from hvdtrain.config.declare import REMOVED, switch
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.config.values import count, fraction, non_negative, numbers, positive
from hvdtrain.errors import UsageError
from hvdtrain.workloads.data.image_folder import ImageOptions
from hvdtrain.workloads.mnist.data import MnistOptions


@dataclass(frozen=True)
class Every(ImageOptions, MnistOptions):
    """Options of all workloads."""


@dataclass(frozen=True)
class Drawn(Options):
    """Options of a task of one's own, two of which exclude one another."""

    synthetic: bool = switch("whether the data is drawn")
    mean: bool = switch("draw the mean", either="moment")
    deviation: bool = switch("draw the deviation", either="moment")


def read(*arguments: str, kind: type[Options] = Every) -> Any:
    return parse("mnist", arguments, description="words", epilog="end", kind=kind)


def refusal(*arguments: str, kind: type[Options] = Every) -> str:
    with pytest.raises(UsageError) as caught:
        read(*arguments, kind=kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Of each kind: option, its value on the command line (None: a switch), the parsed value.
KINDS: list[tuple[str, str | None, Any]] = [
    ("framework", "tensorflow", "tensorflow"),
    *(("strategy", name, name) for name in STRATEGIES),
    ("data", "/some/my_data", Path("/some/my_data")),
    ("synthetic", None, True),
    ("model", "small", "small"),
    ("num-steps", "5e9", 5_000_000_000),
    ("num-steps", "0", 0),
    ("batch-size", "1e3", 1000),
    ("lr", "5e-2", 0.05),
    ("lr-milestones", "0.5", (0.5,)),
    ("momentum", "0", 0.0),
    ("seed", "18446744073709551615", 2**64 - 1),
    ("evaluate-epochs", "21,31,37", (21, 31, 37)),
    ("tracker", "mlflow=some/my_runs", ("mlflow=some/my_runs",)),
]
SPELLED = ("num-steps", "lr-milestones", "data", "synthetic", "evaluate-epochs")


def field_of(option: str) -> str:
    return option.replace("-", "_")


@pytest.mark.parametrize(("option", "value", "result"), KINDS)
def test_an_option_of_each_kind_in_every_spelling(
    option: str, value: str | None, result: Any
) -> None:
    for name in {option, field_of(option)} if option in SPELLED else {option}:
        lines = [[f"--{name}"]]
        if value is not None:
            lines = [[f"--{name}", value], [f"--{name}={value}"]]
        for line in lines:
            assert read(*line) == dataclasses.replace(Every(), **{field_of(option): result})


def test_an_evaluation() -> None:
    options = read("--predict", "p.csv", "--checkpoint", "c/step-000000004")
    assert (options.predict, options.checkpoint) == (Path("p.csv"), Path("c/step-000000004"))
    assert options.evaluates_only
    assert read("--evaluate-only", "--checkpoint-dir=c", "--epochs=3").evaluates_only
    assert not read("--checkpoint-dir=c").evaluates_only


def test_a_checkpoint_on_the_line_wins_over_the_directory_of_a_file(tmp_path: Path) -> None:
    file = config(tmp_path, "checkpoint-dir: d\ncheckpoint-every: 5\nresume: must\n")
    options = read(file, "--evaluate-only", "--checkpoint=c")
    assert (options.checkpoint, options.checkpoint_dir) == (Path("c"), None)


@pytest.mark.parametrize(
    ("value", "span"), [("3:9", (3, 9)), ("3:", (3, None)), (":9", (0, 9)), ("0:1e3", (0, 1000))]
)
def test_a_window_of_steps(value: str, span: tuple[int, int | None]) -> None:
    assert read("--timeline=t.json", "--timeline-steps", value).timeline_steps == span


def test_trackers_and_ranks_to_profile_in_each_spelling(tmp_path: Path) -> None:
    several = ("wandb", "mlflow=a,b", "tensorboard=logs")
    line = [word for choice in several for word in ("--tracker", choice)]
    assert read(*line).tracker == several
    file = config(tmp_path, "tracker: [wandb, 'mlflow=a,b', tensorboard=logs]\n")
    assert read(file).tracker == several
    assert read(file, "--tracker=wandb").tracker == ("wandb",)  # the line wins
    assert read(config(tmp_path, "tracker: mlflow\n")).tracker == ("mlflow",)
    for words in (["--tensorboard", "my logs"], ["--tensorboard=my logs"]):
        assert read(*words).tracker == ("tensorboard=my logs",)
    assert read(config(tmp_path, "tensorboard: my logs\n")).tracker == ("tensorboard=my logs",)
    for words in (["--tensorboard"], ["--tensorboard="], ["--tensorboard", "--quiet"]):
        assert refusal(*words) == "--tensorboard: expected one argument"
    assert "line 1: tensorboard: expected" in refusal(config(tmp_path, "tensorboard: true\n"))
    for words in (["--profile-ranks=0,3,0"], ["--profile-ranks", "0", "3"]):
        assert read("--profile=2:4", *words).profile_ranks == (0, 3)


def test_a_variable_in_stage_is_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/local/job 7")
    assert read("--data=d", "--stage=/tmp").stage == Path("/tmp")
    assert read("--data=d", "--stage=$SCRATCH/x").stage == Path("/local/job 7/x")
    assert read("--data=d", "--stage=${SCRATCH}").stage == Path("/local/job 7")
    monkeypatch.delenv("SCRATCH")
    assert "$SCRATCH is not set on this host" in refusal("--data=d", "--stage=$SCRATCH/x")
    assert "--stage needs --data" in refusal("--stage=/tmp")


# Of each kind: an option and wrong values of it.
WRONG = {
    "--epochs": ("0", "1.5", "many", "-1", "nan", "inf", ""),
    "--num-steps": ("-1", "1e999"),
    "--batch_size": ("0", "1e10"),
    "--lr": ("-0.1", "nan", "inf", "fast"),
    "--lr-milestones": ("30,x", "", "30,,60"),
    "--evaluate-epochs": ("0", "21,"),
    "--momentum": ("1", "nan", "-0.1"),
    "--seed": ("-1", "99999999999999999999", "x"),
    "--accumulate-steps": ("1e29",),
    "--checkpoint-every": ("0", "auto"),
    "--framework": ("jax", ""),
    "--data": ("",),
    "--stage": ("",),
    "--config": ("",),
    "--timeline-steps": ("9:3", "3:3", "3", "a:b", "-1:4", "1:2:3", "1.5:2", ""),
    "--tracker": ("comet", "", "=runs", "mlflow=", "wandb,mlflow", "mlflow=http://me:pass@host"),
    "--profile-ranks": ("-1", "0,", "all"),
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_value_is_one_line_that_names_the_option(option: str) -> None:
    for value in WRONG[option]:
        for line in ([option, value], [f"{option}={value}"]):
            assert refusal(*line).startswith(option.replace("_", "-") + ": ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--batchsize", "64"], ["--batchsize", "--batch-size"]),
        (["--epoch=3"], ["--epoch:", "--epochs"]),  # no abbreviations either
        (["--zzzzzzzz"], ["--zzzzzzzz", "--help"]),
        (["somewhere"], ["somewhere"]),
        (["--lr"], ["--lr"]),
        (["--epochs", "--quiet"], ["--epochs"]),
        (["--quiet=5"], ["--quiet"]),
        (["--stge", "d"], ["did you mean --stage?"]),
        (["--learning-rate", "0.1"], ["--learning-rate: no such option; did you mean --lr?"]),
        (["--num_epochs=3"], ["did you mean --epochs?"]),
        (["--max_steps=3"], ["did you mean --num-steps?"]),
        (["--nproc-per-node=3"], ["see python -m hvdtrain", "--help"]),  # of launch
        (["--strategy=magic"], ["'magic'", ", ".join(STRATEGIES)]),
        (["--lr-schedule=step"], ["'step'", "constant, linear, cosine, polynomial, multistep"]),
    ],
)
def test_a_wrong_command_line_is_reported(line: list[str], words: list[str]) -> None:
    message = refusal(*line)
    assert all(word in message for word in words)


@pytest.mark.parametrize("removed", [name for name in REMOVED if name.startswith("--")])
def test_what_replaces_a_removed_option_or_value(removed: str, tmp_path: Path) -> None:
    option, _, value = removed.partition(" ")
    subject = f"{option}: {value}" if value else option
    name = option.removeprefix("--")
    for line in (
        [option, value or "1"],
        [f"{option}={value or 1}"],
        [f"--{name.replace('-', '_')}={value}"],
    ):
        assert refusal(*line) == f"{subject} was removed: {REMOVED[removed]}"
    message = refusal(config(tmp_path, f"{name}: {value or 'true'}\n"))
    assert message.endswith(f"line 1: {subject.removeprefix('--')} was removed: {REMOVED[removed]}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--batch-size=8", "--global-batch-size=16"], ["--batch-size", "--global-batch-size"]),
        (["--synthetic", "--data=d"], ["--synthetic", "--data"]),
        (["--warmup-steps=3", "--warmup-epochs=1"], ["--warmup-steps", "--warmup-epochs"]),
        (["--warmup-steps=0", "--warmup-epochs=5"], ["--warmup-steps", "--warmup-epochs", "omit"]),
        (["--framework=tensorflow", "--seed=4294967296"], ["--seed 4294967296", "at most 42949"]),
        (["--lr-milestones=5,3"], ["--lr-milestones 5,3", "rising order: 3,5"]),
        (["--lr-milestones=3,3,5.5"], ["--lr-milestones 3,3,5.5", "rising order: 3,5.5"]),
        (
            ["--accumulate-steps=65", "--global-batch-size=64"],
            ["--accumulate-steps 65", "--global-batch-size, 64"],
        ),
        (["--benchmark=training", "--evaluate-only"], ["--benchmark training", "--evaluate-only"]),
        (["--checkpoint-every=5"], ["--checkpoint-every", "--checkpoint-dir"]),
        (["--resume=must"], ["--resume", "--checkpoint-dir"]),
        (["--timeline-steps=3:9"], ["--timeline-steps needs --timeline FILE"]),
        (["--tracker=mlflow", "--tracker=mlflow=d"], ["--tracker mlflow is set twice"]),
        (["--profile-dir=d"], ["--profile-dir needs --profile A:B"]),
        (["--profile-ranks=0,1"], ["--profile-ranks needs --profile A:B"]),
        (["--profile=20:"], ["--profile 20: needs an end, e.g. 20:30"]),
        (["--sync-batchnorm", "--accumulate-steps=2"], ["--sync-batchnorm", "omit one"]),
        (["--compile", "--framework=tensorflow"], ["--compile", "--framework tensorflow"]),
        (["--evaluate-only"], ["--evaluate-only", "--checkpoint ", "--checkpoint-dir"]),
        (["--predict=p"], ["--predict needs", "--checkpoint ", "--checkpoint-dir"]),
        (["--checkpoint=c"], ["--checkpoint ", "--evaluate-only", "--predict", "--checkpoint-dir"]),
        (["--predict=p", "--checkpoint=c", "--checkpoint-dir=d"], ["--checkpoint ", "-dir"]),
        (["--predict=p", "--checkpoint-dir=d", "--resume=never"], ["--resume never", "--predict"]),
        (["--evaluate-only", "--checkpoint=c", "--timeline=t"], ["--timeline", "--evaluate-only"]),
        (["--evaluate-only", "--checkpoint=c", "--profile=2:3"], ["--profile", "--evaluate-only"]),
        (
            ["--benchmark=inference", "--timeline=t"],
            ["--timeline", "--benchmark inference"],
        ),
        (["--benchmark=inference", "--resume=never"], ["--resume never and --benchmark inference"]),
    ],
)
def test_contradictions_name_both_options(line: list[str], words: list[str]) -> None:
    message = refusal(*line)
    assert all(word in message for word in words)


def test_a_workload_refuses_the_options_of_another() -> None:
    assert "--dropout: no such option" in refusal("--dropout=0", kind=ImageOptions)
    assert "--synthetic: no such option" in refusal("--synthetic", kind=MnistOptions)
    assert read("--data=d", "--dropout=0.5", kind=MnistOptions).dropout == 0.5
    assert read("--data=d", "--synthetic", kind=Drawn).synthetic  # a pair only where it is declared
    message = "--mean and --deviation cannot be combined: omit one"
    assert refusal("--deviation", "--mean", kind=Drawn) == message


@pytest.mark.parametrize("option", ["lr-milestones", "evaluate-epochs"])
def test_a_list_in_several_words_is_the_list_with_commas(option: str) -> None:
    name = f"--{option}"
    together, apart = read(f"{name}=30,60,80", "--quiet"), read(name, "30", "60,80", "--quiet")
    assert together == apart
    assert getattr(apart, field_of(option)) == (30, 60, 80)


def test_inference_is_measured_with_and_without_weights() -> None:
    assert read("--benchmark=inference").evaluates_only
    assert read("--benchmark=inference", "--checkpoint=c").checkpoint == Path("c")
    assert not read("--benchmark=training").evaluates_only


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Every(tf32=True), "--tf32 is for GPUs"),
        (Every(precision="fp16"), "--precision fp16 needs a GPU"),
    ],
)
def test_what_needs_a_gpu(options: Options, words: str) -> None:
    check(of_device(options, gpu=True))
    check(of_device(Every(), gpu=False))
    with pytest.raises(UsageError, match=words):
        check(of_device(options, gpu=False))


# --config


def config(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return f"--config={path}"


def test_a_file_of_options(tmp_path: Path) -> None:
    options = read(
        config(
            tmp_path,
            "batch-size: 64\nlr_scaling: sqrt\nnum-steps: 5e9\nlr: 5e-2\nquiet: true\n"
            "synthetic: false\nlr-milestones: [30, 60.5]\ncheckpoint-dir: /some/my_dir\n"
            "epochs: null\nseed: 12\n",
        )
    )
    assert options == Every(
        batch_size=64,
        lr_scaling="sqrt",
        num_steps=5_000_000_000,
        lr=0.05,
        quiet=True,
        lr_milestones=(30.0, 60.5),
        checkpoint_dir=Path("/some/my_dir"),
        seed=12,
    )


def test_a_tilde_is_the_home_directory_and_numbers_are_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "checkpoint-dir: ~/ck\nstage: ~/s\ntracker: [tensorboard=~/runs]\nbatch-size: 010\n"
    text += "data: ~nobody-here/d\ntimeline: a~b\ntimeline-steps: 1:30\n"
    words = [
        f"--{line.replace(': ', '=')}"
        for line in text.replace("[", "").replace("]", "").split("\n")
    ]
    assert (
        read(*words[:-1])
        == read(config(tmp_path, text))
        == Every(
            checkpoint_dir=tmp_path / "ck",
            stage=tmp_path / "s",
            tracker=(f"tensorboard={tmp_path}/runs",),
            batch_size=10,
            data=Path("~nobody-here/d"),
            timeline=Path("a~b"),
            timeline_steps=(1, 30),
        )
    )
    assert read("--config=~/run.yaml") == read("--config", str(tmp_path / "run.yaml"))
    assert read("--tracker=mlflow=http://a/~b").tracker == ("mlflow=http://a/~b",)


def test_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, "epochs: 3\nseed: 5\n")
    for line in ([file, "--epochs", "7"], ["--epochs=3", "--epochs=7", file]):
        options = read(*line)
        assert (options.epochs, options.seed) == (7, 5)


def test_the_last_of_several_files_takes_precedence(tmp_path: Path) -> None:
    for folder, text in (("a", "batch-size: 3\nseed: 5\n"), ("b", "global-batch-size: 7\n")):
        (tmp_path / folder).mkdir()
        config(tmp_path / folder, text)
    first, second = (f"--config={tmp_path / folder}/run.yaml" for folder in "ab")
    assert read(first, second) == Every(global_batch_size=7, seed=5)
    assert read(second, first) == Every(batch_size=3, seed=5)
    assert read(first, second, "--batch-size=9") == Every(batch_size=9, seed=5)


def test_a_default_value_on_the_command_line_takes_precedence_too(tmp_path: Path) -> None:
    assert read(config(tmp_path, "framework: tensorflow\n"), "--framework=pytorch") == Every()
    assert read(config(tmp_path, "# nothing\n")) == Every()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("epochs: 0\n", "line 1: epochs: 0 is not a whole number of 1 or more"),
        ("seed: 1\nepochs: [1, 2]\n", "line 2: epochs: '1,2' is not a number"),
        ("# first\n\nlr: fast\n", "line 3: lr: 'fast' is not a number"),
        ("lr: {a: 1}\n", "line 1: lr: must be text or a number"),
        ("data: [a, b]\n", "line 1: data: must be text or a number"),
        ("seed: 1\nlr-milestones: [1, [2]]\n", "line 2: lr-milestones: must be text or a number"),
        ("optimizer: lion\n", "line 1: optimizer: 'lion': choose from sgd, adam, adamw"),
        (
            "lr: 1\nseed: 1\nbatchsize: 3\n",
            "line 3: batchsize: no such option; did you mean batch-",
        ),
        ("batchsize: false\n", "line 1: batchsize: no such option"),
        ("batch-size: 1:30\n", "line 1: batch-size: '1:30' is not a number"),
        ("quiet: yes\n", "line 1: quiet: 'yes' is not true or false"),
        ("epochs: true\n", "line 1: epochs: must be text or a number"),
        ("config: other.yaml\n", "line 1: config: "),
        ("lr: 1\nepochs: 2\nlr: 3\n", "line 3: lr: line 1"),
        ("batch-size: 1\nbatch_size: 2\n", "line 2: batch_size: line 1"),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_line(
    tmp_path: Path, text: str, word: str
) -> None:
    assert refusal(config(tmp_path, text)).startswith(f"{tmp_path / 'run.yaml'} {word}")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """Others that cannot be read: tests/unit/system/test_settings.py."""
    assert str(tmp_path / "absent.yaml") in refusal("--config", str(tmp_path / "absent.yaml"))


# Readers of single values


@given(st.integers(0, 2**70))
@example(2**53 + 1)
def test_a_count_is_exact_at_any_size(number: int) -> None:
    assert count(str(number)) == number


@given(st.integers(0, 15), st.integers(1, 9999))
def test_counts_in_powers_of_ten(power: int, digits: int) -> None:
    assert count(f"{digits}e{power}") == digits * 10**power
    assert positive(f"{digits}E+{power}") == digits * 10**power


@settings(max_examples=30)
@given(st.text(max_size=8))
def test_readers_return_a_value_or_raise_value_error(text: str) -> None:
    for reader in (count, positive, fraction, non_negative, numbers):
        try:
            value = reader(text)
        except ValueError:
            continue
        assert value is not None


def test_edges_of_the_readers() -> None:
    assert (fraction("0"), fraction("0.999"), numbers([1, 2])) == (0, 0.999, (1.0, 2.0))


def test_wrong_use_of_the_command_is_exit_code_2_and_one_line() -> None:
    line = [sys.executable, "-m", "hvdtrain.mnist", "--batch_size", "0"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--batch-size" in result.stderr
