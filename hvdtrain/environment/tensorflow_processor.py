"""What TensorFlow computes on in this process."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.environment import gpus


def processor(tf: Any) -> tuple[str | None, int]:
    """What tells its GPU from the others of the host, or None, and its threads, 0 on a GPU.

    Args:
        tf: TensorFlow; it is handed in, as whoever watches a script must not import it first.
    """
    if visible := tf.config.get_visible_devices("GPU"):
        # Its name counts within the GPUs that the environment leaves: 0 on every rank, perhaps.
        known = gpus.identities(len(tf.config.list_physical_devices("GPU")), os.environ)
        return known[int(visible[0].name.rpartition(":")[2])], 0
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0)
    return None, threads or len(os.sched_getaffinity(0))  # 0: all that there are
