"""Scripts shown in the documentation."""

from __future__ import annotations

import re
import textwrap

from tests.conftest import ROOT


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def own_script() -> str:
    """Return the script of docs/own.md."""
    return blocks("own.md")[1]


def own_script_with_all() -> str:
    """Return the same with all optional parts of the page, and their imports and data."""
    _, script, evaluation, scheduler, saving, *_ = blocks("own.md")
    before, rate, after = _pieces(scheduler)
    resume, epochs, save = _pieces(saving)
    imports = (
        "from torch.optim.lr_scheduler import ReduceLROnPlateau\n"
        "from torch.utils.data import DataLoader, Subset\n"
    )
    rate_line = r" +for group in optimizer\.param_groups:\n.*\n"
    script = _put(script, r"import torch\n", imports, keep=True)
    script = _put(
        script, r" +optimizer = torch.*\n", "test = Subset(data, range(101))\n", keep=True
    )
    script = _put(script, rate_line, rate)
    script = _put(script, r" +hvd\.broadcast_state.*\n", before + resume)
    script = _put(script, r" +for epoch in .*\n", f"for epoch in {epochs.rstrip()}:\n")
    script = _put(script, r" +means, count = .*\n", after, keep=True)
    return _put(script, r" +hvd\.save_checkpoint.*\n", evaluation + save)


def own_script_in_background() -> str:
    """Return the same script with checkpoints that are written in the background."""
    script = own_script()
    before, done, save, after = _pieces(blocks("own.md")[5])
    script = _put(script, r" +hvd\.broadcast_state.*\n", before, keep=True)
    script = _put(script, r" +optimizer\.step\(\).*\n", done, keep=True)
    script = _put(script, r" +hvd\.save_checkpoint.*\n", save)
    return script.replace(
        "\n\n\nif __name__", "\n" + textwrap.indent(after, "    ") + "\n\nif __name__"
    )


def recipe(heading: str) -> str:
    """Return the Python block under a heading of docs/own.md."""
    section = (ROOT / "docs" / "own.md").read_text().partition(f"\n### {heading}\n")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block, heading
    return block[1]


def own_script_with_cycle() -> str:
    """Return the script of docs/own.md with a scheduler of PyTorch that counts steps."""
    before, after = _pieces(recipe("Schedulers of PyTorch"))
    imports = "from torch.optim.lr_scheduler import OneCycleLR\n"
    script = _put(own_script(), r"import torch\n", imports, keep=True)
    script = _put(script, r" +for group in optimizer\.param_groups:\n.*\n", "")
    script = _put(script, r" +hvd\.broadcast_state.*\n", before, keep=True)
    return _put(script, r" +optimizer\.step\(\).*\n", after, keep=True)


def own_script_with_augmentation() -> str:
    """Return the script of docs/own.md with samples that are drawn, and recorded in a file."""
    data = (
        "class Drawn(torch.utils.data.Dataset):\n"
        "    epoch = 0\n\n"
        "    def __len__(self):\n"
        "        return 1000\n\n"
        "    def __getitem__(self, index):\n"
        "        draws = [random.random(), np.random.rand(), torch.rand(1).item()]\n"
        "        with open('draws', 'a') as file:\n"
        "            print(self.epoch, index, *draws, file=file)\n"
        "        return torch.tensor(draws * 2 + [0, 1], dtype=torch.float64), index % 3\n\n\n"
    )
    script = _put(own_script(), r"import torch\n", "import random\nimport numpy as np\n", keep=True)
    script = _put(script, r"def main\(\):\n", data + "def main():\n")
    return _put(script, r" +data = TensorDataset.*\n", "data = Drawn()\n")


def own_script_with_rows(file: str) -> str:
    """Return the script of docs/own.md with samples that are read from ``file``."""
    rows = recipe("A file read sample by sample") + "\n\n"
    script = _put(own_script(), r"import torch\n", "import functools\nimport h5py\n", keep=True)
    script = _put(script, r"def main\(\):\n", rows + "def main():\n")
    # The random numbers of the data are drawn, too: the model's are then the same.
    return _put(script, r" +data = TensorDataset.*\n", f"data = Rows({file!r})\n", keep=True)


def _pieces(block: str) -> list[str]:
    """Return the parts of a block; each begins with a comment on its position."""
    return re.split(r"^#.*\n", block, flags=re.MULTILINE)[1:]


def _put(text: str, pattern: str, more: str, *, keep: bool = False) -> str:
    """Replace the line that ``pattern`` matches by ``more``, or insert it after it (``keep``)."""
    line = re.search(pattern, text)
    assert line, pattern
    space = re.match(" *", line.group()).group()  # type: ignore[union-attr]
    new = line.group() * keep + textwrap.indent(more, space)
    return text[: line.start()] + new + text[line.end() :]


def keras_script() -> str:
    """Return the script of docs/keras.md with data and a model."""
    return (
        "import hvdtrain.keras as hvd\n"
        "import keras\n"
        "import numpy as np\n"
        "hvd.init()\n"
        "random = np.random.default_rng(0)\n"
        "x, val_x = random.normal(size=(203, 5)), random.normal(size=(31, 5))\n"
        "y, val_y = np.arange(203) % 3, np.arange(31) % 3\n"
        "model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, 'softmax')])\n"
        + blocks("keras.md")[0]
    )
