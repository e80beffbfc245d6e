"""The script that README shows, sequential and distributed."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file

from hvdtrain.steps.summary import Summary
from tests import pages
from tests.conftest import BIN, ROOT, Outcome, ranks, run
from tests.parallel import resident
from tests.parallel.conftest import Training, assert_close, difference

Weights = dict[str, np.ndarray]
EXAMPLES = ROOT / "examples"


def accuracy(out: str) -> float:
    assert out.startswith("accuracy") and out.rstrip().endswith("of 297"), out
    return float(out.split()[1])


def test_sequential(tmp_path: Path) -> None:
    outcome = run([sys.executable, str(EXAMPLES / "digits_sequential.py")], cwd=tmp_path, code=0)
    assert accuracy(outcome.out) > 0.85


def test_distributed_is_the_same_at_1_2_and_3_ranks(tmp_path: Path) -> None:
    weights = []
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = resident.ranks(number, str(EXAMPLES / "digits_distributed.py"), cwd=folder)
        assert outcome.code == 0, outcome.err
        assert accuracy(outcome.out) > 0.85
        newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
        weights.append(safetensors.numpy.load_file(newest / "model.safetensors"))
    assert_equal(*weights)


def test_the_page_shows_the_task_that_stands_in_the_examples() -> None:
    assert pages.blocks("own.md")[0] == (EXAMPLES / "own_task.py").read_text()


def test_the_scripts_of_horovod_and_ddp_compute_the_same(tmp_path: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    saved = []
    for name, script in zip(("horovod", "ddp"), pages.blocks("moving.md"), strict=True):
        path = tmp_path / f"train_{name}.py"
        path.write_text(script)
        if name == "horovod":
            outcome = resident.ranks(2, str(path), cwd=tmp_path)
        else:
            outcome = run([*torchrun, str(path)], cwd=tmp_path)
        assert outcome.code == 0, outcome.err
        weights = torch.load(tmp_path / "model.pt")
        saved.append({name: value.numpy() for name, value in weights.items()})
        assert outcome.out.count("loss ") == 2
    assert_equal(*saved)


PLATEAU = {"patience=2": "patience=0, threshold=0.1"}
DATA = {"torch.randn(1000, 8)": "torch.randn(391, 8, dtype=torch.float64)", "(1000,)": "(391,)"}


def exact(script: str, epochs: int, workers: int, more: Mapping[str, str]) -> str:
    """The loop of the page in double precision, at a global batch and a rate for any world size.

    391 samples in batches of 39: parts differ in size, and the last one is empty on most ranks.
    """
    for old, new in {
        "torch.nn.Linear(8, 3)": "torch.nn.Linear(8, 3, dtype=torch.float64)",
        "32 * world.size": "39",
        "epochs = 3": f"epochs = {epochs}",
        "num_workers=0": f"num_workers={workers}",
        "scale_learning_rate(0.1": 'scale_learning_rate(0.1, scaling="none"',
        **more,
    }.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def test_all_that_the_page_puts_into_a_loop_is_the_same_at_1_2_and_3_ranks(tmp_path: Path) -> None:
    """Workers that are kept, an evaluation, a scheduler of one's own, state that is resumed."""
    script = pages.own_script_with_all()
    found = []
    for number, runs in {1: [(5, 0)], 2: [(5, 1)], 3: [(3, 0), (5, 0)]}.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        for epochs, workers in runs:
            (folder / "own.py").write_text(exact(script, epochs, workers, DATA | PLATEAU))
            # Workers import the script anew, which resident ranks have not started from.
            start = ranks if workers else resident.ranks
            outcome = start(number, "own.py", cwd=folder, code=0)
        newest = folder / "own-checkpoints" / "step-000000005"
        state = json.loads((newest / "state.json").read_text())
        losses = re.findall(r"loss ([\d.]+) over 391 samples", outcome.out)
        weights = safetensors.numpy.load_file(newest / "model.safetensors")
        found.append((weights, state["lr"], losses[-2:], state["plateau"]["best"]))
    weights, rate, losses, best = found[0]
    assert rate < 0.1, "the scheduler did nothing"
    for values, *others in found[1:]:
        assert others == [rate, losses, pytest.approx(best, rel=1e-9)]
        assert_equal(weights, values)


def weights(script: str, number: int, folder: Path, *, fresh: bool = False) -> Weights:
    """Run a script of the page on ``number`` ranks; return the weights of its last checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(script)
    (ranks if fresh else resident.ranks)(number, "own.py", cwd=folder, code=0)
    newest = sorted((folder / "own-checkpoints").glob("step-*"))[-1]
    return safetensors.numpy.load_file(newest / "model.safetensors")


def assert_equal(one: Weights, *others: Weights) -> None:
    for other in others:
        assert difference(one, other) <= 1e-9


def test_a_samples_random_numbers_depend_on_no_rank_and_no_worker(tmp_path: Path) -> None:
    """Of random, NumPy and PyTorch; workers that are kept see the epoch."""
    found, draws = [], []
    for number, workers in ((1, 0), (2, 2), (3, 1)):
        folder = tmp_path / str(number)
        script = exact(pages.own_script_with_augmentation(), 2, workers, {"1000": "150"})
        found.append(weights(script, number, folder, fresh=True))
        draws.append(set((folder / "draws").read_text().splitlines()))
    assert_equal(*found)
    assert draws == [draws[0]] * 3
    for column, distinct in enumerate((2, 150, 300, 300, 300)):  # epoch, index, random numbers
        assert len({line.split()[column] for line in draws[0]}) == distinct


HEAD = """
import itertools
import sys
from pathlib import Path
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from hvdtrain import adapter

hvd = adapter("pytorch", *sys.argv[1:])
world = hvd.initialize()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.cells = torch.nn.GRU(4, 5)
        self.head = torch.nn.Linear(5, 7)
    def forward(self, x, hidden=None):
        output, hidden = self.cells(self.embed(x), hidden)
        return self.head(output), hidden

tokens = torch.arange(60) ** 2 % 7
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""
START = """
model, optimizer = hvd.distribute_optimizer(model, optimizer)
hvd.broadcast_state(model, optimizer)
"""
TRAIN = """
for rows in itertools.islice(map(windows, shards.epoch(0)), 8):
    x, y = (tensor.T for tensor in rows)
    optimizer.zero_grad()
    cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).backward()
    optimizer.step()
"""
SAVE = """
hvd.save_checkpoint("own-checkpoints", model, optimizer, state={"step": 1})
"""
RECIPES = {  # by heading: what comes before and after it
    "Random windows of a text": ("block, batch = 5, 6\n", START + TRAIN),
    "A hidden state along batches": (
        f"{START}columns, length = tokens[:54].reshape(6, 9).T, 3\n",
        "",
    ),
}


@pytest.mark.parametrize("heading", [*RECIPES, "Schedulers of PyTorch"])
def test_a_recipe_is_the_same_at_1_2_and_3_ranks(heading: str, tmp_path: Path) -> None:
    if heading in RECIPES:
        before, after = RECIPES[heading]
        script = HEAD + before + pages.recipe(heading) + after + SAVE
    else:
        script = exact(pages.own_script_with_cycle(), 3, 0, DATA | {"0.1 * world.size": "0.1"})
    assert_equal(*(weights(script, number, tmp_path / str(number)) for number in (1, 2, 3)))


WEIGHTED = """
shards = hvd.shard_data(11, global_batch=4)
for part in shards.epoch(0):
    x = torch.stack([tokens[i : i + 5] for i in part.indices], 1)
    y = torch.where(x > torch.as_tensor(part.indices) % 4, x, -100)
    output, y = model(x)[0].flatten(0, 1), y.flatten()
    optimizer.zero_grad()
{recipe}
    optimizer.step()
"""


def test_a_loss_over_tokens_is_the_same_at_1_2_and_3_ranks(tmp_path: Path) -> None:
    recipe = textwrap.indent(pages.recipe("A loss over tokens, pixels or boxes"), "    ")
    script = HEAD + START + WEIGHTED.format(recipe=recipe) + SAVE
    one, *others = (weights(script, number, tmp_path / str(number)) for number in (1, 2, 3))
    assert_equal(one, *others)
    unweighted = script.replace("hvd.weight_loss", "id")
    assert difference(one, weights(unweighted, 2, tmp_path / "unweighted")) > 1e-3


STREAM = """
state = hvd.resume("own-checkpoints", model, optimizer)
consumed = state["consumed"] if state else 0
stream = ((tokens[i : i + 5], tokens[i + 1 : i + 6]) for i in range(50))
for rows, count, consumed in itertools.islice(of_this_rank(stream, 7, consumed), BATCHES):
    x, y = (tensor.T for tensor in rows)
    optimizer.zero_grad()
    loss = cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    hvd.weight_loss(count)
    loss.backward()
    optimizer.step()
state = {"step": consumed, "consumed": consumed}
hvd.save_checkpoint("own-checkpoints", model, optimizer, state=state)
"""


def test_a_stream_is_the_same_at_1_2_and_3_ranks_and_continued(tmp_path: Path) -> None:
    """Of 50 samples in batches of 7: the last one is a single sample."""
    script = HEAD + pages.recipe("Streams") + START + STREAM
    some, rest = (script.replace("BATCHES", text) for text in ("3", "None"))
    weights(some, 2, tmp_path / "cut")
    continued = weights(rest, 3, tmp_path / "cut")
    whole = [weights(rest, number, tmp_path / str(number)) for number in (1, 2, 3)]
    assert_equal(continued, *whole)
    saved = {path.name for path in tmp_path.glob("*/own-checkpoints/step-*")}
    assert saved == {"step-000000021", "step-000000050"}


@pytest.mark.parametrize("kind", ["hdf5", "npy"])
def test_a_file_is_read_sample_by_sample(kind: str, tmp_path: Path) -> None:
    """By workers, too; as the same data in memory."""
    torch.manual_seed(0)
    x, y = torch.randn(391, 8, dtype=torch.float64).numpy(), torch.randint(3, (391,)).numpy()
    script = exact(pages.own_script_with_rows(str(tmp_path / "data")), 2, 0, DATA)
    if kind == "hdf5":
        with pytest.importorskip("h5py").File(tmp_path / "data", "w") as file:
            file["x"], file["y"] = x, y
    else:
        rows = np.zeros(391, [("x", "f8", 8), ("y", "i8")])
        rows["x"], rows["y"] = x, y
        with (tmp_path / "data").open("wb") as stream:
            np.save(stream, rows)
        script = script.replace("h5py.File(path)", 'np.load(path, mmap_mode="c")')
        script = script.replace("import h5py", "import numpy as np")
    in_memory = weights(exact(pages.own_script(), 2, 0, DATA), 1, tmp_path / "1")
    read = weights(script, 3, tmp_path / "3")
    by_workers = script.replace("num_workers=0", "num_workers=1")
    assert_equal(in_memory, read, weights(by_workers, 2, tmp_path / "2", fresh=True))


DOWNLOAD = """
def download(folder):
    {how}
    Path(folder).mkdir()
    Path(folder, "data").touch()

def MyDataset(folder, download):
    return Path(folder, "data").stat()

"""


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
@pytest.mark.parametrize("how", ["pass", "raise OSError('no network')"])
def test_one_rank_downloads_and_the_others_wait(how: str, strategy: str, tmp_path: Path) -> None:
    recipe = pages.recipe("Download on one rank")
    (tmp_path / "own.py").write_text(HEAD + DOWNLOAD.format(how=how) + recipe)
    outcome = resident.ranks(3, "own.py", strategy, cwd=tmp_path)
    assert (outcome.code == 0, "no network" in outcome.err) == (how == "pass", how != "pass")


SAVES = """
x = tokens[:24].reshape(4, 6)
model, optimizer = hvd.distribute_optimizer(model, optimizer)
hvd.broadcast_state(model, optimizer)
cross_entropy(model(x)[0].flatten(0, 1), x.flatten()).backward()
optimizer.step()
if world.is_writer: torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.parametrize("strategy", ["horovod", "ddp", "zero", "mpi"])
def test_my_own_save_may_stay(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HEAD + SAVES + SAVE)
    resident.ranks(2, "own.py", strategy, cwd=tmp_path, code=0)
    mine = torch.load(tmp_path / "model.pt", weights_only=True)
    files = (tmp_path / "own-checkpoints" / "step-000000001").glob("model*.safetensors")
    saved = {name: value for file in files for name, value in load_file(file).items()}
    prefix = "module." if strategy in ("ddp", "zero") else ""
    assert mine.keys() == {prefix + name for name in saved}
    assert all(torch.equal(mine[prefix + name], value) for name, value in saved.items())


def test_the_page_saves_in_the_background(tmp_path: Path) -> None:
    files = []
    for name, script in (
        ("waiting", pages.own_script()),
        ("background", pages.own_script_in_background()),
    ):
        (folder := tmp_path / name).mkdir()
        (folder / "own.py").write_text(script)
        outcome = resident.ranks(2, "own.py", cwd=folder, code=0)
        assert "was not completed" not in outcome.err
        saved = sorted((folder / "own-checkpoints").glob("step-*"))
        assert [path.name[-1] for path in saved] == ["1", "2", "3"]
        files.append([(path / "model.safetensors").read_bytes() for path in saved])
    assert files[0] == files[1]


def test_the_two_scripts_are_eight_calls_apart() -> None:
    text = (EXAMPLES / "digits_distributed.py").read_text()
    assert [f"step {number}" in text for number in range(1, 9)] == [True] * 8
    sequential = (EXAMPLES / "digits_sequential.py").read_text().splitlines()
    gone = [line for line in sequential if line not in text.splitlines()]
    assert len(gone) <= 9  # its first line, the loop over batches, the save and the result


@pytest.fixture(autouse=True)
def _needs_scikit_learn() -> None:
    pytest.importorskip("sklearn")


OWN = {"pytorch": "own_task.py", "tensorflow": "own_task_tf.py"}


def own(
    folder: Path, number: int, framework: str, *options: str, file: str = "", **how: Any
) -> Outcome:
    file = file or str(EXAMPLES / OWN[framework])
    where = [f"--summary={folder / 'summary.json'}", f"--checkpoint-dir={folder / 'checkpoints'}"]
    words = [file, f"--framework={framework}", "--precision=fp64", *where, *options]
    return resident.ranks(number, "-m", "hvdtrain.train", *words, **how)


@pytest.mark.parametrize("framework", OWN)
def test_a_task_of_ones_own_is_the_same_at_1_2_and_3_ranks(framework: str, tmp_path: Path) -> None:
    """353 samples in global batches of 88: parts differ in size, the last batch is one sample."""
    recipe = ("--global-batch-size=88", "--hidden=16", "--momentum=0.5", "--epochs=3")
    runs = []
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        if number == 3:  # stopped in the second epoch and resumed
            own(folder, 3, framework, *recipe, "--num-steps=7", code=0)
        outcome = own(folder, number, framework, *recipe, code=0)
        runs.append(Training(outcome, folder))
    one = runs[0].summary
    assert (one["workload"], one["eval_samples"]) == (Path(OWN[framework]).stem, 89)
    assert one["eval_accuracy"] is None
    assert 0 < one["eval_metrics"]["r2"] < 1
    assert one["options"]["hidden"] == 16
    assert "353 samples" in runs[0].outcome.out and "test r2" in runs[0].outcome.out
    for other in runs[1:]:
        found = other.summary
        assert found["eval_metrics"] == pytest.approx(one["eval_metrics"], rel=1e-9)
        for key in ("parameter_norm", "eval_loss"):
            assert found[key] == pytest.approx(one[key], rel=1e-9)
        assert_close(other, runs[0], 1e-9)


def test_a_broken_task_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "broken_task.py"
    file.write_text("def task(options):\n    return 1 / 0\n")
    outcome = own(tmp_path, 2, "pytorch", "--quiet", file=str(file), code=2)
    (message,) = outcome.said
    assert "broken_task.py, line 2: ZeroDivisionError" in message
    assert "Traceback" not in outcome.err


SMALL = """
import os, signal
from dataclasses import dataclass
import numpy as np
import torch
from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

@dataclass
class Options:
    tests: int = 0  # samples
    stops: bool = False  # in the evaluation
    label: int = 1

class Stopped(TorchTask):
    def evaluate(self, batch, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate(batch, metrics)

def task(options):
    torch.manual_seed(options.seed)
    x, y = np.eye(8), np.arange(8) % 2 * options.label
    rows = np.arange(options.tests) % 8
    data = (InMemory(x[rows], y[rows], options.device) for rows in (np.arange(8), rows))
    return (Stopped if options.stops else TorchTask)(torch.nn.Linear(8, 2), options, *data)
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small_task.py").write_text(SMALL)
    return str(tmp_path / "small_task.py")


def test_an_empty_test_set_is_none(small: str, tmp_path: Path) -> None:
    """WholeSet finds no array to join in it, and Accuracy divides by zero."""
    line = ("--epochs=2", "--global-batch-size=4", f"--metrics={tmp_path / 'metrics.jsonl'}")
    first = Training(own(tmp_path, 2, "pytorch", *line, file=small), tmp_path)
    assert first.outcome.code == 0, first.outcome.err
    assert (first.summary["eval_loss"], first.summary["eval_samples"]) == (None, None)
    assert "epoch 2 done: loss " in first.outcome.out and "test loss" not in first.outcome.out


def test_a_finished_training_is_not_continued(small: str, tmp_path: Path) -> None:
    """Its --summary is written again, from the checkpoint."""
    line = ("--epochs=2", "--global-batch-size=4", "--tests=4")
    first = Training(own(tmp_path, 2, "pytorch", *line, file=small), tmp_path)
    before = first.summary
    again = Training(own(tmp_path, 2, "pytorch", *line, file=small), tmp_path)
    assert again.outcome.code == 0, again.outcome.err
    assert "step-000000004: step 4, finished after 2 epochs" in again.outcome.out
    keys = ("epochs_completed", "steps_completed", "train_loss", "eval_loss", "stopped")
    assert [again.summary[key] for key in keys] == [before[key] for key in keys]
    assert before["train_loss"] > 0


def test_an_epoch_counts_as_whole_before_its_evaluation(small: str, tmp_path: Path) -> None:
    line = ("--epochs=3", "--global-batch-size=4", "--tests=64", "--stops")
    stopped = Training(own(tmp_path, 2, "pytorch", *line, file=small), tmp_path)
    assert "8 samples in 2 steps, 1 whole epoch" in stopped.outcome.out, stopped.outcome.err
    keys = ("stopped", "eval_loss", "epochs_completed")
    assert [stopped.summary[key] for key in keys] == ["preempted", None, 1]


def test_a_label_outside_the_classes_is_one_line(small: str, tmp_path: Path) -> None:
    line = ("--epochs=1", "--global-batch-size=4", "--label=7", "--quiet")
    outcome = own(tmp_path, 2, "pytorch", *line, file=small)
    assert outcome.code != 0 and "Traceback" not in outcome.err, outcome.err
    assert "has the label 7, and its model 2 outputs" in outcome.said[0]


def test_launch_starts_a_task_of_ones_own(tmp_path: Path) -> None:
    line = ["-m", "hvdtrain.train", str(EXAMPLES / "own_task.py"), "--epochs=1"]
    command = [str(BIN / "hvdtrain"), "launch", "-n", "2", "--", sys.executable, *line]
    run([*command, f"--summary={tmp_path / 'summary.json'}"], cwd=tmp_path, code=0)
    summary = Summary.read(tmp_path / "summary.json", needed=["eval_metrics"])
    assert (summary.workload, summary.world_size, summary.steps_completed) == ("own_task", 2, 6)
