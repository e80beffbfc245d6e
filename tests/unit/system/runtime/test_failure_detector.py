"""Connections between ranks: whose end is a death, and whose not."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import unmeasured

# Three ranks, each on a host of its own, in one process: what one of them sees is the same.
HEAD = """
import logging, os, socket, threading, time
from hvdtrain.system.runtime import handshake
from hvdtrain.system.runtime.failure_detector import FailureDetector
logging.basicConfig(level=logging.WARNING, format="%(message)s")
hosts = [(f"h{number}", "") for number in range(3)]
ranks = [FailureDetector(number, hosts, []) for number in range(3)]
endpoints = [one.endpoint() for one in ranks]
port = ranks[0].listeners["tcp"].getsockname()[1]
def until(happened):
    while not happened():
        time.sleep(0.01)
def connected(*others):
    until(lambda: {one.rank for one in ranks[0].connections} == set(others))
"""
# Long enough for the end of a connection to be noticed.
TAIL = """
time.sleep(0.5)
print("goes on", sorted(one.rank for one in ranks[0].connections), flush=True)
os._exit(0)
"""


def run(body: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body + TAIL],
        env=unmeasured(),  # several of its ranks end it at once
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_who_gave_up_before_rank_0_came_is_not_dead() -> None:
    code, out, err = run("""
handshake.ANSWER = 0.2
ranks[1].connect(endpoints)
until(lambda: not [one for one in threading.enumerate() if one.name == "failure detector"])
handshake.ANSWER = 30.0
ranks[0].connect(endpoints)
ranks[2].connect(endpoints)
connected(2)
""")
    assert (code, out) == (0, "goes on [2]\n"), err
    assert err.strip() == (
        "rank 1 on h1 cannot reach rank 0 on h0 by TCP: if a host is lost, it may take long to be "
        "noticed"
    )


def test_who_is_answered_and_then_gives_up_is_not_dead() -> None:
    code, out, err = run("""
ranks[0].connect(endpoints)
line = socket.create_connection(("127.0.0.1", port))
line.sendall(ranks[0].secret[:handshake.KEY] + (1).to_bytes(handshake.RANK, "big"))
assert handshake.receive(line, handshake.KEY) == ranks[0].secret[handshake.KEY:]
line.close()
ranks[2].connect(endpoints)
connected(2)
""")
    assert (code, out, err) == (0, "goes on [2]\n", "")


def test_silent_and_foreign_processes_hold_nobody_up() -> None:
    code, out, err = run("""
handshake.ANSWER = 5.0  # of the ranks; 20 x HELLO one after the other would be far more
silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
for line in silent[:5]:
    line.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n" + bytes(100))
for one in ranks:
    one.connect(endpoints)
connected(1, 2)
""")
    assert (code, out, err) == (0, "goes on [1, 2]\n", "")


def test_silent_connections_are_closed() -> None:
    code, out, err = run("""
handshake.HELLO = 0.2
ranks[0].connect(endpoints)
with socket.create_connection(("127.0.0.1", port)) as line:
    assert line.recv(1) == b""
ranks[1].connect(endpoints)
ranks[2].connect(endpoints)
connected(1, 2)
""")
    assert (code, out, err) == (0, "goes on [1, 2]\n", "")


def test_a_confirmed_connection_that_ends_is_a_death() -> None:
    code, out, err = run("""
for one in ranks:
    one.connect(endpoints)
connected(1, 2)
until(lambda: ranks[2].connections)
ranks[2].connections[0].socket.shutdown(socket.SHUT_WR)
time.sleep(60)
""")
    assert (code, out) == (1, "")
    assert "rank 2 on h2 has ended without a word: it crashed, or was killed" in err
