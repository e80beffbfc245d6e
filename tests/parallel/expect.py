"""For scripts that run on every rank: refusals, models, and what a save has to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.steps.checkpoint import load_newest


def expect_error(
    action: Callable[[], object], *words: str, kind: type[HvdtrainError] = UsageError
) -> None:
    """Fail unless ``action`` raises an error of this ``kind`` that says all ``words``."""
    try:
        action()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no error with {words}")


def expect_model(hvd: CommonAdapter, net: Any, single: Any, *context: object) -> None:
    """Fail unless ``net``, which ranks may hold in parts, is ``single``, of one process."""
    found = hvd.export_state(net, None).model
    expected = single.state_dict()
    assert found.keys() == expected.keys()
    worst = max(float(abs(found[name] - value.numpy()).max()) for name, value in expected.items())
    assert worst < 1e-12, (*context, worst)


def expect_snapshot(
    hvd: CommonAdapter, folder: Path, model: Any, optimizer: Any, updates: Iterable[object]
) -> None:
    """Fail unless what is saved in the background during ``updates`` is the state at the call."""
    save, number = None, 0
    for number, _ in enumerate(updates, 1):
        if number == 2:
            now = hvd.export_state(model, optimizer)
            state = {name: np.array(value) for name, value in {**now.model, **now.training}.items()}
            save = hvd.save_checkpoint(folder, model, optimizer, state={"step": 2}, wait=False)
        elif save and save.poll():
            break
    assert save and number > 3, number
    path = save.result()
    saved = load_newest(folder)
    assert saved and saved.path == path
    held = {**saved.model, **saved.training}
    names = {name for row in hvd.communicator.gather_json(list(state)) for name in row}
    assert held.keys() == names, held.keys() ^ names  # of zero each rank exports its own
    for name, value in state.items():
        assert np.asarray(held[name]).tobytes() == value.tobytes(), name
