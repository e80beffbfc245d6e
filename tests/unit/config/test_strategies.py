"""The table of strategies: records name existing things, and no other file compares a name."""

from __future__ import annotations

import ast

import pytest

from hvdtrain.commands.collectives.timing import BACKENDS
from hvdtrain.config.strategies import PACKAGES, STRATEGIES, Strategy
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
