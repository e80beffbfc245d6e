"""The replay of ``hvdtrain verify --script`` on scripts of Horovod and hvdtrain for PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import LONG, ROOT
from tests.parallel.test_verify_distributed import copied, rows, watched

PLAIN, PORT, OURS = "plain_torch", "port_torch", "adapter_torch"
STEP = r"        optimizer\.step\(\)"

# Script, pattern, replacement, ranks, --exact or not, arguments, and what the row says.
RIGHT: dict[str, tuple[str, str, str, int, bool, str, str]] = {
    "Horovod": (PLAIN, "", "", 3, True, "", "3 ranks = one process: largest difference"),
    "in fp32": (PLAIN, "", "", 2, False, "", "2 ranks = one process: largest difference"),
    "a port": (PORT, "", "", 2, True, "", "in fp64"),
    "summed, groups": (
        PLAIN,
        r"model\.named_parameters\(\)\)$(\n(.*\n)*?)( +)loss.backward",
        r"model.named_parameters(), op=hvd.Sum, groups=2)\1\3(loss / hvd.size()).backward",
        3,
        True,
        "",
        "in fp64",
    ),
    "predivided": (
        PLAIN,
        r"model\.named_parameters\(\)\)$",
        "model.named_parameters(), gradient_predivide_factor=4.0)",
        3,
        True,
        "",
        "in fp64",
    ),
    "sparse": (
        PLAIN,
        r"model = (.*)\n(.*\n)*?optimizer = (.*momentum=0.9)",
        "class Bag(torch.nn.EmbeddingBag):\n"
        "    def forward(self, x):\n        return super().forward(x.long() % 5)\n\n\n"
        "model = torch.nn.Sequential(Bag(5, 16, sparse=True), torch.nn.Linear(16, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size()",
        3,
        True,
        "",
        "in fp64",
    ),
    "over all tokens": (
        PLAIN,
        r"loss = (.*) labels\)",
        r"""valid = hvd.allreduce((labels > 0).sum(), op=hvd.Sum, name="valid")
        loss = \1 labels, ignore_index=0, reduction="sum") * hvd.size() / valid""",
        3,
        True,
        "",
        "in fp64",
    ),
    "hvdtrain": (OURS, "", "", 3, True, "horovod own", "in fp64"),
    "hvdtrain in fp32": (OURS, "", "", 2, False, "ddp loader", "2 ranks = one process: largest"),
    "a sampler": (OURS, "", "", 3, True, "mpi sampler", "in fp64"),
    "zero": (OURS, "", "", 3, True, "zero own", "in fp64"),
    "fsdp": (OURS, "", "", 2, True, "fsdp loader", "in fp64"),
    "BatchNorm": (OURS, "LayerNorm", "BatchNorm1d", 2, True, "ddp own", "statistics of BatchNorm"),
    "stand-ins": (
        OURS,
        "BATCH, PASSES = 14",
        "BATCH, PASSES = 2",
        3,
        True,
        "ddp sampler",
        "in fp64",
    ),
    "weighted": (
        OURS,
        r"( +)loss = (.*) labels\).*",
        r"\1loss = \2 labels, ignore_index=0)\n\1hvd.weight_loss((labels > 0).sum())",
        3,
        True,
        "horovod loader",
        "in fp64",
    ),
    "several denominators": (
        OURS,
        r"( +)loss = (.*) labels\).*",
        r"""\1total = hvd.total(tokens=(labels > 0).sum(), passes=1)
\1hvd.weight_loss(1)
\1loss = \2 labels, ignore_index=0, reduction="sum") * total["passes"] / total["tokens"]""",
        3,
        True,
        "zero own",
        "in fp64",
    ),
}


@pytest.mark.parametrize("name", RIGHT if LONG else ("Horovod", "stand-ins"))
def test_n_ranks_equal_one_process(name: str, tmp_path: Path) -> None:
    script, pattern, replacement, ranks, exact, arguments, words = RIGHT[name]
    outcome = watched(
        copied(script, tmp_path, pattern, replacement),
        *["--exact"] * exact,
        ranks=ranks,
        updates="5",
        arguments=tuple(arguments.split()),
    )
    assert rows(outcome, "failed") == {}, outcome.out
    assert words in rows(outcome, "ok").get(9, ""), outcome.out
    facts = json.loads(outcome.out)["rows"][8]["facts"]
    assert max(facts["differences"]) < facts["limit"]


TOKENS = "if the loss divides by something else than samples (tokens"
# Script, pattern, replacement, arguments, state of the row, and its words.
REPLAYS: dict[str, tuple[str, str, str, str, str, str]] = {
    "tokens": (PLAIN, r"labels\)$", "labels, ignore_index=0)", "", "failed", TOKENS),
    "class weights": (
        PLAIN,
        r"labels\)$",
        "labels, weight=torch.tensor([1.0, 2.0, 9.0]))",
        "",
        "failed",
        TOKENS,
    ),
    "uneven parts": (
        PLAIN,
        "DataLoader.data, 16, sampler=sampler",
        "DataLoader(data, 16 + 4 * hvd.rank(), sampler=range(hvd.rank(), 400, hvd.size())",
        "",
        "failed",
        "the mean of the ranks' means, of 16 + 20 samples",
    ),
    "inputs by rank": (
        PLAIN,
        r"model\(inputs",
        r"\g<0> + 0.1 * hvd.rank()",
        "",
        "failed",
        "depend on the rank",
    ),
    "labels by rank": (
        PLAIN,
        r"labels\)$",
        "(labels + hvd.rank()) % 3)",
        "",
        "failed",
        "depend on the rank",
    ),
    "clipped before the reduction": (
        PLAIN,
        rf"    optimizer = hvd.*\n((.*\n)*?){STEP}",
        r"""\1        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for name, parameter in model.named_parameters():
            parameter.grad = hvd.allreduce(parameter.grad, name=name)
        optimizer.step()""",
        "",
        "failed",
        "2 ranks differ from one process",
    ),
    "a noisy rank": (
        PLAIN,
        STEP,
        "        optimizer.step()\n        model[0].bias.data += 0.001 * hvd.rank()",
        "",
        "failed",
        "",
    ),
    "a part of the batch": (
        PORT,
        r"model\(images\)",
        "model(images + 0.05 * torch.arange(len(images)).view(-1, 1, 1, 1))",
        "",
        "not seen",
        "use --exact to see more",
    ),
    "compression": (
        PLAIN,
        r"model\.named_parameters\(\)\)$",
        "model.named_parameters(), hvd.Compression.fp16)",
        "",
        "not seen",
        "use --exact to see more",
    ),
    "random numbers": (
        PLAIN,
        r"model\(inputs",
        r"\g<0> + torch.randn(10)",
        "",
        "not seen",
        "random numbers drawn in the training loop",
    ),
    "a dataset by rank": (
        PLAIN,
        r"data = TensorDataset\(x",
        "data = TensorDataset(x + hvd.rank()",
        "",
        "failed",
        "depend on the rank",
    ),
    "activations": (
        PLAIN,
        r"loss = .*",
        r"\g<0> + 0.1 * hvd.allgather(model(inputs)).std()",
        "",
        "not seen",
        "a gather of activations",
    ),
    "Adasum": (
        PLAIN,
        r"model\.named_parameters\(\)\)$",
        "model.named_parameters(), op=hvd.Adasum)",
        "",
        "not seen",
        "Adasum",
    ),
    "join": (PLAIN, STEP, r"\g<0>\n        hvd.join()", "", "not seen", "hvd.join"),
    "no loader": ("by_hand_pytorch", "", "", "", "not seen", "no DataLoader of samples"),
    "hvdtrain: tokens": (
        OURS,
        r"labels\) / PASSES",
        "labels, ignore_index=0)",
        "horovod own",
        "failed",
        TOKENS,
    ),
    "hvdtrain: uneven tokens": (
        OURS,
        r"( +)loss = (.*) labels\).*",
        r"\1loss = \2 labels, ignore_index=0)\n\1hvd.weight_loss(len(labels))",
        "ddp loader",
        "failed",
        "the ranks' means",
    ),
    "hvdtrain: inputs by rank": (
        OURS,
        r"model\(inputs",
        r"\g<0> + 0.1 * world.rank",
        "mpi sampler",
        "failed",
        "2 ranks differ from one process",
    ),
    "hvdtrain: random numbers": (
        OURS,
        r"model\(inputs",
        r"\g<0> + torch.randn(10)",
        "zero own",
        "not seen",
        "random numbers drawn in the training loop",
    ),
    "hvdtrain: sums": (
        OURS,
        r"PASSES = 14(, 2\n(.*\n)*.*)labels\) / PASSES",
        r'PASSES = 15\1labels, reduction="sum")',
        "ddp own",
        "failed",
        "2 ranks differ from one process",
    ),
}
NEW = ("tokens", "uneven parts", "hvdtrain: uneven tokens")


@pytest.mark.parametrize("name", REPLAYS if LONG else NEW)
def test_a_mistake_that_the_replay_sees(name: str, tmp_path: Path) -> None:
    script, pattern, replacement, arguments, state, words = REPLAYS[name]
    outcome = watched(
        copied(script, tmp_path, pattern, replacement),
        updates="5",
        code=int(state == "failed"),
        arguments=tuple(arguments.split()),
    )
    assert words in rows(outcome, state).get(9, "no row"), outcome.out


@pytest.mark.skipif(not LONG, reason="two minutes")
@pytest.mark.parametrize("strategy", ["horovod", "ddp", "fsdp"])
def test_the_gpt(strategy: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "gpt.py").read_text()
    for weighs, code in ((True, 0), (False, 1)):
        script = tmp_path / "gpt.py"
        script.write_text(text if weighs else text.replace("hvd.weight_loss(tokens)", "pass"))
        arguments = ("--strategy", strategy)
        outcome = watched(script, "--exact", updates="3", code=code, arguments=arguments)
        assert 9 in rows(outcome, "ok" if weighs else "failed"), outcome.out
