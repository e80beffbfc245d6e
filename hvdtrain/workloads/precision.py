"""Which precision a training takes: a function of workload and processor, not of the ranks."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.errors import UsageError

BF16_FLAGS = ("avx512_bf16", "amx_bf16")


def processor_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 by itself (Linux; elsewhere: no)."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return any(flag in flags.split() for flag in BF16_FLAGS)


def choose(asked: str, *, prefers_bf16: bool, gpu: bool, has_bf16: bool) -> str:
    """The precision of the forward pass.

    Args:
        asked: ``auto``, ``fp64``, ``fp32``, ``bf16`` or ``fp16``.
        prefers_bf16: the workload was measured to be faster with it.
        gpu: the device is a GPU.
        has_bf16: the device multiplies bfloat16 by itself.

    Raises:
        UsageError: fp16 on a CPU, where its range needs a loss scaling that nothing speeds up.
    """
    if asked == "fp16" and not gpu:
        raise UsageError("--precision fp16 needs a GPU: use bf16 or fp32 on a CPU")
    if asked == "auto":
        return "bf16" if prefers_bf16 and has_bf16 else "fp32"
    return asked
