"""``python -m hvdtrain.collectives``: the program in ``commands/collectives``."""

from hvdtrain.commands.collectives.program import main
from hvdtrain.system.runtime.exit import run_and_exit

if __name__ == "__main__":
    run_and_exit(main)
