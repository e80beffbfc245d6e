"""A slow or lossy cable: copies frames between two ports late, and loses some (not netem).

python -m tests.cluster.relay DELAY LOSS: in the namespace of the switch, until it is killed.
The hosts must fill in checksums and send plain frames (ethtool --offload).
"""

from __future__ import annotations

import heapq
import itertools
import random
import select
import socket
import sys
import time

PORTS = ("port1", "port2")
ALL = 3  # ETH_P_ALL
MAX_BYTES = 1 << 16  # bytes of a frame


def relay(delay: float, loss: float) -> None:
    """Copy frames for ever.

    Args:
        delay: seconds for which each frame is kept.
        loss: fraction of the frames that are lost.
    """
    chance, numbers = random.Random(0), itertools.count()
    ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) for _ in PORTS]
    for port, name in zip(ports, PORTS, strict=True):
        port.bind((name, 0))
    others = dict(zip(ports, reversed(ports), strict=True))
    kept: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        wait = max(0.0, kept[0][0] - time.monotonic()) if kept else None
        for port in select.select(ports, (), (), wait)[0]:
            frame, source = port.recvfrom(MAX_BYTES)
            if source[2] != socket.PACKET_OUTGOING and chance.random() >= loss:
                due = time.monotonic() + delay
                heapq.heappush(kept, (due, next(numbers), others[port], frame))
        while kept and kept[0][0] <= time.monotonic():
            *_, port, frame = heapq.heappop(kept)
            port.send(frame)


if __name__ == "__main__":
    relay(*map(float, sys.argv[1:]))
