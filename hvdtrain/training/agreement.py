"""Comparison of the options and the data of all ranks before the first step.

The ranks of one job may have been started with different command lines (mpirun's application
contexts, a wrapper script), and a host may have another copy of the data. Without this check the
ranks would train with different learning rates, orders or numbers of steps, or would hang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.config.declare import declared
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.integrity import differences
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.tasks.task import Task

SHOWN = 12  # digits of a digest
# Options that only rank 0 uses, or that do not affect results.
LOCAL = ("quiet", "summary", "metrics", "tensorboard", "workers", "local_rank")


def check_options(adapter: CommonAdapter, options: Options, file: str) -> None:
    """Compare the options of all ranks, in one collective.

    Args:
        adapter: adapter of this rank.
        options: options of this rank.
        file: digest of the user's file that defines the task; empty: no such file.

    Raises:
        UsageError: on every rank, naming the option and the values by rank.
    """
    mine = {
        f"--{field.name.replace('_', '-')}": str(getattr(options, field.name))
        for field in declared(type(options))
        if field.name not in LOCAL
    }
    # Each host may have its copy in another directory; but the embedded data is different data.
    for name in ("data", "stage"):
        mine[f"--{name}"] = "given" if getattr(options, name) else "not given"
    mine["the file that defines the task (a digest)"] = file[:SHOWN]
    remedy = "start all ranks with the same options"
    _compare(adapter, {name: _plain(value) for name, value in mine.items()}, remedy)


def check_data(adapter: CommonAdapter, task: Task) -> None:
    """Compare the number and the digests of the samples of all ranks, in one collective.

    Raises:
        UsageError: on every rank, naming the values by rank.
    """
    mine = {
        "the number of training samples": f"{task.train.samples:,}",
        "the number of test samples": f"{task.test.samples if task.test else 0:,}",
        "the training data (a digest of labels and names)": task.train.digest[:SHOWN],
        "the test data (a digest of labels and names)": (
            task.test.digest[:SHOWN] if task.test else ""
        ),
    }
    remedy = "use the same data on every host (--data), preferably on a shared file system"
    _compare(adapter, mine, remedy)


def _plain(value: str) -> str:
    return {"": "not given", "None": "not given", "True": "given", "False": "not given"}.get(
        value, value
    )


def _compare(adapter: CommonAdapter, mine: Mapping[str, str], remedy: str) -> None:
    gathered = adapter.communicator.gather(json.dumps(mine).encode())
    hosts = [facts.host for facts in adapter.ranks]
    for name, owners in differences([json.loads(data) for data in gathered], hosts):
        raise agreed(UsageError(f"{name} differs: {owners}: {remedy}"))
