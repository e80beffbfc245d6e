"""``hvdtrain submit``: make a job of a command, check it, and hand it to PBS or Slurm."""

from __future__ import annotations

import argparse

from hvdtrain.commands.submit.arguments import Request, add_arguments
from hvdtrain.commands.submit.submission import submit
from hvdtrain.system.output.result import Report

__all__ = ["add_arguments", "run_verb"]


def run_verb(arguments: argparse.Namespace) -> Report:
    """Carry the verb out with parsed ``arguments``.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers about it.
    """
    return submit(Request.of(arguments))
