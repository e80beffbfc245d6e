"""Ranks that were started together find one another in a store that has seen others before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvdtrain.collectives.torch_distributed import agree_on_rendezvous

SOON = timedelta(seconds=0.5)


def together(store: dist.Store, size: int) -> str:
    """What ``size`` ranks agree on."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            pool.submit(agree_on_rendezvous, store, rank, size, 60 * SOON) for rank in range(size)
        ]
    (agreed,) = {rank.result() for rank in ranks}
    return agreed


def test_each_start_has_a_name_of_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    sizes = (2, 3, 3, 1, 2)
    assert len({together(store, size) for size in sizes}) == len(sizes)


def test_those_that_are_gone_are_not_taken_for_others() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    together(store, 3)
    for rank in range(3):  # each alone, where the two others have been before
        with pytest.raises(TimeoutError, match="3 ranks"):
            agree_on_rendezvous(store, rank, 3, SOON)
    assert together(store, 3)
