"""The output of a job on its way to the reader."""

from __future__ import annotations

import os
import threading
import time

from hvdtrain.commands.launch.watch import write_all


def test_a_pipe_that_does_not_block_gets_every_byte() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    text = os.urandom(300_000)  # more than a pipe holds
    writer = threading.Thread(target=lambda: (write_all(target, text), os.close(target)))
    writer.start()
    time.sleep(0.2)  # the pipe is full
    with os.fdopen(source, "rb") as reader:
        assert reader.read() == text
    writer.join()


def test_output_is_dropped_if_its_reader_is_gone() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    writer = threading.Thread(target=write_all, args=(target, bytes(300_000)))
    writer.start()
    time.sleep(0.2)
    os.close(source)
    writer.join(10)
    assert not writer.is_alive()
    os.close(target)
