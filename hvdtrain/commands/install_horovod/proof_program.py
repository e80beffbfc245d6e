"""Program of each rank that proves a wheel: one allreduce with a known result.

Run by its path, not as a module, so that it does not import hvdtrain: the interpreter's ``-P``
keeps this directory off the module path. It prints one JSON object on rank 0.

Rank r contributes r + 1 times 0, 1, 2, ...; the sum over N ranks is N (N + 1) / 2 times that,
exactly, in float32.
"""

from __future__ import annotations

import importlib
import json
import sys

LENGTH = 1000


def torch_sum(hvd: object) -> tuple[list[float], str]:
    """Return the sum over all ranks, and the device of the tensor."""
    import torch

    # NCCL needs a GPU per rank: with fewer GPUs, only the CPU path can be proven here.
    use_gpu = hvd.nccl_built() and torch.cuda.device_count() >= hvd.local_size()  # type: ignore[attr-defined]
    device = f"cuda:{hvd.local_rank()}" if use_gpu else "cpu"  # type: ignore[attr-defined]
    values = torch.arange(LENGTH, dtype=torch.float32, device=device)
    total = hvd.allreduce(values * (hvd.rank() + 1), op=hvd.Sum, name="proof")  # type: ignore[attr-defined]
    return total.tolist(), device


def tensorflow_sum(hvd: object) -> tuple[list[float], str]:
    """Return the sum over all ranks, and the device of the tensor."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    use_gpu = hvd.nccl_built() and len(gpus) >= hvd.local_size()  # type: ignore[attr-defined]
    tf.config.set_visible_devices(gpus[hvd.local_rank()] if use_gpu else [], "GPU")  # type: ignore[attr-defined]
    values = tf.range(LENGTH, dtype=tf.float32)
    total = hvd.allreduce(values * float(hvd.rank() + 1), op=hvd.Sum, name="proof")  # type: ignore[attr-defined]
    return total.numpy().tolist(), "cuda" if use_gpu else "cpu"


def main(framework: str, expected_size: int, folder: str) -> int:
    """Reduce with the Horovod in ``folder``, compare with the closed form, report on rank 0."""
    sys.path.insert(0, folder)
    module = {"pytorch": "torch", "tensorflow": "tensorflow"}[framework]
    hvd = importlib.import_module(f"horovod.{module}")
    hvd.init()
    total, device = {"pytorch": torch_sum, "tensorflow": tensorflow_sum}[framework](hvd)
    factor = expected_size * (expected_size + 1) / 2
    error = max(abs(got - factor * i) for i, got in enumerate(total))
    ok = hvd.size() == expected_size and error == 0.0
    if hvd.rank() == 0:
        facts = {"ok": ok, "size": hvd.size(), "max_error": error, "device": device}
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
    hvd.shutdown()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
