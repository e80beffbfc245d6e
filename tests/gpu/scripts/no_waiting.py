"""Train as ``python -m hvdtrain.WORKLOAD ...``; in the middle, waiting for the device is an error.

The middle is from update 23 to 36, with all that the trainer does between them: it looks at the
device after update 20 and 40, and tells of the training at 19 and 38 or at 20 and 40. After the
middle the process ends.
"""

import os
import runpy
import sys
from typing import Any

import torch

from hvdtrain.system.machine import accelerator
from hvdtrain.tasks.training_step_pytorch import TorchTask

BEFORE, LAST = 22, 36
update = TorchTask.update
done = 0


def watched(self: TorchTask, *arguments: Any, **named: Any) -> Any:
    global done
    result = update(self, *arguments, **named)
    done += 1
    if accelerator.kind() == "cuda" and done == BEFORE:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    if done == LAST:
        print(f"nothing was waited for in updates {BEFORE + 1} to {LAST}", flush=True)
        os._exit(0)
    return result


TorchTask.update = watched  # type: ignore[method-assign]
workload, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(f"hvdtrain.{workload}", run_name="__main__", alter_sys=True)
