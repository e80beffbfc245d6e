"""``hvdtrain verify --script`` on scripts of libraries that stand on torch.distributed.

These have an environment of their own (``make peers``).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG, Outcome, run

SCRIPTS = Path(__file__).parent / "scripts"
ACCELERATE, LIGHTNING, FABRIC, TRAINER = "accelerate", "lightning", "fabric", "trainer"
PACKAGES = {FABRIC: "lightning", TRAINER: "transformers"}


def watched(name: str, folder: Path, *more: str, change: tuple[str, str] = ("", "")) -> Outcome:
    """Verify a copy of a script in ``folder``, with ``change``, a pattern and its replacement."""
    pytest.importorskip(PACKAGES.get(name, name), reason="make peers installs it")
    pattern, replacement = change
    original = (SCRIPTS / f"{name}_torch.py").read_text()
    text, count = re.subn(pattern, replacement, original, flags=re.MULTILINE)
    assert count
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "hvdtrain", "verify", *more, "--json", "--script", "train.py"]
    return run(command, cwd=folder, code=None)


def rows(outcome: Outcome, state: str) -> dict[int, str]:
    """Return the evidence of the rows that have a state, by step."""
    found = json.loads(outcome.out)["rows"]
    return {row["step"]: row["evidence"] for row in found if row["state"] == state}


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("name", [ACCELERATE, LIGHTNING, FABRIC, TRAINER])
def test_a_right_script(name: str, exact: bool, tmp_path: Path) -> None:
    more = ["-n", "3", "--exact"] if exact else ["-n", "2"]
    outcome = watched(name, tmp_path, *more, "--updates", "all")
    assert list(rows(outcome, "ok")) == list(range(1, 10)), outcome.out
    assert ("in fp64" in rows(outcome, "ok")[9]) == exact


COPY = "__import__('copy').deepcopy"
TOKENS = r"(cross_entropy.*labels)", r"\1, ignore_index=0"
MEAN = "a mean of the ranks' means, if the loss divides by something else than samples"
NO_GRADIENT = "no parameter of the optimizer had a gradient"
# Script, pattern, replacement; state, step and words of the row that shows it, None if none does.
MISTAKES: dict[str, tuple[str, str, str, str, int | None, str]] = {
    "a: optimizer of another model": (
        ACCELERATE,
        r"AdamW\(network",
        rf"AdamW({COPY}(network)",
        "failed",
        5,
        NO_GRADIENT,
    ),
    "a: model not prepared": (
        ACCELERATE,
        "^model, (.*)prepare.network, (.*)$",
        r"model = network.train()\n\1prepare(\2",
        "failed",
        5,
        "nothing was reduced",
    ),
    "a: equal seeds": (
        ACCELERATE,
        r"^(generator(?:.*\n)+?)model, (.*)prepare.network, (.*)",
        r"torch.manual_seed(0)\n\1model = network.train()\n\2prepare(\3",
        "failed",
        6,
        "no broadcast was executed; max difference",
    ),
    "a: loader not prepared": (
        ACCELERATE,
        r"^model, optimizer, loader, (.*), loader, evaluation",
        r"model, optimizer, \1, evaluation",
        "failed",
        3,
        "on more than one rank",
    ),
    "a: past the wrapper": (
        ACCELERATE,
        r"cross_entropy\(model",
        "cross_entropy(model.module",
        "failed",
        5,
        "no pass",
    ),
    "a: divided twice": (ACCELERATE, r"backward\(loss", "backward(loss / 2", "ok", None, ""),
    "a: no zero_grad": (ACCELERATE, r"optimizer\.zero_grad\(\)", "pass", "ok", None, ""),
    "a: metric of one rank": (
        ACCELERATE,
        r"accelerator\.gather_for_metrics",
        "",
        "not seen",
        8,
        "no metric was reduced",
    ),
    "a: tokens": (ACCELERATE, *TOKENS, "failed", 9, MEAN),
    "a: clipped by rank": (
        ACCELERATE,
        r"with (accelerator\.acc.*\n(?:.*\n)+?)( +)accelerator\.clip.*",
        r"with model.no_sync(), \1\2torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
        r'\2for p in model.parameters():\n\2    p.grad = accelerator.reduce(p.grad, "mean")',
        "failed",
        9,
        "clipped or scaled before the reduction",
    ),
    "a: all save": (
        ACCELERATE,
        r"if accelerator\.is_main_process",
        "if True",
        "failed",
        7,
        "ranks 0, 1 wrote",
    ),
    "a: rate by rank": (
        ACCELERATE,
        "lr=0.01",
        "lr=0.01 * (accelerator.process_index + 1)",
        "failed",
        4,
        "by rank",
    ),
    "l: no sampler": (
        LIGHTNING,
        "logger=False",
        r"use_distributed_sampler=False, \g<0>",
        "failed",
        3,
        "on more than one rank",
    ),
    "l: metric of one rank": (
        LIGHTNING,
        ", sync_dist=True",
        "",
        "not seen",
        8,
        "were equal on all ranks before",
    ),
    "l: manual, not by the strategy": (
        LIGHTNING,
        r"(__init__\(\)\n)((?:.*\n)+?)( +)return (cross.*)((?:.*\n)+?) +accum.*\n +gradient.*",
        r"\1\3self.automatic_optimization = False\n\2\3loss = \4\n\3loss.backward()\n"
        r"\3self.optimizers().step()\n\3self.optimizers().zero_grad()\5",
        "failed",
        5,
        "",
    ),
    "l: optimizer of another model": (
        LIGHTNING,
        r"SGD\(self\.",
        rf"SGD({COPY}(self.layers).",
        "failed",
        5,
        NO_GRADIENT,
    ),
    "l: tokens": (
        LIGHTNING,
        r"return (.*labels)\)$",
        r"return \1, ignore_index=0)",
        "failed",
        9,
        MEAN,
    ),
    "l: inputs by rank": (
        LIGHTNING,
        r"return (.*)\(inputs\)",
        r"return \1(inputs + 0.1 * self.global_rank)",
        "failed",
        9,
        "layers that depend on the rank",
    ),
    "l: data by rank": (
        LIGHTNING,
        r"seed\(1\)",
        'seed(int(os.environ["RANK"]))',
        "failed",
        9,
        "the samples depend on the rank",
    ),
    "l: rate by rank": (
        LIGHTNING,
        "lr=0.05",
        "lr=0.05 * (self.global_rank + 1)",
        "failed",
        4,
        "by rank",
    ),
    "l: all save": (
        LIGHTNING,
        r"\Z",
        'torch.save(trainer.model.state_dict(), "model.pt")\n',
        "failed",
        7,
        "ranks 0, 1 wrote",
    ),
    "f: loader not set up": (
        FABRIC,
        r"fabric\.setup_dataloaders|    loader\.sampler\.set.*",
        "",
        "failed",
        3,
        "",
    ),
    "f: past the wrapper": (
        FABRIC,
        r"model\(inputs",
        "network(inputs",
        "failed",
        5,
        "no pass went through",
    ),
    "f: never reduced": (
        FABRIC,
        "enabled=not last",
        "enabled=True",
        "failed",
        5,
        "no pass went through",
    ),
    "f: metric of one rank": (FABRIC, r"^    sums = fabric.*", "", "not seen", 8, "no metric"),
    "f: tokens": (FABRIC, *TOKENS, "failed", 9, MEAN),
    "f: all save": (
        FABRIC,
        r"^fabric\.save.*",
        'torch.save(model.state_dict(), "model.pt")',
        "failed",
        7,
        "ranks 0, 1 wrote",
    ),
    "t: tokens": (
        TRAINER,
        "use_cpu",
        r"average_tokens_across_devices=False, \g<0>",
        "failed",
        9,
        MEAN,
    ),
    "t: optimizer of another model": (
        TRAINER,
        "compute_metrics=right",
        r"\g<0>, optimizers=(torch.optim.AdamW(GPT2LMHeadModel(config).parameters()), None)",
        "failed",
        5,
        NO_GRADIENT,
    ),
    "t: all save": (
        TRAINER,
        r"\Z",
        'torch.save(trainer.model.state_dict(), "model.pt")\n',
        "failed",
        7,
        "ranks 0, 1 wrote",
    ),
}


@pytest.mark.parametrize("name", MISTAKES if LONG else ())
def test_a_mistake_is_seen_in_its_row(name: str, tmp_path: Path) -> None:
    script, pattern, replacement, state, step, words = MISTAKES[name]
    more = ("-n", "2", "--updates", "all" if step in (7, 8) else "5")
    outcome = watched(script, tmp_path, *more, change=(pattern, replacement))
    if step is None:
        assert not rows(outcome, "failed"), outcome.out
    else:
        assert words in rows(outcome, state).get(step, ""), outcome.out
