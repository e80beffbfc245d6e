"""Run hvdtrain.mnist with smaller buckets of gradients: ``small_buckets.py BYTES [options]``."""

from __future__ import annotations

import runpy
import sys

from hvdtrain.adapters import partition

partition.BUCKET_BYTES = int(sys.argv.pop(1))
runpy.run_module("hvdtrain.mnist", run_name="__main__", alter_sys=True)
