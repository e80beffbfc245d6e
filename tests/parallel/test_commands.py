"""Each command of README and of the pages starts as printed, on a machine of two cores."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.system.machine.frameworks import is_installed
from tests import pages
from tests.commands import Shown, shown
from tests.conftest import BIN, LONG, ROOT, run
from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS
from tests.parallel.test_homework import write_idx

# What is not started here: it would install, submit, run all tests, or needs a GPU.
ELSEWHERE = re.compile(r"(\S+=\S+ +)*(make|pip|qsub|bash)\b|.* --gpu nccl")
# Slow, and with a test of their own (test_homework.py, test_grade.py).
SLOW = re.compile(r".*(train_resnet34(_hvd)?|grade)\.py|.*run_all\.sh", re.DOTALL)
# Looked at instead of run: other hosts, a batch system, a build, a download, and ranks by the dozen
# that have tests of their own (test_doctor.py, test_verify.py, test_compare.py). (The words that
# are put in.)
DRY = (
    (re.compile(r"^hvdtrain submit (?!.*--dry-run)"), "hvdtrain submit --dry-run "),
    (re.compile(r"submit (?=--dry-run)(?!.*--(scheduler|site))"), "submit --scheduler pbs "),
    (re.compile(r'(?<=--submit ")(?!.*--scheduler)'), "--scheduler pbs "),
    (
        re.compile(r"^hvdtrain (doctor|verify) (?=-n \d+( --updates all.*)?$)"),
        r"hvdtrain \1 --dry-run ",
    ),
    (re.compile(r"^hvdtrain install-horovod"), "hvdtrain install-horovod --dry-run"),
    (re.compile(r"^hvdtrain launch (?=.*--hosts)(?!.*--dry-run)"), "hvdtrain launch --dry-run "),
    (re.compile(r"(?<=launch --dry-run )(.*)--stage-env "), r"\1"),  # not with --dry-run
    (re.compile(r"^hvdtrain scaling (?=.*--(submit|batches))"), "hvdtrain scaling --dry-run "),
    (re.compile(r"^hvdtrain data-fetch (?!.*--dry-run)"), "hvdtrain data-fetch --dry-run "),
    (re.compile(r"^hvdtrain compare "), "hvdtrain compare --dry-run "),
)
SHORTER = (
    (re.compile(r"^hvdtrain scaling --ranks \S+ --"), "hvdtrain scaling --ranks 1,2 --repeat 1 --"),
    (re.compile(r"launch -n [48](?= -- )"), "launch -n 2"),
    (
        re.compile(r"^(?!hvdtrain (scaling|compare)).*hvdtrain\.mnist\b.*"),
        r"\g<0> --num-steps 2 --summary run-7/summary.json",
    ),
    (re.compile(r"hvdtrain\.resnet\b.*"), r"\g<0> --model resnet18 --image-size 32 --batch-size 1"),
    # So many steps are looked at.
    (re.compile(r".*(scaling .*\.resnet|--timeline-steps)\b.*"), r"\g<0> --num-steps 4"),
    (re.compile(r".*hvdtrain\.resnet\b(?!.*--num-steps 4).*"), r"\g<0> --num-steps 1"),
    (re.compile(r"--time\b"), r"\g<0> --sizes 4 --seconds 0.001"),
    (re.compile(r"--stage '\$TMPDIR'"), "--stage scratch"),
    (re.compile(r"--timeline-steps 20:40"), "--timeline-steps 1:4"),
    (re.compile(r"--profile 20:30"), "--profile 1:2"),
    (re.compile(r"5e9"), "1e6"),
    (re.compile(r"in 1 2 4 8"), "in 2"),
    (re.compile(r"in 0 1 2 3 4 5 6"), "in 4"),
    (re.compile(r"--epochs [248]\b"), "--epochs 1"),
    (re.compile(r"train_resnet34_hvd.py"), r"\g<0> --image-size 32 --batch-size 1"),
    (re.compile(r"--num-steps (20|50) --"), "--num-steps 2 --"),
    (re.compile(r"--num-steps (20|50)$"), "--num-steps 2"),
    (re.compile(r"-n 4 (?=python train_resnet34_hvd.py)"), "-n 2 "),
    (re.compile(r"^DATA=\S+"), r"\g<0> RANKS=2 WARMUPS=0 EPOCHS=1 FRAMEWORKS=pytorch"),
)
# Packages of which setup installs none.
PACKAGES = {"--decoder dali": "nvidia.dali", "--tracker mlflow": "mlflow"}
# The python of the commands: as a rank, a resident process.
PYTHON = """\
#!/bin/sh
[ -n "$OMPI_COMM_WORLD_RANK" ] || exec {python} "$@"
case "$*" in
    *tensorflow* | *resnet34*) address={tensorflow} ;;
    *) address={pytorch} ;;
esac
exec {python} -SE {rank} "$address" "$@"
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: data, scripts, figures."""
    home = tmp_path_factory.mktemp("home")
    write_idx(home / "mnist", 389, 101)
    noise = np.random.default_rng(1)
    for place in ("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg", "val/dog/4.jpg"):
        (home / "imagenet" / place).parent.mkdir(parents=True)
        pixels = noise.integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(home / "imagenet" / place)
    Packing(home / "imagenet", home / "imagenet-packed", PackOptions(2**28, workers=1)).run()
    for script in (ROOT / "homework").glob("*.*"):
        shutil.copy(script, home)
    shutil.copytree(ROOT / "homework/results/pytorch-warmup", home / "warm")
    shutil.copytree(ROOT / "examples", home / "examples")
    (home / "jobs").mkdir()  # where jobs/README.md writes
    (home / ".venv").symlink_to(BIN.parent)
    (home / "bin").mkdir()
    addresses = {framework: resident.address(framework) for framework in FRAMEWORKS}
    text = PYTHON.format(python=sys.executable, rank=resident.RANK, **addresses)
    (home / "bin" / "python").write_text(text)
    (home / "bin" / "python").chmod(0o755)
    shutil.copy(home / "pytorch_mnist_hvd.py", home / "my_mnist_hvd.py")
    plain = ROOT / "tests/parallel/scripts/plain_torch.py"
    (home / "train.py").write_text(
        f"import runpy, sys\ndel sys.argv[1:]\nrunpy.run_path({str(plain)!r}, run_name='__main__')"
    )
    own = re.search(r"```python\n(.*?)```", _page("own"), re.DOTALL)
    assert own
    (home / "own.py").write_text(own[1])
    for name, script in zip(("horovod", "ddp"), pages.blocks("moving.md"), strict=True):
        (home / f"train_{name}.py").write_text(script)
    table = re.search(r"^ranks,images_per_second\n.*?(?=^\$)", _page("measuring"), re.M | re.S)
    assert table
    (home / "measured.csv").write_text(table[0])
    return home


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("command", shown(), ids=lambda command: command.text[:70])
def test_a_command_of_the_pages_starts(command: Shown, desk: Path) -> None:
    text = command.text
    if ELSEWHERE.match(text):
        for name in re.findall(r"\S+\.(?:pbs|sh|txt)\b", text):
            assert (ROOT / name).is_file()
        if text.startswith("make"):
            assert run([*text.split(), "--dry-run"], timeout=60).code == 0
        return
    if SLOW.match(text) and not LONG:
        pytest.skip("HVDTRAIN_LONG=1 starts it; it has a test of its own")
    for option, package in PACKAGES.items():
        if option in text and not is_installed(package):
            pytest.skip(f"{package} is not installed")
    for pattern, words in (*DRY, *SHORTER):
        text = pattern.sub(words, text, count=1)
    # A training does not go on from what another page's command has saved.
    shutil.rmtree(desk / "checkpoints", ignore_errors=True)
    path = os.pathsep.join([str(desk / "bin"), str(BIN), os.environ["PATH"]])
    run(["bash", "-euc", text], cwd=desk, HOME=str(desk), PATH=path, code=0)
