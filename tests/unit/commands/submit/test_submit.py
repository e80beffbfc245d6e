"""``hvdtrain submit``: wrong use, defaults, and the commands of qsub and sbatch."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.launch.prepare import checkpoint_dir
from hvdtrain.commands.submit import submission
from hvdtrain.commands.submit.dialect import Local
from hvdtrain.commands.submit.job import memory_megabytes, variable
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.slurm import Slurm
from hvdtrain.commands.submit.submission import choose_dialect, default_name
from hvdtrain.errors import UsageError
from tests.conftest import executable

Captured = pytest.CaptureFixture[str]
Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty directory, with an empty directory of programs and no site file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return programs


def program(directory: Path, name: str, body: str) -> None:
    executable(directory / name, f"#!/bin/sh\n{body}\n")


def submit(*words: str) -> int:
    return cli.main(["submit", *words])


PBS = ("--scheduler", "pbs", "--walltime", "1:00:00")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--walltime 60", "--walltime: '60': must be H:MM:SS"),
        ("--walltime 0:00", "--walltime: '0:00'"),
        ("--nodes 0", "--nodes: 0 is not a whole number of 1 or more"),
        ("--threads 0", "--threads: 0 is not a whole number of 1 or more"),
        ("--name 'two words'", "--name: 'two words': must be a letter, then"),
        (f"--name {'n' * 231}", "at most 230 characters"),
        ("--name 'a\n#PBS -q x'", "--name: 'a\\n#PBS -q x'"),
        ("--account 'me\n#PBS'", "--account: 'me\\n#PBS': must be one word"),
        ("--queue 'a b'", "--queue: 'a b': must be one word"),
        ("--module 'a b'", "--module: 'a b' is not one module"),
        ("--memory 64", "--memory: '64': must be a number with a unit"),
        ("--after '7 8'", "--after: '7 8': must be the ID of a job"),
        ("--array 5", "--array: '5': must be a range such as 1-10"),
        ("--array 5-5", "--array: '5-5': must be a range"),
        ("--array 1-2 --chain --progress d", "--array and --chain"),
        ("--ladder --chain --progress d", "--chain and --ladder"),
        ("--ladder --once", "--once and --ladder"),
        ("--stage-env try", "--stage-env try: it takes no value: omit 'try'"),
        ("--stage-env --once", "--stage-env and --once cannot be combined: add --stage-env to"),
        ("--chain", "--checkpoint-dir"),
        ("--chain --chain-limit 1", "--chain-limit 1: must be at least 2"),
        ("--var A", "--var: 'A': must be NAME=VALUE"),
        ("--var 1A=", "--var: 1A: not a valid variable"),
        ("--var PATH=x", "--var: PATH: bash or the batch system sets this variable"),
        ("--name näme", "--name: 'näme': must be a letter, then"),
        ("--array '\uff10-\uff19'", "must be a range such as 1-10"),
        (f"--site {'n' * 300}", ": File name too long"),
        (f"--logs {'n' * 300}", ": File name too long"),
        ("--var RANKS=x", "--var: RANKS: reserved for the script"),
        ("--var A=1 --var A=2", "--var A: specified twice"),
        ("--ppn 4 --gpus-per-node 2", "--ppn 4: more ranks than"),
        ("--gpus-per-node 2", "--gpus-per-node: PBS refuses"),
        ("--setup '#PBS -q other'", "directive after the first command"),
        ("--setup 'cd x\n#SBATCH -p q'", "directive after the first command"),
        ("--setup 'cd x\r'", "DOS line ends"),
        ("--site nowhere", "--site nowhere: no such file"),
        ("--site polaris --walltime 2:00:00", "the limit of queue debug is"),
        ("--site polaris", "--account: this site requires one"),
        ("--directive umask=027", "'umask=027': must be an option of qsub or sbatch, without #PBS"),
        ("--directive '#PBS -M x'", "'#PBS -M x': must be an option of qsub or sbatch"),
        ("--directive '-M x\necho'", "must be an option of qsub or sbatch"),
        ("--directive '-l select=2'", "'-l select=2': written by submit; use its options"),
        ("--email 'a b'", "--email: 'a b': must be one word"),
        ("--scheduler none --follow", "--follow, --chain and --array require"),
    ],
)
def test_wrong_use(options: str, message: str, refused: Refused) -> None:
    assert message in refused("submit", *PBS, *shlex.split(options), "--", "x")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "neither sbatch nor qsub is on the PATH"),
        (("--scheduler", "pbs", "--", "x"), "--walltime is required"),
        (("--scheduler", "pbs", "x", "--walltime", "1:00:00"), "--walltime after the command"),
        (PBS, "missing command: put it after `--`"),
        ((*PBS, "--", ""), "missing command"),
    ],
)
def test_missing_words(words: tuple[str, ...], message: str, refused: Refused) -> None:
    assert message in refused("submit", *words)


def test_a_job_script_is_no_command(refused: Refused) -> None:
    Path("train.pbs").write_text("#!/bin/bash\n#PBS -q debug\npython train.py\n")
    message = refused("submit", *PBS, "--", "bash", "train.pbs")
    assert "train.pbs is a job script" in message
    assert "`qsub train.pbs`" in message
    words = ("--scheduler", "pbs", "train.pbs", "--walltime", "0:05:00")
    assert refused("submit", *words) == message


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--walltime", "0:00:50", "--chain"), "--walltime 00:00:50: trainers need up to"),
        (("--walltime", "0:01:59"), "30 s and two steps before the end to save, so that the job"),
        (("--walltime", "0:02:00"), ""),
    ],
)
def test_a_walltime_that_leaves_little_time_for_training(
    words: tuple[str, ...], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = ("--dry-run", "--", "python", "-m", "hvdtrain.mnist", "--checkpoint-dir", "c")
    assert submit("--scheduler", "pbs", *words, *command) == 0
    assert [
        warning in record.message for record in caplog.records if record.levelname == "WARNING"
    ] == ([True] if warning else [])
    caplog.clear()
    assert submit("--scheduler", "pbs", "--walltime", "0:00:50", "--dry-run", "--", "pi") == 0
    assert "WARNING" not in caplog.text


def test_an_invalid_log_directory(refused: Refused) -> None:
    Path("file").touch()
    for name, reason in (("file", "not a directory"), ("file/in", "Not a directory")):
        assert f"--logs {name}: {reason}" in refused("submit", *PBS, "--logs", name, "--", "x")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-m", "hvdtrain.mnist", "--epochs", "3"], "mnist"),
        (["env", "A=1", "python", "/home/u/my train.py"], "mytrain"),
        (["bash", "./7-run.sh"], "run"),
        (["./a.out"], "a"),
        (["python", "-m", "a.module_of_a_long_name"], "module_of_a_lon"),
        (["日本"], "job"),
    ],
)
def test_the_name_comes_from_the_command(command: list[str], name: str) -> None:
    assert default_name(command) == name


@pytest.mark.parametrize(
    ("command", "directory"),
    [
        (["x", "--checkpoint-dir", "a b"], Path("a b")),
        (["x", "--checkpoint_dir=a=b"], Path("a=b")),
        (["x", "--checkpoint-dir"], None),
        (["x"], None),
    ],
)
def test_the_checkpoints_of_the_command(command: list[str], directory: Path | None) -> None:
    assert checkpoint_dir(command) == directory


def test_the_checkpoints_of_a_file_of_options(tmp_path: Path) -> None:
    (file := tmp_path / "options.yaml").write_text("lr: 0.1\ncheckpoint_dir: saved\n")
    (other := tmp_path / "other.yaml").write_text("lr: 0.2\n")
    files = [f"--config={file}", "--config", str(other)]
    assert checkpoint_dir(["x", *files]) == Path("saved")
    other.write_text("checkpoint-dir: null\n")
    assert checkpoint_dir(["x", *files]) == Path("saved")
    assert checkpoint_dir(["x", "--checkpoint-dir=here", *files]) == Path("here")
    assert checkpoint_dir(["x", "--config", str(tmp_path / "missing")]) is None


def test_memory() -> None:
    amounts = {"64gb": 65536, "1T": 1048576, "512 MiB": 512, "1kb": 1}
    assert {text: memory_megabytes(text) for text in amounts} == amounts


def test_the_detected_batch_system(bin_directory: Path) -> None:
    environ = {"PATH": str(bin_directory)}
    with pytest.raises(UsageError, match="--scheduler"):
        choose_dialect(None, environ)
    program(bin_directory, "qsub", "")
    dialect = choose_dialect(None, environ)
    assert isinstance(dialect, Pbs)
    assert not dialect.wraps_slurm
    program(bin_directory, "sbatch", "")
    assert isinstance(choose_dialect(None, environ), Slurm)
    program(bin_directory, "qsub", "# part of Slurm")
    dialect = choose_dialect("pbs", environ)
    assert isinstance(dialect, Pbs)
    assert dialect.wraps_slurm
    assert isinstance(choose_dialect("none", environ), Local)


def test_a_script_that_cannot_be_submitted_leaves_no_file(
    bin_directory: Path, refused: Refused
) -> None:
    program(bin_directory, "qsub", "# part of Slurm")
    message = refused("submit", *PBS, "--logs", "a b", "--", "x")
    assert "passes 'a b/x-1.pbs' to a shell" in message
    assert list(Path("a b").iterdir()) == []


def test_a_dry_run_prints_the_script_and_writes_nothing(
    capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hvdtrain")
    assert submit(*PBS, "--dry-run", "--env", "none", "--", "python", "train.py") == 0
    streams = capsys.readouterr()
    command = "qsub -j oe -o hvdtrain-jobs/train-1.log hvdtrain-jobs/train-1.pbs"
    assert caplog.messages == [f"# {command}"]
    assert streams.out.startswith("#!/bin/bash -l\n#PBS -N train\n")
    assert streams.out.endswith("hvdtrain launch -n 1 --ppn 1 -- \\\n    python train.py\n")
    assert list(Path.cwd().iterdir()) == []
    assert submit(*PBS, "--dry-run", "--json", "--env", "none", "--", "python", "train.py") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["script"] == streams.out
    assert answer["submit"] == command.split()


def test_values_are_spelled_as_the_batch_system_does(capsys: Captured) -> None:
    """The ID of an array is printed by ``submit --array``."""
    for memory in ("64 GiB", "64G"):
        words = ("--memory", memory, "--after", "2[].s", "--dry-run")
        assert submit(*PBS, *words, "--", "x") == 0
        text = capsys.readouterr().out
        assert "\n#PBS -l select=1:ncpus=1:mpiprocs=1:mem=64gb\n" in text
        assert "\n#PBS -W depend=afterok:2[].s\n" in text


def test_options_override_site_defaults(capsys: Captured) -> None:
    words = ("--site", "polaris", "--account", "me", "--walltime", "0:10:00", "--dry-run")
    assert submit(*words, "--", "x") == 0
    text = capsys.readouterr().out
    assert f"HVDTRAIN_ENV=${{HVDTRAIN_ENV:-{sys.prefix}}}\n" in text
    for line in ("-q debug", "-l select=1:system=polaris", "-l filesystems=home:eagle"):
        assert f"#PBS {line}\n" in text
    assert "hvdtrain launch -n 4 --ppn 4 --" in text
    assert submit(*words, "--queue", "debug-scaling", "--nodes", "9", "--ppn", "2", "--", "x") == 0
    text = capsys.readouterr().out
    assert "#PBS -q debug-scaling\n" in text
    assert "hvdtrain launch -n 18 --ppn 2 --" in text
    # A name is cut at the limit of the site.
    Path("site.yaml").write_text("name_limit: 15\n")
    words = ("--site", "site.yaml", "--name", "a_name_of_twenty_two", "--dry-run")
    assert submit(*PBS, *words, "--", "x") == 0
    assert "#PBS -N a_name_of_twent\n" in capsys.readouterr().out


def test_without_a_batch_system_the_script_is_written(capsys: Captured) -> None:
    assert submit("--scheduler", "none", "--ppn", "2", "--", "x", "a b") == 0
    assert capsys.readouterr().out == "bash hvdtrain-jobs/x-1.sh\n"
    assert Path("hvdtrain-jobs/x-1.sh").read_text().endswith("    x 'a b'\n")


# Output of a PBS with history for an array with a failed task, and for other jobs.
QSTAT = """for job; do :; done
case $* in
    *json*|"-f "*) exit 1 ;;
    *-t*"8[].s") state=F ;;
    *) echo "qstat: Unknown Job Id $job" >&2; exit 153 ;;
esac
printf 'Job Id: 8[].s\\n    job_state = F\\n    substate = 93\\n    Exit_status = 0\\n'
for task in 1 2; do
    printf 'Job Id: 8[%s].s\\n    job_state = F\\n' $task
    printf '    Output_Path = s:hvdtrain-jobs/x-1.log.^array_index^\\n    stime = Sat Nov 21\\n'
    printf '    Exit_status = %s\\n' $((3 * task - 3))
    echo "task $task" > hvdtrain-jobs/x-1.log.$task
done
"""


def test_a_failed_task_of_an_array_fails_the_job(bin_directory: Path, capsys: Captured) -> None:
    program(bin_directory, "qsub", "echo '8[].s'")
    program(bin_directory, "qstat", QSTAT)
    assert submit(*PBS, "--array", "1-2", "--follow", "--json", "--", "x") == 3
    streams = capsys.readouterr()
    answer = json.loads(streams.out)
    logs = [f"hvdtrain-jobs/x-1.log.{task}" for task in (1, 2)]
    assert (answer["ok"], answer["exit_code"], answer["logs"]) == (False, 3, logs)
    assert answer["tasks"] == {
        "1": {"state": "finished", "exit_code": 0, "log": logs[0]},
        "2": {"state": "finished", "exit_code": 3, "log": logs[1]},
    }
    assert "task 1\ntask 2\n" in streams.err


def test_a_job_to_wait_for_that_does_not_exist(bin_directory: Path, refused: Refused) -> None:
    program(bin_directory, "qsub", "echo 9.s")
    words = (*PBS, "--after", "7", "--", "x")
    finished = "echo 'Job Id: 7.s'; echo '    job_state = F'"
    for answer, reason in (
        (QSTAT, "--after 7: pbs has no such job"),
        (f"{finished}; echo '    Exit_status = 3'", "--after 7: it ended with exit code 3"),
        (finished, "it was deleted before it ran"),
    ):
        program(bin_directory, "qstat", answer)
        assert reason in refused("submit", *words)
    assert list(Path.cwd().iterdir()) == []
    program(bin_directory, "qstat", "exit 255")  # no answer is no refusal
    assert submit(*words) == 0


def test_a_directory_that_qsub_cannot_accept(bin_directory: Path, capsys: Captured) -> None:
    """The log gets the default path of PBS, which is reported."""
    program(bin_directory, "qsub", "echo '9[].s'")
    words = ("--logs", "lo gs: a,b", "--name", "f", "--json")
    assert submit(*PBS, *words, "--array", "1-2", "--", "x") == 0
    here = Path.cwd()
    assert json.loads(capsys.readouterr().out)["logs"] == [f"{here}/f.o9.{n}" for n in (1, 2)]
    program(bin_directory, "qsub", "echo 9.s")
    assert submit(*PBS, *words, "--", "x") == 0
    assert json.loads(capsys.readouterr().out)["logs"] == [f"{here}/f.o9"]


def test_a_job_that_is_followed_leaves_its_exit_code(capsys: Captured) -> None:
    """How: see ``test_the_exit_file_of_a_followed_job``."""
    assert submit(*PBS, "--array", "1-2", "--follow", "--dry-run", "--", "x") == 0
    assert 'realpath -m -- hvdtrain-jobs/x-1.exit)."$TASK"' in capsys.readouterr().out
    assert submit(*PBS, "--dry-run", "--", "x") == 0
    assert "HVDTRAIN_EXIT" not in capsys.readouterr().out


QSUB = """for script; do :; done
[ -s "$script" ] || exit 9
echo "$@" >> calls
set -- $(/usr/bin/wc -l < calls)
echo "$1.server"
"""


def test_a_job_is_submitted(bin_directory: Path, capsys: Captured) -> None:
    program(bin_directory, "qsub", QSUB)
    for number in (1, 2):
        assert submit(*PBS, "--", "python", "train.py") == 0
        assert capsys.readouterr().out == f"{number}.server\n"
    assert Path("calls").read_text().splitlines() == [
        "-j oe -o hvdtrain-jobs/train-1.log hvdtrain-jobs/train-1.pbs",
        "-j oe -o hvdtrain-jobs/train-2.log hvdtrain-jobs/train-2.pbs",
    ]
    assert submit(*PBS, "--json", "--", "python", "train.py") == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "jobs": ["3.server"],
        "script": "hvdtrain-jobs/train-3.pbs",
        "logs": ["hvdtrain-jobs/train-3.log"],
    }


def chain_of(limit: int, *options: str) -> int:
    words = ("--chain", "--chain-limit", str(limit), "--", "x", "--checkpoint-dir", "c")
    return submit(*PBS, *options, *words)


def test_the_jobs_of_a_chain_wait_for_one_another(bin_directory: Path, capsys: Captured) -> None:
    program(bin_directory, "qsub", QSUB)
    assert chain_of(3) == 0
    assert capsys.readouterr().out == "1.server\n2.server\n3.server\n"
    words = "-j oe -o hvdtrain-jobs/x-1.{}log {}hvdtrain-jobs/x-1.pbs"
    assert Path("calls").read_text().splitlines() == [
        words.format("", ""),
        words.format("2.", "-W depend=afterany:1.server "),
        words.format("3.", "-W depend=afterany:2.server "),
    ]
    links = [json.loads(line) for line in Path("hvdtrain-jobs/x-1.chain").read_text().splitlines()]
    assert links == [{"event": "link", "job": f"{number}.server"} for number in (1, 2, 3)]


def test_every_job_of_a_chain_needs_the_job_before_the_chain(bin_directory: Path) -> None:
    program(bin_directory, "qsub", QSUB)
    assert chain_of(2, "--after", "7") == 0
    assert "\n#PBS -W depend=afterok:7\n" in Path("hvdtrain-jobs/x-1.pbs").read_text()
    first, second = Path("calls").read_text().splitlines()
    assert "depend" not in first  # but in the script
    assert " -W depend=afterany:1.server,afterok:7 " in second


def test_a_site_that_limits_the_number_of_jobs(
    bin_directory: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    full = "qsub: would exceed queue generic's per-user limit"
    program(bin_directory, "qsub", f'[ ! -s calls ] || {{ echo "{full}"; exit 1; }}\n{QSUB}')
    assert chain_of(3) == 0
    assert capsys.readouterr().out == "1.server\n"
    message = f"only 1 of 3 jobs were accepted: qsub refused hvdtrain-jobs/x-1.pbs: {full}"
    assert message in caplog.text


def test_an_interrupted_submission_names_the_jobs_that_will_run(
    bin_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program(bin_directory, "qsub", f'[ ! -s calls ] || kill -INT "$PPID"\n{QSUB}')
    assert chain_of(3) == 130
    message = "1 of 3 jobs were accepted, and one more may have been: see `qstat`; cancel: qdel 1."
    assert message in caplog.text


def test_a_batch_system_that_does_not_answer_may_have_accepted_the_job(
    bin_directory: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_directory, "qsub", "exec /bin/sleep 60")
    monkeypatch.setattr(submission, "TIMEOUT", 0.5)
    assert submit(*PBS, "--", "x") == 1
    assert "x-1.pbs may have been submitted; see `qstat` before" in capsys.readouterr().err


def test_a_script_that_cannot_be_written_leaves_no_file(
    bin_directory: Path, refused: Refused
) -> None:
    program(bin_directory, "qsub", QSUB)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        message = refused("submit", *PBS, "--", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--logs hvdtrain-jobs: File too large" in message
    assert list(Path("hvdtrain-jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("scheduler", "inherits"), [("slurm", True), ("none", True), ("pbs", False)]
)
def test_variables_of_the_environment_that_a_job_inherits(
    scheduler: str,
    inherits: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATA", "/a")
    monkeypatch.setenv("SAME", "1")
    words = ("--var", "DATA=/b", "--var", "SAME=1", "--var", "OTHER=2", "--dry-run", "--", "x")
    assert submit(*PBS, "--scheduler", scheduler, *words) == 0
    warning = "DATA=/a of the environment replaces --var DATA in the job"
    assert (warning in caplog.text) is inherits
    assert "SAME" not in caplog.text
    assert "OTHER" not in caplog.text


def test_no_variable_of_bash_is_one_of_a_job() -> None:
    line = ["/bin/bash", "--norc", "-c", "compgen -v"]
    names = subprocess.run(line, env={}, capture_output=True, text=True, check=True).stdout.split()
    assert "SECONDS" in names
    for name in names:
        with pytest.raises(ValueError, match="use another name"):
            variable(f"{name}=1")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo qsub: Unknown queue; exit 170", "qsub refused hvdtrain-jobs/x-1.pbs: qsub: U"),
        ("echo no number", "qsub refused hvdtrain-jobs/x-1.pbs: no number"),
        (None, "is this a login node?"),
    ],
)
def test_a_job_that_is_refused(
    body: str | None, message: str, bin_directory: Path, capsys: Captured
) -> None:
    if body:
        program(bin_directory, "qsub", body)
    assert submit(*PBS, "--", "x") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--", "-x", "--", "--nodes", "3", ""], ["--"], ["--nodes"]])
@pytest.mark.parametrize("mark", [["--"], []])
def test_the_command_is_not_changed(mark: list[str], words: list[str], capsys: Captured) -> None:
    assert submit(*PBS, "--dry-run", "--env", "none", *mark, "x", *words) == 0
    shown = " ".join(word or "''" for word in words)
    assert capsys.readouterr().out.endswith(f"    x {shown}\n")
