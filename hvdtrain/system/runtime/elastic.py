"""What a rank of ``hvdtrain launch --elastic`` asks the driver, which gives out the ranks.

The driver keeps a worker process per slot (``commands/launch/worker.py``), which starts the rank.
When a rank is lost, or slots come or go, each other rank ends with ``EXIT_ANEW``; its worker asks
for a new rank and starts it anew, from the newest checkpoint. So nothing of the old world is left
in a rank, no thread, no connection, no state of a library; and where Horovod itself ends the
process, as it does when it cannot connect, that is no other case.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Mapping

from hvdtrain.system.runtime.detect import SLOT

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"  # of the driver
EXIT_ANEW = 76  # of a rank: start it again
EVERY = 1.0  # seconds between two looks for other slots, as often as the driver itself looks

# Questions: which rank this slot has, which counts as "I am ready" and is answered when all slots
# have asked or ended; whether other slots are to be used; whether another rank is lost.
RANK_AND_SIZE, CHANGED, LOST = "rank_and_size", "hosts_changed", "lost"
YES, NO = "1", "0"


def ask(question: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the driver's answer to a rank's ``question``.

    Raises:
        OSError: it is not there.
    """
    line = http.client.HTTPConnection(environ[ADDRESS], int(environ[PORT]))
    try:
        line.request("GET", f"/{question}/{environ[SLOT]}")
        return line.getresponse().read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"the driver ended while it was asked: {error!r}") from error
    finally:
        line.close()


def another_is_lost() -> bool:
    """Return whether the driver knows of another rank that has failed in this world."""
    with contextlib.suppress(OSError):
        return ask(LOST) == YES
    return False


def watch_hosts(changed: Callable[[], None]) -> None:
    """Call ``changed``, in a thread, once other slots are to be used than those of this world.

    Horovod's driver would tell rank 0 once, and if rank 0 is just starting, never again; so it is
    asked. To be called on one rank.
    """

    def watch() -> None:
        while True:
            time.sleep(EVERY)
            with contextlib.suppress(OSError):
                if ask(CHANGED) == YES:
                    return changed()

    threading.Thread(target=watch, name="hosts", daemon=True).start()
