"""The homework's grader on the solutions, and on copies with one step broken each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG, ROOT, Outcome, run
from tests.parallel import resident
from tests.parallel.test_homework import write_idx

SCRIPTS = Path(__file__).parent / "scripts"
HOMEWORK = ROOT / "homework"
GRADE = str(HOMEWORK / "grade.py")

# By step: what a student might have left out or got wrong. The pattern and what it becomes.
COMMON = {
    1: (r"^hvd\.init\(\)", "pass"),
    # Left out altogether, MKL sees that MPI started the rank and takes one core by itself.
    2: (r"^cores = .*$", "cores = os.cpu_count()"),
    3: (r"^mine = .*$", "mine = slice(None)"),
    4: (r"args\.lr \* hvd\.size\(\)", "args.lr"),
    6: (r"^hvd\.broadcast_.*$", ""),
    7: (r"if hvd\.rank\(\) == 0:", "if True:"),
    8: (r"hvd\.allreduce\(((torch|tf)\.stack\(.*\)), op=hvd\.Sum\)", r"\1"),
}
# A mean over each rank's part of the batch, averaged, where the solution sums.
MEANS = {
    "model.named_parameters(), op=hvd.Sum": "model.named_parameters()",
    "loss / len(batch)": "loss / len(picked)",
}
# That each fails alone test_verify.py tells, of the same judge.
STEPS = range(1, 9) if LONG else (5,)
BROKEN = {
    "pytorch": COMMON | {5: (r"^optimizer = hvd\.DistributedOptimizer\(.*$", "")},
    "tensorflow2": COMMON | {5: (r"^    tape = hvd\.DistributedGradientTape\(.*$", "")},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data of odd sizes that take a few updates an epoch."""
    return f"--data={write_idx(tmp_path_factory.mktemp('small'), 389, 101)}"


def grade(*words: str) -> Outcome:
    """Grade scripts, on resident ranks where they are of PyTorch (test_verify.py says why)."""
    more = {} if "tensorflow" in words[0] else {"PATH": resident.path("pytorch")}
    return run([sys.executable, GRADE, *words], timeout=900, **more)


def reports(outcome: Outcome) -> dict[str, dict[int, str]]:
    """The state of each step, by the name of the script."""
    found: dict[str, dict[int, str]] = {}
    for one in re.split(r"^(?=\S+\.py on )", outcome.out, flags=re.M)[1:]:
        name = one.split()[0]
        states = re.findall(r"^(works|failed|not seen) +(\d) ", one, re.M)
        found[name] = {int(step): state for state, step in states}
        works = sum(state == "works" for state, _ in states)
        assert f"{works} of 8 steps work" in one
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", ["pytorch", *(["tensorflow2"] if LONG else [])])
def test_the_solution_and_copies_with_one_step_broken(
    framework: str, small: str, tmp_path: Path
) -> None:
    right = HOMEWORK / f"{framework}_mnist_hvd.py"
    handed_in = [right]
    for step in STEPS:
        pattern, other = BROKEN[framework][step]
        text, count = re.subn(pattern, other, right.read_text(), flags=re.M)
        assert count >= 1, step
        handed_in.append(tmp_path / f"without_{step}.py")
        handed_in[-1].write_text(text)
    outcome = grade(*map(str, handed_in), *[small] * (not LONG))
    assert outcome.code == 1, outcome.err
    found = reports(outcome)
    assert found.pop(right.name) == dict.fromkeys(range(1, 9), "works"), outcome.out
    wrong = {
        name: [step for step, state in states.items() if state != "works"]
        for name, states in found.items()
    }
    # Without Horovod nothing else runs.
    expected = {f"without_{step}.py": [step] if step > 1 else [*range(1, 9)] for step in STEPS}
    assert wrong == expected, outcome.out
    marks = [0 if step == 1 else 7 for step in STEPS]
    total = re.findall(r"^(\d) of 8  ", outcome.out, re.M)
    assert total == [str(mark) for mark in (8, *marks)]
    if LONG:
        assert [step for step, state in found["without_1.py"].items() if state == "failed"] == [1]
    assert not list(tmp_path.glob("metrics*"))  # what the scripts write is thrown away


def test_a_script_that_was_not_changed_has_no_credit(small: str) -> None:
    """It runs on each rank as if alone, on a core of its own and with the rate of one rank."""
    outcome = grade(str(HOMEWORK / "pytorch_mnist.py"), small, "--", "--epochs=1")
    found = reports(outcome)["pytorch_mnist.py"]
    assert outcome.code == 1
    assert (found[1], "works" in found.values()) == ("failed", False), outcome.out


def test_a_mean_of_the_means_of_uneven_parts(small: str, tmp_path: Path) -> None:
    text = (HOMEWORK / "pytorch_mnist_hvd.py").read_text()
    for old, new in MEANS.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "means.py").write_text(text)
    outcome = grade(str(tmp_path / "means.py"), small)
    found = reports(outcome)["means.py"]
    assert (outcome.code, found.pop(5), set(found.values())) == (1, "failed", {"works"})
    text = " ".join(outcome.out.split())
    uneven = r"parts of (\d+) \+ (?!\1)\d+ samples at update \d+: the mean of the ranks"
    assert re.search(uneven, text)


@pytest.mark.skipif(LONG, reason="the copies are tested with it")
def test_the_solution_in_tensorflow(small: str) -> None:
    outcome = grade(str(HOMEWORK / "tensorflow2_mnist_hvd.py"), small)
    assert outcome.code == 0, outcome.out
    assert outcome.out.rstrip().endswith("8 of 8 steps work")


def test_right_scripts_that_do_it_by_hand() -> None:
    """They broadcast and reduce tensor by tensor, and lock what several ranks may open."""
    for name in ["by_hand_pytorch.py", "by_hand_tensorflow.py"][: None if LONG else 1]:
        outcome = grade(str(SCRIPTS / name))
        assert reports(outcome) == {name: dict.fromkeys(range(1, 9), "works")}, outcome.out


@pytest.mark.skipif(not LONG, reason="two minutes; the judge's rule has a test of its own")
def test_the_solution_on_the_real_mnist(mnist: Path) -> None:
    words = ["--data", str(mnist), "--", "--epochs=1", "--batch-size=3000"]
    outcome = grade(str(HOMEWORK / "pytorch_mnist_hvd.py"), *words)
    assert outcome.code == 0, outcome.out


def test_wrong_use(tmp_path: Path) -> None:
    missing = grade(str(tmp_path / "none.py"))
    assert missing.code == 2 and "none.py: no such file" in missing.err
    alone = grade(GRADE, "-n", "1")
    assert alone.code == 2 and "at least 2 ranks" in alone.err
    broken = tmp_path / "broken.py"
    broken.write_text("import horovod.torch as hvd\nhvd.init(\n")
    outcome = grade(str(broken))
    assert outcome.code == 1
    assert "0 of 8 steps work" in outcome.out
    assert "crashed before update 1; nothing was checked: rank 0: SyntaxError" in outcome.out
