"""Requests of a rank of ``hvdtrain launch --elastic`` to the driver, which assigns ranks.

The driver keeps a process per slot (``commands/launch/host_process.py``), which starts the rank.
If a rank is lost, or slots are added or removed, the other ranks end with ``EXIT_RESTART``; each
process requests a new rank and restarts it from the newest checkpoint. So no thread, connection or
library state of the old world remains in a rank; and a process that Horovod itself ends, because it
cannot connect, is handled in the same way.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Callable

from hvdtrain.system.runtime.detect import SLOT
from hvdtrain.system.runtime.keep_alive import SILENCE, keep_alive

# Of the driver. In a rank the address is HOST:PORT/SECRET: Horovod requests http://ADDRESS:PORT/...,
# so that the job's secret is the first part of each path, which the driver checks.
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
EXIT_RESTART = 76  # of a rank that is to be restarted
MOST = 2**10  # bytes of an answer
ANSWER = 3.0  # seconds for the driver to answer, except for a rank
EVERY = 1.0  # seconds between queries for other slots, the driver's own interval

# Of the driver's answer on a rank, and of its variables HOROVOD_*.
RANK_FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# Requests: the rank of this slot, which also reports readiness and is answered when all slots have
# sent it or ended; whether the slots are to change; whether another rank is lost.
RANK_AND_SIZE, CHANGED, LOST = "rank_and_size", "hosts_changed", "lost"
YES, NO = "1", "0"


def query_driver(question: str) -> str:
    """Return the driver's answer to a request of this rank.

    Raises:
        OSError: the driver cannot be reached, or its host is lost.
    """
    server, _, secret = os.environ[ADDRESS].partition("/")
    waits = question == RANK_AND_SIZE
    # All slots request a rank at once, and the driver's queue of connections is short.
    connection = http.client.HTTPConnection(server, timeout=SILENCE if waits else ANSWER)
    try:
        connection.connect()
        if waits:
            connection.sock.settimeout(None)
            keep_alive(connection.sock)
        connection.request("GET", f"/{secret}/{question}/{os.environ[SLOT]}")
        return connection.getresponse().read(MOST).decode()
    except (http.client.HTTPException, ValueError, OverflowError) as error:
        raise OSError(f"no valid answer from the driver: {error!r}") from error
    finally:
        connection.close()


def query_rank() -> list[str] | None:
    """Return the driver's values of ``RANK_FIELDS`` for this slot; None: it is not used.

    Raises:
        OSError: the driver cannot be reached, or its answer is invalid.
    """
    values = query_driver(RANK_AND_SIZE).split(",")
    if len(values) != len(RANK_FIELDS) or values[0].startswith("-"):
        return None
    if not all(value.isascii() and value.isdecimal() for value in values):
        raise OSError(f"no valid answer from the driver: {','.join(values)!r}")
    return values


def is_rank_lost() -> bool:
    """Return whether another rank of this world has failed, according to the driver."""
    with contextlib.suppress(OSError):
        return query_driver(LOST) == YES
    return False


def watch_hosts(changed: Callable[[], None]) -> None:
    """Call ``changed`` in a thread once the slots of this world are to change.

    The driver is polled, as Horovod's driver notifies rank 0 only once, even if rank 0 is just
    starting. Call on one rank only.
    """

    def watch() -> None:
        while True:
            time.sleep(EVERY)
            with contextlib.suppress(OSError):
                if query_driver(CHANGED) == YES:
                    return changed()

    threading.Thread(target=watch, name="hosts", daemon=True).start()
