"""Run a script on this rank and record what it does."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from hvdtrain.commands.verify import STALLED
from hvdtrain.commands.verify.hooks import Action, AfterImport, on_write
from hvdtrain.commands.verify.script import (
    watch_distributed,
    watch_horovod,
    watch_tensorflow,
    watch_torch,
)
from hvdtrain.commands.verify.script.record import ScriptRecorder
from hvdtrain.commands.verify.script.replay import Replay, ReplayPlan
from hvdtrain.commands.verify.script.replay_tensorflow import TensorFlowReplay
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import set_defaults

# Modules that distribute a script, and are not watched.
OTHERS = ("deepspeed", "mpi4py")
MAX_LENGTH = 300  # characters of an error


def main() -> int:
    """Run the script of the command line; return its exit code, 0 if it was ended."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.commands.verify.script")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--master", metavar="HOST:PORT")
    parser.add_argument("--replay", type=Path, metavar="FOLDER")  # of what the ranks draw
    parser.add_argument("--stands-for", type=int, default=0, metavar="RANKS")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--perturbed", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    recorder = ScriptRecorder(options.folder, options.updates, Path(options.script))
    set_defaults(STALLED)
    if options.master:
        set_defaults(torchrun_variables(options.master, options.stands_for))
    replay = None
    if options.replay:
        plan = ReplayPlan(options.replay, options.stands_for, options.exact, options.perturbed)
        replay = Replay(plan, recorder)
    watch(recorder, replay, fresh=options.fresh)
    sys.argv = [options.script, *options.arguments]
    script = os.path.abspath(options.script)  # noqa: PTH100 (as Python's: not resolved)
    sys.path[0] = str(Path(options.script).resolve().parent)
    code = EXIT_OK
    recorder.write()  # marks this rank as started, however it ends
    try:
        recorder.kept.append(runpy.run_path(script, run_name="__main__"))
        recorder.record.ended = "its own end"
    except SystemExit as stop:
        recorder.kept.append(stop)
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILURE if stop.code else EXIT_OK
        recorder.record.ended = recorder.record.ended or f"exit code {code}"
    except BaseException as error:
        recorder.kept.append(error)
        traceback.print_exc()
        code = EXIT_FAILURE
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if len(text) > MAX_LENGTH:  # TensorFlow puts the call stack first
            text = f"{text[: MAX_LENGTH // 3]} ... {text[-MAX_LENGTH * 2 // 3 :]}"
        recorder.record.ended = text + _line(error, script)
    if not recorder.record.distributed:
        imported = (name for name in OTHERS if name in sys.modules)
        recorder.record.library = next(imported, recorder.record.library)
    if replay:
        replay.finish()
    recorder.finish()
    return code


def torchrun_variables(master: str, stands_for: int = 0) -> dict[str, str]:
    """Return the variables by which torchrun, or a job script, starts this rank.

    ``master`` is host and port of the rendezvous; ``stands_for``: the ranks that this one process
    answers for.
    """
    launch, (host, _, port) = detect(os.environ), master.rpartition(":")
    return {
        "TORCHELASTIC_RUN_ID": "verify",  # by which libraries know that they start no processes
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(stands_for or launch.size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(stands_for or launch.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def _line(error: BaseException, script: str) -> str:
    """Return the line of the script that raised the error; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == script]
    return f" ({Path(script).name} line {lines[-1]})" if lines else ""


def watch(recorder: ScriptRecorder, replay: Replay | None = None, *, fresh: bool) -> None:
    """Watch the modules that the script imports, and the files that it writes.

    Args:
        recorder: where events are recorded.
        replay: what the script is trained on, in a run to be compared.
        fresh: hide hvdtrain's checkpoints from the script.
    """
    horovod = watch_horovod.HorovodWatch(recorder)
    tensorflow = watch_tensorflow.TensorFlowWatch(recorder)
    ranks = (replay and replay.plan.ranks) or detect(os.environ).size
    groups = watch_distributed.DistributedWatch(recorder, ranks)

    def pytorch(torch: Any) -> None:
        watch_torch.watch(torch, recorder)
        groups.watch(torch)

    actions: dict[str, Action] = {
        "torch": pytorch,
        "torch.distributed.fsdp": groups.shards,
        "tensorflow": tensorflow.tensorflow,
        "keras": tensorflow.keras,
        "horovod.torch.mpi_ops": horovod.operations,
        "horovod.tensorflow.mpi_ops": horovod.operations,
        "horovod.torch": horovod.calls,
        "horovod.tensorflow": horovod.calls,
        "horovod.tensorflow.keras": horovod.calls,
        "horovod.keras": horovod.calls,
        "hvdtrain.adapters.common_adapter": horovod.adapters,
        "hvdtrain.steps.checkpoint": lambda module: watch_horovod.checkpoints(
            module, recorder, fresh=fresh
        ),
        "hvdtrain.keras.callbacks": horovod.keras_callbacks,
        "hvdtrain.keras.data": horovod.keras_data,
    }
    if replay:
        tensorflow_replay = TensorFlowReplay(replay, tensorflow)
        for name, action in (*replay.actions.items(), *tensorflow_replay.actions.items()):
            actions[name] = _in_turn(actions.get(name), action)
    AfterImport(actions).install()
    on_write(recorder.wrote)


def _in_turn(first: Action | None, second: Action) -> Action:
    def both(module: Any) -> None:
        if first:
            first(module)
        second(module)

    return both


if __name__ == "__main__":
    run_and_exit(main)
