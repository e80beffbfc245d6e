"""What ``hvdtrain launch --elastic`` starts for each slot, on its host; it starts the rank there.

A rank that wants so is started anew, with the rank that the driver gives the slot then; otherwise
this process ends with the rank, and with its exit code. Standard input is the driver's: ``ASK``
asks the rank to save and stop, as a signal does, ``ANEW`` ends it and starts it anew; and when it
closes, because the driver is gone, the rank is ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from hvdtrain.commands.launch.agent import ask, kill, watch_input
from hvdtrain.errors import EXIT_OK
from hvdtrain.system.machine.network import interface_towards
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.processes import STOP_SIGNALS, exit_code, say

ASK, ANEW = b"\n", b"r"
PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # of HOROVOD_*
INTERFACE = "HOROVOD_GLOO_IFACE"
# By these Horovod's own threads end a rank that has lost another one.
OF_LIBRARIES = (128 + signal.SIGABRT, 128 + signal.SIGSEGV)
PATIENCE = 3.0  # seconds for the driver to know who was lost before


def main(words: Sequence[str]) -> int:
    """Start the rank, as often as it takes; return its last exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ask())
    told = threading.Event()

    def obey(order: bytes) -> None:
        if order == ANEW:
            told.set()
            kill()
        else:
            ask()

    watch_input(obey)
    own: dict[str, str] = {}
    if INTERFACE not in os.environ:
        own[INTERFACE] = interface_towards(os.environ[elastic.ADDRESS]) or "lo"
    while True:
        told.clear()
        code = exit_code(start(Command(tuple(words), own)).wait())
        if not (code == elastic.EXIT_ANEW or told.is_set() or _comes_of_a_loss(code)):
            return code
        try:
            place = elastic.ask(elastic.RANK_AND_SIZE).split(",")
        except OSError as error:
            say(f"{socket.gethostname()}: the driver of the ranks cannot be asked: {error}")
            return code
        if len(place) != len(PLACE) or int(place[0]) < 0:  # this slot is not used any more
            return EXIT_OK
        own |= variables(place)


def variables(place: Sequence[str]) -> dict[str, str]:
    """Return the variables that tell a rank its ``place``, as the driver spells it."""
    return {f"HOROVOD_{name}": value for name, value in zip(PLACE, place, strict=True)}


def _comes_of_a_loss(code: int) -> bool:
    end = time.monotonic() + PATIENCE
    while code in OF_LIBRARIES and time.monotonic() < end:
        if elastic.another_is_lost():
            return True
        time.sleep(PATIENCE / 10)
    return False


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # an order that comes now has nobody to go to
