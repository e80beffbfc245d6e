"""``hvdtrain verify --script`` on scripts of torch.distributed: right ones, and each mistake."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

import pytest

from tests.conftest import BIN, LONG, Outcome, run
from tests.parallel import resident

SCRIPTS = Path(__file__).parent / "scripts"
DDP, ALLREDUCE, ACCUMULATION = "ddp_torch", "allreduce_torch", "accumulation_torch"
SHARDED = "sharded_torch"


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
    script = copied(SHARDED, tmp_path)
    outcome = watched(script, "--exact", updates="5", arguments=(kind,))
    assert (list(rows(outcome, "not seen")), rows(outcome, "failed")) == (unseen, {}), outcome.out
    assert "in fp64" in rows(outcome, "ok")[9]


WRAPPED = r"DistributedDataParallel\(network\)"
FSDP = r"    fully_shard\(model\)"
# Script, pattern, replacement.
RIGHT: dict[str, tuple[str, str, str]] = {
    "device mesh": (
        SHARDED,
        r"fully_shard\(model\)",
        'fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))',
    ),
    "static graph": (DDP, WRAPPED, "DistributedDataParallel(network, static_graph=True)"),
    "bucket view": (DDP, WRAPPED, "DistributedDataParallel(network, gradient_as_bucket_view=True)"),
    "join": (
        DDP,
        "    for inputs, labels in loader:\n((?:        .*\n)*)",
        "    with model.join():\n      for inputs, labels in loader:\n\\1",
    ),
    "compiled": (DDP, "^optimizer", 'model = torch.compile(model, backend="aot_eager")\n\\g<0>'),
    "workers": (
        DDP,
        r"sampler=sampler\)",
        "sampler=sampler, num_workers=2, persistent_workers=True)",
    ),
    "closure": (
        DDP,
        r"torch.optim.SGD\((?s:.*)step\(\)",
        """torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

for epoch in range(EPOCHS):
    sums = torch.zeros(2)
    for inputs, labels in loader:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        loss = optimizer.step(closure)""",
    ),
    "checkpointed": (
        DDP,
        r"model\(inputs\)",
        "torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)",
    ),
    "average of the weights": (
        DDP,
        "^optimizer",
        "ema = torch.optim.swa_utils.AveragedModel(model)\n"
        "model.register_forward_hook(lambda *_: ema.update_parameters(model))\n\\g<0>",
    ),
    "sharded by layers": (SHARDED, FSDP, "    fully_shard(model[0])\n    fully_shard(model)"),
    "not resharded": (SHARDED, FSDP, "    fully_shard(model, reshard_after_forward=False)"),
    "sharded, bf16": (
        SHARDED,
        FSDP,
        "    from torch.distributed.fsdp import MixedPrecisionPolicy\n"
        "    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
    ),
    "sharded, clipped": (
        SHARDED,
        r"^    optimizer.step\(\)",
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n\\g<0>",
    ),
}


@pytest.mark.parametrize("name", RIGHT if LONG else ())
def test_another_right_script(name: str, tmp_path: Path) -> None:
    script, pattern, replacement = RIGHT[name]
    arguments = ("fsdp",) if script == SHARDED else ()
    outcome = watched(
        copied(script, tmp_path, pattern, replacement), updates="5", arguments=arguments
    )
    assert rows(outcome, "failed") == {}, outcome.out
    assert 9 in rows(outcome, "not seen" if "bf16" in name else "ok")


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
    "replaced after wrapping": (
        DDP,
        "^optimizer",
        "for layer in network[::2]:\n    for key, value in list(layer._parameters.items()):\n"
        "        layer._parameters[key] = torch.nn.Parameter(value.detach().clone())\n\\g<0>",
        "5",
        [5],
        "4 parameters of the optimizer not held by DistributedDataParallel",
    ),
    "optimizer of a copy": (
        DDP,
        r"^(optimizer.*)model(.*)",
        r"import copy\n\n\1copy.deepcopy(network)\2",
        "5",
        [5],
        "no parameter of the optimizer had a gradient",
    ),
    "another checkpoint": (
        DDP,
        "^optimizer",
        "state = {key: value + rank for key, value in network.state_dict().items()}\n"
        "network.load_state_dict(state)\n\\g<0>",
        "5",
        [6],
        "max difference to rank 0 before update 1: 1,",
    ),
    "state of another checkpoint": (
        DDP,
        "^(optimizer.*)",
        r"\1\nmomentum = torch.ones(16, 10) * rank\n"
        r'optimizer.state[network[0].weight]["momentum_buffer"] = momentum',
        "5",
        [6],
        "the optimizer's state differs by rank",
    ),
    "drift": (
        DDP,
        r"^        optimizer\.step\(\)",
        "\\g<0>\n        steps = globals().get('steps', 0) + 1\n"
        "        network[0].weight.data += 0.1 * rank * (steps == 3)",
        "5",
        [6],
        "before update 4: 0.1, they drift apart",
    ),
    "other shards": (
        DDP,
        r"Sampler\(train\)",
        "Sampler(train, num_replicas=4, rank=rank)",
        "5",
        [3],
        "shards 0 of 4, 1 of 4",
    ),
    "rate by a rank's loss": (
        DDP,
        r"^(optimizer .*)((?s:.*?)step\(\))",
        r"\1\nrate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)"
        r"\2\n        rate.step(loss.item())",
        "all",
        [4],
        "by rank",
    ),
    "hook that sums": (
        DDP,
        "^optimizer",
        "def hook(_, bucket):\n    future = dist.all_reduce(bucket.buffer(), async_op=True)"
        ".get_future()\n    return future.then(lambda f: f.value()[0])\n\n\n"
        "model.register_comm_hook(None, hook)\n\\g<0>",
        "5",
        [5],
        "the sum, not the mean",
    ),
    "summed after the mean": (
        DDP,
        r"loss\.backward\(\)",
        "\\g<0>\n        [dist.all_reduce(value.grad) for value in network.parameters()]",
        "5",
        [5],
        "the sum, not the mean",
    ),
    "step before the reduction": (
        ALLREDUCE,
        r"^( +average_grad.*\n)( +optimizer\.step.*\n)",
        r"\2\1",
        "5",
        [5],
        "different gradients than rank 0",
    ),
    "one layer not reduced": (
        ALLREDUCE,
        r"(in )(model.parameters\(\))(:\n +dist\.all_reduce)",
        r"\1list(\2)[2:]\3",
        "5",
        [5],
        "different gradients than rank 0",
    ),
    "a group of one rank": (
        ALLREDUCE,
        r"op=dist\.ReduceOp\.SUM((?s:.*))^optimizer",
        r"group=groups[dist.get_rank()]\1groups = [dist.new_group([0]), dist.new_group([1])]"
        r"\noptimizer",
        "5",
        [5],
        "different gradients than rank 0",
    ),
    "clipped before the reduction": (
        ALLREDUCE,
        "^        average_grad",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n\\g<0>",
        "5",
        [9],
        "times the gradients of the ranks: clipped or scaled before the reduction",
    ),
    "augmented by rank": (
        ALLREDUCE,
        r"randn\(6\)",
        "randn(6, generator=torch.Generator().manual_seed(index + dist.get_rank()))",
        "5",
        [9],
        "the samples depend on the rank",
    ),
    "other data on each rank": (
        DDP,
        r"seed\(1\)",
        "seed(1 + rank)",
        "5",
        [9],
        "depend on the rank",
    ),
    "gradients scaled by rank": (
        DDP,
        "^optimizer",
        "network[0].weight.register_hook(lambda gradient: gradient * (1 + rank))\n\\g<0>",
        "5",
        [9],
        "layers that depend on the rank",
    ),
    "frozen on one rank": (
        DDP,
        WRAPPED,
        "DistributedDataParallel(network, find_unused_parameters=True)\n"
        "network[0].requires_grad_(rank == 0)",
        "5",
        [9],
        "layers that depend on the rank",
    ),
    "weights of classes": (
        DDP,
        r"labels\)\n",
        "labels, weight=torch.tensor([1.0, 5.0, 9.0]))\n",
        "5",
        [9],
        "if the loss divides by something else than samples",
    ),
    "optimizer before the shards": (
        SHARDED,
        rf"({FSDP}\n)(    optimizer.*\n)",
        r"\2\1",
        "5",
        [5],
        "no parameter of the optimizer had a gradient",
    ),
    "shards never reduced": (
        SHARDED,
        FSDP,
        "\\g<0>\n    model.set_requires_gradient_sync(False)",
        "5",
        [5],
        "no parameter of the optimizer had a gradient",
    ),
    "not sharded": (SHARDED, FSDP, "    pass", "5", [5, 6], "nothing was reduced"),
    "one layer sharded": (
        SHARDED,
        FSDP,
        "    fully_shard(model[0])",
        "5",
        [5],
        "different gradients than rank 0",
    ),
    "shards clipped alone": (
        SHARDED,
        r"^    optimizer\.step",
        "    local = [value.grad.to_local() for value in model.parameters()]\n"
        "    norm = sum(part.norm() ** 2 for part in local) ** 0.5\n"
        "    [part.mul_(min(1.0, 0.05 / norm)) for part in local]\n\\g<0>",
        "5",
        [9],
        "differ from one process",
    ),
    "sharded, tokens": (
        SHARDED,
        r", labels\)\.",
        ", labels, ignore_index=0).",
        "5",
        [9],
        "if the loss divides by something else than samples",
    ),
}
NEW = (
    "no sampler",
    "past the wrapper",
    "sum for mean",
    "divided twice",
    "changed after wrapping",
    "replaced after wrapping",
)


@pytest.mark.parametrize("name", MISTAKES if LONG else NEW)
def test_a_mistake_fails_in_its_row(name: str, tmp_path: Path) -> None:
    script, pattern, replacement, updates, steps, words = MISTAKES[name]
    path = copied(script, tmp_path, pattern, replacement)
    arguments = ("fsdp",) if script == SHARDED else ()
    outcome = watched(path, updates=updates, code=1, arguments=arguments)
    failed = rows(outcome, "failed")
    assert [step for step in failed if step <= 8 or step in steps] == steps, outcome.out
    assert words in failed[steps[0]]


def test_what_is_noted_or_not_seen(tmp_path: Path) -> None:
    pattern = r"sampler\.set_epoch\(epoch\)|dist\.all_reduce\(sums\)"
    outcome = watched(copied(DDP, tmp_path, pattern, "pass"))
    assert "note: epoch 2 has the same order of samples" in rows(outcome, "ok")[3]
    assert "not multiplied by the ranks, a choice" in rows(outcome, "ok")[4]
    assert list(rows(outcome, "not seen")) == [8]


def spawned(folder: Path) -> Path:
    """Write the script of DDP as one that starts its two ranks itself."""
    text = (SCRIPTS / f"{DDP}.py").read_text().replace('int(os.environ["RANK"])', "local_rank")
    imports, body = text.split('dist.init_process_group("gloo")\n')
    port = 20_000 + os.getpid() % 10_000
    start = f"""
os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"}}
dist.init_process_group("gloo", rank=local_rank, world_size=2)
"""
    train = f"def train(local_rank):\n{textwrap.indent(start + body, '    ')}\n\n"
    main = 'if __name__ == "__main__":\n    torch.multiprocessing.spawn(train, (), nprocs=2)\n'
    script = folder / "train.py"
    script.write_text(f"{imports}{train}{main}")
    return script


def test_ranks_that_the_script_starts_itself(tmp_path: Path) -> None:
    script = spawned(tmp_path)
    outcome = watched(script)
    assert list(rows(outcome, "not seen")) == [4], outcome.out  # there is no run on one rank
    assert list(rows(outcome, "ok")) == [1, 2, 3, 5, 6, 7, 8, 9]
    outcome = watched(script, ranks=3, code=2)
    assert "mp.spawn starts nprocs=2, verify 3 ranks: use -n 2" in outcome.err


def test_ranks_that_are_processes_are_refused(tmp_path: Path) -> None:
    start = "torch.multiprocessing.Process(target=run, args=(rank, 2))\n"
    outcome = watched(copied(DDP, tmp_path, "^dist.init", rf"{start}\g<0>"), code=2)
    assert "distributed by multiprocessing.Process" in outcome.err


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
    "random numbers in the collate function": (
        "sampler=sampler",
        "sampler=sampler, collate_fn=lambda batch: (\n"
        "    torch.stack([x for x, _ in batch]) + torch.randn(10),\n"
        "    torch.stack([y for _, y in batch]),\n"
        ")",
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
