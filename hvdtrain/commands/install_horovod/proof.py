"""Prove a wheel of Horovod: two ranks under the real mpirun, one allreduce per framework."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.install_horovod import proof_program
from hvdtrain.commands.install_horovod.build import decisive_line
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.machine.toolchain import Mpi
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run

log = logging.getLogger(__name__)

RANKS = 2
TIMEOUT = 180.0  # seconds; TensorFlow's import alone takes half a minute from a cold shared disk


def proof_command(
    framework: str, mpi: Mpi, python: Path, folder: Path, gpu: str, environ: Mapping[str, str]
) -> Command:
    """Return the command that reduces over two ranks, with the Horovod in ``folder``.

    More ranks than cores are allowed: a machine with one core can prove it too. Settings of a
    training (HOROVOD_...) are kept away, and the GPU where the build has no operations for it.
    """
    changes: dict[str, str | None] = {n: None for n in environ if n.startswith("HOROVOD_")}
    if gpu == "none":
        changes["CUDA_VISIBLE_DEVICES"] = ""
    options: tuple[str, ...] = ("-n", str(RANKS))
    if mpi.is_open_mpi:
        options += ("--oversubscribe",)
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = (str(python), "-P", proof_program.__file__, framework, str(RANKS), str(folder))
    return Command((str(mpi.mpirun), *options, *program), changes)


def read_proof(output: str) -> dict[str, Any]:
    """Return the object that rank 0 printed; empty if it did not come so far."""
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and "max_error" in found:
                return found
    return {}


def prove(commands: Sequence[tuple[str, Command]], log_file: Path) -> dict[str, Any]:
    """Run the proof for each framework; return what each answered.

    Raises:
        HvdtrainError: one did not give the result in closed form.
    """
    answers = {}
    for framework, command in commands:
        start = time.monotonic()
        result = run(command, timeout=TIMEOUT)
        with log_file.open("a") as stream:
            stream.write(f"$ {command.show()}\n{result.output}")
        answer = read_proof(result.output)
        if not (result.ok and answer.get("ok")):
            raise HvdtrainError(f"{_failure(framework, result, answer)}; log: {log_file}")
        seconds = round(time.monotonic() - start, 1)
        answers[framework] = answer | {"seconds": seconds}
        log.info("proven: %s, allreduce over %d ranks, %.1f s", framework, RANKS, seconds)
    return answers


def _failure(framework: str, result: Result, answer: Mapping[str, Any]) -> str:
    """Say how the proof ended, and what the ranks said last."""
    cause = dict(answer) or decisive_line(result.output.splitlines())
    end = f"ended with exit code {result.exit_code}"
    if result.exit_code == TIMED_OUT:
        end = f"did not end within {TIMEOUT:.0f} s"
    return f"the proof for {framework} failed: an allreduce over {RANKS} ranks {end} ({cause})"
