"""``hvdtrain verify`` on real ranks: each step that is disabled fails only its row."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.commands.verify.rows import STEPS
from tests import pages
from tests.conftest import BIN, LONG, ROOT, Outcome, on_demand, run
from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS
from tests.parallel.test_homework import folder_of_images

SCRIPTS = Path(__file__).parent / "scripts"
VERIFY = [str(BIN / "hvdtrain"), "verify"]
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "-n"]


def states(outcome: Outcome) -> dict[int, str]:
    """Return the states of the rows from --json, which must be the only output."""
    return {row["step"]: row["state"] for row in json.loads(outcome.out)["rows"]}


def failed(outcome: Outcome) -> list[int]:
    return [step for step, state in states(outcome).items() if state == "failed"]


def evidence(outcome: Outcome, step: int) -> str:
    return str(json.loads(outcome.out)["rows"][step - 1]["evidence"])


@pytest.mark.parametrize(
    ("framework", "number", "selection"),
    [
        ("pytorch", 2, "all"),
        ("tensorflow", 3, "few"),
        *([("pytorch", 3, "few"), ("tensorflow", 2, "few")] if LONG else []),
    ],
)
def test_each_mutation_fails_only_its_row(
    framework: str, number: int, selection: str, tmp_path: Path
) -> None:
    script = str(SCRIPTS / "mutations.py")
    words = (script, framework, str(tmp_path), selection)
    resident.ranks(number, *words, framework=framework, timeout=600, code=0)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(number)]
    assert all(result == results[0] for result in results), "the results differ between ranks"
    titles = {step.number: f"{step.number} {step.title}" for step in STEPS}
    for name, result in results[0].items():
        bad = [row["step"] for row in result["rows"] if row["state"] != "ok"]
        print(f"{framework} {number} ranks: {name}: {[titles[step] for step in bad]}")
        assert [row["step"] for row in result["rows"]] == list(titles), name
        assert bad == [result["expected"]] * (result["expected"] is not None), (name, result)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_single_rank(framework: str, tmp_path: Path) -> None:
    outcome = run([*VERIFY, "--framework", framework, "--json"], cwd=tmp_path, code=0)
    assert set(states(outcome).values()) == {"ok"}, outcome.out
    assert json.loads(outcome.out)["ranks"] == 1
    assert not list(tmp_path.iterdir())


def test_ranks_that_it_starts() -> None:
    outcome = run([*VERIFY, "-n", "2", "--framework", "tensorflow", "--json"], code=0)
    assert states(outcome) == dict.fromkeys(range(1, 9), "ok")
    assert outcome.err.splitlines()[0].startswith("mpirun -n 2 ")  # what it runs


def test_ranks_of_mpirun_report_once() -> None:
    outcome = run([*MPIRUN, "3", *VERIFY], code=0)
    lines = outcome.out.splitlines()
    assert lines[0] == "hvdtrain verify: pytorch over horovod, 3 ranks on 1 host"
    first_lines = [line for line in lines[1:-1] if not line.startswith(" ")]  # of the rows
    rows = [line.split()[:2] for line in first_lines]
    assert rows == [["ok", str(n)] for n in range(1, 9)]
    assert lines[-1] == "all steps took effect"


def test_too_many_threads_in_the_environment() -> None:
    # PBS, for example, sets OMP_NUM_THREADS to all cores of the job.
    command = [*MPIRUN, "2", *VERIFY, "--framework", "tensorflow", "--json"]
    outcome = run(command, OMP_NUM_THREADS=str(os.cpu_count()), code=1)
    assert failed(outcome) == [2]
    remedy = json.loads(outcome.out)["rows"][1]["remedy"]
    assert "unset OMP_NUM_THREADS" in remedy


def test_a_step_that_is_disabled_on_one_rank(tmp_path: Path) -> None:
    # Rank 0 waits in a broadcast that rank 1 never enters.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "    from hvdtrain.adapters.common_adapter import CommonAdapter\n"
        "    CommonAdapter.broadcast_state = lambda self, model, optimizer=None: ''\n"
    )
    stall = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }
    outcome = run([*VERIFY, "-n", "2", "--json"], **stall, code=1)
    assert states(outcome) == {**dict.fromkeys(range(1, 9), "ok"), 6: "failed"}
    assert "different collectives" in evidence(outcome, 6)


def watched(
    script: Path,
    *arguments: str,
    cwd: Path,
    updates: str = "all",
    strict: bool = False,
    fresh: bool = False,
    exact: bool = False,
    code: int = 0,
) -> Outcome:
    """Let ``verify`` watch a script on two ranks.

    They are resident, unless ``fresh``, or with TensorFlow: Horovod's modules for it hold one
    another's functions, so that these are watched only if that begins before the import.
    """
    command = [*VERIFY, "-n", "2", "--json", "--updates", updates, *["--exact"] * exact]
    command += ["--script", str(script)]
    fresh = fresh or bool(re.search("tensorflow|keras", script.read_text()))
    more = {} if fresh else {"PATH": resident.path("pytorch")}
    return run([*command, *["--strict"] * strict, "--", *arguments], cwd=cwd, code=code, **more)


def test_a_correct_script_of_a_user(tmp_path: Path) -> None:
    script = SCRIPTS / "plain_torch.py"
    outcome = watched(script, "--checkpoint", "x y.pt", cwd=tmp_path, fresh=True)
    assert set(states(outcome).values()) == {"ok"}, outcome.out
    assert "linear rule, x 2" in evidence(outcome, 4)
    assert "1 file by rank 0" in evidence(outcome, 7)
    assert (tmp_path / "x y.pt").is_file()
    assert "rank 1: loss" in outcome.err  # what the script prints is not the result


# Common errors in a port: pattern, replacement, updates after which it shows, and the row that
# fails. Row 8 is only not seen, because it is unknown which numbers are metrics.
BROKEN = {
    "no init": (r"^hvd\.init\(\)", "pass", "5", 1),
    "threads": (r"set_num_threads\(1\)", "set_num_threads(8)", "5", 2),
    "no sampler": (r"4, sampler=sampler, num", "4, shuffle=True, num", "all", 3),
    "rank 0 for all": (r"(train, hvd\.size\(\)), hvd\.rank\(\)", r"\1, 0", "5", 3),
    "no set_epoch": (r"^ *sampler\.set_epoch.*$", "", "all", 3),
    "rate not scaled": (r"RATE \* hvd\.size\(\)", "RATE", "5", 4),
    "rate times size squared": (r"(RATE \* hvd\.size\(\))", r"\1 ** 2", "5", 4),
    "sum": (r"(?<=PASSES)(\n\)(.|\n)*)0\.1\)", r", op=hvd.Sum\g<1>1e9)", "5", 5),
    "not distributed": (
        r"^optimizer = hvd\.DistributedOptimizer\(\n.*\n\)",
        "import contextlib\n"
        "optimizer.synchronize, optimizer.skip_synchronize = int, contextlib.nullcontext",
        "5",
        5,
    ),
    "no broadcast": (r"^hvd\.broadcast_parameters.*$", "", "5", 6),
    "all write": (r"if hvd\.rank\(\) == 0:", "if True:", "all", 7),
    "own metrics": (r"hvd\.allreduce\((sums),.*\)", r"\1", "all", 8),
}
# The others: tests/unit/commands/verify/script/test_judge.py, from records of a script; and all
# at once in test_a_script_with_every_mistake.
NEW = ("no init", "no set_epoch")


def test_a_correct_port_with_common_features(tmp_path: Path) -> None:
    """Transforms are modules, loaders have workers, gradients are clipped, accumulated, in bf16."""
    outcome = watched(SCRIPTS / "port_torch.py", cwd=tmp_path, strict=True, exact=True)
    assert set(states(outcome).values()) == {"ok"}, outcome.out
    assert "0 of 96 samples" in evidence(outcome, 3)


@pytest.mark.parametrize("name", BROKEN if LONG else NEW)
def test_a_broken_port_fails_in_its_row(name: str, tmp_path: Path) -> None:
    pattern, replacement, updates, step = BROKEN[name]
    text, count = re.subn(pattern, replacement, (SCRIPTS / "port_torch.py").read_text(), flags=re.M)
    assert count, name
    script = tmp_path / "port.py"
    script.write_text(text)
    outcome = watched(script, cwd=tmp_path, updates=updates, strict=True, exact=True, code=1)
    assert failed(outcome) == [step] * (step < 8), outcome.out
    unseen = [number for number, state in states(outcome).items() if state == "not seen"]
    if updates == "all":
        assert unseen == [step] * (step == 8)
    else:
        assert json.loads(outcome.out)["to_see_more"] or step == 1  # without init it crashes


def test_a_script_with_every_mistake(tmp_path: Path) -> None:
    outcome = watched(SCRIPTS / "plain_torch.py", "--wrong", cwd=tmp_path, code=1)
    assert failed(outcome) == [2, 3, 4, 5, 6, 7]
    assert states(outcome)[8] == "not seen"
    assert evidence(outcome, 3).startswith("400 of 400 samples ")
    assert evidence(outcome, 7).startswith("ranks 0, 1 wrote ")


def test_a_correct_script_in_tensorflow(tmp_path: Path) -> None:
    outcome = watched(SCRIPTS / "plain_tensorflow.py", cwd=tmp_path)
    assert states(outcome) == {**dict.fromkeys(range(1, 10), "ok"), 7: "not seen"}


@on_demand
def test_a_broadcast_whose_guard_is_too_late(tmp_path: Path) -> None:
    script = SCRIPTS / "plain_tensorflow.py"
    outcome = watched(script, "--late-guard", cwd=tmp_path, updates="3", code=1)
    assert failed(outcome) == [6]
    assert evidence(outcome, 6).startswith("no broadcast was executed; max difference to rank 0")
    expected = {
        **dict.fromkeys(range(1, 6), "ok"),
        6: "failed",
        7: "not seen",
        8: "not seen",
        9: "ok",
    }
    assert states(outcome) == expected


def test_horovods_optimizer_for_keras_reduces_nothing(tmp_path: Path) -> None:
    outcome = watched(SCRIPTS / "plain_keras.py", cwd=tmp_path, updates="3", code=1)
    assert failed(outcome) == [5, 6, 9]
    assert "reduces nothing with Keras 3" in evidence(outcome, 5)


@pytest.mark.parametrize("page", [pages.own_script, pages.keras_script])
def test_the_script_of_a_page_is_correct(page: Callable[[], str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(page())
    outcome = watched(tmp_path / "train.py", cwd=tmp_path, strict=page is pages.own_script)
    assert set(states(outcome).values()) == {"ok"}, outcome.out
    if page is pages.own_script:
        assert evidence(outcome, 3).startswith("shard_data gives 2 shards; 0 of 1,000 samples")
        losses = re.findall(
            r"epoch \d: loss ([\d.]+) over 1000 samples$", outcome.err, re.MULTILINE
        )
        assert len(losses) == 6 and float(losses[2]) < float(losses[0])  # on 2 ranks, and on 1
    else:
        assert evidence(outcome, 3).startswith("hvd.shard gives 2 shards; 0 of 203 samples")
        assert "MetricAverageCallback (accuracy, loss): " in evidence(outcome, 8)
        assert "UserWarning" not in outcome.err  # for example of Keras, on arguments of fit


@on_demand
def test_scripts_of_the_homework_without_a_test_of_the_grader(tmp_path: Path) -> None:
    images = folder_of_images(tmp_path, 24, 8)
    small = [f"--data={images}", "--image_size=32", "--batch_size=4", "--epochs=2"]
    for name, options in {
        "tensorflow2_keras_mnist_hvd.py": ["--epochs=2"],
        "train_resnet34_hvd.py": small,
    }.items():
        outcome = watched(ROOT / "homework" / name, *options, cwd=tmp_path)
        assert set(states(outcome).values()) == {"ok"}, outcome.out


def test_the_example_that_uses_hvdtrain(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    script = ROOT / "examples" / "digits_distributed.py"
    outcome = watched(script, cwd=tmp_path, strict=True)
    assert set(states(outcome).values()) == {"ok"}, outcome.out
    assert evidence(outcome, 3).startswith("shard_data gives 2 shards; 0 of 1,500 samples ")
