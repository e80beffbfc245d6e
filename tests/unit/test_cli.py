"""The command line: verbs, exit codes, what goes to which stream."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import select
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain import __version__, cli, errors
from hvdtrain.cli import PROGRAMS
from hvdtrain.config.declare import json_switch
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.output import Report
from tests.conftest import ROOT, run

FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "torchvision", "sklearn"}
PROGRAM = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code, stop.code
print("LOADED", *sys.modules)
"""


@pytest.mark.parametrize(
    "command",
    [
        "hvdtrain --help",
        "hvdtrain --version",
        "hvdtrain install-horovod --help",
        "hvdtrain doctor --help",
        *(f"hvdtrain.{name} --help" for name in ("mnist", "resnet", "ssd300", "pi")),
    ],
)
def test_help_imports_no_framework(command: str) -> None:
    line = [sys.executable, "-c", PROGRAM, *command.split()]
    result = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    slow = FRAMEWORKS | ({"numpy"} if command.startswith("hvdtrain ") else set())
    assert not slow & set(result.stdout.rpartition("LOADED")[2].split())


def test_help_lists_every_verb_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert not stop.value.code
    for verb in cli.VERBS:
        assert f"\n  {verb} " in text
    assert "example:" in text


def test_help_names_every_program_and_begins_as_the_readme_does() -> None:
    text = cli.overview().format_help()
    programs = sorted(
        path.stem for path in ROOT.glob("hvdtrain/*.py") if "run_and_exit(main)" in path.read_text()
    )
    assert {"mnist", "pi", "train"} <= set(programs)
    for name in (*programs, "collectives"):
        assert f"\n  hvdtrain.{name} " in text
    example = "  hvdtrain launch -n 2 -- python -m hvdtrain.mnist\n"
    assert example in text
    assert example.strip() in (ROOT / "README.md").read_text()
    assert max(map(len, PROGRAMS.splitlines())) < 80


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_each_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert f"usage: hvdtrain {verb}" in text
    assert f"example:\n  hvdtrain {verb}" in text


def test_help_of_a_verb_in_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["help", "timeline"], ["timeline", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert not stop.value.code
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    with pytest.raises(SystemExit):
        cli.main(["help"])
    assert "verbs:" in capsys.readouterr().out


def test_the_package_is_the_command() -> None:
    line = [sys.executable, "-m", "hvdtrain", "--version"]
    result = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == f"hvdtrain {__version__}\n"


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What bash evaluates."""
    pytest.importorskip("shtab")
    script = tmp_path_factory.mktemp("bash") / "completion"
    line = [sys.executable, "-m", "hvdtrain", "--completion", "bash"]
    with script.open("w") as file:
        subprocess.run(line, stdout=file, check=True, timeout=60)
    return script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ti", "timeline"),
        ("comp", "compare"),
        ("verify --fram", "--framework"),
        ("submit --site po", "polaris"),
        ("launch -n 2 -- python -m hvdtrain.r", "hvdtrain.resnet"),
        ("launch -n 2 -- python -m hvdtrain.mnist --framework t", "tensorflow"),
        ("scaling --ranks 1,2 -- python -m hvdtrain.train own.py --acc", "--accumulate-steps"),
        ("submit -- python -m hvdtrain.ssd300 --backb", "--backbone-path"),
        ("launch -n 2 -- python -m hvdtrain.pi --sa", "--samples"),
        ("launch -n 2 -- python -m hvdtrain.collectives --lib", "--libraries"),
        ("launch -n 2 -- python -m other --ep", ""),
    ],
)
def test_completion_in_bash(typed: str, offered: str, completion: Path) -> None:
    words = ["hvdtrain", *typed.split()]
    ask = f"source {completion}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    result = subprocess.run(
        ["bash", "-c", f'{ask}; _hvdtrain; echo "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == offered, result.stderr


def test_tab_in_a_terminal(completion: Path, tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=tmp_path,
        env={**os.environ, "HISTFILE": "", "TERM": "dumb"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as shell:
        os.close(terminal)
        typed = "hvdtrain launch -n 2 -- python -m hvdtrain.mnist --ep\t3; exit"
        os.write(keyboard, f"hvdtrain() {{ echo [$*]; }}; source {completion}\n".encode())
        os.write(keyboard, f"{typed}\n".encode())
        seen = b""
        with contextlib.suppress(OSError):  # Linux says so at the end
            while select.select([keyboard], [], [], 60)[0]:
                seen += os.read(keyboard, 65_536)
        shell.wait(60)
    os.close(keyboard)
    assert "[launch -n 2 -- python -m hvdtrain.mnist --epochs 3]" in seen.decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["teach"], "unknown verb 'teach': choose from install-horovod, doctor"),
        (["train"], "'train' is a program, not a verb: hvdtrain launch -n 2 -- python -m hvdtrain"),
        (["timelin"], "unknown verb 'timelin': did you mean timeline?"),
        (["help", "lanch"], "unknown verb 'lanch': did you mean launch?"),
        (["compare", "--strategies", "ddp"], "missing command"),
        (["install-horovod", "--frameworks", "mxnet"], "choose from pytorch, tensorflow"),
        (["install-horovod", "--gpu", "ncl"], "--gpu: 'ncl': choose from auto, nccl, none (did"),
        (["install-horovod", "--jobs", "many"], "--jobs: 'many' is not a number"),
        (["doctor", "here"], "'here' is not expected here; see hvdtrain doctor --help"),
        (["doctor", "-n", "0"], "-n: 0 is not a whole number of 1 or more"),
        (["doctor", "--ppn", "2"], "need -n N"),
        (["doctor", "--hosts", "a:2"], "need -n N"),
        (["verify", "--timeout", "soon"], "--timeout: 'soon' is not a number"),
        (["verify", "--timeout", "0"], "--timeout: 0 is not a number above 0"),
        (["verify", "--", "--epochs", "1"], "--epochs: "),
        (["verify", "--updates", "3"], "--updates needs --script"),
        (["verify", "-n", "0"], "-n: 0 is not a whole number of 1 or more"),
        (["verify", "--script", "absent.py"], "--script absent.py: no such file"),
        (["verify", "--script", __file__, "--updates", "0"], "--updates: 0 is not a whole number"),
        (["verify", "--script", __file__, "--updates", "x"], "'x' is not a number, nor all"),
        (["data-fetch", "mnits", "--to", "x"], "NAME: 'mnits': choose from mnist,"),
        (["data-fetch", "mnits", "--to", "x"], "(did you mean mnist?)"),
        (["data-fetch"], "NAME, --to: missing; see hvdtrain data-fetch --help"),
        (["pack", "--workers", "0", "a", "b"], "--workers: 0 is not a whole number of 1 or more"),
        (["launch", "-n", "two", "--", "x"], "-n: 'two' is not a number"),
        (["launch", "-n", "2", "--tiemout", "3", "--", "x"], "did you mean --timeout?"),
        (["launch", "--nproc-per-node", "2", "--", "x"], "did you mean --ppn?"),
        (["submit", "--nodes", "x", "--", "x"], "--nodes: 'x' is not a number"),
        (["submit", "--scheduler", "pbss", "--", "x"], "slurm, none (did you mean pbs?)"),
        (["scaling", "--repeats", "x", "--", "x"], "--repeats: 'x' is not a"),
        (["compare", "--repeats", "x", "--", "x"], "--repeats: 'x' is not a"),
        (["scaling", "--ranks", "1,x", "--", "x"], "--ranks: 'x' is not a number"),
        (["scaling", "--weak", "--strong"], "--strong: not allowed with argument --weak"),
        (["compare", "--batch-size", "max"], "--batch-size was removed: omit it"),
        (["report", "x", "--hmtl", "y"], "--hmtl: no such option; did you mean --html?"),
        (["--completion", "bsh"], "--completion: 'bsh': choose from bash, zsh (did"),
        (["--versoin"], "--versoin: no such option; did you mean --version?"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*words)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
@pytest.mark.parametrize(
    "words",
    [
        "report private",
        "report private/run",
        "verify --script private/train.py",
        "pack private out",
        "pack private/data out",
        "pack images out",
        "submit --walltime 1:00:00 --site private/site.yaml -- x",
        "submit --scheduler none --logs private/jobs -- x",
        "launch -n 2 -- private/train.py",
        "-m hvdtrain.train private/train.py",
    ],
)
def test_a_directory_of_another_user_is_one_line(words: str, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "images/train").mkdir(parents=True)
    (tmp_path / "images/train/private").mkdir(mode=0o700)
    for name in ("private", "images/train/private"):
        os.chown(tmp_path / name, 65534, 65534)
    as_any_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    program = [] if words.startswith("-m ") else ["-m", "hvdtrain.cli"]
    done = run([*as_any_user, sys.executable, *program, *words.split()], cwd=tmp_path)
    message = "no such program" if "launch -n" in words else "Permission denied"
    assert done.code == 2
    (error,) = done.said
    assert "private" in error
    assert message in error


@pytest.mark.parametrize("redirection", ["> /dev/full", ">&-"])
def test_output_that_cannot_be_written(redirection: str, tmp_path: Path) -> None:
    script = f'exec "$@" {redirection}'
    line = ["sh", "-c", script, "sh", sys.executable, "-m", "hvdtrain.cli", "submit", "--dry-run"]
    done = run([*line, "--scheduler=none", "--", "é.py"], cwd=tmp_path, PYTHONIOENCODING="ascii")
    message = "hvdtrain: error: standard output: No space left on device"
    assert done.code == (1 if "full" in redirection else 0)
    assert (message in done.err) is ("full" in redirection)
    assert "Traceback" not in done.err


def test_a_name_that_the_locale_cannot_spell_is_escaped(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hvdtrain.cli", "submit", "--dry-run", "--scheduler=none"]
    done = run([*line, "--", "é.py"], cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.code == 0
    assert r"\xe9.py" in done.out


def test_an_empty_path_is_not_the_current_directory() -> None:
    seen = 0
    for verb in cli.VERBS:
        parser = cli.parser_of(verb)
        for action in parser._actions:
            if action.type is Path:
                seen += 1
                name = "".join(action.option_strings)
                with pytest.raises(UsageError, match="the path is empty"):
                    parser.read([name, ""] if name else ["", ""])
    assert seen > 10


ON_ANOTHER_HOST = "hvdtrain launch -n 1 --launcher torchrun --hosts other:1 --dry-run -- true"


@pytest.mark.parametrize("program", [ON_ANOTHER_HOST, "hvdtrain.mnist"])
def test_a_removed_working_directory_is_named(program: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    remove = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m"]
    done = run([*remove, *program.split()], cwd=tmp_path / "gone")
    line = "hvdtrain: error: the working directory was removed: cd to another"
    assert (done.code, done.said, done.err.count("\n")) == (2, [line], 1)


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    assert "verbs:" in text and len(text.splitlines()) < 24  # it fits, with the prompt


def with_verb(monkeypatch: pytest.MonkeyPatch, outcome: Report | BaseException) -> None:
    """Make ``hvdtrain probe`` end with ``outcome``."""

    @dataclass(frozen=True)
    class Options:
        json: bool = json_switch()

    def run_verb(options: Options) -> Report:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    run_verb.__annotations__["options"] = Options  # a name of this function only
    module = types.SimpleNamespace(EPILOG="", run_verb=run_verb)
    monkeypatch.setitem(sys.modules, "hvdtrain.commands.probe.verb", module)
    monkeypatch.setitem(cli.VERBS, "probe", "probes")


def test_report_as_text_or_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_verb(monkeypatch, Report("all well", {"ok": True}, 1))
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().out == "all well\n"
    assert cli.main(["probe", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": True}


def test_escape_sequences_in_a_report_are_shown_but_for_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\x1b[1;32mok\x1b[0m\tname \x1b]0;title\x07 \x9b2J \udcff \u00e9\nend"
    with_verb(monkeypatch, Report(text, {}))
    assert cli.main(["probe"]) == 0
    shown = "\x1b[1;32mok\x1b[0m\tname \\x1b]0;title\\x07 \\x9b2J \\udcff \u00e9\nend\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("bad"), 2),
        (HvdtrainError("bad"), 1),
        (errors.CheckpointError("bad"), 1),
        (errors.TrainingError("bad"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError(cli.NO_THREAD), 1),  # a small pids.max
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 1),
    ],
)
def test_errors_have_their_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_verb(monkeypatch, error)
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err.startswith("hvdtrain: error: ")


def test_exit_codes_by_name() -> None:
    codes = (errors.EXIT_OK, errors.EXIT_FAILURE, errors.EXIT_USAGE, errors.EXIT_PREEMPTED)
    assert codes == (0, 1, 2, 75)


def test_an_error_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_verb(monkeypatch, HvdtrainError("bad"))
    assert cli.main(["probe", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "bad"}


@pytest.mark.parametrize(
    ("words", "purpose"),
    [
        (("report", "."), "hvdtrain report"),
        (("scaling", "--out", "x"), "hvdtrain scaling"),
        (("compare", "--out", "x"), "hvdtrain compare"),
        (("timeline", os.devnull, "--html", "x.html"), "--html"),
    ],
)
def test_what_draws_names_the_missing_extra(words: tuple[str, ...], purpose: str) -> None:
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('matplotlib', 'scipy', 'jinja2', 'sklearn'))\n"
        "from hvdtrain import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    outcome = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    message = f"hvdtrain: error: {purpose} needs matplotlib: pip install 'hvdtrain[studies]'\n"
    assert (outcome.returncode, outcome.stderr) == (2, message)
