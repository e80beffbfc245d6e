"""Inject each kind of fault several times at random moments, and print the table.

python -m tests.faults [--times 5] [--only "disk: full"] [--strategies ddp] [--lines FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hvdtrain.system.output.tables import Table
from tests.faults.job import STRATEGIES
from tests.faults.run import Result, result_of
from tests.faults.table import FAULTS


def main() -> int:
    """Run the faults; return 1 if one was not survived as promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*FAULTS], choices=FAULTS, metavar="FAULT")
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=STRATEGIES)
    parser.add_argument("--lines", type=Path, help="append each result as a line of JSON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = []
    for time in range(options.times):
        for number, name in enumerate(options.only):
            possible = [s for s in FAULTS[name].strategies if s in options.strategies]
            strategy = possible[(number + time) % len(possible)]
            with tempfile.TemporaryDirectory() as folder:
                seed = options.seed + 1000 * time + number
                result = result_of(name, strategy, Path(folder), seed)
            results.append(result)
            print(f"{len(results)}. {result}", flush=True)
            if options.lines:
                with options.lines.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    print("\n" + summary_table(results) + "\n\nReports, of the last time each:")
    for name, report in {result.fault: result.report for result in results}.items():
        print(f"{name}: {report or '-'}")
    return int(any(result.problem for result in results))


def summary_table(results: Sequence[Result]) -> str:
    """Return a row for each kind of fault."""
    rows = []
    for name in dict.fromkeys(result.fault for result in results):
        same = [result for result in results if result.fault == name]
        rows.append(
            [
                name,
                str(len(same)),
                str(sum(not result.problem for result in same)),
                f"{max(result.seconds for result in same):.1f}",
                ", ".join(sorted({str(result.code) for result in same})),
                str(max(result.lost for result in same)),
                "; ".join(sorted({result.left for result in same if result.left})) or "nothing",
            ]
        )
    header = [
        "fault",
        "times",
        "as promised",
        "seconds",
        "exit code",
        "updates lost",
        "left behind",
    ]
    return Table("", header, rows).body


if __name__ == "__main__":
    sys.exit(main())
