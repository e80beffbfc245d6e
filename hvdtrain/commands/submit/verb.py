"""``hvdtrain submit``: turn a command into a job, check it, and submit it to PBS or Slurm."""

from __future__ import annotations

import argparse

from hvdtrain.commands.submit.arguments import Request, add_arguments
from hvdtrain.commands.submit.submission import submit
from hvdtrain.system.output import Report

__all__ = ["add_arguments", "run_verb"]


def run_verb(arguments: argparse.Namespace) -> Report:
    """Submit the job of the parsed ``arguments``; return the report.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers.
    """
    return submit(Request.of(arguments))
