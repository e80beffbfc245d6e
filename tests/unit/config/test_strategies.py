"""The table of strategies: what the records name is there, and no other file compares a name."""

from __future__ import annotations

import ast

import pytest

from hvdtrain.collectives.bench import BACKENDS
from hvdtrain.config.strategies import PACKAGES, STRATEGIES, Strategy
from tests.conftest import ROOT

RECORDS = pytest.mark.parametrize("record", STRATEGIES.values(), ids=list(STRATEGIES))


@RECORDS
def test_each_adapter_is_a_class_of_that_strategy(record: Strategy) -> None:
    assert record.adapters and set(record.adapters) <= set(PACKAGES)
    for place in record.adapters.values():
        module, _, name = place.partition(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        (found,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
        assert f"name = '{record.name}'" in [ast.unparse(line) for line in found.body]


@RECORDS
def test_what_a_record_says_fits_together(record: Strategy) -> None:
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
    # In verify/script and doctor "horovod" is the library, in collectives/bench.py a back end.
    rooms = ("adapters", "training", "steps", "system", "workloads", "commands/scaling")
    for file in (file for room in rooms for file in (ROOT / "hvdtrain" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                names = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                assert not names & set(STRATEGIES), f"{file}:{node.lineno}"
