"""torchrun starts its ranks anew: a killed one costs what was done since the last checkpoint.

Hosts are agents here, which is all that torchrun knows of them.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.steps.checkpoint import newest_name
from tests.conftest import BIN, LONG, begin, end_session, ended, on_demand, run
from tests.parallel.conftest import show_seconds_lost, until

TRAIN = ("hvdtrain.mnist", "--strategy=ddp", "--model=small")
SAMPLES = 1500
# A host that is silent for 3 s is lost, and who comes first waits 1 s for the others.
QUICK = "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Torchrun:
    """Agents of torchrun that train together."""

    def __init__(self, *training: str, hosts: str, restarts: int) -> None:
        place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        rendezvous = ("--rdzv-backend=c10d", place, "--rdzv-id=1", QUICK)
        world = (f"--nnodes={hosts}", "--nproc-per-node=1", f"--max-restarts={restarts}")
        local = ("--local-addr=127.0.0.1", "-m")
        # As docs/launch.md says: otherwise an agent that joins waits for an address in vain.
        alone = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") if ":" in hosts else ()
        torchrun = str(BIN / "torchrun")
        self.line = [*alone, torchrun, *rendezvous, *world, *local, *TRAIN, *training]
        self.agents: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start one more agent."""
        self.agents.append(begin(self.line, start_new_session=True))

    def ranks(self, agent: int = 0) -> list[psutil.Process]:
        """The ranks of ``agent`` that there are now."""
        return psutil.Process(self.agents[agent].pid).children()

    def world(self) -> int:
        """How many ranks the first agent's rank was told of; 0 while it has none."""
        with contextlib.suppress(psutil.Error, LookupError):
            return int(self.ranks()[0].environ()["WORLD_SIZE"])
        return 0

    def kill(self, agent: int) -> None:
        """Do what the loss of a host does."""
        with self.agents[agent] as process:
            ranks = self.ranks(agent) if process.poll() is None else []
            end_session(process.pid)
            for rank in ranks:
                rank.kill()


@contextlib.contextmanager
def torchrun(*training: str, **how: Any) -> Iterator[Torchrun]:
    """``Torchrun``, of which nothing stays."""
    running = Torchrun(*training, **how)
    try:
        yield running
    finally:
        for agent in range(len(running.agents)):
            running.kill(agent)


def newest(saved: Path) -> str:
    """The name of the newest checkpoint; empty: there is none."""
    return newest_name(saved) or ""


def is_asked(process: psutil.Process) -> bool:
    """Whether TERM waits for ``process``, which is suspended."""
    waits = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(waits and int(waits[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("ddp", 1),
        *([("ddp", 2), ("zero", 1), ("zero", 2), ("fsdp", 1), ("fsdp", 2)] if LONG else []),
    ],
)
def test_a_host_that_joins_and_one_that_is_lost(strategy: str, hosts: int, tmp_path: Path) -> None:
    saved, summary = tmp_path / "checkpoints", tmp_path / "summary.json"
    files = (f"--checkpoint-dir={saved}", "--checkpoint-every=20", f"--summary={summary}")
    line = (f"--strategy={strategy}", "--epochs=16", *files)
    with torchrun(*line, hosts="1:4", restarts=1) as job:
        for _ in range(hosts):
            job.start()
        first = job.agents[0]
        until(lambda: job.world() == hosts and newest(saved), first)
        (rank,) = job.ranks()
        rank.suspend()  # the others wait for it, and there is something left to do
        job.start()
        until(lambda: is_asked(rank), first)
        rank.resume()
        until(lambda: job.world() == hosts + 1, first)
        before = newest(saved)
        until(lambda: newest(saved) > before, first)
        kept = newest(saved)
        job.kill(hosts)
        show_seconds_lost("torchrun, a host lost", saved, first)
        said = ended(first, 0)
    result = json.loads(summary.read_text())
    assert (result["stopped"], result["world_size"]) == ("finished", hosts)
    assert result["samples_trained"] == 16 * SAMPLES  # each sample of each epoch once
    if hosts == 1:  # else any of them may be rank 0, which speaks
        worlds = re.findall(r"(\d) ranks? on.*\n.* x (\d) =", said)
        assert worlds == [("1", "1"), ("2", "2"), ("1", "1")]  # and so the learning rate
        (step,) = re.findall(r"resumed from .*: step (\d+)", said)[1:]
        # Nothing that was saved is lost.
        assert int(step) >= int(kept.removeprefix("step-").partition("+")[0])


@on_demand  # twelve, each after another time
@pytest.mark.parametrize("number", range(12))
def test_a_rank_that_is_killed(number: int, tmp_path: Path) -> None:
    saved, summary = tmp_path / "checkpoints", tmp_path / "summary.json"
    files = (f"--checkpoint-dir={saved}", "--checkpoint-every=5", f"--summary={summary}")
    strategy = f"--strategy={('ddp', 'zero', 'fsdp')[number % 3]}"
    with torchrun("--quiet", strategy, "--epochs=16", *files, hosts="2", restarts=3) as job:
        job.start()
        job.start()
        first = job.agents[0]
        until(lambda: job.world() == 2 and newest(saved), first)
        chance = random.Random(number)
        time.sleep(chance.random() / 2)
        ranks = {rank.environ()["RANK"]: rank for one in (0, 1) for rank in job.ranks(one)}
        ranks[str(chance.randrange(2))].kill()
        show_seconds_lost("torchrun, a rank killed", saved, first)
        ended(first, 0)
    result = json.loads(summary.read_text())
    assert (result["stopped"], result["world_size"]) == ("finished", 2)
    assert result["samples_trained"] == 16 * SAMPLES  # each sample of each epoch once


def test_launch_goes_on_after_a_loss_and_stops_when_asked(tmp_path: Path) -> None:
    hosts = ("--min=1", "--max=2", "--hosts=localhost:1,127.0.0.1:1")
    launch = (str(BIN / "hvdtrain"), "launch", "--launcher=torchrun", "--elastic", *hosts, "--")
    files = (f"--checkpoint-dir={tmp_path}", "--checkpoint-every=5")
    train = ("python", "-m", *TRAIN, "--quiet", "--epochs=10000", *files)
    line = ["env", f"MASTER_PORT={free_port()}", *launch, *train]
    process = begin(line, start_new_session=True)

    def ranks() -> dict[str, psutil.Process]:
        agents = psutil.Process(process.pid).children()
        with contextlib.suppress(psutil.Error, KeyError):
            return {one.environ()["RANK"]: one for agent in agents for one in agent.children()}
        return {}

    try:
        until(lambda: len(ranks()) == 2 and newest(tmp_path), process)
        lost = ranks()["0"]  # the one with the rendezvous of all
        lost.kill()
        until(lambda: len(ranks()) == 2 and lost not in ranks().values(), process)
        kept = newest(tmp_path)
        until(lambda: newest(tmp_path) > kept, process)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        for rank in ranks().values() if process.poll() is None else ():
            rank.kill()
        end_session(process.pid)
    assert process.returncode == 75, said
    assert said.count("stopped after step") == 1  # and was not started anew
    assert "frame #" not in said and "rendezvous" not in said  # of the agent that ended last


def test_without_a_checkpoint_it_would_begin_anew() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}
    outcome = run([str(BIN / "python"), "-m", *TRAIN], **variables, TORCHELASTIC_MAX_RESTARTS="3")
    assert outcome.code == 2
    assert len(outcome.said) == 1
    assert "--max-restarts" in outcome.said[0]
    assert "--checkpoint-dir" in outcome.said[0]
