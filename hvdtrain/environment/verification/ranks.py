"""What each rank runs to verify the eight steps.

A row that fails leaves the others as they are: the true world replaces a false one, each step is
given what it needs by hand, and what all ranks found is exchanged after each step whatever it was.
Where the ranks lose each other (one waits in a collective that another never enters) Horovod is
told to give up after ``STALLED`` seconds, that row fails, and the rest has to be asked for anew.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.environment.verification.bench import Bench, Check, Facts
from hvdtrain.environment.verification.initialize import host_name, true_world
from hvdtrain.environment.verification.rows import ALL, FAILED, STEPS, Row
from hvdtrain.environment.verification.stalled import STALLED
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.detect import detect
from hvdtrain.launch.tuning import set_defaults

Emit = Callable[[Row], None]


class LostError(Exception):
    """The ranks no longer take part in the same collectives."""


def verify(
    framework: str, strategy: str | None, emit: Emit, steps: Collection[int] = ALL
) -> list[Row]:
    """Verify ``steps``; all ranks call it, and all get the same rows.

    Args:
        framework: ``pytorch`` or ``tensorflow``.
        strategy: see ``select.adapter``.
        emit: called with each row as soon as it is known, on every rank.
        steps: their numbers. The first is done in any case, the others need it.

    Returns:
        The rows in order; those that could not be seen any more are missing.

    Raises:
        UsageError: framework, strategy and launcher do not fit together.
    """
    adapter = select_adapter(framework, strategy)
    set_defaults(STALLED)
    rows: list[Row] = []
    try:
        bench = start(adapter, framework)
    except Exception as error:
        _note(rows, emit, Row(1, FAILED, describe(error)))
        return rows
    for step in STEPS:
        if step.number not in steps:
            continue
        check: Any = importlib.import_module(f"{__package__}.{step.method}")
        try:
            _note(rows, emit, examine(bench, check, step.number))
        except LostError as error:
            _note(rows, emit, Row(step.number, FAILED, str(error)))
            break
    return rows


def _note(rows: list[Row], emit: Emit, row: Row) -> None:
    rows.append(row)
    emit(row)


def start(adapter: CommonAdapter, framework: str) -> Bench:
    """Step 1 itself; afterwards the adapter has the true world, whatever it believed."""
    claimed = adapter.initialize()
    exchange = adapter.communicator
    hosts = [host.decode() for host in exchange.gather(host_name().encode())]
    adapter.world = true_world(exchange.rank, hosts)
    kits: Any = importlib.import_module(f"{__package__}.kit_{framework}")
    return Bench(adapter, kits.kit(adapter), claimed)


def examine(bench: Bench, check: Check, step: int) -> Row:
    """Measure on every rank, exchange what was found, and judge it.

    Raises:
        LostError: on every rank: they wait in different collectives.
    """
    failure = ""
    facts: Facts = {}
    try:
        facts = check.measure(bench)
    except Exception as error:
        failure = describe(error)
    everyone = exchange(bench, step, {"failure": failure, "facts": facts})
    failures = {rank: one["failure"] for rank, one in enumerate(everyone) if one["failure"]}
    if failures:
        first, text = next(iter(failures.items()))
        who = "" if len(failures) == len(everyone) else f"rank {first}: "
        return Row(step, FAILED, who + text, {"failures": len(failures)})
    return check.judge([one["facts"] for one in everyone])


def exchange(bench: Bench, step: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank found in ``step``, by rank."""
    try:
        packed = json.dumps([step, found]).encode()
        answers = [json.loads(one) for one in bench.adapter.communicator.gather(packed)]
        if [answer[0] for answer in answers] != [step] * bench.size:
            raise LostError("the ranks are in different steps")
    except Exception as error:
        own = found["failure"] or describe(error)
        place = detect(os.environ)
        if place.rank and found["failure"]:
            sys.stderr.write(f"hvdtrain: rank {place.rank}, step {step}: {own}\n")
        raise LostError(f"the ranks wait for each other in different places: {own}") from error
    return [answer[1] for answer in answers]


def describe(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if "Horovod has been shut down" in text:
        return "Horovod gave up because one of the ranks did not take part"
    return text if isinstance(error, HvdtrainError) else f"{type(error).__name__}: {text[:300]}"
