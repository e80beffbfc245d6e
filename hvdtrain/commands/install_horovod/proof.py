"""Prove a Horovod wheel by an allreduce per framework on two ranks of mpirun."""

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
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, Result, run

log = logging.getLogger(__name__)

RANKS = 2
TIMEOUT = 180.0  # seconds; TensorFlow's import takes half a minute from an uncached shared disk


def proof_command(
    framework: str, mpi: Mpi, python: Path, folder: Path, gpu: str, environ: Mapping[str, str]
) -> Command:
    """Return the command of an allreduce over two ranks, with the Horovod in ``folder``.

    More ranks than cores are allowed, for machines with one core. A training's settings
    (HOROVOD_...) are unset, and GPUs are hidden if the build has no GPU operations.
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
    """Return the object printed by rank 0; empty if there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                result = json.loads(line)
            except ValueError:
                continue
            if isinstance(result, dict) and "max_error" in result:
                return result
    return {}


def prove(commands: Sequence[tuple[str, Command]], log_file: Path) -> dict[str, Any]:
    """Run the proof of each framework; return the results.

    Raises:
        HvdtrainError: a result differs from the closed form, or is missing.
    """
    answers = {}
    for framework, command in commands:
        start = time.monotonic()
        with terminal.working(f"testing Horovod for {framework}: allreduce on {RANKS} ranks"):
            result = run(command, timeout=TIMEOUT)
        with log_file.open("a") as stream:
            stream.write(f"$ {command.show()}\n{result.output}")
        answer = read_proof(result.output)
        if not (result.ok and answer.get("ok")):
            raise HvdtrainError(f"{_failure(framework, result, answer)}; log: {log_file}")
        seconds = round(time.monotonic() - start, 1)
        answers[framework] = answer | {"seconds": seconds}
        log.info("proven: %s, allreduce on %d ranks, %.1f s", framework, RANKS, seconds)
    return answers


def _failure(framework: str, result: Result, answer: Mapping[str, Any]) -> str:
    """Return the message of a failed proof: its end, and the ranks' decisive line."""
    cause = dict(answer) or decisive_line(result.output.splitlines())
    end = f"exit code {result.exit_code}"
    if result.exit_code == TIMED_OUT:
        end = f"no end within {TIMEOUT:.0f} s"
    return f"the proof for {framework} failed: allreduce on {RANKS} ranks, {end} ({cause})"
