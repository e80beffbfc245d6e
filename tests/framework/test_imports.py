"""What a rank imports besides its framework: a job of N ranks reads each file N times.

``-s`` shows the number of modules and the seconds, for which the project has a budget of its own:
0.3 s (docs/speed.md).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.conftest import LONG, run

# Of the project, in the first update of a training. More modules need a reason.
BUDGET = 100
# What the project's modules import that a framework may not: its dependencies, and psutil of MPI.
PACKAGES = {"PIL", "hvdtrain", "msgspec", "packaging", "psutil", "rich", "safetensors", "yaml"}
PACKAGES |= {"xxhash", "pynvml"}  # the second is optional
# An update without the project.
BARE = {
    "pytorch": (
        "import torch, torchvision; net = torch.nn.Linear(1, 1); net(torch.ones(1)).backward(); "
        "torch.optim.SGD(net.parameters(), lr=0.1).step()"
    ),
    "tensorflow": (
        "import tensorflow as tf; v = tf.keras.Variable([1.0]); "
        "tf.keras.optimizers.SGD(0.1).apply([v.value], [v])"
    ),
}
IMPORT = re.compile(
    r"^import time: +(?P<microseconds>\d+) \| +\d+ \| *(?P<package>\w+)[\w.]*$", re.M
)


@dataclass(frozen=True)
class Imports:
    """Number of modules and seconds to execute them, by package; both also of failed imports."""

    modules: Counter[str]
    seconds: Counter[str]

    @property
    def packages(self) -> set[str]:
        """The packages that are installed, less the standard library."""
        names = self.modules.keys() - sys.stdlib_module_names
        return {name for name in names if not name.startswith("_") and _installed(name)}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def imports(*words: str) -> Imports:
    """Return what Python imports with the command line ``words``."""
    done = run([sys.executable, "-X", "importtime", *words], code=0)
    modules, seconds = Counter[str](), Counter[str]()
    for match in IMPORT.finditer(done.err):
        modules[match["package"]] += 1
        seconds[match["package"]] += int(match["microseconds"]) / 1e6
    return Imports(modules, seconds)


@pytest.mark.parametrize("framework", list(BARE))
@pytest.mark.parametrize("program", ["mnist", "resnet"] if LONG else ["mnist"])
def test_a_rank_imports_little_besides_its_framework(program: str, framework: str) -> None:
    pytest.importorskip({"pytorch": "torch"}.get(framework, framework))
    options = ["--strategy=single", f"--framework={framework}", "--num-steps=1", "--quiet"]
    if program == "resnet":
        options += ["--model=resnet18", "--image-size=32", "--batch-size=2"]
    bare = imports("-c", BARE[framework])
    trained = imports("-m", f"hvdtrain.{program}", *options)
    for name, seen in (("bare", bare), (program, trained)):
        print(
            f"\n{framework}, {name}: {seen.modules.total()} modules, {seen.seconds.total():.2f} s",
            end="",
        )
    number, seconds = trained.modules["hvdtrain"], trained.seconds["hvdtrain"]
    print(f", of them hvdtrain {number}, {seconds:.2f} s")
    assert trained.packages - bare.packages <= PACKAGES
    assert 50 < number <= BUDGET
