"""Agents of torchrun: the request, their commands per host, and how they end together."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.launch import elastic
from hvdtrain.commands.launch.elastic import (
    NO_SHARED_STORE,
    PROGRAM,
    SSH,
    Agents,
    ElasticAgents,
    agent_commands,
    on_host,
)
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.command import run as run_command
from hvdtrain.system.runtime.spawn import StopSignals
from tests.conftest import BIN, executable, run

WORDS = ("python", "-m", "hvdtrain.resnet", "--data", "my images")
ENVIRON = {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "ib0", "HOME": "/root", "MASTER_PORT": "4711"}
TWO = RankLayout(3, (Host("node1.cluster", 2), Host("node2", 1)))


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name this machine, in a directory with a blank in its name."""
    monkeypatch.setattr(elastic, "local_names", lambda: {"node1", "node0"})
    monkeypatch.setattr(Path, "cwd", lambda: Path("/my work"))


def test_one_host_needs_no_rendezvous() -> None:
    for layout in (RankLayout(2), RankLayout(2, (Host("node1", 2),))):
        (agent,) = agent_commands(layout, WORDS, None, ENVIRON).values()
        assert agent == Command(
            (*PROGRAM, "--standalone", "--nproc-per-node=2", "--no-python", *WORDS)
        )


def test_this_host_and_a_remote_one() -> None:
    agents = agent_commands(TWO, WORDS, 4, ENVIRON)
    rendezvous = ("--nnodes=2", "--master-addr=node1.cluster", "--master-port=4711")
    first = (*PROGRAM, *rendezvous, "--node-rank=0", "--nproc-per-node=2", "--no-python", *WORDS)
    assert agents["node1.cluster"] == Command(first, {"OMP_NUM_THREADS": "4"})
    assert agents["node2"].argv[:4] == (*SSH, "node2")
    # As the remote shell splits it.
    assert shlex.split(agents["node2"].argv[-1]) == [
        *("exec", "env", "--chdir=/my work", "GLOO_SOCKET_IFNAME=ib0", "OMP_NUM_THREADS=4"),
        *("PATH=/bin", *PROGRAM, *rendezvous, "--node-rank=1", "--nproc-per-node=1"),
        *("--no-python", *WORDS),
    ]


def test_hosts_that_may_be_lost() -> None:
    layout = RankLayout(8, tuple(Host(name, 2) for name in ("node1", "node2", "node3", "node4")))
    agents = agent_commands(layout, WORDS, None, ENVIRON, 3)
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1:4711", "--rdzv-id=4711")
    first = (*PROGRAM, "--nnodes=2:4", *rendezvous, "--max-restarts=10", "--rdzv-conf=is_host=1")
    words = ("--local-addr=node1", "--nproc-per-node=2", "--no-python", *WORDS)
    assert agents.pop("node1") == Command((*first, *words), NO_SHARED_STORE)
    for host, agent in agents.items():
        line = shlex.split(agent.argv[-1])
        assert f"--local-addr={host}" in line
        assert {"--rdzv-conf=is_host=0", "--nnodes=2:4", *rendezvous} < set(line)
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line


@pytest.mark.parametrize(
    ("slots", "fewest", "expected"),
    [((4, 1), 4, 2), ((4, 1), 1, 1), ((4, 4, 2), 8, 3), ((4, 4, 2), 6, 2), ((2, 2), 4, 2)],
)
def test_hosts_of_unequal_slots(slots: tuple[int, ...], fewest: int, expected: int) -> None:
    """The minimum number of hosts holds the ranks, whichever hosts they are."""
    layout = RankLayout(sum(slots), tuple(Host(f"node{n}", count) for n, count in enumerate(slots)))
    job = {"PBS_JOBID": "7.server"}
    for agent in agent_commands(layout, WORDS, None, job, fewest).values():
        assert f"--nnodes={expected}:{len(slots)}" in agent.show()
        assert "--rdzv-id=7.server" in agent.show()


def test_ranks_that_may_be_lost_on_one_host() -> None:
    (agent,) = agent_commands(RankLayout(2), WORDS, None, {}, 1).values()
    options = ("--standalone", "--max-restarts=10", "--nproc-per-node=2", "--no-python")
    assert agent == Command((*PROGRAM, *options, *WORDS), NO_SHARED_STORE)


def test_a_dry_run_prints_a_line_per_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = "launch -n 4 --hosts a:2,b:2 --launcher torchrun --dry-run -- true --epochs 3"
    assert cli.main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[:4] for line in lines] == [[*SSH, host] for host in "ab"]
    assert all("--master-port=29500" in line for line in lines)  # torchrun's


TRAIN = "python -m hvdtrain.mnist"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--elastic --max 2 -- true", "--min N and --max M"),
        ("--elastic --min 0 --max 2 -- true", "0 is not a whole number of 1 or more"),
        ("-n 2 --elastic --min 1 --max 2 -- true", "-n N, or --elastic"),
        ("-- true", "-n N, or --elastic"),
        ("-n 2 --max 2 -- true", "need --elastic"),
        ("--elastic --min 1 --max 2 --tag -- true", "--elastic does not support --tag"),
        ("--elastic --min 3 --max 2 -- true", "--min 3: more than --max 2"),
        ("--elastic --min 3 --max 4 --hosts a:2 -- true", "the 2 slots"),
        ("--elastic --min 1 --max 2 --launcher mpi -- true", "not support --launcher mpi"),
        (f"--elastic --min 1 --max 2 -- {TRAIN}", "not support --strategy horovod: use --strategy"),
        (
            f"--elastic --min 1 --max 2 -- {TRAIN} --framework tensorflow",
            "not support --framework tensorflow: use a chain of jobs",
        ),
        (f"--elastic --min 1 --max 2 -- {TRAIN} --strategy=mpi", "not support --strategy mpi"),
        (f"--elastic --min 1 --max 2 -- {TRAIN} --config recipe.yaml", "--framework tensorflow"),
        (
            "--elastic --min 1 --max 2 -- sh x.sh --framework tensorflow",
            "(hvdtrain submit --chain)",
        ),
    ],
)
def test_wrong_use(
    words: str,
    message: str,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("framework: tensorflow\nstrategy: horovod\n")
    assert message in refused("launch", *words.split())


@pytest.mark.parametrize("words", ["true", f"{TRAIN} --strategy fsdp", f"{TRAIN} --strategy=zero"])
def test_elastic_ranks_are_started_by_torchrun(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"launch --elastic --min 1 --max 2 --dry-run -- {words}"
    assert cli.main(line.split()) == 0
    assert f" {' '.join(PROGRAM[1:])} --standalone --max-restarts=10 " in capsys.readouterr().out


def started(*programs: str, kind: type[Agents] = Agents, received: Sequence[int] = ()) -> Agents:
    """Return agents that run these Python programs."""
    signals = StopSignals()
    signals.received += received
    running = kind(signals)
    commands = [Command((sys.executable, "-c", program)) for program in programs]
    running.start({f"node{n}": command for n, command in enumerate(commands)})
    return running


def test_an_agent_that_fails_ends_the_others_by_closing_their_input() -> None:
    waits = "import sys; sys.stdin.read(); sys.exit(9)"
    with started(waits, "import sys; sys.exit(5)") as running:
        assert running.wait() == 5
    assert [process.returncode for process in running.running] == [9, 5]


def test_the_first_of_elastic_agents_counts() -> None:
    lost, last = "import sys; sys.exit(9)", "import sys, time; time.sleep(1); sys.exit(5)"
    with started(last, lost, lost, kind=ElasticAgents) as running:
        assert running.wait() == 5


def test_an_agent_that_is_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with started("import os; os.kill(os.getpid(), 9)") as running:
        assert running.wait() == 128 + 9
    assert capfd.readouterr().err == "hvdtrain: the agent on node0 was ended by SIGKILL\n"


def test_a_stop_request_reaches_the_input_of_agents() -> None:
    stops = "import os, sys; sys.exit(75 if os.read(0, 1) else 1)"
    with started(stops, stops, received=[15]) as running:
        assert running.wait() == 75


def program(file: Path, text: str) -> Path:
    return executable(file, f"#!/bin/sh\n{text}\n")


def test_the_remote_shell_passes_all_words_and_variables_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", 'for last; do :; done; eval "$last"')  # as sshd's shell does
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = (f"$(touch {tmp_path}/evil)", "a b", "'", '"; exit 3', "`id`", "*", "\n", "", "-n")
    show = "import os, sys; print([os.environ['HVDTRAIN_X'], *sys.argv[1:]])"
    command = Command((sys.executable, "-c", show, *words), {"HVDTRAIN_X": words[0]})
    done = run_command(on_host("elsewhere", command, {"HVDTRAIN_Y": words[0]}))
    assert (done.exit_code, ast.literal_eval(done.output)) == (0, [words[0], *words])
    assert not (tmp_path / "evil").exists()


def test_the_end_of_the_job_is_exported_to_all_hosts(tmp_path: Path) -> None:
    program(tmp_path / "ssh", f'echo "$3" >> {tmp_path}/$2')
    program(tmp_path / "qstat", 'echo " Resource_List.walltime = 01:00:00"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = ["launch", "-n", "2", "--hosts=a,b", "--launcher=torchrun", "--", "true"]
    outcome = run([str(BIN / "hvdtrain"), *line], PATH=path, PBS_JOBID="7.server")
    assert outcome.code == 0, outcome.err
    for host in "ab":
        assert " HVDTRAIN_WALLTIME_ENDS=" in (tmp_path / host).read_text()
