"""Two hosts of two ranks each: the same results as on one host, and the loss of a host.

What a training survives, such as a slow network, is in tests/faults.

The seconds until every rank has stopped are printed (pytest -s); 30 is the contract.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import TwoHosts, send
from tests.conftest import BIN, Outcome, executable, on_demand, run, until
from tests.conftest import LONG as ALL_CASES
from tests.parallel.conftest import STRATEGIES, Training, assert_bit_equal, assert_close, train

CONTRACT = 30.0  # seconds within which a job must end after the loss of a host or a link
START = 120.0  # seconds until the first steps of a training on a busy machine
LAUNCH = (sys.executable, "-m", "hvdtrain.cli", "launch")
EXACT = (
    *("--precision=fp64", "--lr-scaling=none", "--warmup-epochs=0", "--dropout=0"),
    *("--global-batch-size=96", "--seed=1"),
)
# Steps of a few milliseconds, each second one saved: a run can be interrupted anywhere.
LONG = ("--model=small", "--epochs=100", "--checkpoint-every=2", "--keep=1000", "--deterministic")
LAST = 60  # step of the uninterrupted run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts, removed at the end."""
    if reason := hosts.lacks():
        pytest.skip(reason)
    two = TwoHosts(tmp_path_factory.mktemp("hosts"))
    try:
        two.start()
        yield two
    finally:
        two.stop()


def trainer(folder: Path, *options: str) -> list[str]:
    """Return the command of a rank that trains on digits."""
    files = (f"--summary={folder / 'summary.json'}", f"--checkpoint-dir={folder / 'checkpoints'}")
    return [sys.executable, "-m", "hvdtrain.mnist", "--quiet", *files, *options]


def train_on(two: TwoHosts, folder: Path, *options: str) -> Training:
    """Train on both hosts to the end."""
    outcome = two.run(two.mpirun(*trainer(folder, *options)), code=0)
    return Training(outcome, folder)


@pytest.fixture(scope="module")
def uncut(two: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """An uninterrupted run with a checkpoint at each second step."""
    return train_on(two, tmp_path_factory.mktemp("uncut"), *LONG, f"--num-steps={LAST}")


def test_the_world(two: TwoHosts, tmp_path: Path) -> None:
    script = tmp_path / "world.py"
    script.write_text(
        "from hvdtrain.adapters.select import adapter\n"
        "eight = adapter()\n"
        "world = eight.initialize()\n"
        "print(world.rank, world.size, world.local_rank, world.local_size, world.host, world.hosts,"
        " eight.pin_device(), flush=True)\n"
    )
    outcome = two.run(two.mpirun("--bind-to", "none", sys.executable, str(script)), code=0)
    assert not outcome.said
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    device = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    assert sorted(outcome.out.splitlines()) == [
        f"{rank} 4 {rank % 2} 2 {two.name(1 + rank // 2)} 2 {device}" for rank in range(4)
    ]


def test_launch_by_a_nodefile_trains_as_one_rank_does(two: TwoHosts, tmp_path: Path) -> None:
    options = ("--model=small", "--num-steps=20", *EXACT)
    single = train(1, tmp_path / "one", "mnist", *options)
    command = two.on(1, *LAUNCH, "-n", "4", "--", *trainer(tmp_path / "four", *options))
    outcome = two.run(command, PBS_NODEFILE=str(two.nodefile()), code=0)
    four = Training(outcome, tmp_path / "four")
    assert_close(single, four, 1e-9)
    assert (four.summary["world_size"], four.summary["hosts"]) == (4, 2)
    assert four.summary["eval_accuracy"] == single.summary["eval_accuracy"]
    assert four.summary["eval_samples"] == 297


def test_ddp_by_launch_by_torchrun_and_by_mpirun(two: TwoHosts, tmp_path: Path) -> None:
    """Start a training by launch with an agent per host; resume by torchrun, mpirun, launch."""
    options = ("--strategy=ddp", "--model=small", "--checkpoint-every=2", "--keep=1000", *EXACT)
    launch = (*LAUNCH, "-n", "4", "--launcher=torchrun", "--")
    command = two.on(1, *launch, *trainer(tmp_path, *options, "--epochs=1000"))
    variables = {"PBS_NODEFILE": str(two.nodefile()), "GLOO_SOCKET_IFNAME": "eth0"}

    with two.running(command, **variables) as process:
        wait_for_checkpoints(2, process, tmp_path)
        process.send_signal(signal.SIGTERM)
        outcome = wait_until_over(two, process, "TERM")
    assert outcome.code == 75, outcome.err
    four = Training(outcome, tmp_path)
    assert four.summary["stopped"] == "preempted"

    end = four.summary["steps_completed"] + 4
    more = (*options, "--epochs=1000", f"--num-steps={end}")
    _by_torchrun(two, trainer(tmp_path, *more)[2:], variables)
    assert (four.summary["world_size"], four.summary["hosts"]) == (4, 2)
    assert four.summary["steps_completed"] == end
    assert_close(train(1, tmp_path / "one", "mnist", *more), four, 1e-9)

    # The names of these hosts do not resolve: the ranks find their common network.
    on = train_on(two, tmp_path, *options, "--epochs=1000", f"--num-steps={end + 2}")
    assert (on.summary["steps_completed"], on.summary["hosts"]) == (end + 2, 2)
    if ALL_CASES:
        elastic = (*LAUNCH, "--launcher=torchrun", "--elastic", "--min=2", "--max=4", "--")
        words = trainer(tmp_path, *options, "--epochs=1000", f"--num-steps={end + 4}")
        line = two.on(1, *elastic, *words)
        outcome = two.run(line, **variables, code=0)
        assert (four.summary["steps_completed"], four.summary["world_size"]) == (end + 4, 4)

    count = len(list(tmp_path.glob("checkpoints/step-*")))
    with two.running(command, **variables) as process:
        wait_for_checkpoints(count + 1, process, tmp_path)
        (agent,) = two.programs(2, r"python\S* -m hvdtrain\.commands\.launch\.elastic ")
        os.kill(agent, signal.SIGKILL)
        outcome = wait_until_over(two, process, "an agent killed")
    assert outcome.code not in (0, 75), outcome.err
    assert [f"on {two.name(2)} exited unexpectedly" in line for line in outcome.said] == [True]


def _by_torchrun(two: TwoHosts, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run ``words`` as a user does without ``launch``: one torchrun on each host."""
    static = ("--nnodes=2", f"--master_addr={two.address(1)}", "--nproc-per-node=2", "-m")
    first, second = (
        two.on(number, str(BIN / "torchrun"), f"--node_rank={number - 1}", *static, *words)
        for number in (1, 2)
    )
    with two.running(first, **variables) as agent1, two.running(second, **variables) as agent2:
        outputs = [agent.communicate(timeout=START)[0] for agent in (agent1, agent2)]
    assert (agent1.returncode, agent2.returncode) == (0, 0), outputs


def test_tensorflow_trains_as_one_rank_does(two: TwoHosts, tmp_path: Path) -> None:
    options = ("--framework=tensorflow", "--model=small", "--num-steps=6", *EXACT)
    single = train(1, tmp_path / "one", "mnist", *options)
    four = train_on(two, tmp_path / "four", *options)
    assert_close(single, four, 1e-9)
    assert four.summary["hosts"] == 2


class At(Training):
    """A training after a step."""

    def __init__(self, training: Training, step: int) -> None:
        super().__init__(training.outcome, training.folder)
        self.step = step

    @property
    def newest(self) -> Path:
        # At the end of an epoch it is saved again, with the result of the evaluation.
        return sorted(self.folder.glob(f"checkpoints/step-{self.step:09}*"))[-1]


def wait_for_checkpoints(number: int, process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until the running training has saved ``number`` checkpoints."""
    until(lambda: len(list(folder.glob("checkpoints/step-*"))) >= number, process, seconds=START)


def wait_until_over(two: TwoHosts, process: subprocess.Popen[str], event: str) -> Outcome:
    """Wait until mpirun and all ranks on both hosts have ended; return and print the outcome."""
    began = time.monotonic()
    while (running := two.ranks()) or process.poll() is None:
        assert time.monotonic() - began < CONTRACT, f"{event}: ranks {running} are still running"
        time.sleep(0.1)
    seconds = time.monotonic() - began
    output, _ = process.communicate(timeout=CONTRACT)  # its readers do not wait either
    print(f"\n{event}: all ended after {seconds:.1f} s, code {process.returncode}\n{output}")
    return Outcome(process.returncode, "", output)


def lose(
    two: TwoHosts,
    accident: Callable[[TwoHosts], None],
    command: list[str],
    folder: Path,
    checkpoints: int = 3,
    **variables: str,
) -> Outcome:
    """Start a training, and lose a host after so many checkpoints; return its outcome."""
    with two.running(command, **variables) as process:
        wait_for_checkpoints(checkpoints, process, folder)
        accident(two)
        return wait_until_over(two, process, accident.__name__)


@pytest.mark.parametrize(
    ("accident", "strategy"),
    [
        (TwoHosts.power_off, "horovod"),
        pytest.param(TwoHosts.cut, "horovod", marks=on_demand),
        *(
            pytest.param(TwoHosts.power_off, name, marks=on_demand)
            for name in STRATEGIES
            if name != "horovod"
        ),
    ],
)
def test_a_host_is_lost_and_the_training_goes_on_later(
    accident: Callable[[TwoHosts], None],
    strategy: str,
    two: TwoHosts,
    uncut: Training,
    tmp_path: Path,
) -> None:
    options = (*LONG, f"--strategy={strategy}")
    outcome = lose(two, accident, two.mpirun(*trainer(tmp_path, *options)), tmp_path)
    newest = Training(outcome, tmp_path).newest
    assert outcome.code == 1
    (said,) = outcome.said
    if strategy == "horovod":
        assert said.startswith(f"hvdtrain: rank 0 on {two.name(1)}, step ")
    assert f"host {two.name(2)} (ranks 2-3) has not answered for 15 s" in said
    assert said.endswith(f"again: it resumes from {newest}")
    step = newest.name.partition("+")[0]  # at the end of an epoch it is saved twice
    end = int(step.removeprefix("step-")) + 6
    resumed = train_on(two, tmp_path, *options, f"--num-steps={end}", "--resume=must")
    assert resumed.summary["steps_completed"] == end
    if strategy == "horovod":
        assert_bit_equal(At(uncut, end), At(resumed, end))


def kill_daemon(two: TwoHosts) -> None:
    send(signal.SIGKILL, two.programs(2, "prted "))


def end_daemon(two: TwoHosts) -> None:
    send(signal.SIGTERM, two.programs(2, "prted "))


def kill_agent(two: TwoHosts) -> None:
    send(signal.SIGKILL, two.programs(1, f".* {two.agent} "))


def kill_host(two: TwoHosts) -> None:
    two.kill(2)


WAYS = (kill_daemon, end_daemon, kill_agent, kill_host)


@pytest.mark.parametrize("number", range(10 if ALL_CASES else 1))
@pytest.mark.parametrize("way", WAYS if ALL_CASES else WAYS[2:])
def test_a_host_is_lost_while_its_network_stays_up(
    way: Callable[[TwoHosts], None], number: int, two: TwoHosts, tmp_path: Path
) -> None:
    """mpirun detects it at once, and returns 0 for a job that it has ended early."""
    command = two.on(1, *LAUNCH, "-n", "4", "--", *trainer(tmp_path, *LONG))
    nodes = str(two.nodefile())
    outcome = lose(two, way, command, tmp_path, 1 + number, PBS_NODEFILE=nodes)
    assert outcome.code == 1
    assert outcome.said[-1].startswith(f"hvdtrain: error: host {two.name(2)} was lost")
    _, words, newest = outcome.said[-1].rpartition("again: it resumes from ")
    # A concurrent save may end after that line.
    assert words and Path(newest) in sorted(tmp_path.glob("checkpoints/step-*"))[-2:]


@pytest.mark.parametrize("way", WAYS if ALL_CASES else WAYS[1:2])
@pytest.mark.parametrize("once", [False, True], ids=["by launch", "by its own mpirun"])
def test_a_job_script_fails_if_a_host_is_lost(
    once: bool, way: Callable[[TwoHosts], None], two: TwoHosts, tmp_path: Path
) -> None:
    """The script that submit writes, run on the first node: its exit code is what PBS keeps."""
    words = two.mpirun(*trainer(tmp_path, *LONG)) if once else trainer(tmp_path, *LONG)
    words = words[len(two.on(1)) :] if once else words  # it is on that host already
    job = ("--scheduler=pbs", "--nodes=2", "--ppn=2", "--walltime=1:00:00", "--dry-run")
    verb = [sys.executable, "-m", "hvdtrain.cli", "submit", *job, *(["--once"] if once else [])]
    script = tmp_path / "job.pbs"
    script.write_text(run([*verb, "--", *words]).out)
    command = two.on(1, "bash", str(script))
    outcome = lose(two, way, command, tmp_path, 2, PBS_NODEFILE=str(two.nodefile()))
    assert outcome.code in (1, 75)  # mpirun may leave the ranks the time to save
    assert two.name(2) in outcome.err


@pytest.mark.parametrize("number", range(10 if ALL_CASES else 1))
@pytest.mark.parametrize("way", WAYS if ALL_CASES else WAYS[:1])
def test_a_host_is_lost_under_a_bare_mpirun(
    way: Callable[[TwoHosts], None], number: int, two: TwoHosts, tmp_path: Path
) -> None:
    """A job script reads the exit code of rank 0."""
    mark = tmp_path / "mark"
    mark.touch()
    command = two.mpirun(*trainer(tmp_path, *LONG))
    outcome = lose(two, way, command, tmp_path, 1 + number, HVDTRAIN_END_MARK=str(mark))
    assert two.name(2) in outcome.err
    assert mark.read_text() in ("1\n", "75\n")  # mpirun may leave them the time to save


@pytest.mark.parametrize("number", range(10 if ALL_CASES else 1))
@pytest.mark.parametrize("agent", ["ssh", "the site's"])
def test_term_to_all_that_a_job_runs_on_its_first_node(
    agent: str, number: int, two: TwoHosts, tmp_path: Path
) -> None:
    """PBS ends a job so, including ssh: the ranks save, on both nodes, before mpirun notices."""
    # Steps of more than the half second in which mpirun kills, and an evaluation after each.
    steps = ("--batch-size=375", "--precision=fp32", "--epochs=10000", "--checkpoint-every=1")
    command = two.on(1, *LAUNCH, "-n", "4", "--", *trainer(tmp_path, *steps))
    variables = {"PBS_NODEFILE": str(two.nodefile())}
    if agent != "ssh":
        variables["PRTE_MCA_plm_ssh_agent"] = shutil.copy(two.agent, tmp_path / "tmssh")
    with two.running(command, **variables) as process:
        wait_for_checkpoints(2, process, tmp_path)
        chance = random.Random(number)
        time.sleep(chance.random())  # anywhere in a step, an evaluation or a save
        job = two.processes(1)
        chance.shuffle(job)
        send(signal.SIGTERM, job)
        outcome = wait_until_over(two, process, "TERM")
    assert outcome.code == 75
    summary = Training(outcome, tmp_path).summary
    assert summary["stopped"] == "preempted"
    newest = Training(outcome, tmp_path).newest
    assert summary["checkpoint"] == str(newest)
    assert newest.name.partition("+")[0] == f"step-{summary['steps_completed']:09}"


@on_demand
def test_doctor_times_allreduce_on_hosts_that_share_cores(two: TwoHosts, tmp_path: Path) -> None:
    """As with sshd, the daemon of each host is in a separate session."""
    text = two.agent.read_text().replace(" --leave-session-attached", "")
    agent = executable(tmp_path / "ssh", text.replace("unshare -u sh", "unshare -u setsid -w sh"))
    doctor = (sys.executable, "-m", "hvdtrain.cli", "doctor", "-n", "4", "--json")
    variables = {"PBS_NODEFILE": str(two.nodefile()), "PRTE_MCA_plm_ssh_agent": str(agent)}
    outcome = two.run(two.on(1, *doctor), timeout=500, **variables)
    report = json.loads(outcome.out)
    assert [row for row in report["findings"] if "allreduce" in row["check"]] == [
        {
            "check": "allreduce",
            "state": "ok",
            "evidence": "correct sums by mpi4py; Horovod, PyTorch; torch.distributed, Gloo: see "
            "the table",
            "remedy": "",
        }
    ]
    assert (report["allreduce"]["ranks"], report["allreduce"]["hosts"]) == (4, 2)
