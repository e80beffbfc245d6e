"""What ``hvdtrain verify -n N`` starts on each rank: rank 0 prints a marked line for each row."""

from __future__ import annotations

import argparse
import json
import sys

from hvdtrain.environment.verification.ranks import verify
from hvdtrain.environment.verification.rows import ALL, Row
from hvdtrain.environment.verification.start import MARK
from hvdtrain.launch import ending


def main() -> int:
    """Verify the steps that are asked for. 0 also where a row failed: the row says so."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.environment.verification")
    parser.add_argument("--framework", required=True)
    parser.add_argument("--strategy")
    parser.add_argument("--steps", default=",".join(map(str, ALL)))
    options = parser.parse_args()
    steps = [int(step) for step in options.steps.split(",")]
    verify(options.framework, options.strategy, tell, steps)
    return 0


def tell(row: Row) -> None:
    """Print a row on rank 0, in one piece."""
    if ending.rank() == 0:
        sys.stdout.write(f"{MARK}{json.dumps(row.data())}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    ending.run(main)
