"""N ranks compute what one rank computes, and a resumed run what an uncut one does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import BIN, LONG, on_demand, ranks, run
from tests.parallel import resident
from tests.parallel.conftest import (
    FRAMEWORKS,
    SOME,
    WAYS,
    Training,
    assert_bit_equal,
    assert_close,
    train,
)

EXACT = ("--precision=fp64", "--lr-scaling=none", "--warmup-epochs=0", "--seed=1")
# In CI the small net, three ranks (what two compute, three do with parts that are more uneven), and
# Horovod: each strategy is in test_uneven_parts_and_tail and the resumed runs.
SMALL = () if LONG else ("--model=small",)
MORE = (2, 3) if LONG else (3,)
FEW = WAYS if LONG else [way for way in WAYS if str(way.id).endswith("horovod")]
# Read by the rank itself: test_packed.py compares it with what workers read.
RESNET = ("--model=resnet18", "--image-size=32", "--workers=0")

OneRank = Callable[..., Training]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Train on one rank, once for each framework: there all strategies compute the same."""
    trained: dict[tuple[str, ...], Training] = {}

    def train_once(way: tuple[str, ...], workload: str, *options: str) -> Training:
        words = (way[0], *options)
        if words not in trained:
            folder = tmp_path_factory.mktemp("one-rank")
            trained[words] = train(1, folder, workload, *words, timeout=400)
        return trained[words]

    return train_once


@pytest.mark.parametrize("way", FEW)
def test_thirty_steps_on_mnist(
    way: tuple[str, ...], one_rank: OneRank, mnist: Path, tmp_path: Path
) -> None:
    options = (f"--data={mnist}", "--global-batch-size=96", "--num-steps=30", "--dropout=0")
    one = one_rank(way, "mnist", *options, *SMALL, *EXACT)
    for number in MORE:
        other = train(number, tmp_path / str(number), "mnist", *way, *options, *SMALL, *EXACT)
        assert_close(one, other, 1e-9)
        assert other.summary["eval_samples"] == 10_000
        assert other.summary["eval_accuracy"] == one.summary["eval_accuracy"]
        assert other.summary["train_loss"] == pytest.approx(one.summary["train_loss"], rel=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [107, *([97, 1499] if LONG else [])])
def test_uneven_parts_and_tail(
    way: tuple[str, ...], batch: int, one_rank: OneRank, tmp_path: Path
) -> None:
    # Of 1,500 images such batches leave 2, 45 and 1: at three ranks, or two, a part is empty.
    steps = (f"--global-batch-size={batch}", "--epochs=2", "--clip-norm=0.3", "--dropout=0")
    options = (*steps, "--lr=0.01", *SMALL, *EXACT)
    one = one_rank(way, "mnist", *options)
    two = train(2, tmp_path / "2", "mnist", *way, *options, "--accumulate-steps=4")
    three = train(3, tmp_path / "3", "mnist", *way, *options)
    for other in (two, three):
        assert_close(one, other, 1e-9)
        assert other.summary["samples_trained"] == 3000
        assert other.summary["eval_samples"] == 297


@pytest.mark.parametrize("way", WAYS if LONG else WAYS[:3])
def test_resnet_with_synchronized_batchnorm(
    way: tuple[str, ...], one_rank: OneRank, few_images: Path, imagenette: Path, tmp_path: Path
) -> None:
    # 40 images in batches of 13 leave 1, as do 400 in batches of 133: at 2 and 3 ranks the last
    # step has empty parts. Of 2 images the batch norm of the deepest layers would divide by hardly
    # anything.
    data, batch, evaluated = (imagenette, 133, 120) if LONG else (few_images, 13, 10)
    steps = (f"--data={data}", f"--global-batch-size={batch}", "--epochs=1", "--lr=0.01")
    options = (*steps, *RESNET, "--sync-batchnorm", *EXACT)
    one = one_rank(way, "resnet", *options)
    traces_long = not LONG and "--framework=tensorflow" in way
    for number in (2,) if traces_long else MORE:
        other = train(number, tmp_path / str(number), "resnet", *way, *options, timeout=400)
        assert_close(one, other, 1e-9)
        assert other.summary["eval_samples"] == evaluated


@pytest.mark.parametrize("framework", SOME)
def test_fp32_confirms(framework: str, tmp_path: Path) -> None:
    optimizer = ("--lr=0.01", "--momentum=0", "--lr-scaling=none", "--warmup-epochs=0")
    steps = ("--global-batch-size=96", "--num-steps=30", "--dropout=0", "--seed=1")
    options = (f"--framework={framework}", *steps, *optimizer, *SMALL, "--precision=fp32")
    one = train(1, tmp_path / "1", "mnist", *options)
    for number in MORE:
        other = train(number, tmp_path / str(number), "mnist", *options)
        norm = one.summary["parameter_norm"]
        assert other.summary["parameter_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", MORE)
def test_resumed_mnist_is_bit_equal(way: tuple[str, ...], number: int, tmp_path: Path) -> None:
    options = [*way, "--epochs=4", "--batch-size=64", *SMALL]
    if number == 3:
        options.append("--deterministic")
    uncut = train(number, tmp_path / "uncut", "mnist", *options, "--num-steps=40")
    train(number, tmp_path / "cut", "mnist", *options, "--num-steps=17")
    resumed = train(number, tmp_path / "cut", "mnist", *options, "--num-steps=40", "--resume=must")
    assert_bit_equal(uncut, resumed)
    assert resumed.summary["samples_trained"] == uncut.summary["samples_trained"]
    assert resumed.summary["train_loss"] == pytest.approx(uncut.summary["train_loss"], rel=1e-6)


@on_demand  # test_packed.py resumes a ResNet, too
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resumed_resnet_is_bit_equal(framework: str, imagenette: Path, tmp_path: Path) -> None:
    model = ("--model=resnet18", "--image-size=64", "--batch-size=8", "--epochs=2")  # of 25 steps
    options = (f"--framework={framework}", f"--data={imagenette}", *model)
    # What the ranks read themselves is what workers read ahead.
    line = (*options, "--num-steps=40", "--workers=0")
    uncut = train(2, tmp_path / "uncut", "resnet", *line, timeout=400)
    train(2, tmp_path / "cut", "resnet", *options, "--num-steps=17", timeout=400)
    resumed = train(2, tmp_path / "cut", "resnet", *options, "--num-steps=40", timeout=400)
    assert_bit_equal(uncut, resumed)


@pytest.mark.parametrize("framework", SOME)
def test_resume_on_another_number_of_ranks(framework: str, tmp_path: Path) -> None:
    """The global batch fixed, the whole training is the same whoever does which half of it."""
    steps = ("--global-batch-size=96", "--epochs=2", "--dropout=0")
    options = (f"--framework={framework}", *steps, *SMALL, *EXACT)
    uncut = train(1, tmp_path / "uncut", "mnist", *options)
    train(2, tmp_path / "cut", "mnist", *options, "--num-steps=21")
    resumed = train(3, tmp_path / "cut", "mnist", *options, "--resume=must")
    assert_close(uncut, resumed, 1e-9)
    assert resumed.summary["samples_trained"] == 3000


def test_torchrun_starts_what_mpirun_starts(tmp_path: Path) -> None:
    options = ("--strategy=ddp", "--num-steps=6", "--model=small")
    one = train(2, tmp_path / "mpirun", "mnist", *options, start=ranks)
    folder = tmp_path / "torchrun"
    files = (
        f"--summary={folder / 'summary.json'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
    )
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m"]
    outcome = run([*torchrun, "hvdtrain.mnist", *options, "--quiet", *files], code=0)
    assert_bit_equal(one, Training(outcome, folder))


def test_torchrun_with_horovod_is_told(tmp_path: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m"]
    launch = [sys.executable, "-m", "hvdtrain.cli", "launch", "-n", "2", "--launcher=torchrun"]
    by_hand = run([*torchrun, "hvdtrain.mnist"])
    by_launch = run([*launch, "--", sys.executable, "-m", "hvdtrain.mnist"])
    assert (by_hand.code, by_launch.code) == (1, 2)  # torchrun knows no other code
    for outcome in (by_hand, by_launch):
        (said,) = outcome.said
        assert said.startswith(
            "hvdtrain: error: --strategy horovod is started by mpirun, not by torchrun: use "
            "mpirun, or --strategy ddp"
        )
    assert len(by_launch.err.splitlines()) == 2  # and what was run


@pytest.mark.parametrize("way", WAYS if LONG else [("--strategy=ddp",)])
def test_a_compiled_model_is_the_same_model(way: tuple[str, ...], tmp_path: Path) -> None:
    """Uneven parts, an epoch's tail of one sample, and a checkpoint that goes on uncompiled."""
    if "--framework=tensorflow" in way:
        pytest.skip("torch.compile is PyTorch's")
    options = (*way, "--global-batch-size=1499", "--dropout=0", "--lr=0.01", *SMALL, *EXACT)
    plain = train(2, tmp_path / "plain", "mnist", *options, "--num-steps=3")
    kernels = tmp_path / "kernels"
    start = functools.partial(resident.ranks, TORCHINDUCTOR_CACHE_DIR=str(kernels))
    line = (*options, "--num-steps=2", "--compile")
    half = train(2, tmp_path / "half", "mnist", *line, start=start)
    assert half.summary["steps_completed"] == 2
    assert len(list(kernels.glob("*/*.py"))) > 1  # of the first look's small function, and more
    whole = train(2, tmp_path / "half", "mnist", *options, "--num-steps=3")
    assert_close(plain, whole, 1e-9)
