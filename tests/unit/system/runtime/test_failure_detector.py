"""Connections between ranks: which broken connections mean a lost rank."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import unmeasured

# Three ranks on three hosts, in one process.
HEAD = """
import logging, os, socket, threading, time
from hvdtrain.system.runtime import failure_detector as detector, handshake
from hvdtrain.system.runtime.failure_detector import FailureDetector
logging.basicConfig(level=logging.WARNING, format="%(message)s")
hosts = [(f"h{number}", "") for number in range(3)]
ranks = [FailureDetector(number, hosts, ["127.0.0.1"]) for number in range(3)]
endpoints = [rank.endpoint() for rank in ranks]
port = ranks[0].listeners["tcp"].getsockname()[1]
def until(happened):
    while not happened():
        time.sleep(0.01)
def connected(*peers):
    until(lambda: {connection.rank for connection in ranks[0].connections} == set(peers))
"""
# Long enough to detect a broken connection.
TAIL = """
time.sleep(0.5)
print("continues", sorted(connection.rank for connection in ranks[0].connections), flush=True)
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


def test_a_rank_that_gave_up_before_rank_0_connected_is_not_lost() -> None:
    code, out, err = run("""
handshake.ANSWER_TIMEOUT = 0.2
ranks[1].connect(endpoints)
until(lambda: "failure detector" not in [thread.name for thread in threading.enumerate()])
handshake.ANSWER_TIMEOUT = 30.0
ranks[0].connect(endpoints)
ranks[2].connect(endpoints)
connected(2)
""")
    assert (code, out) == (0, "continues [2]\n"), err
    assert err.startswith("rank 1 on h1 cannot connect to rank 0 on h0") and err.count("\n") == 1


def test_rank_0_listens_at_its_only_address() -> None:
    code, out, err = run("""
import psutil
ports = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
assert ports == [("127.0.0.1", port)], ports
ranks.append(FailureDetector(0, hosts, ["10.0.0.1", "127.0.0.1"]))  # no network in common
assert ranks[-1].listeners["tcp"].getsockname()[0] == "0.0.0.0"
""")
    assert (code, out, err) == (0, "continues []\n", "")


def test_a_process_that_gives_up_after_the_answer_is_not_lost() -> None:
    code, out, err = run("""
ranks[0].connect(endpoints)
line = socket.create_connection(("127.0.0.1", port))
facts = handshake.receive(line, handshake.NONCE), ("127.0.0.1", port), bytes([0, 0, 0, 1])
line.sendall(facts[2] + handshake.prove(ranks[0].secret, "connecting", *facts))
answer = handshake.receive(line, handshake.KEY)
assert answer == handshake.prove(ranks[0].secret, "accepting", *facts)
line.close()
ranks[2].connect(endpoints)
connected(2)
""")
    assert (code, out, err) == (0, "continues [2]\n", "")


def test_silent_and_foreign_processes_get_no_answer_and_delay_no_rank() -> None:
    code, out, err = run("""
handshake.ANSWER_TIMEOUT = 5.0  # of the ranks; 20 x HELLO one after the other would be far more
silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
for line in silent[:5]:
    line.sendall(b"GET / HTTP/1.0".ljust(handshake.RANK + handshake.KEY))
for rank in ranks:
    rank.connect(endpoints)
connected(1, 2)
for line in silent[:5]:
    assert len(handshake.receive(line, 100)) == handshake.NONCE
""")
    assert (code, out, err) == (0, "continues [1, 2]\n", "")


def test_what_a_rank_sends_to_a_foreign_listener_does_not_open_rank_0() -> None:
    code, out, err = run("""
foreign = socket.create_server(("127.0.0.1", 0))
line = socket.create_connection(("127.0.0.1", port))
def relay():
    rank, _ = foreign.accept()
    rank.sendall(handshake.receive(line, handshake.NONCE))
    line.sendall(handshake.receive(rank, handshake.RANK + handshake.KEY))
    rank.sendall(handshake.receive(line, handshake.KEY))
    rank.close()
ranks[0].connect(endpoints)
threading.Thread(target=relay, daemon=True).start()
assert handshake.connect([foreign.getsockname()], 1, ranks[0].secret) is None
assert line.recv(1) == b"" and not ranks[0].connections
ranks[1].connect(endpoints)
ranks[2].connect(endpoints)
connected(1, 2)
""")
    assert (code, out, err) == (0, "continues [1, 2]\n", "")


def test_silent_connections_are_closed() -> None:
    code, out, err = run("""
detector.HELLO_TIMEOUT = handshake.HELLO_TIMEOUT = 0.2
ranks[0].connect(endpoints)
with socket.create_connection(("127.0.0.1", port)) as line:
    assert len(handshake.receive(line, 100)) == handshake.NONCE
ranks[1].connect(endpoints)
ranks[2].connect(endpoints)
connected(1, 2)
""")
    assert (code, out, err) == (0, "continues [1, 2]\n", "")


def test_a_confirmed_connection_that_ends_is_a_lost_rank() -> None:
    code, out, err = run("""
for rank in ranks:
    rank.connect(endpoints)
connected(1, 2)
until(lambda: ranks[2].connections)
ranks[2].connections[0].socket.shutdown(socket.SHUT_WR)
time.sleep(60)
""")
    assert (code, out) == (1, "")
    assert "rank 2 on h2 exited unexpectedly" in err


def test_all_ranks_end_with_the_code_of_the_first_that_fails() -> None:
    """As after Ctrl-C, whichever rank is the first."""
    code, out, err = run("""
detector.EXIT_TIMEOUT = 0.0
for rank in ranks:
    rank.connect(endpoints)
connected(1, 2)
ranks[2].send_last(130)
time.sleep(60)
""")
    assert (code, out, err) == (130, "", "")


def test_the_end_of_rank_0_is_the_end_for_all() -> None:
    code, out, err = run("""
ended = []
for number, rank in enumerate(ranks):
    rank.on_end = lambda number=number: ended.append(number)
    rank.connect(endpoints)
connected(1, 2)
ranks[1].send_last(0)
assert ended == [1]
ranks[0].send_last(0)
until(lambda: sorted(ended) == [0, 1, 1, 2])
""")
    assert (code, out, err) == (0, "continues [1, 2]\n", "")
