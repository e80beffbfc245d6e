"""``mpirun -n 2 python -m hvdtrain.train FILE.py``: train the task defined in a Python file."""

from __future__ import annotations

import sys

from hvdtrain.system.runtime import terminal

if __name__ == "__main__" and not {"-h", "--help", "--quiet"} & set(sys.argv):
    terminal.begin("train")

from pathlib import Path

from hvdtrain.config.command_line import build_parser
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks import own
from hvdtrain.training import trainer

EPILOG = f"""\
the file:
  defines task(options), which returns a TorchTask or a TFTask; may define
  Options, a dataclass whose fields become command-line options

defaults:
  batch 32 per rank; 10 epochs, no warm-up, no weight decay, fp32; learning
  rate per rank (of lars and lamb: for a batch of 32, see --lr-scaling):
    {own.RECIPE.lr}

examples:
  mpirun -n 2 python -m hvdtrain.train examples/own_task.py --epochs 20
  mpirun -n 2 python -m hvdtrain.train examples/own_task_tf.py \\
      --framework tensorflow
"""


def main() -> int:
    """Train; return the exit code."""
    file, *arguments = sys.argv[1:] or [""]
    if {"-h", "--help"} & {file}:
        build_parser("train FILE.py", own.DESCRIPTION, EPILOG).print_help()
        return EXIT_OK
    if not file or file.startswith("-"):
        raise UsageError("FILE.py must come first: python -m hvdtrain.train FILE.py [options]")
    if any("tensorflow" in argument for argument in arguments):  # before the file imports it
        import hvdtrain.adapters.tensorflow  # noqa: F401  # without its banners
    workload = own.workload(Path(file), epilog=EPILOG)
    return trainer.main(workload, arguments)


if __name__ == "__main__":
    run_and_exit(main)
