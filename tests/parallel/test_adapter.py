"""Each step of the adapters on real ranks, against closed forms of rank and size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS, LONG, SCRIPTS, SIZES, STRATEGIES, run_script


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_steps(framework: str, number: int, tmp_path: Path) -> None:
    words = (framework, str(tmp_path))
    run_script(number, "steps.py", *words, folder=tmp_path, framework=framework)


@pytest.mark.parametrize(("strategy", "number"), SIZES)
def test_loops_of_users_equal_one_process_and_misuse_is_told(
    strategy: str, number: int, tmp_path: Path
) -> None:
    """Clip, accumulate, scale the loss, several passes and optimizers, loaders that read ahead."""
    run_script(number, "own_loop.py", strategy, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize(
    ("strategy", "number"), [*SIZES, *(((name, 5) for name in STRATEGIES) if LONG else ())]
)
def test_gradients_from_any_source_equal_one_process(
    strategy: str, number: int, tmp_path: Path
) -> None:
    """Assigned ones, passes beside the wrapper, layers used twice, closures, spectral norms."""
    run_script(number, "sources.py", strategy, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize("strategy", ["horovod", "mpi", "ddp", "zero", "fsdp"])
def test_models_trained_in_phases_and_in_part(strategy: str, tmp_path: Path) -> None:
    """Several optimizers of a model, frozen and unfrozen layers, parameters of no optimizer."""
    run_script(2, "phases.py", strategy, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize(("strategy", "number"), SIZES)
def test_optimizers_and_their_options(strategy: str, number: int, tmp_path: Path) -> None:
    run_script(number, "optimizers.py", strategy, str(tmp_path), folder=tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pass_that_a_rank_leaves_out_ends_the_job(strategy: str, tmp_path: Path) -> None:
    outcome = resident.ranks(3, str(SCRIPTS / "own_loop.py"), strategy, str(tmp_path), "skipped")
    assert outcome.code
    assert "every rank must make each" in outcome.err and "stand-in" in outcome.err


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_call_under_a_test_of_the_rank_ends_at_once(strategy: str, tmp_path: Path) -> None:
    outcome = resident.ranks(3, str(SCRIPTS / "own_loop.py"), strategy, str(tmp_path), "alone")
    assert outcome.code == 1
    assert "the ranks wait in different calls: rank 0 on" in outcome.err
    # One that is in the other call is enough to tell.
    assert re.search(r"in save_checkpoint, ranks? [12]\b.* on", outcome.err)
    gathers = strategy == "fsdp"
    waits = "the gathering of the parameters" if gathers else "the sum of the gradients"
    assert f"in {waits}" in outcome.err
    assert not list(tmp_path.iterdir())
