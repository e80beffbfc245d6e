"""The output of a launcher and its ranks: the rank of a line, the last output, mpirun's messages.

Open MPI's mpirun prints its messages as blocks between two rules.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field

from hvdtrain.commands.launch.hosts import RankLayout

STEP = re.compile(rb"\bstep (\d+)")
# The mark of each dialect; its first group is the rank. Open MPI and Hydra put one before every
# piece that they read, so also into the middle of a line: "<rank 0> par<rank 1> other\n<rank 0>
# tial". The others write whole lines, so that a mark counts only at the beginning.
MARKS = {
    "openmpi4": re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:"),
    "openmpi5": re.compile(rb"\[[^\[\]\s]*,(\d+)\]<std(?:out|err|diag)>: ?"),
    "mpich": re.compile(rb"<rank (\d+)> "),
    "intel": re.compile(rb"\A\[(\d+)\] ?"),
    "pals": re.compile(rb"\A\S+ (\d+): ?"),
    "srun": re.compile(rb"\A *(\d+): ?"),
}
# Messages of Open MPI's mpirun are between two rules.
RULE = b"-" * 74 + b"\n"
BLOCK = re.compile(rb"^%b.*?^%b" % (RULE, RULE), re.MULTILINE | re.DOTALL)
ENDING = re.compile(rb"non-zero (?:status|exit\s+code)|exited\s+on\s+signal")  # of a rank
# The periodic message of a rank that waits for another one (``waits``): no sign of progress.
WAITING = re.compile(rb"hvdtrain: \d+ s in [^\n]* waiting for ")
# Messages with the reason why a rank ends: those of hvdtrain (``exit.print_error``, ``announce``),
# a traceback, an error of the interpreter, an error of a command line.
REASON = re.compile(
    rb"hvdtrain: (?:error|failed|interrupted|rank \d+ on|SIG[A-Z]+\d?:)"
    rb"|Traceback \(most recent call last\)|[\w.-]+: error: "
    rb"|python[\d.]*: (?:can't open file|No module named)"
)
MAX_BLOCK = 4096  # bytes of a block


def split_endings(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` into all other text, and mpirun's blocks about exit codes of ranks."""
    endings = [block for block in BLOCK.findall(text) if ENDING.search(block)]
    others = BLOCK.sub(lambda block: b"" if ENDING.search(block[0]) else block[0], text)
    return others, b"".join(endings)


def cut_block(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` before an incomplete block of mpirun's."""
    complete = text.count(RULE) % 2 == 0
    end = text.rfind(b"\n") + 1 if complete else text.rfind(RULE)
    block = text[end:]
    if (complete and not RULE.startswith(block)) or len(block) > MAX_BLOCK:
        return text, b""
    return text[:end], block


def holds_output(data: bytes) -> bool:
    """Return whether ``data`` is a sign of progress, not only of a rank waiting for another one."""
    return any(line and not WAITING.search(line) for line in data.split(b"\n"))


@dataclass
class RankOutput:
    """Joins the pieces of a stream to lines, rank by rank."""

    dialect: str  # of the marks
    _raw: bytes = b""
    _incomplete: dict[int | None, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return the lines that ``data`` completes, with their rank; None: the launcher's."""
        *complete, self._raw = (self._raw + data).split(b"\n")
        return [self._line(line) for line in complete]

    def end(self) -> list[tuple[int | None, bytes]]:
        """Return the unfinished lines when the stream closes."""
        lines = [self._line(self._raw)] if self._raw else []
        self._raw = b""
        return [*lines, *((rank, text) for rank, text in self._incomplete.items() if text)]

    def _line(self, line: bytes) -> tuple[int | None, bytes]:
        """Return the last piece of ``line``, which its end completes; keep the others."""
        before, *marked = MARKS[self.dialect].split(line)
        pieces: list[tuple[int | None, bytes]] = [(None, before)] if before or not marked else []
        pieces += [(int(rank), text) for rank, text in zip(marked[::2], marked[1::2], strict=True)]
        for rank, text in pieces:
            self._incomplete[rank] = self._incomplete.get(rank, b"") + text
        last = pieces[-1][0]
        return last, self._incomplete.pop(last)


@dataclass
class LastOutput:
    """The last output of the ranks."""

    at: float = field(default_factory=time.monotonic)  # time of the last output
    rank: int | None = None  # the rank that wrote last, if known
    text: bytes = b""  # its last line
    steps: dict[int | None, int] = field(default_factory=dict)  # by rank

    def note(self, rank: int | None, line: bytes) -> None:
        """Record that ``rank`` wrote ``line``."""
        if rank is None or not holds_output(line):
            return
        self.rank, self.text = rank, line
        if steps := STEP.findall(line):
            self.steps[rank] = int(steps[-1])

    def describe(self, layout: RankLayout) -> str:
        """Return a description of the last output: its rank, host and step."""
        if self.rank is None:
            return "no rank has produced output"
        host = layout.host_of(self.rank) or socket.gethostname()
        step = self.steps.get(self.rank, max(self.steps.values(), default=None))
        # A line without a step may be from any later one: progress is reported at intervals.
        relation = "at" if STEP.search(self.text) else "after"
        position = "" if step is None else f", {relation} step {step}"
        line = self.text.decode(errors="replace").strip()
        shown = line if len(line) <= 100 else line[:97] + "..."
        return f"last output from rank {self.rank} on {host}{position}: {shown!r}"
