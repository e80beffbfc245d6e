"""Following a job: its states, the lines of its log, its exit code."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.commands.submit import chain, follow
from hvdtrain.commands.submit.dialect import ENDED, RUNNING, WAITING, Dialect, Local, Query, State
from hvdtrain.commands.submit.follow import SubmittedJob, Tail
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import Command
from tests.conftest import executable

End = tuple[str, int | None]


class Folder(Local):
    """Jobs whose next states are in a file each; a query advances to the next state.

    A line is the phase, the exit code or ``-``, and the text that the job then writes to its log,
    without a newline if it ends in ``...``.
    """

    stop = ("kill", "-URG")

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, job: str, *lines: str) -> None:
        (self.directory / job).write_text("".join(f"{line}\n" for line in lines))

    def queries(self, job_id: str) -> Sequence[Query]:
        file = self.directory / job_id

        def read(output: str) -> State | None:
            if output.startswith("cat:"):
                return None
            first, _, rest = output.partition("\n")
            file.write_text(rest)
            phase, code, *words = first.split()
            text = " ".join(words)
            log = self.directory / f"{job_id}.log"
            if text:
                with log.open("a") as lines:
                    lines.write(text[:-3] if text.endswith("...") else text + "\n")
            return State(phase, phase, None if code == "-" else int(code), (log,))

        return (Query(Command(("cat", str(file))), read),)

    def delete(self, job_ids: Sequence[str]) -> Command:
        return Command(("rm", *job_ids))


@pytest.fixture
def jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Folder:
    """A batch system without delays."""
    caplog.set_level("INFO")
    for name in ("LOG_PERIOD", "QUERY_FIRST", "QUERY_LAST", "DELIVERY"):
        monkeypatch.setattr(follow, name, 0.001)
    return Folder(tmp_path)


def followed(dialect: Dialect, directory: Path, *ids: str, chained: bool = False) -> End:
    """Follow jobs with all files in ``directory``; their output is in the file ``out``.

    Returns:
        The state at the end, and the exit code.
    """
    jobs = [SubmittedJob(id_, {chain.number(id_): directory / f"{id_}.log"}) for id_ in ids]
    file = directory / "chain" if chained else None
    with (directory / "out").open("w") as out:
        end = follow.follow(dialect, jobs, directory / "exit", file, out)
    return end.detail, end.exit_code


def test_a_job_from_start_to_end(jobs: Folder, caplog: pytest.LogCaptureFixture) -> None:
    jobs.add(
        "7",
        f"{WAITING} -",
        f"{WAITING} -",
        f"{RUNNING} - one",
        f"{RUNNING} - half a line...",
        f"{RUNNING} -  of it",
        f"{ENDED} 3 no newline...",
    )
    assert followed(jobs, jobs.directory, "7") == (ENDED, 3)
    assert (jobs.directory / "out").read_text() == "one\nhalf a lineof it\nno newline"
    assert caplog.messages == ["job 7: waiting", "job 7: running", "job 7: ended, exit code 3"]
    jobs.add("8", f"{ENDED} - done")
    assert followed(jobs, jobs.directory, "8") == (ENDED, None)
    assert caplog.messages[-1] == "job 8: ended, exit code unknown"


def test_ctrl_c_only_stops_following(
    jobs: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def press(seconds: float) -> None:
        raise KeyboardInterrupt

    # Only that of follow: threads of earlier tests sleep, too.
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=press, monotonic=time.monotonic))
    jobs.add("7", f"{RUNNING} - one")
    assert followed(jobs, jobs.directory, "7", "8") == ("running", 130)
    assert (jobs.directory / "out").read_text() == "one\n"
    assert caplog.messages[-2] == "\njob 7 continues; to save and end it: kill -URG 7"
    assert caplog.messages[-1] == "to delete it: rm 8 7"


def test_a_batch_system_that_no_longer_answers(
    jobs: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is shown meanwhile."""
    (jobs.directory / "7.log").write_text("step 1\n")
    monkeypatch.setattr(follow, "SERVER_TIMEOUT", 0.6)
    away = r"job 7: no answer of the batch system for 0.01 min \(cat: .*No such .*\); "
    with pytest.raises(HvdtrainError, match=rf"{away}the job continues; log .*/7.log; .*: rm 8 7"):
        followed(jobs, jobs.directory, "7", "8")
    assert (jobs.directory / "out").read_text() == "step 1\n"


def test_a_batch_system_that_is_away_for_a_while(
    jobs: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More queries fail than a job may take: what counts is the time."""
    answers = iter([f"{RUNNING} - one", *[""] * 20, f"{RUNNING} - two", f"{ENDED} 3 three"])
    real = jobs.queries

    def queries(job_id: str) -> Sequence[Query]:
        line = next(answers)
        (jobs.directory / job_id).unlink(missing_ok=True)
        if line:
            jobs.add(job_id, line)
        return real(job_id)

    monkeypatch.setattr(jobs, "queries", queries)
    assert followed(jobs, jobs.directory, "7") == (ENDED, 3)
    assert (jobs.directory / "out").read_text() == "one\ntwo\nthree\n"
    away = "job 7: no answer of the batch system, trying for 10 min"
    running = "job 7: running"
    assert caplog.messages == [running, away, running, "job 7: ended, exit code 3"]


def test_a_job_that_ends_while_the_batch_system_is_away(jobs: Folder) -> None:
    (jobs.directory / "exit.7").write_text("5\n")
    assert followed(jobs, jobs.directory, "7") == ("ended", 5)


def test_the_log_is_shown_during_a_slow_query(
    jobs: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = jobs.directory / "out"
    (jobs.directory / "7.log").write_text("step 1\n")
    waits = f"until grep -q step {out}; do sleep 0.01; done; echo '{ENDED} 0'"
    query = Query(Command(("sh", "-c", waits)), lambda text: State(ENDED, ENDED, 0))
    monkeypatch.setattr(jobs, "queries", lambda job_id: (query,))
    assert followed(jobs, jobs.directory, "7") == (ENDED, 0)


def test_a_chain_is_followed_to_its_end(jobs: Folder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    jobs.add("1", f"{ENDED} 75 first")
    jobs.add("2", f"{ENDED} 0 second")
    jobs.add("3", f"{ENDED} 0 third")
    assert followed(jobs, tmp_path, "1", "2", "3", chained=True) == (ENDED, 0)
    assert out.read_text() == "first\nsecond\nthird\n"

    # The third job does not count.
    chain.write(tmp_path / "chain", event="over", job="2.server", why="finished")
    jobs.add("1", f"{ENDED} 75 again")
    jobs.add("2", f"{ENDED} 3 again")
    assert followed(jobs, tmp_path, "1", "2", "3", chained=True)[1] == 3


# --- a PBS that forgets a job at its end, the default of OpenPBS ----------------------------------

# Output of qstat while a job runs and afterwards; "lasts" is the number of queries until its end.
QSTAT = """#!/bin/bash
for job; do :; done
case $* in *-x*) echo "qstat: PBS is not configured to maintain job history"; exit 1 ;; esac
lasts=$(($(cat "lasts.$job" 2>/dev/null || echo 0) - 1)); echo "$lasts" > "lasts.$job"
[ "$lasts" -ge 0 ] || { echo "qstat: Unknown Job Id $job" >&2; exit 153; }
printf 'Job Id: %s\\n    job_state = R\\n    Output_Path = login:%s/%s.log\\n' "$job" "$PWD" "$job"
"""


@pytest.fixture
def forgetful(jobs: Folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of such a PBS, with the files of its jobs."""
    executable(jobs.directory / "qstat", QSTAT)
    monkeypatch.chdir(jobs.directory)
    monkeypatch.setenv("PATH", f"{jobs.directory}:/usr/bin:/bin")
    return jobs.directory


def ran(directory: Path, job: str, exit_text: str, lasts: int = 1) -> None:
    (directory / f"lasts.{job}").write_text(str(lasts))
    (directory / f"{job}.log").write_text(f"log of {job}\n")
    (directory / f"exit.{chain.number(job)}").write_text(exit_text)


@pytest.mark.parametrize("lasts", [0, 2])
@pytest.mark.parametrize(
    ("left", "code", "word"), [("0\n", 0, "0"), ("3\n", 3, "3"), ("", None, "unknown")]
)
def test_the_exit_code_that_a_job_left(
    left: str,
    code: int | None,
    word: str,
    lasts: int,
    forgetful: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran(forgetful, "7.pbs1", left, lasts)
    assert followed(Pbs(), forgetful, "7.pbs1") == ("ended", code)
    assert caplog.messages[-1] == f"job 7.pbs1: ended, exit code {word}"
    assert (forgetful / "out").read_text() == "log of 7.pbs1\n"


def test_a_log_that_is_delivered_at_the_end(
    forgetful: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PBS's mom copies it back."""
    monkeypatch.setattr(follow, "NO_LOG", -1.0)
    ran(forgetful, "7.pbs1", "0\n", 4)
    (forgetful / "7.pbs1.log").unlink()
    assert followed(Pbs(), forgetful, "7.pbs1")[1] == 0
    (message,) = [line for line in caplog.messages if "no log yet" in line]
    assert "$usecp" in message


def test_a_job_that_left_nothing_never_ran(
    forgetful: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert followed(Pbs(), forgetful, "7.pbs1") == ("deleted before it ran", None)
    assert caplog.messages == ["job 7.pbs1: deleted before it ran"]


# Output of qstat of OpenPBS 23.06.06 if the node has no such directory.
HELD = """#!/bin/bash
[[ $* = *json* ]] || cat <<'END'
Job Id: 37.pbs1
    Job_Name = b1
    job_state = H
    substate = 20
    Output_Path = login:/home/bob/work/hvdtrain-jobs/b1-1.log
    comment = job held, too many failed attempts to run
END
"""


def test_a_job_that_pbs_cannot_start(forgetful: Path) -> None:
    (forgetful / "qstat").write_text(HELD)
    with pytest.raises(HvdtrainError) as error:
        followed(Pbs(), forgetful, "37.pbs1", "38.pbs1")
    message = str(error.value)
    assert message.startswith(
        "job 37.pbs1: PBS could not start it and holds it (job held, too many "
    )
    assert "the directory of its log does not exist on the node" in message
    assert "--logs" in message
    assert f"log {forgetful}/37.pbs1.log" in message
    assert message.endswith("qdel 38.pbs1 37.pbs1")


def test_the_path_that_submit_chose_comes_first(
    forgetful: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenPBS mangles letters outside ASCII in Output_Path; another path of a site counts."""
    text = (forgetful / "qstat").read_text()
    (forgetful / "qstat").write_text(text.replace("$PWD", "/home/^C^..bung"))
    ran(forgetful, "7.pbs1", "3\n", 2)
    assert followed(Pbs(), forgetful, "7.pbs1") == ("ended", 3)
    assert (forgetful / "out").read_text() == "log of 7.pbs1\n"
    assert caplog.messages[-1] == "job 7.pbs1: ended, exit code 3"
    (forgetful / "qstat").write_text(text.replace("$PWD", f"{forgetful}/site"))
    ran(forgetful, "8.pbs1", "0\n", 2)
    (forgetful / "site").mkdir()
    (forgetful / "8.pbs1.log").rename(forgetful / "site" / "8.pbs1.log")
    assert followed(Pbs(), forgetful, "8.pbs1") == ("ended", 0)
    assert (forgetful / "out").read_text() == "log of 8.pbs1\n"


def test_a_log_that_is_never_delivered(forgetful: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If PBS regards a local directory as shared, the log stays on the node."""
    text = (forgetful / "qstat").read_text()
    running = "    job_state = R\\n    exec_host = node1/0*2+node2/0*2\\n"
    (forgetful / "qstat").write_text(text.replace("    job_state = R\\n", running))
    ran(forgetful, "7.pbs1", "2\n", 2)
    (forgetful / "7.pbs1.log").unlink()
    assert followed(Pbs(), forgetful, "7.pbs1")[1] == 2
    log = forgetful / "7.pbs1.log"
    assert caplog.messages[-1].startswith(
        "job 7.pbs1: ended, exit code 2; its log was not delivered"
    )
    assert f"{log} on node1" in caplog.messages[-1]
    # There is no exit code either, but the job was seen running.
    (forgetful / "exit.7").unlink()
    (forgetful / "lasts.7.pbs1").write_text("2")
    assert followed(Pbs(), forgetful, "7.pbs1") == ("ended", None)
    assert "exit code unknown; its log was not delivered" in caplog.messages[-1]


def test_a_chain_continues_if_pbs_forgets_its_jobs(forgetful: Path) -> None:
    """After a killed job, and without a deleted one."""
    for number, left in enumerate(("75\n", "", "75\n"), 1):
        ran(forgetful, f"{number}.pbs1", left)
    ran(forgetful, "5.pbs1", "0\n")
    ids = [f"{number}.pbs1" for number in range(1, 7)]
    chain.write(forgetful / "chain", event="over", job="5.pbs1", why="finished")
    assert followed(Pbs(), forgetful, *ids, chained=True) == ("ended", 0)
    assert (forgetful / "out").read_text().count("log of") == 4


def test_the_tasks_of_an_array(forgetful: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = {str(task): forgetful / f"log.{task}" for task in (1, 2, 3)}
    for task, code in ((1, 0), (2, 3)):
        logs[str(task)].write_text(f"task {task}\n")
        (forgetful / f"exit.{task}").write_text(f"{code}\n")
    job = SubmittedJob("8[].pbs1", logs)
    out = io.StringIO()
    end = follow.follow(Pbs(), [job], forgetful / "exit", None, out)
    assert end.exit_code == 3
    assert out.getvalue() == "task 1\ntask 2\n"
    assert caplog.messages == [
        f"task 1: ended, exit code 0; log {logs['1']}",
        f"task 2: ended, exit code 3; log {logs['2']}",
        "task 3: deleted before it ran",
        "job 8[].pbs1: 1 deleted before it ran, 2 ended, exit code 3",
    ]


def test_a_log_that_does_not_exist_yet(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.new() == ""
    tail.path.write_bytes(b"\xff one\ntwo")
    assert tail.new() == "\ufffd one\n"
    assert tail.new() == ""
    assert tail.new(partial=True) == "two"
