"""Ranks of a job start from the copies, with variables that lead there; signals end the staging."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from hvdtrain.commands.launch import stage_environment
from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.environment_copy import HOLD
from hvdtrain.commands.launch.hosts import Host, RankLayout
from hvdtrain.commands.launch.launcher_choice import MpiLauncher
from hvdtrain.commands.launch.stage_environment import MUST, TRY, StagedEnvironment, staged
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.runtime.command import Command, CommandResult
from hvdtrain.system.runtime.spawn import StopSignals
from tests.environments import PYTHON, make_editable, make_environment


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of a user with an active environment."""
    prefix = make_environment(tmp_path / "conda")
    (prefix / "bin" / PYTHON).touch(0o755)
    return {
        "HVDTRAIN_CACHE": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "local"),
        "PATH": f"/opt/cuda/bin:{prefix}/bin:/usr/bin",
        "CONDA_PREFIX": str(prefix),
        "PYTHONPATH": f"{prefix}/extra:{prefix}2:/home/me/project",
        "LD_LIBRARY_PATH": f"/opt/lib:{prefix}/lib",
        "HVDTRAIN_OUT": f"{prefix}/results",
    }


def job(environ: dict[str, str], *words: str) -> Launch:
    """Return a job of two ranks on two hosts."""
    mpi = MpiLauncher("openmpi5", "/usr/bin/mpirun", "5.0.11")
    layout = RankLayout(2, (Host("a", 1), Host("b", 1)))
    return Launch(mpi, words or (PYTHON, "train.py"), layout, environ=environ)


def test_ranks_start_from_the_copy(environ: dict[str, str], tmp_path: Path) -> None:
    environment = StagedEnvironment(job(environ))
    copy = environment.folder
    assert copy.is_relative_to(tmp_path / "local")
    command = environment.launch.command
    reserved = f"{copy}.job-{environment._job}"
    words = (*HOLD, str(copy), reserved, f"{copy}/bin/{PYTHON}", "train.py")
    assert command.argv[-len(words) :] == words
    prefix = environ["CONDA_PREFIX"]
    assert command.env["PATH"] == f"/opt/cuda/bin:{copy}/bin:/usr/bin"
    assert command.env["CONDA_PREFIX"] == str(copy)
    assert command.env["PYTHONPATH"] == f"{copy}/extra:{prefix}2:/home/me/project"
    assert command.env["LD_LIBRARY_PATH"] == f"/opt/lib:{copy}/lib"
    assert "HVDTRAIN_OUT" not in command.env  # the results must not go with the copy
    assert "CONDA_PREFIX" in command.argv  # of -x


def test_a_program_by_a_relative_path_is_that_of_the_copy(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = StagedEnvironment(job(environ, f"conda/bin/{PYTHON}", "train.py"))
    assert environment.launch.words[-2:] == (f"{environment.folder}/bin/{PYTHON}", "train.py")


@pytest.mark.parametrize("first", ["{prefix}/bin/python", "/bin/sh\n'''exec' {prefix}/bin/python"])
def test_a_script_in_python_runs_with_the_interpreter_of_the_copy(
    first: str, environ: dict[str, str]
) -> None:
    prefix = environ["CONDA_PREFIX"]
    script = Path(prefix, "bin", "train")
    script.write_text(f"#!{first.format(prefix=prefix)}\n")
    script.chmod(0o755)
    environment = StagedEnvironment(job(environ, "train", "--epochs=2"))
    binaries = environment.folder / "bin"
    assert environment.launch.words[-3:] == (
        f"{binaries}/python",
        f"{binaries}/train",
        "--epochs=2",
    )


@pytest.mark.parametrize("first", ["/bin/sh\n# starts python", "/opt/python-envs/x/bin/bash"])
def test_a_script_of_a_shell_runs_by_itself(first: str, environ: dict[str, str]) -> None:
    script = Path(environ["CONDA_PREFIX"], "bin", "train")
    script.write_text(f"#!{first}\npython train.py\n")
    script.chmod(0o755)
    environment = StagedEnvironment(job(environ, "train", "--epochs=2"))
    assert not environment.launch.words[-3].endswith("/python")
    assert environment.launch.words[-2:] == (f"{environment.folder}/bin/train", "--epochs=2")


def test_editable_installs_are_reported(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_editable(Path(environ["CONDA_PREFIX"]), tmp_path / "project")
    with caplog.at_level("INFO"):
        StagedEnvironment(job(environ))
    assert f"{tmp_path}/project is editable: ranks import it from there" in caplog.text


class Runs:
    """Replaces the runs of mpirun, which have these exit codes and outputs."""

    def __init__(self, *results: tuple[int, str]) -> None:
        self.results, self.verbs = list(results), list[str]()

    def __call__(self, command: Command, timeout: float | None = None) -> CommandResult:
        self.verbs.append(command.argv[command.argv.index("-m") + 2])
        code, output = self.results.pop(0)
        if code < 0:
            os.kill(os.getpid(), -code)
        return CommandResult(command, code, output)


def test_one_process_per_host_makes_and_removes_the_copies(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs((0, ""), (0, ""))
    monkeypatch.setattr(stage_environment, "run", runs)
    with StopSignals() as signals, staged(job(environ), MUST, signals) as launch:
        assert runs.verbs == ["stage"]
        assert launch.words[:3] == HOLD
    assert runs.verbs == ["stage", "remove"]


def test_an_error_on_a_host_is_one_line(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the job, or is a warning."""
    output = "a notice\nhvdtrain: --stage-env: host b: 1 GB are needed\nmpirun: a box\n"
    monkeypatch.setattr(stage_environment, "run", Runs((1, output)))
    with (
        StopSignals() as signals,
        pytest.raises(HvdtrainError, match=r"^--stage-env: host b: 1 GB are needed$"),
        staged(job(environ), MUST, signals),
    ):
        pass
    monkeypatch.setattr(stage_environment, "run", Runs((1, output)))
    with StopSignals() as signals, staged(job(environ), TRY, signals) as launch:
        assert launch.words == (PYTHON, "train.py")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "hvdtrain: --stage-env: host b: 1 GB are needed; the ranks start from the shared "
        "environment"
    ]


def test_the_output_of_a_failed_mpirun_is_shown_whole(
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It cannot reach a host, for example, and fails again when the copies are removed."""
    output = "ssh: connect to host b: refused\n" + "a line of a box\n" * 40
    monkeypatch.setattr(stage_environment, "run", Runs((1, output), (1, output)))
    with (
        StopSignals() as signals,
        pytest.raises(HvdtrainError, match=r"^--stage-env: mpirun ended with code 1; its output"),
        staged(job(environ), MUST, signals),
    ):
        pass
    assert output in capsys.readouterr().err
    assert "may be left on a host" in caplog.text


@pytest.mark.parametrize("mode", [MUST, TRY])
def test_copies_are_removed_if_a_process_that_makes_them_is_killed(
    mode: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then mpirun kills the others, which have no time to remove theirs."""
    runs = Runs((137, "mpirun: rank 1 exited on signal 9\n"), (0, ""))
    monkeypatch.setattr(stage_environment, "run", runs)
    with (
        StopSignals() as signals,
        contextlib.suppress(HvdtrainError),
        staged(job(environ), mode, signals) as launch,
    ):
        assert (mode, launch.words) == (TRY, (PYTHON, "train.py"))
    assert runs.verbs == ["stage", "remove"]


def test_an_error_of_the_job_is_passed_on_and_copies_are_removed(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs((0, ""), (1, ""))
    monkeypatch.setattr(stage_environment, "run", runs)
    with (
        StopSignals() as signals,
        pytest.raises(HvdtrainError, match="a host was lost"),
        staged(job(environ), TRY, signals),
    ):
        raise HvdtrainError("a host was lost")
    assert runs.verbs == ["stage", "remove"]


@pytest.mark.parametrize("mode", [MUST, TRY])
def test_a_signal_ends_the_staging(
    mode: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs((-signal.SIGTERM, ""), (0, ""))
    monkeypatch.setattr(stage_environment, "run", runs)
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt), staged(job(environ), mode, signals):
            pytest.fail("the ranks were started")
        assert signals.received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)  # is recorded again
        assert signals.received == [signal.SIGTERM, signal.SIGTERM]
    assert runs.verbs == ["stage", "remove"]


def test_without_the_option_nothing_is_staged(environ: dict[str, str]) -> None:
    launch = job(environ)
    with StopSignals() as signals, staged(launch, None, signals) as same:
        assert same is launch
