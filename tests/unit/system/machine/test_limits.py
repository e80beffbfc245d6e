"""Peak memory of this process, as reported by the kernel."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from hvdtrain.system.machine.limits import peak_resident_bytes


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
