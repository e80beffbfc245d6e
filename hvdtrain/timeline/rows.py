"""The rows of a timeline: which number is which tensor, and what is counted together."""

from __future__ import annotations

import re

from hvdtrain.timeline.bars import Cell, Phase, Row, Tensor, kind_of

MOST = 50_000  # tensors with a row of their own; any more are counted together

# PyTorch numbers the tensors that were given no name, TensorFlow calls them all alike.
_NAMELESS = re.compile(
    r"(?P<kind>.*\.noname)\.\d+|Horovod(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter)"
)


class Rows:
    """Tensors by their number in the file, rows by their name, phases by name and kind."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.by_name: dict[str, Row] = {}
        self.phases: dict[tuple[str, str], Phase] = {}

    def add(self, number: int, name: str) -> None:
        """The tensor of that number has this name from now on."""
        nameless = _NAMELESS.fullmatch(name)
        once = bool(nameless and nameless["kind"])
        group = f"{nameless['kind']}.*" if nameless and once else name
        if group not in self.by_name:
            if len(self.by_name) >= MOST:
                group = "(other tensors)"
            self.by_name.setdefault(group, Row(group))
        self.tensors[number] = Tensor(self.by_name[group], lasting=not nameless, once=once)

    def cell(self, tensor: Tensor, name: str) -> Cell:
        """A new cell for the bars of that name on the tensor."""
        kind = kind_of(name, len(tensor.bars))
        phase = self.phases.setdefault((name, kind), Phase(name, kind))
        tensor.cells[name] = Cell(phase)
        return tensor.cells[name]
