"""Precision: a function of workload and processor alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.workloads.precision import choose, processor_has_bf16


@pytest.mark.parametrize("asked", ["fp64", "fp32", "bf16"])
def test_what_was_asked_for_is_taken(asked: str) -> None:
    for prefers, gpu, has in itertools.product((True, False), repeat=3):
        assert choose(asked, prefers_bf16=prefers, gpu=gpu, has_bf16=has) == asked


def test_auto_is_bf16_where_wanted_and_there() -> None:
    for gpu in (True, False):
        assert choose("auto", prefers_bf16=True, gpu=gpu, has_bf16=True) == "bf16"
        assert choose("auto", prefers_bf16=True, gpu=gpu, has_bf16=False) == "fp32"
        assert choose("auto", prefers_bf16=False, gpu=gpu, has_bf16=True) == "fp32"


def test_fp16_wants_a_gpu() -> None:
    assert choose("fp16", prefers_bf16=True, gpu=True, has_bf16=True) == "fp16"
    with pytest.raises(UsageError, match="--precision fp16 needs a GPU"):
        choose("fp16", prefers_bf16=True, gpu=False, has_bf16=True)


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("model name : x\nflags\t\t: fpu avx512_bf16 sse\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("flags\t\t: fpu avx512f not_avx512_bf16_but_longer\n", False),
        ("flags\t\t: fpu avx2\n", False),
        ("Features\t: asimd bf16\n", False),
        ("", False),
    ],
)
def test_flags_of_the_processor(tmp_path: Path, text: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_has_bf16(tmp_path / "cpuinfo") is has


def test_without_cpuinfo_there_is_none(tmp_path: Path) -> None:
    assert processor_has_bf16(tmp_path / "absent") is False
