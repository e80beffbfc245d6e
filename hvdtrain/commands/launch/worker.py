"""The worker that ``hvdtrain launch --elastic`` starts for each slot; it starts the rank there.

A rank that requests it is restarted, with the number that the driver assigns to the slot then;
otherwise the worker ends with the rank, and with its exit code. The driver writes to standard
input: on ``STOP`` the rank saves and stops, as on a signal, on ``RESTART`` it is killed and
restarted; when the pipe closes, because the driver has exited, the rank is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from hvdtrain.commands.launch.agent import kill_ranks, request_stop, watch_input
from hvdtrain.errors import EXIT_OK
from hvdtrain.system.machine.network import interface_towards
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.command import Command, start
from hvdtrain.system.runtime.processes import STOP_SIGNALS, exit_code, say

STOP, RESTART = b"\n", b"r"
# Suffixes of HOROVOD_*.
RANK_FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
INTERFACE = "HOROVOD_GLOO_IFACE"
# Exit codes of a rank that Horovod's threads abort when another one is lost.
ABORTED = (128 + signal.SIGABRT, 128 + signal.SIGSEGV)
PATIENCE = 3.0  # seconds for the driver to detect the rank that was lost first


def main(words: Sequence[str]) -> int:
    """Start the rank, and restart it on request; return its last exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: request_stop())
    restart = threading.Event()

    def handle(order: bytes) -> None:
        if order == RESTART:
            restart.set()
            kill_ranks()
        else:
            request_stop()

    watch_input(handle)
    environ: dict[str, str] = {}
    if INTERFACE not in os.environ:
        environ[INTERFACE] = interface_towards(os.environ[elastic.ADDRESS]) or "lo"
    while True:
        restart.clear()
        code = exit_code(start(Command(tuple(words), environ)).wait())
        if not (code == elastic.EXIT_RESTART or restart.is_set() or _is_caused_by_a_loss(code)):
            return code
        try:
            values = elastic.query_driver(elastic.RANK_AND_SIZE).split(",")
        except OSError as error:
            say(f"{socket.gethostname()}: no answer from the elastic driver: {error}")
            return code
        if len(values) != len(RANK_FIELDS) or int(values[0]) < 0:  # this slot is no longer used
            return EXIT_OK
        environ |= variables(values)


def variables(values: Sequence[str]) -> dict[str, str]:
    """Return the variables of a rank: rank, size and so on, in the order of the driver's answer."""
    return {f"HOROVOD_{name}": value for name, value in zip(RANK_FIELDS, values, strict=True)}


def _is_caused_by_a_loss(code: int) -> bool:
    end = time.monotonic() + PATIENCE
    while code in ABORTED and time.monotonic() < end:
        if elastic.is_rank_lost():
            return True
        time.sleep(PATIENCE / 10)
    return False


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # an order that comes now has no receiver
