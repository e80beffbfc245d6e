"""What another user of the node can do where he may write: never to the files of a user.

Real users, by number only; the interpreter may be where they may not read, so they keep that right.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import EXIT_OK, EXIT_USAGE
from tests.conftest import ROOT

USER, OTHER, GROUP = 54321, 54322, 54400
SETPRIV = shutil.which("setpriv") or ""
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not SETPRIV, reason="becoming another user needs root and setpriv"
)


def start(uid: int, *words: object, umask: int = 0o022, **variables: str) -> subprocess.Popen[str]:
    """Start Python with ``words`` as a user, in the common group."""
    user = (SETPRIV, f"--reuid={uid}", f"--regid={GROUP}", "--clear-groups")
    right = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return subprocess.Popen(
        (*user, *right, sys.executable, *map(str, words)),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables},
        cwd="/",
        umask=umask,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def give(path: Path, owner: int, mode: int) -> None:
    path.chmod(mode)
    os.chown(path, owner, GROUP)


def content(folder: Path) -> dict[str, bytes]:
    """Return what is in the user's directory, but for data that he has packed."""
    files = (path for path in folder.rglob("*") if path.is_file() and "data" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """Yield a directory of the user, and one in which the other user may rename everything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        home, shared = Path(folder, "home"), Path(folder, "shared")
        shared.mkdir()
        give(shared, OTHER, 0o777)
        for name in ("precious", "images/train/a/0.jpg", "ck/step-000000001/state.json"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text("precious")
        for path in (home, *home.rglob("*")):
            os.chown(path, USER, GROUP)
        yield home, shared


PAUSED = """
import hashlib, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from hvdtrain.commands.data_fetch.catalogue import DATA_SETS, Remote
from hvdtrain.commands.data_fetch.fetch import Fetch
from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.steps import checkpoint
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Piece
from hvdtrain.steps.tensor_file import ArraySpec
from hvdtrain.training.staging import Copy

home, shared, (owner, name) = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
original = getattr(owner, name)

def paused(*arguments):
    print("now", flush=True)
    input()
    return original(*arguments)

def save(folder, step):
    w = Piece(MODEL_FILE, "w", ArraySpec(np.dtype("f8"), (2,)), lambda: None)
    partial = checkpoint.begin(folder, step)
    files = {kind: kind for kind in (MODEL_FILE, TRAINING_FILE)}
    writer = checkpoint.Writer(partial, step, files, [w])
    writer.write(w, np.ones(2))
    done = checkpoint.commit(partial, writer.close(), {"step": step, "metrics": None})
    checkpoint.prune(folder, 1, done.name)
"""
# Where the user's process waits, what it does, what is swapped meanwhile, and the links then in it.
FETCH = """
Fetch._chunks = lambda *_: iter([b"abc"])
remote = Remote("http://x/a.gz", 3, ("a.gz",), hashlib.md5(b"abc").hexdigest())
Fetch._check = paused
Fetch(replace(DATA_SETS[0], remotes=(remote,)), shared).run()
"""
PACK = """
Packing._write_tar = paused
Packing(home / "images", shared, PackOptions(2**20, workers=1)).run()
"""
STAGE = """
Packing(home / "images", home / "data", PackOptions(2**20, workers=1)).run()
Copy._fetch = paused
copy = Copy(home / "data", shared)
copy.thread.start()
copy.thread.join()
copy.raise_error()
"""
SAVE = "checkpoint.Writer = paused\nsave(shared, 4)"
SAVE_AGAIN = 'save(shared / "ck", 2)\ncheckpoint.begin = paused\nsave(shared / "ck", 4)'
TARS = ("train-000000.tar", "train-000000.tar.new", "train-000000.tar.part", "../index.safetensors")
FILES = ("model.safetensors", "training.safetensors", "state.json")
CASES = {
    "data-fetch": ("Fetch, '_check'", FETCH, ".data-fetch", ("mnist/a.gz.json", "mnist/a.gz")),
    "pack": ("Packing, '_write_tar'", PACK, ".pack", TARS),
    "stage": ("Copy, '_fetch'", STAGE, "data-*", (*TARS[:3], "index.safetensors.part")),
    "partial": ("checkpoint, 'Writer'", SAVE, ".partial-*", FILES),
    "checkpoints": ("checkpoint, 'begin'", SAVE_AGAIN, "ck", ()),
}
ATTACK = """
import os, sys
from pathlib import Path
home, shared, swapped, *links = sys.argv[1:]
(swapped,) = Path(shared).glob(swapped)
swapped.rename(f"{shared}/away")
os.umask(0)
if not links:
    swapped.symlink_to(f"{home}/ck")
for link in links:
    (swapped / link).parent.mkdir(parents=True, exist_ok=True)
    (swapped / link).symlink_to(f"{home}/precious")
"""


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
@pytest.mark.parametrize("case", CASES)
def test_a_directory_that_is_swapped_leads_to_no_file_of_the_user(
    case: str, umask: int, places: tuple[Path, Path]
) -> None:
    """It was checked by its path, and the files in it were opened by theirs."""
    where, script, swapped, links = CASES[case]
    before = content(places[0])
    user = start(USER, "-c", PAUSED + script, *places, where, umask=umask)
    assert user.stdout is not None and user.stdout.readline() == "now\n"
    attack = start(OTHER, "-c", ATTACK, *places, swapped, *links)
    attack_output = attack.communicate()[0]
    assert attack.returncode == 0, attack_output
    output = user.communicate("\n" * 9, timeout=60)[0]
    assert content(places[0]) == before, output
    assert user.returncode == 0 or "Error: " in output.splitlines()[-1], output


COMPILE = """
import sys
from hvdtrain import mnist
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.training import trainer
trainer.select_adapter = lambda *_, **__: sys.exit(0)
sys.argv[1:] = ["--compile", "--strategy", "single", "--num-steps", "1", "--quiet"]
run_and_exit(mnist.main)
"""
STAGE_ENV = """
import os
from pathlib import Path
from hvdtrain.commands.launch.staging.__main__ import make_folder
from hvdtrain.system.runtime.exit import run_and_exit
run_and_exit(lambda: make_folder(Path(os.environ["TMPDIR"], "hvdtrain-0123"), 1) and 0)
"""
WRITABLE, FOREIGN = "others may write to", "belongs to another user"


@pytest.mark.parametrize(
    ("mode", "owner", "below", "reason"),
    [
        (0o1777, 0, "", ""),
        (0o700, USER, "", ""),
        (0o777, 0, "", WRITABLE),
        (0o2770, USER, "", WRITABLE),
        (0o1777, OTHER, "", FOREIGN),
        (0o777, 0, "own", WRITABLE),
        (0o1777, 0, "link", FOREIGN),
    ],
)
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
@pytest.mark.parametrize("script", [COMPILE, STAGE_ENV], ids=["compile", "stage-env"])
def test_nothing_is_executed_that_others_may_exchange(
    script: str,
    umask: int,
    mode: int,
    owner: int,
    below: str,
    reason: str,
    places: tuple[Path, Path],
) -> None:
    home, shared = places
    give(shared, owner, mode)
    directory = shared / below
    if below == "own":
        directory.mkdir()
        give(directory, USER, 0o700)
    elif below == "link":
        directory.symlink_to(home)
        os.chown(directory, OTHER, GROUP, follow_symlinks=False)
    user = start(USER, "-c", script, umask=umask, TMPDIR=str(directory))
    output = user.communicate(timeout=60)[0]
    if reason:
        assert user.returncode == EXIT_USAGE and reason in output and "set TMPDIR to" in output
        return
    assert user.returncode == EXIT_OK, output
    (made,) = directory.glob("torchinductor_*" if script == COMPILE else "hvdtrain-0123")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    if script == COMPILE:  # as an older version has made it, which would have executed its content
        made.chmod(0o775)
        user = start(USER, "-c", script, TMPDIR=str(directory))
        assert f"{made} is not a directory that only you" in user.communicate(timeout=60)[0]


def test_scratch_files_are_not_where_others_may_exchange_them(places: tuple[Path, Path]) -> None:
    """TensorFlow executes code that it writes there."""
    use = "import tempfile\nfrom hvdtrain.system.runtime import scratch\n"
    use += "scratch.use_scratch_directory()\nprint(tempfile.gettempdir())"
    user = start(USER, "-c", use, TMPDIR=str(places[1]))
    assert user.communicate(timeout=60)[0].startswith("/tmp/hvdtrain-")


def test_a_training_saves_and_resumes_in_the_directory_of_another_user(
    places: tuple[Path, Path],
) -> None:
    """Project directories of clusters are of mode 2770, and often somebody else's."""
    home, shared = places
    shared.chmod(0o2770)
    words = ("-m", "hvdtrain.mnist", "--strategy", "single", "--checkpoint-dir", shared)
    for steps, said in ((2, "trained"), (4, "resumed from")):
        user = start(USER, *words, "--num-steps", steps, HOME=str(home), umask=0o007)
        output = user.communicate(timeout=300)[0]
        assert user.returncode == EXIT_OK and said in output, output
    saved = (shared / "step-000000004").stat()
    assert (saved.st_uid, saved.st_gid) == (USER, GROUP)
