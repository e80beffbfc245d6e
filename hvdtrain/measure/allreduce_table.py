"""A measured table of allreduce times, as ``hvdtrain doctor -n N --json`` prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.measure.problem import Reduction

# Whose times say what a training waits for: its own library's, else the fastest there is.
BACKENDS = {"horovod": ("horovod", "nccl", "gloo", "mpi4py")}
OTHERS = ("nccl", "gloo", "horovod", "mpi4py")


def read_reductions(paths: Sequence[Path], strategy: str | None) -> list[Reduction]:
    """The rows of all tables, of the library that ``strategy`` trains with.

    A file holds what ``hvdtrain doctor`` prints, or the object of ``hvdtrain.measure.allreduce``
    itself: {"ranks": N, "backends": {NAME: {"state": "ok", "rows": [{"bytes", "seconds"}]}}}.

    Raises:
        UsageError: a file is none of these, or no library has rows in it.
    """
    found: list[Reduction] = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            times = content.get("allreduce", content)
            tables = {name: one.get("rows") for name, one in times["backends"].items()}
            ranks = int(times["ranks"])
            names = BACKENDS.get(strategy or "horovod", OTHERS)
            rows = [tables[name] for name in names if tables.get(name)]
            read = (
                [Reduction(ranks, int(row["bytes"]), float(row["seconds"])) for row in rows[0]]
                if rows
                else []
            )
        except OSError as error:
            raise UsageError(f"--allreduce {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--allreduce {path}: not a table of allreduce times ({error!r}); make one by "
                "`hvdtrain doctor -n N --json`"
            ) from error
        read = [row for row in read if row.nbytes > 0 and row.seconds > 0]
        if ranks < 2 or not read:
            raise UsageError(f"--allreduce {path}: no times of an allreduce over 2 ranks or more")
        found += read
    return found
