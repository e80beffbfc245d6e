"""Requests of an elastic rank to a driver that does not answer, or late."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.system.runtime import elastic

VALUES = "0,2,0,1,0,2"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listen where this rank expects its driver."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        monkeypatch.setenv(elastic.ADDRESS, f"{host}:{port}/secret")
        monkeypatch.setenv(elastic.SLOT, "node+0:0")
        yield listener


def ends(action: Callable[[], object]) -> bool:
    """Return whether ``action`` ends within some seconds."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_driver_that_never_answers_does_not_keep_a_rank(driver: socket.socket) -> None:
    lost: list[bool] = []
    assert ends(lambda: lost.append(elastic.is_rank_lost()))
    assert lost == [False]


def test_a_rank_waits_for_the_other_slots_unless_the_drivers_host_is_lost(
    driver: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "ANSWER", 0.1)
    monkeypatch.setattr(elastic, "SILENCE", 0.1)
    kept: list[int] = []
    keep_alive = elastic.keep_alive

    def noted(connection: socket.socket) -> None:
        keep_alive(connection)
        kept.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(elastic, "keep_alive", noted)
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(elastic.query_rank)
        connection, _ = driver.accept()
        with connection:
            time.sleep(0.5)
            connection.sendall(f"HTTP/1.0 200 OK\r\n\r\n{VALUES}".encode())
            connection.shutdown(socket.SHUT_WR)
            assert values.result(20) == VALUES.split(",")
    assert kept == [1]
