"""How gradients travel, on real ranks: their type, in closed forms; buckets; what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.steps.summary import Summary
from tests.conftest import LONG
from tests.parallel import resident
from tests.parallel.conftest import SCRIPTS, run_script

COMPRESSED = [
    (framework, name)
    for name, one in STRATEGIES.items()
    for framework in one.adapters
    if one.compressions
]
SMALL = ("--model=small", "--num-steps=3")
PARAMETERS = 21_840  # of the small net
MNIST = ("-m", "hvdtrain.mnist")
SMALL_BUCKETS = (str(SCRIPTS / "small_buckets.py"), str(PARAMETERS // 2 * 4))


@pytest.mark.parametrize("number", [2, 3] if LONG else [3])
@pytest.mark.parametrize(("framework", "strategy"), COMPRESSED)
def test_gradients_of_16_bits(framework: str, strategy: str, number: int, tmp_path: Path) -> None:
    words = (framework, strategy, str(tmp_path))
    run_script(number, "gradients.py", *words, folder=tmp_path, framework=framework)


def trained(folder: Path, program: tuple[str, ...], *options: str, **variables: str) -> Summary:
    file = folder / "summary.json"
    resident.ranks(2, *program, *SMALL, *options, f"--summary={file}", **variables, code=0)
    return Summary.read(file)


@pytest.mark.parametrize(
    ("framework", "strategy", "program", "options", "messages"),
    [
        ("pytorch", "horovod", MNIST, ["--compression=fp16"], 1),
        ("pytorch", "ddp", MNIST, ["--compression=fp16"], 1),
        ("pytorch", "horovod", SMALL_BUCKETS, [], 2),
        ("tensorflow", "mpi", SMALL_BUCKETS, [], 2),
    ],
)
def test_messages_are_of_the_number_and_the_type_requested(
    framework: str,
    strategy: str,
    program: tuple[str, ...],
    options: list[str],
    messages: int,
    tmp_path: Path,
) -> None:
    way = (f"--framework={framework}", f"--strategy={strategy}")
    done = trained(tmp_path, program, *way, *options)
    size = 2 if options else 4
    assert done.compression == ("fp16" if options else "none")
    assert done.gradient_messages and done.gradient_messages.count == messages
    assert 1 <= done.gradient_messages.bytes / (size * PARAMETERS) < 1.02  # and flags


@pytest.mark.parametrize(
    "variables",
    [
        {"HOROVOD_AUTOTUNE": "1"},  # Horovod tunes what is not set
        {
            "HOROVOD_AUTOTUNE": "0",
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_FUSION_THRESHOLD": "1048576",
            "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        },
    ],
)
def test_horovods_variables_are_those_of_the_user(
    variables: dict[str, str], tmp_path: Path
) -> None:
    record = tmp_path / "tuned.csv"
    options = ("--num-steps=10", "--check-replicas=5")
    done = trained(tmp_path, MNIST, *options, **variables, HOROVOD_AUTOTUNE_LOG=str(record))
    assert done.environment
    used: Mapping[str, str] = done.environment["variables"]
    tuning = ("AUTOTUNE", "CYCLE_TIME", "FUSION_THRESHOLD", "HIERARCHICAL_ALLREDUCE")
    names = [name for name in used if name.removeprefix("HOROVOD_") in tuning]
    assert {name: used[name] for name in names} == variables
    tunes = record.exists() and "tensor_fusion_threshold" in record.read_text()
    assert tunes == (variables["HOROVOD_AUTOTUNE"] == "1")
