"""The rows of a timeline: which number is which tensor, and what is counted together."""

from __future__ import annotations

import re

from hvdtrain.timeline.bars import Cell, Phase, Row, Tensor, kind_of

MOST = 50_000  # names with a row of their own; any more are counted together
OTHERS = "(other tensors)"

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
        """The tensor of that number has this name from now on.

        Where there are too many names it is forgotten: those that come in every step have come by
        then, and names that never return ("loss.step.7") would fill the memory.
        """
        nameless = _NAMELESS.fullmatch(name)
        once = bool(nameless and nameless["kind"])
        group = f"{nameless['kind']}.*" if nameless and once else name
        if group not in self.by_name and len(self.by_name) >= MOST:
            self.tensors.pop(number, None)
            return
        row = self.by_name.setdefault(group, Row(group))
        self.tensors[number] = Tensor(row, lasting=not nameless, once=once)

    def add_unknown(self, number: int) -> None:
        """A tensor of that number is there; its name was lost, or forgotten."""
        if len(self.by_name) < MOST:
            self.add(number, f"tensor {number}")
        else:
            row = self.by_name.setdefault(OTHERS, Row(OTHERS))
            self.tensors[number] = Tensor(row, lasting=False, once=True)

    def cell(self, tensor: Tensor, name: str) -> Cell:
        """A new cell for the bars of that name on the tensor."""
        kind = kind_of(name, len(tensor.bars))
        phase = self.phases.setdefault((name, kind), Phase(name, kind))
        tensor.cells[name] = Cell(phase)
        return tensor.cells[name]
