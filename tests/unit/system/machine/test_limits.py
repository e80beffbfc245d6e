"""Cores, processor packages, GPUs and peak memory, as reported by the kernel."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import packages, peak_resident_bytes, physical_cores


def test_peak_memory_grows_with_an_allocation() -> None:
    before = peak_resident_bytes()
    taken = np.ones(2 * before, np.uint8)
    assert peak_resident_bytes() >= before + taken.nbytes / 2
    resident = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert resident
    assert peak_resident_bytes() >= 1024 * int(resident[1])


def test_peak_memory_is_0_if_the_kernel_does_not_report_it(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert peak_resident_bytes(tmp_path / "status") == 0


def topology(folder: Path, file: str, values: list[str]) -> Path:
    for cpu, value in enumerate(values):
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / file).write_text(value + "\n")
    return folder


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    system = topology(tmp_path, "thread_siblings_list", ["0,2", "1,3", "0,2", "1,3"])
    assert physical_cores({0, 1, 2, 3}, system) == 2
    assert physical_cores({0, 2}, system) == 1
    assert physical_cores({0, 1, 7}, system) == 3  # the last one is unknown


def test_packages(tmp_path: Path) -> None:
    system = topology(tmp_path, "physical_package_id", ["0", "0", "1", "1"])
    assert packages({0, 1, 2, 3}, system) == 2
    assert packages({0, 1}, system) == 1
    assert packages({0, 1, 2}, system) == 0
    assert packages({0, 8, 9}, tmp_path / "unknown") == 1


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b,"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"ZE_AFFINITY_MASK": "0.0,0.1"}, 2),
    ],
)
def test_gpus(environ: dict[str, str], gpus: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(environ, tmp_path) == gpus
