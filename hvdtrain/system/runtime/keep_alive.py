"""Connections that break if the other host is down, although nothing is sent or expected."""

from __future__ import annotations

import socket

# Seconds without an answer after which a host is considered lost. The job has to end within 30 s of
# the loss; rerouting in a switch or migration of a virtual machine also takes some seconds.
SILENCE = 15
IDLE = 5  # idle seconds before the kernel sends the first probe


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel break ``connection`` if the other host's kernel does not answer.

    Also with unacknowledged data; after ``IDLE`` seconds it sends a probe per second. It has no
    effect on a connection within a host.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE - IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)
