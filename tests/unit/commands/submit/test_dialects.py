"""The commands of PBS and Slurm, and the parsing of their original output."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.submit import pbs, slurm
from hvdtrain.commands.submit.dialect import (
    ENDED,
    GONE,
    NEVER_RAN,
    RUNNING,
    WAITING,
    Dialect,
    Local,
    State,
)
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.slurm import Slurm
from hvdtrain.errors import UsageError

# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "array", "waits", "line"),
    [
        (Pbs(), None, None, "qsub -j oe -o d/x.log d/x"),
        (Pbs(), None, "afterany:7.s", "qsub -j oe -o d/x.log -W depend=afterany:7.s d/x"),
        (Pbs(), "1-3", None, "qsub -j oe -J 1-3 -o 'd/x.log.^array_index^' d/x"),
        (Pbs(wraps_slurm=True), "1-3", None, "qsub -j oe -J 1-3 -o d/x.log.%a d/x"),
        (Slurm(), None, None, "sbatch --parsable --output=d/x.log d/x"),
        (Slurm(), "1-3", None, "sbatch --parsable --output=d/x.log.%a d/x"),
        (Slurm(), None, "after:7", "sbatch --parsable --output=d/x.log --dependency=after:7 d/x"),
        (Local(), None, None, "bash d/x"),
    ],
)
def test_submission(dialect: Dialect, array: str | None, waits: str | None, line: str) -> None:
    assert dialect.submit("d/x", "d/x.log", array=array, waits=waits).show() == line


def test_paths_with_special_characters() -> None:
    by_pbs = Pbs().submit("a b:c/x", "a b:c/x.log", array=None, waits=None)
    assert by_pbs.show() == "qsub -j oe 'a b:c/x'"
    by_slurm = Slurm().submit("50%/x", "50%/x.log", array=None, waits=None)
    assert by_slurm.show() == "sbatch --parsable --output=50%%/x.log 50%/x"
    with pytest.raises(UsageError, match="unquoted"):
        Pbs(wraps_slurm=True).submit("a b/x", "a b/x.log", array=None, waits=None)


@pytest.mark.parametrize(
    ("dialect", "output", "job"),
    [
        (Pbs(), "1234.pbs-server\n", "1234.pbs-server"),
        (Pbs(), "qsub: warning: queue is busy\n2[].server.domain.org\n", "2[].server.domain.org"),
        (Pbs(), "12\n", "12"),
        (Pbs(), "qsub: Unknown queue\n", None),
        (Slurm(), "12\n", "12"),
        (Slurm(), "12;cluster\n", "12"),
        (Slurm(), "sbatch: a note of the site, 3 lines\n13\n", "13"),
        (Slurm(), "sbatch: error: invalid partition specified: x\n", None),
        (Local(), "12\n", None),
    ],
)
def test_ids(dialect: Dialect, output: str, job: str | None) -> None:
    assert dialect.read_id(output) == job


@pytest.mark.parametrize(
    ("dialect", "job", "lines"),
    [
        (Pbs(), "7.s", "qstat -x -f -F json 7.s; qstat -x -f 7.s; qstat -f 7.s"),
        # The tasks of an array.
        (Pbs(), "[].s", "qstat -x -t -f -F json '[].s'; qstat -x -t -f '[].s'; qstat -t -f '[].s'"),
        (Slurm(), "7", "scontrol show job -o 7"),
        # The qstat that comes with Slurm knows neither -x nor exit codes.
        (Pbs(wraps_slurm=True), "7", "scontrol show job -o 7"),
    ],
)
def test_queries(dialect: Dialect, job: str, lines: str) -> None:
    assert "; ".join(query.command.show() for query in dialect.queries(job)) == lines


def test_deletions() -> None:
    assert Pbs().delete(["1.s", "2.s"]).show() == "qdel 1.s 2.s"
    assert Slurm().delete(["1", "2"]).show() == "scancel 1 2"


# --- output ---------------------------------------------------------------------------------------

# scontrol show job -o, Slurm 22.05; with blanks and equal signs in a path and a comment.
SLURM_LINE = (
    "JobId=1 JobName=hello UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 "
    "Nice=0 Account=later QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:00 TimeLimit=00:02:00 "
    "TimeMin=N/A SubmitTime=2026-11-21T09:14:00 Command=/w/a b.pbs WorkDir=/w "
    "Comment=stdout=/w/x.o%A  StdErr=/w/a b.e1 StdIn=/dev/null StdOut=/w/a b.o1 Power= \n"
)


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected"),
    [
        ("PENDING", "Dependency", "0:0", State(WAITING, "pending (Dependency)")),
        ("PENDING", "None", "0:0", State(WAITING, "pending")),
        ("RUNNING", "None", "0:0", State(RUNNING, "running")),
        ("COMPLETING", "None", "0:0", State(RUNNING, "completing")),
        ("STOPPED", "None", "0:0", State(RUNNING, "stopped")),  # by a signal, with its cores
        ("RESV_DEL_HOLD", "None", "0:0", State(WAITING, "resv_del_hold")),
        ("REQUEUE_FED", "None", "0:0", State(WAITING, "requeue_fed")),
        ("SPECIAL_EXIT", "None", "7:0", State(WAITING, "special_exit")),  # requeued and held
        ("COMPLETED", "None", "0:0", State(ENDED, "completed", 0)),
        ("FAILED", "NonZeroExitCode", "3:0", State(ENDED, "failed", 3)),
        ("FAILED", "NonZeroExitCode", "75:0", State(ENDED, "failed", 75)),
        ("CANCELLED", "None", "0:15", State(ENDED, "cancelled", 143)),
        ("CANCELLED", "None", "0:0", State(ENDED, "cancelled", 1)),
        ("TIMEOUT", "TimeLimit", "0:15", State(ENDED, "timeout", 124)),
        ("TIMEOUT", "TimeLimit", "75:0", State(ENDED, "timeout", 75)),
        ("NODE_FAIL", "NodeDown", "0:0", State(ENDED, "node_fail", 1)),
        ("OUT_OF_MEMORY", "OutOfMemory", "0:125", State(ENDED, "out_of_memory", 253)),
    ],
)
def test_slurm_states(state: str, reason: str, code: str, expected: State) -> None:
    line = SLURM_LINE.format(state=state, reason=reason, code=code)
    assert slurm.read(line) == State(
        expected.phase, expected.detail, expected.exit_code, (Path("/w/a b.o1"),)
    )


def test_a_slurm_array_ends_with_its_last_task() -> None:
    first, second = (
        SLURM_LINE.format(**values)
        .replace("JobId=1 ", f"JobId={task} ArrayJobId=1 ArrayTaskId={task} ")
        .replace(".o1", f".o{task}")
        for task, values in (
            (1, {"state": "FAILED", "reason": "NonZeroExitCode", "code": "2:0"}),
            (2, {"state": "RUNNING", "reason": "None", "code": "0:0"}),
        )
    )
    logs = (Path("/w/a b.o1"), Path("/w/a b.o2"))
    tasks = {
        "1": State(ENDED, "failed", 2, logs[:1]),
        "2": State(RUNNING, "running", None, logs[1:]),
    }
    assert slurm.read(first + second) == State(
        RUNNING, "1 failed, 1 running", None, logs, tasks=tasks
    )
    tasks["2"] = State(ENDED, "completed", 0, logs[1:])
    second = second.replace("RUNNING", "COMPLETED")
    assert slurm.read(first + second) == State(ENDED, "1 completed, 1 failed", 2, logs, tasks=tasks)


def test_a_slurm_job_that_never_ran_or_is_unknown() -> None:
    assert slurm.read("slurm_load_jobs error: Invalid job id specified\n") == State(GONE)
    line = SLURM_LINE.format(state="CANCELLED", reason="Priority", code="0:0")
    assert slurm.read(line.replace("Command=", "NodeList= NumNodes=1 Command=")) == NEVER_RAN
    ran = slurm.read(line.replace("Command=", "NodeList=n1 BatchHost=n1 Command="))
    assert ran is not None
    assert (ran.ran, ran.host) == (True, "n1")


PBS_JSON = """{"timestamp":1700000000, "pbs_version":"23.06.06", "pbs_server":"server", "Jobs":{
"12.server":{"Job_Name":"hello", "job_state":"F", "Resource_List":{"select":"1:ncpus=1"},
"Output_Path":"login:/home/u/hvdtrain-jobs/hello-1.log", "Exit_status":%d}}}
"""
PBS_TEXT = """Job Id: 12.server
    Job_Name = hello
    job_state = %s
    Output_Path = login:/home/u/a very long name of a directory indeed/hvdtrain-j
\tobs/hello-1.log
    Resource_List.walltime = 00:01:00
    Variable_List = PBS_O_HOME=/home/u,PBS_O_PATH=/usr/bin,NASTY=x
    job_state = X
\t,PBS_O_WORKDIR=/home/u
    comment = Not Running: Insufficient amount of resource: ncpus
"""
LOG = Path("/home/u/hvdtrain-jobs/hello-1.log")
LONG_LOG = Path("/home/u/a very long name of a directory indeed/hvdtrain-jobs/hello-1.log")


@pytest.mark.parametrize(
    ("status", "code"),
    [(0, 0), (3, 3), (75, 75), (-29, 124), (271, 143), (265, 137), (-3, 1), (255, 255)],
)
def test_a_finished_pbs_job(status: int, code: int) -> None:
    assert pbs.read_json(PBS_JSON % status) == State(ENDED, "finished", code, (LOG,))


def test_invalid_json_of_pbs() -> None:
    for text in (PBS_JSON.replace('"hello"', '"say "hello""'), "qstat: Unknown Job Id 12.server\n"):
        assert pbs.read_json(text) is None


@pytest.mark.parametrize(
    ("letter", "expected"),
    [
        ("Q", (WAITING, "queued (Not Running: Insufficient amount of resource: ncpus)")),
        ("H", (WAITING, "held (Not Running: Insufficient amount of resource: ncpus)")),
        ("R", (RUNNING, "running")),
        ("E", (RUNNING, "exiting")),
    ],
)
def test_pbs_text(letter: str, expected: tuple[str, str]) -> None:
    assert pbs.read_text(PBS_TEXT % letter) == State(*expected, None, (LONG_LOG,))


PBS_ARRAY = """Job Id: 8[].pbs1
    Job_Name = f
    job_state = F
    Output_Path = login:/home/u/hvdtrain-jobs/f-1.log.^array_index^
    substate = 93
    comment = Job Array Began at Sat Nov 21 at 10:00 and failed
    array = True
    Exit_status = 0

Job Id: 8[1].pbs1
    Job_Name = f
    job_state = F
    Output_Path = login:/home/u/hvdtrain-jobs/f-1.log.^array_index^
    stime = Sat Nov 21 10:00:00 2026
    Exit_status = 0

Job Id: 8[2].pbs1
    Job_Name = f
    job_state = F
    Output_Path = login:/home/u/hvdtrain-jobs/f-1.log.^array_index^
    stime = Sat Nov 21 10:00:00 2026
    Exit_status = 3
    Variable_List = PBS_O_HOME=/home/u,NASTY=x
    Exit_status = 0
"""


def test_a_pbs_array_ends_as_its_tasks_do() -> None:
    """PBS always reports 0 for the array."""
    logs = tuple(Path(f"/home/u/hvdtrain-jobs/f-1.log.{task}") for task in (1, 2))
    tasks = {
        "1": State(ENDED, "finished", 0, logs[:1]),
        "2": State(ENDED, "finished", 3, logs[1:]),
    }
    assert pbs.read_text(PBS_ARRAY) == State(ENDED, "finished", 3, logs, tasks=tasks)
    state = pbs.read_text(PBS_ARRAY.replace("job_state = F", "job_state = B", 1))
    assert state is not None
    assert (state.phase, state.exit_code) == (RUNNING, None)
    begun = PBS_ARRAY.replace("job_state = F", "job_state = B", 1)
    state = pbs.read_text(begun.replace("job_state = F", "job_state = R", 1))
    assert state is not None
    assert state.detail == "1 finished, 1 running"
    # Without -t only the state of the array is known.
    array = pbs.read_text(PBS_ARRAY.partition("\n\n")[0])
    assert array is not None
    assert array.exit_code is None


@pytest.mark.parametrize(
    ("comment", "code"),
    [("Subjob finished", 0), ("Subjob failed", None), ("Subjob terminated", None)],
)
def test_a_task_that_pbs_has_dropped_before_its_array(comment: str, code: int | None) -> None:
    """It is then shown with the values of the array, including its exit code."""
    task = f"Job Id: 8[1].s\n    job_state = X\n    Exit_status = 0\n    comment = {comment}\n"
    state = pbs.read_text("Job Id: 8[].s\n    job_state = F\n    Exit_status = 0\n\n" + task)
    assert state is not None
    assert state.tasks["1"].exit_code == code
    assert state.exit_code == (1 if code is None else 0)


def test_a_pbs_array_as_json() -> None:
    tasks = ",".join(
        f'"8[{task}].pbs1": {{"job_state": "F", "stime": "x", "Exit_status": {code}}}'
        for task, code in enumerate((0, 3), 1)
    )
    parent = '"8[].pbs1": {"job_state": "F", "stime": "x", "Exit_status": 0, "substate": 93}'
    state = pbs.read_json(f'{{"Jobs": {{{parent},{tasks}}}}}')
    assert state is not None
    assert state.exit_code == 3
    assert {number: task.exit_code for number, task in state.tasks.items()} == {"1": 0, "2": 3}


def test_a_pbs_job_that_was_deleted() -> None:
    """PBS always reports 0: the exit file of the job counts."""
    deleted = PBS_JSON.replace('"Exit_status":%d', '"substate":91,"stime":"x","Exit_status":%d')
    assert pbs.read_json(deleted % 0) == State(ENDED, "finished", None, (LOG,))
    assert pbs.read_json(deleted % 271) == State(ENDED, "finished", 143, (LOG,))
    assert pbs.read_text(PBS_TEXT % "F") == NEVER_RAN
    assert pbs.read_json(PBS_JSON.replace(', "Exit_status":%d', "")) == NEVER_RAN


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ((PBS_TEXT % "C") + "    exit_status = 3\n", (ENDED, 3)),  # of Torque
        ("qstat: Unknown Job Id 12.server\n", (GONE, None)),
        ("qstat: PBS is not configured to maintain job history\n", None),
        ("qstat: 12.server Job has finished, use -x or -H\n", None),
    ],
)
def test_other_answers_of_qstat(text: str, end: tuple[str, int | None] | None) -> None:
    state = pbs.read_text(text)
    assert (state and (state.phase, state.exit_code)) == end


@given(st.integers(-100, 1000))
def test_exit_codes_fit_into_a_byte_and_only_status_0_is_0(status: int) -> None:
    code = pbs.exit_code(status)
    assert 0 <= code <= 255
    assert (code == 0) == (status == 0)


@given(st.sampled_from(["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"]), st.integers(0, 255))
def test_a_slurm_job_that_did_not_complete_is_never_0(state: str, code: int) -> None:
    assert (slurm.exit_code(state, code, 0) == 0) == (state == "COMPLETED" and code == 0)
