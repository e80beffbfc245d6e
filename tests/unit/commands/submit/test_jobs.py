"""The scripts in jobs/: their generation, and their execution as by PBS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.commands.submit import chain
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.script import script_text
from hvdtrain.commands.submit.site import Site
from tests.conftest import ROOT, executable, run, until
from tests.unit.commands.submit.pbs_reader import (
    Node,
    RefusedError,
    job_with,
    read_script,
)
from tests.unit.commands.submit.test_script import WORDS

JOBS = ROOT / "jobs"
SCRIPTS = sorted(path.name for path in JOBS.iterdir() if path.suffix in (".pbs", ".slurm", ".sh"))
PBS_SCRIPTS = [name for name in SCRIPTS if name.endswith(".pbs")]
POLARIS = frozenset({"filesystems", "system"})


def defined(name: str) -> frozenset[str]:
    """Return the resources defined by the site of a script."""
    return POLARIS if "polaris" in name else frozenset()


def test_all_scripts_are_listed() -> None:
    names = """elastic_torchrun.pbs local.sh mnist_1node.pbs mnist_scaling.pbs pi.pbs resnet.slurm
        resnet_1node.pbs resnet_polaris.pbs resnet_scaling.pbs
        ssd300_1node.pbs timeline_capture.pbs"""
    assert names.split() == SCRIPTS
    readme = (JOBS / "README.md").read_text()
    assert [name for name in SCRIPTS if f"| `{name}` |" not in readme] == []


def test_the_scripts_are_generated_by_submit(tmp_path: Path) -> None:
    """The commands in the README generate the files."""
    block = re.search(r"```sh\n(.*?)```", (JOBS / "README.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "jobs").mkdir()
    home = str(tmp_path)
    words = ["bash", "-e", "-c", block[1]]
    assert run(words, cwd=tmp_path, HOME=home, XDG_CONFIG_HOME=home).code == 0
    generated = {path.name: path.read_text() for path in (tmp_path / "jobs").iterdir()}
    assert generated == {name: (JOBS / name).read_text() for name in SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_portable(name: str) -> None:
    text = (JOBS / name).read_text()
    read_script(text, defined(name))
    for word in ("$0", "BASH_SOURCE", "generate_pbs_nodefile", "pip ", "curl", "wget", "git "):
        assert word not in text
    # /soft exists on Polaris; other paths would be those of a developer's machine.
    paths = set(re.findall(r"(?<=[\s='\"(])/\w[\w/]*", text))
    assert paths <= {"/soft/modulefiles"}
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize("name", PBS_SCRIPTS)
def test_pbs_accepts_the_scripts(name: str) -> None:
    text = (JOBS / name).read_text()
    request = read_script(text, defined(name))
    chunk = request.chunk
    assert request.options["j"] == "oe"
    counts = {"scaling": 16, "polaris": 2, "elastic": 4}
    nodes = next((count for word, count in counts.items() if word in name), 1)
    assert int(chunk["count"]) == nodes
    if int(chunk["count"]) > 1:
        assert request.resources["place"] == "scatter"
    if "polaris" not in name:
        sweep = "$((RANKS < 4 ? RANKS : 4)) --room-for 4"
        ranks = sweep if "scaling" in name else "4"
        assert chunk["mpiprocs"] == "4"
        assert f" --ppn {ranks} -- " in text


def test_an_elastic_job_survives_a_lost_node(node: Node) -> None:
    text = (JOBS / "elastic_torchrun.pbs").read_text()
    assert "\n#PBS -W tolerate_node_failures=all\n" in text
    assert run_as_pbs(node, text) == 0
    ((_, _, _, *words),) = launches(node)
    ranks = ["--elastic", "--min", "4", "--max", "16", "--ppn", "4"]
    assert words[: words.index("--")] == ["launch", "--launcher", "torchrun", *ranks]
    assert "--checkpoint-dir=results/elastic_torchrun/checkpoints" in words


HEAD = "#!/bin/bash\n# a comment\n\n#PBS -l walltime=1:00:00\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (HEAD + "#PBS -l select=1:ngpus=1", "Unknown resource: ngpus"),
        (HEAD + "#PBS -l filesystems=home", "Unknown resource: filesystems"),
        (HEAD + "#PBS -l select=1\n#PBS -l nodes=1", "exclude each other"),
        (HEAD + "#PBS -l select=1\n#PBS -l select=2", "select is specified twice"),
        (HEAD + "#PBS -l walltime=2:00:00", "walltime is specified twice"),
        ("#!/bin/bash\n#PBS -l walltime=60m", "walltime"),
        (HEAD + "#PBS -N two words", "illegal -N"),
        (HEAD + "#PBS --nodes=1", "illegal option"),
        (HEAD + "cd x\n#PBS -q a", r"line 6: '#PBS -q a' comes after .* command \(line 5\)"),
        (HEAD + "cd x\n\n#SBATCH -p debug", "line 7: .* comes after"),
        (HEAD[12:], "line 1: no #!"),
        (HEAD.replace("\n", "\r\n"), "DOS line ends"),
        ("#!/bin/bash\n#PBS -l select=1,walltime=1:00", "on lines of their own"),
        (HEAD + "#PBS -l select=2:ncpus=1+1:ncpus=2", "no chunks joined by +"),
        (HEAD + "#PBS -l select=1:mem=1gb:ncpus=1", "mem= only at the end"),
    ],
)
def test_the_emulation_refuses_as_pbs_and_slurm_do(text: str, reason: str) -> None:
    read_script(HEAD + "#PBS -q debug\ncd x\n")
    with pytest.raises(RefusedError, match=reason):
        read_script(text)


# --- run as PBS runs them -------------------------------------------------------------------------

# Records the directory, threads, end of the job and arguments of `hvdtrain launch`.
LAUNCH = """#!/bin/bash
printf '%s\\0' "$PWD" "${OMP_NUM_THREADS-unset}" "$HVDTRAIN_WALLTIME_ENDS" "$#" "$@" >> launches
"""
SAVES_ON_SIGNAL = f"""#!{sys.executable}
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGURG):
    signal.signal(number, lambda *_: (time.sleep(0.5), print("saved"), sys.exit(75)))
open("ready", "w").close()
time.sleep(60)
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node, with an environment in the submit directory whose hvdtrain records its arguments."""
    node = Node(tmp_path)
    programs = node.submit / ".venv" / "bin"
    programs.mkdir(parents=True)
    executable(programs / "hvdtrain", LAUNCH)
    executable(programs / "python", f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    return node


def run_as_pbs(node: Node, text: str, name: str = "", hosts: str = "a", **values: str) -> int:
    """Return the exit code of a script run as by PBS."""
    job = node.start(text, tuple(hosts.split()), read_script(text, defined(name)), **values)
    out, err = job.communicate(timeout=60)
    assert out == ""
    if not values.get("HVDTRAIN_ENV"):
        assert err == ""
    return job.returncode


def launches(node: Node) -> list[list[str]]:
    """Return the directory, threads, end and arguments of each launch."""
    words = os.fsdecode((node.submit / "launches").read_bytes()).split("\0")[:-1]
    records = []
    while words:
        count = int(words[3])
        records.append(words[:3] + words[4 : 4 + count])
        del words[: 4 + count]
    return records


@pytest.mark.parametrize("name", ["pi.pbs", "mnist_1node.pbs", "timeline_capture.pbs"])
def test_a_script_runs_under_pbs(name: str, node: Node) -> None:
    before = time.time()
    assert run_as_pbs(node, (JOBS / name).read_text(), name) == 0
    ((directory, threads, ends, *words),) = launches(node)
    assert directory == str(node.submit)
    assert threads == "unset"
    assert float(ends) > before + 500  # without qstat, from now
    assert words[:6] == ["launch", "-n", "4", "--ppn", "4", "--"]
    assert not any("DATA" in word or "$" in word for word in words)


def test_values_are_changed_by_qsub_v(node: Node) -> None:
    text = (JOBS / "mnist_1node.pbs").read_text()
    values = {"DATA": "/a b/mnist", "EPOCHS": "2", "STEPS": "7", "RESULTS": "r $x"}
    assert run_as_pbs(node, text, OMP_NUM_THREADS="3", **values) == 0
    assert launches(node)[0][1] == "3"  # the user's, not set by PBS
    assert launches(node)[0][3 + 6 :] == [
        *("python", "-m", "hvdtrain.mnist", "--data=/a b/mnist", "--epochs=2", "--num-steps=7"),
        *("--checkpoint-dir=r $x/checkpoints", "--summary=r $x/summary.json"),
    ]


@pytest.mark.parametrize(
    ("hosts", "values", "sizes"),
    [
        ("a", {}, ["1", "2", "4"]),
        ("a b c", {}, ["1", "2", "4", "8"]),
        ("a b c d", {"NODES": "2"}, ["1", "2", "4", "8"]),
        (" ".join(f"n{i}" for i in range(16)), {}, ["1", "2", "4", "8", "16", "32", "64"]),
        # Slurm jobs with directives of PBS have no nodefile.
        ("a", {"PBS_NODEFILE": "", "SLURM_JOB_NUM_NODES": "2"}, ["1", "2", "4", "8"]),
    ],
)
def test_a_sweep_ends_at_the_number_of_nodes(
    hosts: str, values: dict[str, str], sizes: list[str], node: Node
) -> None:
    text = (JOBS / "mnist_scaling.pbs").read_text()
    assert run_as_pbs(node, text, hosts=hosts, **values) == 0
    assert [launch[5] for launch in launches(node)] == sizes
    assert all(launch[8:11] == ["--room-for", "4", "--"] for launch in launches(node))
    assert [launch[-1] for launch in launches(node)] == [
        f"--summary=results/mnist_scaling/{size}.json" for size in sizes
    ]


def test_a_failure_ends_the_sweep_with_its_code(node: Node) -> None:
    executable(node.submit / ".venv" / "bin" / "hvdtrain", LAUNCH + '[ "$3" != 2 ] || exit 3\n')
    assert run_as_pbs(node, (JOBS / "mnist_scaling.pbs").read_text()) == 3
    assert len(launches(node)) == 2


@pytest.mark.parametrize(
    ("mark", "returned", "code"),
    [("1", 0, 1), ("75", 0, 75), ("0", 0, 0), ("", 0, 0), ("1", 137, 137)],
)
def test_a_training_without_launch_reports_its_exit_code(
    mark: str, returned: int, code: int, node: Node
) -> None:
    """mpirun may return 0 for an incomplete training; other programs leave no mark."""
    leave = f'printf "{mark}" > "$HVDTRAIN_END_MARK"; echo "$HVDTRAIN_END_MARK" > mark'
    executable(node.submit / ".venv" / "bin" / "mpirun", f"#!/bin/sh\n{leave}\nexit {returned}\n")
    job = job_with("mpirun", "-n", "2", "python", "x.py", walltime=600, env=".venv", once=True)
    assert run_as_pbs(node, script_text(job, Pbs(), Site())) == code
    assert not Path((node.submit / "mark").read_text().strip()).exists()


def test_a_module_that_cannot_be_loaded_ends_the_job(node: Node) -> None:
    fails = "module() { [ $1 $2 = 'load there' ]; }\n"
    (node.root / "home" / ".bash_profile").write_text(fails.replace("$1 $2", '"$1 $2"'))
    for name, code in (("there", 0), ("nowhere", 2)):
        job = job_with("x", walltime=600, env=".venv", module=(name,))
        assert run_as_pbs(node, script_text(job, Pbs(), Site())) == code
    assert len(launches(node)) == 1


def test_another_environment_or_none(node: Node) -> None:
    text = (JOBS / "pi.pbs").read_text()
    assert run_as_pbs(node, text, HVDTRAIN_ENV="nowhere") == 2
    (node.submit / ".venv").rename(node.root / "an other")
    assert run_as_pbs(node, text, HVDTRAIN_ENV=str(node.root / "an other")) == 0
    assert len(launches(node)) == 1


@pytest.mark.parametrize(
    ("number", "code"),
    # Of qdel, after which PBS kills what is left some seconds after the login shell; and of qsig.
    [(signal.SIGTERM, -signal.SIGTERM), (signal.Signals[Pbs.stop[-1]], 75)],
)
def test_a_signal_to_every_process_lets_the_ranks_save(
    number: signal.Signals, code: int, node: Node
) -> None:
    executable(node.submit / ".venv" / "bin" / "hvdtrain", SAVES_ON_SIGNAL)
    text = (JOBS / "mnist_1node.pbs").read_text()
    job = node.start(text, ("a",), read_script(text))
    until((node.submit / "ready").exists)
    os.killpg(job.pid, number)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out, err) == (code, "saved\n", "")


@pytest.mark.parametrize(
    ("setup", "signals", "exit_text"),
    [
        ("", (), "3\n"),
        ("sh -c 'touch ready; exec sleep 60'", (signal.SIGTERM,), "143\n"),
        ("sh -c 'touch ready; exec sleep 60'", (signal.SIGKILL,), ""),
    ],
)
def test_the_exit_file_of_a_followed_job(
    setup: str, signals: tuple[signal.Signals, ...], exit_text: str, node: Node
) -> None:
    """Also if it ends before its ranks have started, e.g. by qdel."""
    words = ("bash", "-c", "exit 3")
    job = job_with(*words, walltime=600, env=".venv", once=True, setup=(setup,) if setup else ())
    text = script_text(job, Pbs(), Site(), exit_file="x.exit")
    process = node.start(text, ("a",), read_script(text))
    until(lambda: not signals or (node.submit / "ready").exists())
    for number in signals:
        os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert (node.submit / "x.exit.12").read_text() == exit_text


def test_a_job_of_a_chain_in_another_directory(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(node.submit)
    monkeypatch.setenv("HOME", str(node.root))  # no site file of the user
    words = ["submit", "--scheduler", "pbs", "--walltime", "1:00:00", "--env", ".venv", "--chain"]
    setup = ("--progress", "saved", "--setup", "mkdir elsewhere && cd elsewhere")
    assert cli.main([*words, *setup, "--dry-run", "--", "x"]) == 0
    text = capsys.readouterr().out
    Path("hvdtrain-jobs").mkdir()
    job = node.start(text, ("a",), read_script(text))
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (0, ""), err
    assert Path("elsewhere/launches").is_file()
    events = [event["event"] for event in chain.read(Path("hvdtrain-jobs/x-1.chain"))]
    assert events == ["begin", "end", "over"]


@settings(max_examples=20)
@given(st.lists(WORDS.filter(bool), min_size=1, max_size=6), WORDS)
def test_any_command_in_any_directory(words: list[str], name: str) -> None:
    """The script is run by bash, with a program that records its arguments."""
    job = job_with(*words)
    text = script_text(job, Pbs(), Site())
    read_script(text)
    with tempfile.TemporaryDirectory() as root:
        programs = Path(root, "bin")
        programs.mkdir()
        executable(programs / "hvdtrain", LAUNCH)
        executable(programs / "python", "#!/bin/sh\n")
        script = Path(root, "script")
        executable(script, text.replace("bash -l", "bash"))  # a login shell resets PATH
        directory = Path(root, "d" + name.replace("/", ""))
        directory.mkdir()
        values = {"PBS_O_WORKDIR": str(directory), "PATH": f"{programs}:/bin"}
        subprocess.run([str(script)], env=values, check=True, timeout=60)
        record = os.fsdecode((directory / "launches").read_bytes()).split("\0")[:-1]
    assert record[0] == str(directory)
    assert record[4:] == ["launch", "-n", "1", "--ppn", "1", "--", *words]
