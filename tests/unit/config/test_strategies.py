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


def test_several_ranks_yield_and_do_not_fuse() -> None:
    record = STRATEGIES["horovod"]
    assert record.environment["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert record.environment["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert record.short_steps == {"HOROVOD_CYCLE_TIME": "0.1"}
    assert not STRATEGIES["single"].environment


def test_no_other_file_compares_the_name_of_a_strategy() -> None:
    # In verify/script and doctor "horovod" is the library, in commands/collectives a back end.
    rooms = ("adapters", "training", "steps", "system", "tasks", "workloads", "commands/scaling")
    for file in (file for room in rooms for file in (ROOT / "hvdtrain" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                names = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert not names & set(STRATEGIES), f"{file}:{node.lineno}"
