"""``hvdtrain verify --script`` on scripts of torch.distributed: right ones, and each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import BIN, LONG, Outcome, run
from tests.parallel import resident

SCRIPTS = Path(__file__).parent / "scripts"
DDP, ALLREDUCE, ACCUMULATION = "ddp_torch", "allreduce_torch", "accumulation_torch"


def watched(
    script: Path,
    *more: str,
    ranks: int = 2,
    updates: str = "all",
    code: int = 0,
    arguments: tuple[str, ...] = (),
) -> Outcome:
    command = [str(BIN / "hvdtrain"), "verify", "-n", str(ranks), "--json", "--updates", updates]
    command += [*more, "--script", str(script), "--", *arguments]
    # Ranks of TensorFlow are new ones: see ``test_verify.watched``.
    fresh = "keras" in script.read_text()
    variables = {} if fresh else {"PATH": resident.path("pytorch")}
    return run(command, cwd=script.parent, code=code, **variables)


def rows(outcome: Outcome, state: str) -> dict[int, str]:
    """Return the evidence of the rows that have a state, by step."""
    found = json.loads(outcome.out)["rows"]
    return {row["step"]: row["evidence"] for row in found if row["state"] == state}


def copied(name: str, folder: Path, pattern: str = "", replacement: str = "") -> Path:
    """Copy a script into ``folder``, with a mistake."""
    text, count = re.subn(
        pattern, replacement, (SCRIPTS / f"{name}.py").read_text(), flags=re.MULTILINE
    )
    assert count
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(DDP, 2), (ALLREDUCE, 3), (ACCUMULATION, 2), *([(ACCUMULATION, 3)] if LONG else [])],
)
def test_a_right_script(name: str, ranks: int, tmp_path: Path) -> None:
    outcome = watched(copied(name, tmp_path), ranks=ranks)
    assert list(rows(outcome, "ok")) == list(range(1, 10)), outcome.out
    assert rows(outcome, "ok")[9].startswith(f"{ranks} ranks = one process: largest difference ")
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.parametrize(("kind", "unseen"), [("zero", [7, 8]), ("fsdp", [5, 7, 8])])
def test_a_sharded_model_or_optimizer(kind: str, unseen: list[int], tmp_path: Path) -> None:
    script = copied("sharded_torch", tmp_path)
    outcome = watched(script, "--exact", updates="5", arguments=(kind,))
    assert (list(rows(outcome, "not seen")), rows(outcome, "failed")) == (unseen, {}), outcome.out
    assert "in fp64" in rows(outcome, "ok")[9]


# Script, pattern, replacement, updates, the rows that fail, and words of the first one.
MISTAKES: dict[str, tuple[str, str, str, str, list[int], str]] = {
    "threads": (DDP, r"threads\(1\)", "threads(8)", "5", [2], "8 + 8 = 16 threads"),
    "no sampler": (
        DDP,
        "sampler=sampler",
        "shuffle=True",
        "all",
        [3],
        "120 of 120 samples seen were on more than one rank",
    ),
    "one shard for all": (ACCUMULATION, "rank=rank", "rank=0", "5", [3], "shards 0 of 2, 0 of 2"),
    "a rate by rank": (DDP, "lr=RATE", "lr=RATE * (rank + 1)", "5", [4], "0.05, 0.1 by rank"),
    "a rate scaled twice": (
        ALLREDUCE,
        r"(lr=RATE \* dist\.get_world_size\(\))",
        r"\1 ** 2",
        "5",
        [4],
        "x 4, more than the linear rule's 2",
    ),
    "not wrapped": (
        DDP,
        r"DistributedDataParallel\(network\)",
        "network",
        "5",
        [5, 6],
        "nothing was reduced: wrap the model in DistributedDataParallel",
    ),
    "past the wrapper": (
        DDP,
        r"model\(inputs\)",
        "model.module(inputs)",
        "5",
        [5],
        "call the wrapper, not model.module",
    ),
    "sum for mean": (ALLREDUCE, r"parameter\.grad /= .*", "", "5", [5], "the sum, not the mean"),
    "not reduced": (ALLREDUCE, r"^ +average_grad.*", "", "5", [5], "nothing was reduced"),
    "never reduced": (
        ACCUMULATION,
        r"contextlib\.nullcontext\(\) if last else ",
        "",
        "5",
        [5],
        "no pass went through",
    ),
    "divided twice": (
        DDP,
        r"(functional\.cross.*)",
        r"\1 / dist.get_world_size()",
        "5",
        [5],
        "averaged, though each rank's gradient was already divided by the global batch",
    ),
    "changed after wrapping": (
        DDP,
        "^optimizer",
        "network[0].weight.data += rank\noptimizer",
        "5",
        [6],
        "DistributedDataParallel; max difference to rank 0 before update 1: 1,",
    ),
    "no broadcast": (ALLREDUCE, r"dist\.broadcast\(.*", "pass", "5", [6], "no broadcast was exec"),
    "all write": (DDP, "if rank == 0", "if True", "all", [7], "ranks 0, 1 wrote "),
}
NEW = ("no sampler", "past the wrapper", "sum for mean", "divided twice", "changed after wrapping")


@pytest.mark.parametrize("name", MISTAKES if LONG else NEW)
def test_a_mistake_fails_in_its_row(name: str, tmp_path: Path) -> None:
    script, pattern, replacement, updates, steps, words = MISTAKES[name]
    outcome = watched(copied(script, tmp_path, pattern, replacement), updates=updates, code=1)
    failed = rows(outcome, "failed")
    assert [step for step in failed if step <= 8] == steps, outcome.out
    assert words in failed[steps[0]]


def test_what_is_noted_or_not_seen(tmp_path: Path) -> None:
    pattern = r"sampler\.set_epoch\(epoch\)|dist\.all_reduce\(sums\)"
    outcome = watched(copied(DDP, tmp_path, pattern, "pass"))
    assert "note: epoch 2 has the same order of samples" in rows(outcome, "ok")[3]
    assert "not multiplied by the ranks, a choice" in rows(outcome, "ok")[4]
    assert list(rows(outcome, "not seen")) == [8]


def test_ranks_that_the_script_starts_itself_are_refused(tmp_path: Path) -> None:
    script = copied(DDP, tmp_path, "^dist.init", "torch.multiprocessing.spawn\n\\g<0>")
    outcome = watched(script, code=2)
    assert "distributed by multiprocessing.spawn" in outcome.err


TOKENS = r"loss = (.*) labels\)"
OVER_ALL = r"""valid = (labels > 0).sum()
        dist.all_reduce(valid)
        loss = \1 labels, ignore_index=0, reduction="sum") * dist.get_world_size() / valid"""
# Pattern, replacement, further options, state of the row of the replay, and its words.
REPLAYS: dict[str, tuple[str, str, list[str], str, str]] = {
    "in fp64": ("^EPOCHS", "EPOCHS", ["--exact"], "ok", "2 ranks = one process: largest"),
    "over all tokens": (TOKENS, OVER_ALL, ["--exact"], "ok", "in fp64"),
    "tokens": (
        TOKENS,
        r"loss = \1 labels, ignore_index=0)",
        [],
        "failed",
        "if the loss divides by something else than samples (tokens",
    ),
    "uneven parts": (
        r"batch_size=8, sampler=sampler",
        "batch_size=8 + 4 * rank, sampler=range(rank, 120, 2)",
        [],
        "failed",
        "the mean of the ranks' means, of 8 + 12 samples",
    ),
    "inputs by rank": (r"model\(inputs", r"\g<0> + 0.1 * rank", [], "failed", "depend on the rank"),
    "bf16": (
        r"^        loss = torch",
        '        with torch.autocast("cpu", torch.bfloat16):\n            loss = torch',
        [],
        "not seen",
        "use --exact to see more",
    ),
    "random numbers": (
        r"model\(inputs",
        r"\g<0> + torch.randn(10)",
        [],
        "not seen",
        "random numbers drawn in the training loop",
    ),
    "no loader": (
        "in loader:",
        "in zip(x[rank::2].split(8), train.tensors[1][rank::2].split(8)):",
        [],
        "not seen",
        "no DataLoader of samples with an index was seen",
    ),
}


@pytest.mark.parametrize("name", REPLAYS if LONG else ("over all tokens", "tokens", "uneven parts"))
def test_the_replay_on_one_process(name: str, tmp_path: Path) -> None:
    pattern, replacement, more, state, words = REPLAYS[name]
    script = copied(DDP, tmp_path, pattern, replacement)
    outcome = watched(script, *more, updates="5", code=int(state == "failed"))
    assert words in rows(outcome, state)[9], outcome.out
    if more:
        facts = json.loads(outcome.out)["rows"][8]["facts"]
        assert max(facts["differences"]) < facts["limit"] == 1e-9
