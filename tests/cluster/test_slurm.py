"""A real Slurm with real PBS commands in front: jobs/, submit, follow, chains, srun, doctor."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from hvdtrain.commands.submit import chain
from tests.cluster.slurm import Cluster
from tests.conftest import BIN, LONG, ROOT, Outcome, on_demand, until
from tests.unit.commands.submit.pbs_reader import Node, read_script

PATIENCE = 240.0  # seconds for a job to end


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> User:
    """A user in a temporary directory with .venv and jobs/."""
    if not (BIN / "mpirun").exists() or importlib.util.find_spec("horovod") is None:
        pytest.skip("no mpirun or no Horovod in this environment: make setup")
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / ".venv").symlink_to(BIN.parent)
    return User(cluster, tmp_path)


class User:
    """A user who runs commands in a directory and waits for jobs."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory

    def types(self, *words: str, code: int = 0) -> Outcome:
        """Run a command that must end with ``code``."""
        outcome = self.cluster.command(*words, cwd=self.directory, code=code)
        return outcome

    def submits(self, *options: str, code: int = 0) -> Outcome:
        """Run ``hvdtrain submit`` with two ranks."""
        return self.types(str(BIN / "hvdtrain"), "submit", "--ppn", "2", *options, code=code)

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job."""
        text = self.types("scontrol", "show", "job", number).out
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def ended(self, number: str) -> dict[str, str]:
        """Wait for the end of a job; return its record."""
        running = ("PENDING", "RUNNING", "COMPLETING")
        until(
            lambda: self.job(number)["JobState"] not in running,
            seconds=PATIENCE,
            detail=lambda: self.job(number),
        )
        return self.job(number)

    def log(self, number: str) -> str:
        """Return the output of a job."""
        job = self.job(number)
        files = [Path(job[name]) for name in ("StdOut", "StdErr")]
        return "".join(file.read_text() for file in files if file.exists())  # not before it starts

    def runs(self, *words: str) -> str:
        """Submit a job with qsub or sbatch, wait for its completion, and return its log."""
        number = self.types(*words).out.split()[-1]
        job = self.ended(number)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), self.log(number)[-3000:]
        return self.log(number)

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a training."""
        summary: dict[str, Any] = json.loads((self.directory / name).read_text())
        return summary


SMALL = "MODEL=resnet18,BATCH=1"
ONE_NODE = "select=1:ncpus=4:mpiprocs=4"


def test_pi(user: User) -> None:
    assert "1,000,000 samples on 4 ranks" in user.runs(
        *("qsub", "-v", "SAMPLES=1e6", "jobs/pi.pbs")
    )


def test_mnist_on_one_node(user: User, mnist: Path) -> None:
    log = user.runs("qsub", "-v", f"DATA={mnist},EPOCHS=1,STEPS=5", "jobs/mnist_1node.pbs")
    assert "60,000 images" in log
    summary = user.summary("results/mnist/summary.json")
    assert (summary["world_size"], summary["steps_completed"]) == (4, 5)
    assert summary["eval_samples"] == 10_000
    assert Path(user.directory, summary["checkpoint"]).is_dir()


def test_a_sweep_of_mnist(user: User) -> None:
    user.runs("qsub", "-j", "oe", "-l", ONE_NODE, "-v", "STEPS=3", "jobs/mnist_scaling.pbs")
    for size in (1, 2, 4):
        assert user.summary(f"results/mnist_scaling/{size}.json")["world_size"] == size


@on_demand  # as test_a_timeline
def test_resnet_on_one_node(user: User) -> None:
    user.runs("qsub", "-v", f"{SMALL},STEPS=1", "jobs/resnet_1node.pbs")
    summary = user.summary("results/resnet/summary.json")
    assert (summary["world_size"], summary["model"]) == (4, "resnet18")


@on_demand
def test_a_sweep_of_resnet(user: User) -> None:
    user.runs("qsub", "-l", ONE_NODE, "-v", f"{SMALL},STEPS=1,RESULTS=r", "jobs/resnet_scaling.pbs")
    assert [user.summary(f"r/{size}.json")["world_size"] for size in (1, 2, 4)] == [1, 2, 4]


def test_a_timeline(user: User) -> None:
    user.runs("qsub", "-v", f"{SMALL},STEPS=2,TIMELINE=t.json", "jobs/timeline_capture.pbs")
    assert "NEGOTIATE_ALLREDUCE" in (user.directory / "t.json").read_text()


def test_resnet_by_sbatch(user: User) -> None:
    user.runs("sbatch", f"--export=ALL,{SMALL},STEPS=1", "jobs/resnet.slurm")
    assert user.summary("results/resnet/summary.json")["world_size"] == 4


def test_without_a_batch_system(user: User) -> None:
    user.types("env", "STEPS=3", "bash", "jobs/local.sh")
    assert user.summary("results/mnist/summary.json")["world_size"] == 2


@pytest.mark.parametrize("scheduler", ["pbs", "slurm"])
def test_following_a_job_shows_its_log_and_exit_code(scheduler: str, user: User) -> None:
    """With an argument that is hard to quote, by the real qsub and sbatch."""
    argument = 'it\'s $HOME `id`\n#PBS -q no\r\\ "x" é'
    program = "import os, sys; print(ascii(sys.argv[1]), os.getcwd()); sys.exit(3)"
    words = ("--scheduler", scheduler, "--walltime", "0:05:00", "--follow", "--env", ".venv")
    outcome = user.submits(*words, "--", "python", "-c", program, argument, code=3)
    assert f"{argument!a} {user.directory}" in outcome.out
    states = re.findall(r"^job \d+: (.*)$", outcome.err, re.MULTILINE)
    assert states[-1] == "failed, exit code 3"


def test_standard_output_is_only_json(user: User) -> None:
    words = ("--walltime", "0:05:00", "--follow", "--json", "--", "true")
    answer = json.loads(user.submits(*words).out)
    assert (answer["ok"], answer["state"], answer["exit_code"]) == (True, "completed", 0)
    assert Path(user.directory, answer["script"]).is_file()
    assert Path(user.directory, answer["logs"][0]).is_file()


def test_an_array_has_a_log_for_each_task(user: User) -> None:
    words = ("--scheduler", "pbs", "--walltime", "0:05:00", "--follow", "--array", "3-4")
    program = "import sys; print('task', sys.argv[1]); sys.exit(3 * (sys.argv[1] == '4'))"
    words = (*words, "--name", "tasks", "--", "python", "-c", program, "$TASK")
    outcome = user.submits(*words, code=3)
    # Only the first rank of the failed task is sure to have printed.
    for task, word, code, printed in (("3", "completed", 0, 2), ("4", "failed", 3, 1)):
        log = Path("hvdtrain-jobs", f"tasks-1.log.{task}")
        assert f"task {task}: {word}, exit code {code}; log {log}\n" in outcome.err
        exit_text = (user.directory / "hvdtrain-jobs" / f"tasks-1.exit.{task}").read_text()
        assert exit_text == f"{code}\n"
        assert Path(user.directory, log).read_text().count(f"task {task}\n") >= printed
        assert f"task {task}" in outcome.out


def test_a_job_that_never_ran(user: User) -> None:
    (user.directory / "held.yaml").write_text("directives: ['--hold']\n")
    until = "until squeue -h -n never -o %i | grep .; do sleep 0.2; done; scancel --name=never"
    user.types("sbatch", "--wrap", until)
    words = ("--scheduler", "slurm", "--walltime", "0:05:00", "--follow")
    outcome = user.submits(*words, "--site", "held.yaml", "--name", "never", "--", "true", code=1)
    assert re.search(r"^job \d+: deleted before it ran$", outcome.err, re.MULTILINE)
    refused = user.submits(*words, "--after", "9999", "--", "true", code=2)
    assert "--after 9999" in refused.err


# Some seconds of steps; a checkpoint only at a stop.
TRAINING = (
    *("python", "-m", "hvdtrain.mnist", "--epochs", "80", "--batch-size", "48", "--seed", "3"),
    *("--num-steps", "100", "--checkpoint-every", "100000", "--checkpoint-dir", "checkpoints"),
    *("--summary", "summary.json"),
)


def newest_checkpoint(directory: Path) -> dict[str, bytes]:
    """Return all arrays of the newest checkpoint, as bytes."""
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    return {
        f"{file}: {name}": array.tobytes()
        for file in ("model", "training")
        for name, array in safetensors.numpy.load_file(newest / f"{file}.safetensors").items()
    }


def test_a_chain_of_interrupted_jobs_equals_an_uninterrupted_job(
    user: User, tmp_path: Path
) -> None:
    """The first job is stopped at its first step: it has half a minute, the time of two saves.

    Slurm counts in minutes: with HVDTRAIN_LONG=1 the job sleeps for the other half, otherwise it
    takes an earlier end from its environment. The next one asks Slurm, and has half a minute for
    all other steps.
    """
    uncut = User(user.cluster, tmp_path / "uncut")
    uncut.directory.mkdir()
    number = uncut.submits("--walltime", "0:10:00", "--", *TRAINING).out.strip()
    early = "sleep 30" if LONG else "export SLURM_JOB_END_TIME=$(($(date +%s) + 30))"
    first = f"[ -e begun ] || {{ touch begun; {early}; }}"
    words = ("--walltime", "0:01:00", "--follow", "--chain", "--chain-limit", "12")
    outcome = user.submits(*words, "--setup", first, "--", *TRAINING)
    events = chain.read(user.directory / "hvdtrain-jobs" / "mnist-1.chain")
    codes = [event["code"] for event in events if event["event"] == "end"]
    assert codes == [75] * (len(codes) - 1) + [0]
    assert len(codes) >= 2, outcome.out
    begun, *_, last = chain.links(events)
    assert user.job(begun)["ExitCode"] == "75:0"
    assert user.job(last)["JobState"] == "CANCELLED"  # by the job that finished
    assert "resumed from checkpoints/step-" in outcome.out

    assert uncut.ended(number)["JobState"] == "COMPLETED"
    summaries = [owner.summary("summary.json") for owner in (user, uncut)]
    assert [summary["stopped"] for summary in summaries] == ["steps", "steps"]
    assert summaries[0]["parameter_norm"] == summaries[1]["parameter_norm"]
    assert newest_checkpoint(user.directory) == newest_checkpoint(uncut.directory)


def test_the_printed_command_saves_and_ends_a_running_job(user: User) -> None:
    words = ("--walltime", "0:10:00", "--scheduler", "slurm", "--", *TRAINING[:9])
    words += (*TRAINING[11:], "--epochs", "2000")
    outcome = user.submits(*words)
    number = outcome.out.strip()
    (stop,) = re.findall(r"^stop: +(.*\S)  \(", outcome.err, re.MULTILINE)
    until(lambda: "step " in user.log(number), seconds=PATIENCE, detail=lambda: user.log(number))
    user.types(*stop.split())
    assert user.ended(number)["ExitCode"] == "75:0", user.log(number)
    assert "hvdtrain: SIGURG: stopped after step" in user.log(number)
    assert newest_checkpoint(user.directory)


# A user's program in a chain, which saves, and is killed the first time.
KILLED_ONCE = """
import os, subprocess, time
number = len(os.listdir("saved"))
os.mkdir(f"saved/{number}")
if number == 0:
    job = os.environ["SLURM_JOB_ID"]
    subprocess.run(["scancel", "--signal=KILL", "--batch", job])
    while len(os.listdir("saved")) < 2:  # without cgroups Slurm ends the shell only
        time.sleep(0.1)
print("finished by run", number)
"""
CHAIN = ("--ppn", "1", "--walltime", "0:05:00", "--follow", "--chain", "--progress", "saved")


def test_a_chain_continues_after_a_killed_job(user: User) -> None:
    (user.directory / "saved").mkdir()
    outcome = user.submits(*CHAIN, "--", "python", "-c", KILLED_ONCE)
    assert "finished by run 1" in outcome.out
    events = chain.read(user.directory / "hvdtrain-jobs" / "python-1.chain")
    assert [event["event"] for event in events if event["event"] != "link"] == [
        *("begin", "begin", "end", "over"),
    ]


def test_a_chain_without_progress_ends(user: User) -> None:
    outcome = user.submits(*CHAIN, "--", "bash", "-c", "exit 75", code=1)
    assert re.findall(r"job \d+: failed, exit code (\d+)", outcome.err) == ["75", "1"]
    assert "saved no new checkpoint" in outcome.out


def test_no_job_of_a_chain_runs_after_a_failed_job(user: User) -> None:
    number = user.types("sbatch", "--parsable", "--hold", "--wrap", "exit 3").out.strip()
    words = ("--scheduler", "slurm", "--walltime", "0:05:00", "--chain", "--chain-limit", "2")
    jobs = user.submits(*words, "--progress", "saved", "--after", number, "--", "true").out.split()
    user.types("scontrol", "release", number)
    states = [user.ended(job)["JobState"] for job in (number, *jobs)]
    assert states == ["FAILED", "CANCELLED", "CANCELLED"]


def test_a_script_runs_as_under_pbs(tmp_path: Path) -> None:
    """In the home directory, with a bare environment and a host in the nodefile for each rank."""
    node = Node(tmp_path)
    (node.submit / ".venv").symlink_to(BIN.parent)
    text = (ROOT / "jobs" / "pi.pbs").read_text()
    job = node.start(text, (socket.gethostname(),), read_script(text), SAMPLES="1e6")
    out, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, err
    assert "1,000,000 samples on 4 ranks" in out


def test_a_deleted_job_saves(user: User) -> None:
    steps = tuple("1000000" if word in ("100", "80") else word for word in TRAINING)
    number = user.submits("--walltime", "0:10:00", "--", *steps).out.strip()
    log = user.directory / "hvdtrain-jobs" / "mnist-1.log"
    until(lambda: log.exists() and "loss" in log.read_text(), seconds=PATIENCE)
    user.types("qdel", number)
    assert user.ended(number)["JobState"] == "CANCELLED"
    checkpoints = user.directory / "checkpoints"
    until(lambda: list(checkpoints.glob("step-*")), seconds=30, detail=log.read_text)


def test_worlds_of_one_under_srun(cluster: Cluster) -> None:
    line = ("srun", "-n", "2", sys.executable, "-m", "hvdtrain.mnist", "--num-steps=2", "--quiet")
    outcome = cluster.command(*line, cwd=ROOT, code=2)
    (said,) = outcome.said  # by rank 0; both end with 2
    assert outcome.err.count("Exited with exit code 2") == 2
    assert "srun started 2 processes, but Horovod sees a world of 1" in said
    assert "slurmstepd" in said
    remedy = f"`srun --mpi=pmix` (`srun --mpi=list` shows whether this Slurm has it), or with {BIN}"
    assert remedy in said


def test_launch_from_a_step_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """As from the shell of ``srun --pty``, whose core is the only one."""
    launch = (sys.executable, "-m", "hvdtrain.cli", "launch", "-n", "1", "--", "echo", "started")
    line = ("srun", "-n", "1", "env", "SLURM_MPI_TYPE=none", *launch)
    outcome = cluster.command(*line, cwd=tmp_path, timeout=60, PATH="/usr/bin:/bin")  # no mpirun
    assert (outcome.code, outcome.out) == (0, "started\n"), outcome.err


def test_doctor_in_a_job_of_four_slots(cluster: Cluster, tmp_path: Path) -> None:
    line = ("salloc", "-n", "4", sys.executable, "-m", "hvdtrain.cli", "doctor", "--json")
    outcome = cluster.command(*line, cwd=tmp_path, OMP_NUM_THREADS="64", code=0)
    findings = {finding["check"]: finding for finding in json.loads(outcome.out)["findings"]}
    assert "inside job" in findings["scheduler"]["evidence"]
    assert ":4, 4 slots" in findings["hosts of the job"]["evidence"]
    assert "64 threads per rank, 4 ranks" in findings["OMP_NUM_THREADS"]["evidence"]


TRAIN = ("python", "-m", "hvdtrain.mnist", "--model", "small", "--num-steps", "10")
OPTIONS = "--walltime 0:05:00 --ppn 2 --scheduler pbs"


def test_each_size_is_a_job_and_a_row_of_the_report(user: User) -> None:
    verb = (str(BIN / "hvdtrain"), "scaling")
    sweep = (*verb, "--ranks", "1,2", "--repeat", "1", "--submit", OPTIONS, "--json")
    jobs = json.loads(user.types(*sweep, "--", *TRAIN).out)["jobs"]
    assert [job["ranks"] for job in jobs] == [1, 2]
    # Concurrent jobs would disturb each other.
    assert user.job(jobs[1]["jobs"][0])["Dependency"].startswith(f"afterany:{jobs[0]['jobs'][0]}")
    for number in (job["jobs"][0].partition(".")[0] for job in jobs):
        assert user.ended(number)["JobState"] == "COMPLETED", user.log(number)
    report = json.loads(user.types(*verb, "--json").out)
    assert [(size["ranks"], size["runs"]) for size in report["sizes"]] == [(1, 1), (2, 1)]
    assert (user.directory / "scaling" / "scaling.png").is_file()
    second = json.loads(user.types(*sweep, "--", *TRAIN).out)
    assert second["jobs"] == []  # nothing is missing
