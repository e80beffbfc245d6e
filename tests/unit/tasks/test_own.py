"""A task from a file: what it may define, and one clear line for everything that is wrong."""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.command_line import parse
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.tasks import own
from hvdtrain.tasks.task import Workload
from tests.conftest import error_of

TASK = """
def task(options):
    return 3
"""


@pytest.fixture(autouse=True)
def _imports() -> Iterator[None]:
    """Leave nothing imported and no folder to import from."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def load(folder: Path, text: str, name: str = "my_task.py") -> Workload:
    (folder / name).write_text(textwrap.dedent(text))
    return own.workload(folder / name, epilog="end")


def read(workload: Workload, *arguments: str) -> Any:
    words = {"description": workload.description, "epilog": workload.epilog}
    return parse(workload.program, arguments, **words, kind=workload.options)


OPTIONS = """
    from __future__ import annotations
    from dataclasses import dataclass
    from pathlib import Path
    from hvdtrain.config.declare import option
    from hvdtrain.config.values import fraction

    @dataclass
    class Options:
        hidden_size: int = 32
        rate: float = 0.5
        label: str | None = None
        table: Path = Path("t.csv")
        deep: bool = False
        share: float = option(0.1, "of what is kept", fraction)

    def square(number):
        return number * number

    def task(options):
        return None
"""


def test_the_fields_of_its_options_join_the_command_line(tmp_path: Path) -> None:
    workload = load(tmp_path, OPTIONS)
    assert workload.name == "my_task"
    options = read(workload)
    assert (options.hidden_size, options.label, options.deep) == (32, None, False)
    line = "--hidden-size=64 --deep --label x --table=u.csv --share=0 --epochs=3 --rate=-1e-3"
    options = read(workload, *line.split())
    assert (options.hidden_size, options.deep, options.label) == (64, True, "x")
    assert (options.table, options.share, options.rate) == (Path("u.csv"), 0, -1e-3)
    assert isinstance(options, Options) and options.epochs == 3


def test_help_and_messages_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = load(tmp_path, OPTIONS)
    with pytest.raises(UsageError, match="--share: 2 is not a fraction"):
        read(workload, "--share=2")
    with pytest.raises(UsageError, match="--hidden: no such option; did you mean --hidden-size"):
        read(workload, "--hidden=3")
    with pytest.raises(SystemExit):
        read(workload, "--help")
    shown = capsys.readouterr().out
    assert "my_task.py [options]" in shown
    assert "of what is kept (default: 0.1)" in shown


def test_worker_processes_can_import_it(tmp_path: Path) -> None:
    workload = load(tmp_path, OPTIONS)
    options = read(workload, "--hidden-size=5")
    module = sys.modules["my_task"]
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        assert pool.submit(module.square, 7).result(timeout=60) == 49
        assert pool.submit(getattr, options, "hidden_size").result(timeout=60) == 5
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def task(options:\n", "my_task.py, line 1: SyntaxError: "),
        ("x = 1\nimport no_such_module\n", "my_task.py, line 2: ModuleNotFoundError: "),
        ("def f():\n    1 / 0\n\nf()\n", "my_task.py, line 2: ZeroDivisionError: "),
        ("raise SystemExit('gone')\n", "my_task.py, line 1: SystemExit: gone"),
        ("raise ValueError('two\\nlines')\n", "my_task.py, line 1: ValueError: two lines"),
        ("", "my_task.py defines no function task"),
        ("task = 3\n", "my_task.py defines no function task"),
        (TASK + "class Options:\n    x: int = 1\n", "my_task.py: Options must be a dataclass"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in error_of(load, tmp_path, text)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("epochs: int = 3", "epochs of Options: --epochs is an option already"),
        ("config: str = ''", "config of Options: --config is an option already"),
        ("device: str = ''", "device of Options: --device is an option already"),
        ("clip_norm: float = 1.0", "clip_norm of Options: --clip-norm is an option already"),
        ("size: int", "size of Options needs a default"),
        ("sizes: list = field(default_factory=list)", "sizes of Options needs a default"),
        ("sizes: tuple = ()", "sizes of Options: an option is a bool"),
        ("on: bool = True", "on of Options: an option is a bool that is False"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, field: str, words: str) -> None:
    head = "from dataclasses import dataclass, field\n\n@dataclass\nclass Options:\n    "
    with pytest.raises(UsageError, match=words):
        load(tmp_path, f"{head}{field}\n{TASK}")


def test_an_error_in_task_is_reported_with_its_line(tmp_path: Path) -> None:
    workload = load(tmp_path, "def task(options):\n    return {}['x']\n")
    with pytest.raises(UsageError, match=r"my_task.py, line 2: KeyError: 'x'"):
        workload.build(Options())
    with pytest.raises(UsageError, match=r"other.py: task\(\) returned int, which is not a Task"):
        load(tmp_path, TASK, "other.py").build(Options())


@pytest.mark.parametrize("name", ["json.py", "pytest.py", "a.b.py", "task.txt", "absent/x.py"])
def test_a_name_that_cannot_be_imported(tmp_path: Path, name: str) -> None:
    if "/" not in name:
        (tmp_path / name).write_text(TASK)
    with pytest.raises(UsageError, match=r"rename the file|no such file"):
        own.workload(tmp_path / name, epilog="")


@pytest.mark.parametrize(
    ("module", "framework", "words"),
    [
        ("tensorflow", "pytorch", "imports TensorFlow, .* use --framework tensorflow"),
        ("torch", "tensorflow", "imports PyTorch, .* use --framework pytorch"),
        ("torch", "pytorch", "returned NoneType, which is not a Task"),
    ],
)
def test_a_file_for_the_other_framework(
    tmp_path: Path, module: str, framework: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    workload = load(tmp_path, f"import {module}\n\ndef task(options):\n    return None\n")
    with pytest.raises(UsageError, match=words):
        workload.build(Options(framework=framework))
