"""All ranks are killed (SIGKILL) at random moments while checkpoints are written.

The training saves after every update, so most kills hit a copy, a file, an fsync or a commit.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from hvdtrain.steps import checkpoint as checkpoints
from tests.conftest import LONG, until
from tests.parallel.conftest import Start, assert_gone, family, send, train

KILLS = {"horovod": 40, "zero": 20, "fsdp": 20, "tensorflow": 20}
SHORT = {"zero": 1}  # in CI
STEPS = 30  # per kill, more than one does before it
SECONDS = 8  # of a step with its save and its share of the start, at most: the disk may be busy
WINDOW = 0.6  # seconds after a save in which a kill may come


@pytest.mark.timeout(3600)  # 40 kills and 2,400 saves on a busy machine
@pytest.mark.parametrize(("name", "kills"), (KILLS if LONG else SHORT).items())
def test_the_newest_checkpoint_is_intact_and_the_end_bit_equal(
    name: str, kills: int, tmp_path: Path, started: Start
) -> None:
    chosen = "--framework=tensorflow" if name == "tensorflow" else f"--strategy={name}"
    options = (chosen, "--checkpoint-every=1", "--epochs=99", f"--num-steps={STEPS * kills}")
    (tmp_path / "whole").mkdir()
    patience = SECONDS * STEPS * kills
    undisturbed = train(2, tmp_path / "whole", "mnist", *options, timeout=patience)
    folder = tmp_path / "checkpoints"
    chance = random.Random(len(name))
    partial = 0
    for _ in range(kills):
        before = checkpoints.newest_name(folder) or ""
        process = started(
            *("mpirun", "--oversubscribe", "-n", "2", "python", "-m", "hvdtrain.mnist"),
            *(*options, f"--checkpoint-dir={folder}", "--quiet"),
        )
        until(
            lambda before=before: (checkpoints.newest_name(folder) or "") > before,  # type: ignore[misc]
            process,
        )
        time.sleep(chance.uniform(0, WINDOW))
        seen = checkpoints.newest_name(folder) or ""
        killed = family(process)
        send(signal.SIGKILL, reversed(killed))  # the launcher first, which would end by itself
        assert process.wait(30) == -signal.SIGKILL, "it ended before it was killed"
        assert_gone(killed)
        newest = checkpoints.newest_name(folder) or ""
        assert newest >= seen > before, "an earlier save is lost"
        intact = checkpoints.load_newest(folder)
        assert intact and intact.path == folder / newest, "the newest is damaged"
        partial += bool(list(folder.glob(f"{checkpoints.PARTIAL}*")))
    print(f"\n{name}: {partial} of {kills} kills within a save, step {intact.state['step']}")
    resumed = train(2, tmp_path, "mnist", *options, timeout=patience)
    assert resumed.newest.name.partition("+")[0] == undisturbed.newest.name.partition("+")[0]
    for kind in ("model", "training"):
        first, second = undisturbed.tensors(kind), resumed.tensors(kind)
        assert first.keys() == second.keys()
        assert all((first[key] == second[key]).all() for key in first)
    assert not list(folder.glob(".*"))
