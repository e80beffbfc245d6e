"""The table of strategies: records name existing things, and no other file compares a name."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from hvdtrain.commands.collectives.timing import BACKENDS
from hvdtrain.config.checks import check, of_strategy
from hvdtrain.config.declare import declared
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import (
    COMPRESSIONS,
    NONE,
    PACKAGES,
    STRATEGIES,
    CommOptions,
    Strategy,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import SINGLE_RANK
from tests.conftest import ROOT

RECORDS = pytest.mark.parametrize("record", STRATEGIES.values(), ids=list(STRATEGIES))


@RECORDS
def test_each_adapter_is_a_class_of_that_strategy(record: Strategy) -> None:
    assert record.adapters and set(record.adapters) <= set(PACKAGES)
    for location in record.adapters.values():
        module, _, name = location.partition(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        assert f"name = '{record.name}'" in [ast.unparse(line) for line in classes[name].body]


@RECORDS
def test_the_fields_of_a_record_are_consistent(record: Strategy) -> None:
    assert set(record.requires) | set(record.oldest) <= set(record.adapters)
    assert set(record.gradient_libraries) <= set(BACKENDS)
    assert bool(record.launchers) == bool(record.library)
    assert bool(record.requires) == bool(record.remedy)


ALWAYS = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
UNFUSED, SHORT = {"HOROVOD_FUSION_THRESHOLD": "0"}, {"HOROVOD_CYCLE_TIME": "0.1"}


@pytest.mark.parametrize(
    ("autotune", "short_steps", "expected"),
    [
        (None, False, UNFUSED),
        (None, True, UNFUSED | SHORT),
        ("1", True, {}),  # Horovod tunes only what is not set
        ("0", True, UNFUSED | SHORT),
        ("yes", True, UNFUSED | SHORT),  # for Horovod no number is 0
        ("", False, UNFUSED),
    ],
)
def test_several_ranks_yield_and_do_not_fuse(
    autotune: str | None, short_steps: bool, expected: dict[str, str]
) -> None:
    environ = {} if autotune is None else {"HOROVOD_AUTOTUNE": autotune}
    variables = STRATEGIES["horovod"].variables(environ, short_steps=short_steps)
    assert variables == ALWAYS | expected
    assert not STRATEGIES["single"].variables(environ, short_steps=short_steps)


def test_no_other_file_compares_the_name_of_a_strategy() -> None:
    # In verify/script and doctor "horovod" is the library, in commands/collectives a back end.
    rooms = ("adapters", "training", "steps", "system", "tasks", "workloads", "commands/scaling")
    for file in (file for room in rooms for file in (ROOT / "hvdtrain" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                names = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert not names & set(STRATEGIES), f"{file}:{node.lineno}"


def check_options(options: CommOptions, strategy: str, framework: str = "pytorch") -> None:
    check(of_strategy(STRATEGIES[strategy], framework, SINGLE_RANK, options.compression))


def refusal(options: CommOptions, strategy: str, framework: str = "pytorch") -> str:
    with pytest.raises(UsageError) as caught:
        check_options(options, strategy, framework)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_supports_the_compressions_of_its_record(name: str) -> None:
    record = STRATEGIES[name]
    assert set(record.compressions) <= set(COMPRESSIONS) - {NONE}
    for compression in COMPRESSIONS:
        options = CommOptions(compression=compression)
        if compression in (NONE, *record.compressions):
            check_options(options, name)
        else:
            assert f"--compression {compression}" in refusal(options, name)


def test_a_refusal_names_the_alternative() -> None:
    bf16 = CommOptions(compression="bf16")
    message = refusal(bf16, "horovod")
    assert "--compression bf16: Horovod" in message and "--compression fp16" in message
    message = refusal(bf16, "single", "tensorflow")
    assert "--compression bf16" in message and message.endswith("--strategy mpi")
    message = refusal(CommOptions(compression="fp8"), "ddp")
    assert "--compression fp8" in message and "none, fp16, bf16" in message


def test_communication_options_are_options_of_a_training() -> None:
    defaults = {field.name: field.default for field in declared(Options)}
    for field in dataclasses.fields(CommOptions):
        assert defaults[field.name] == field.default
    assert Options().comm_options == CommOptions()
    assert Options(compression="fp16").comm_options == CommOptions(compression="fp16")
    evaluation = Options(compression="fp16", evaluate_only=True)
    assert evaluation.comm_options == CommOptions()  # no updates
