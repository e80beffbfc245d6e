"""``hvdtrain submit``: turn a command into a job, check it, and submit it to PBS or Slurm."""

from __future__ import annotations

from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.submission import submit
from hvdtrain.system.output import Report

USAGE = "hvdtrain submit --walltime H:MM:SS [options] -- COMMAND"
EPILOG = """example:
  hvdtrain submit --nodes 2 --ppn 4 --walltime 1:00:00 -- \\
      python -m hvdtrain.resnet --synthetic
  hvdtrain submit --walltime 0:30:00 --follow -- python train.py
  hvdtrain submit --ppn 4 --walltime 2:00:00 --chain -- \\
      python -m hvdtrain.mnist --checkpoint-dir checkpoints
  hvdtrain submit --site polaris --account me --walltime 1:00:00 --dry-run \\
      -- python train.py
"""


def run_verb(options: Job) -> Report:
    """Submit the job; return the report.

    Raises:
        UsageError: an option is wrong.
        HvdtrainError: the batch system refused the job, or no longer answers.
    """
    return submit(options)
