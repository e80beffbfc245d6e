"""What a launcher and its ranks write: whose line it is, who wrote last, what mpirun says of ends.

Open MPI's mpirun puts what it has to say itself into a block between two rules.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field

from hvdtrain.commands.launch.layout import Layout

STEP = re.compile(rb"\bstep (\d+)")
# The mark of each dialect; its first group is the rank. Open MPI and Hydra put one before every
# piece they get hold of, so also into the middle of a line: "<rank 0> par<rank 1> other\n<rank 0>
# tial". The others write whole lines, and a mark counts at their beginning only.
MARKS = {
    "openmpi4": re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:"),
    "openmpi5": re.compile(rb"\[[^\]\s]*,(\d+)\]<std(?:out|err|diag)>: ?"),
    "mpich": re.compile(rb"<rank (\d+)> "),
    "intel": re.compile(rb"\A\[(\d+)\] ?"),
    "pals": re.compile(rb"\A\S+ (\d+): ?"),
    "srun": re.compile(rb"\A *(\d+): ?"),
}
# What Open MPI's mpirun itself has to say stands between two rules.
RULE = b"-" * 74 + b"\n"
BLOCK = re.compile(rb"^%b.*?^%b" % (RULE, RULE), re.MULTILINE | re.DOTALL)
ENDING = re.compile(rb"non-zero (?:status|exit\s+code)|exited\s+on\s+signal")  # of some rank
# What a rank that waits for another one says now and then (``waits``): no sign of life.
WAITING = re.compile(rb"hvdtrain: \d+ s in [^\n]* waiting for ")
# What a rank has said if it has said why it ends: ours by ``exit.speak`` and ``announce``; Python's
# traceback, the interpreter's own error, a command line's.
REASON = re.compile(
    rb"hvdtrain: (?:error|failed|interrupted|rank \d+ on|SIG[A-Z]+\d?:)"
    rb"|Traceback \(most recent call last\)|[\w.-]+: error: "
    rb"|python[\d.]*: (?:can't open file|No module named)"
)
LONGEST_BLOCK = 4096  # bytes of a block


def take_out_endings(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` into what is not about how ranks ended, and mpirun's blocks that are."""
    endings = []

    def take(block: re.Match[bytes]) -> bytes:
        about = ENDING.search(block[0])
        endings.append(block[0] if about else b"")
        return b"" if about else block[0]

    return BLOCK.sub(take, text), b"".join(endings)


def cut_block(text: bytes) -> tuple[bytes, bytes]:
    """Split ``text`` before a block of mpirun's that has only begun."""
    whole = text.count(RULE) % 2 == 0
    end = text.rfind(b"\n") + 1 if whole else text.rfind(RULE)
    begun = text[end:]
    if (whole and not RULE.startswith(begun)) or len(begun) > LONGEST_BLOCK:
        return text, b""
    return text[:end], begun


def holds_output(data: bytes) -> bool:
    """Return whether ``data`` is a sign of life, and not only that a rank waits for another one."""
    return any(line and not WAITING.search(line) for line in data.split(b"\n"))


@dataclass
class RankOutput:
    """Joins the pieces of one stream again, line by line and rank by rank."""

    dialect: str  # whose marks to look for
    _raw: bytes = b""
    _begun: dict[int | None, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return the lines that ``data`` completes, with their rank; None: the launcher's own."""
        *whole, self._raw = (self._raw + data).split(b"\n")
        lines: list[tuple[int | None, bytes]] = []
        for line in whole:
            lines += self._line(line)
        return lines

    def end(self) -> list[tuple[int | None, bytes]]:
        """Return the unfinished lines when the stream closes."""
        lines = self._line(self._raw) if self._raw else []
        self._raw = b""
        return [*lines, *((rank, text) for rank, text in self._begun.items() if text)]

    def _line(self, line: bytes) -> list[tuple[int | None, bytes]]:
        """Return the piece that the end of ``line`` completes: its last; keep the others."""
        before, *marked = MARKS[self.dialect].split(line)
        pieces: list[tuple[int | None, bytes]] = [(None, before)] if before or not marked else []
        pieces += [(int(rank), text) for rank, text in zip(marked[::2], marked[1::2], strict=True)]
        for rank, text in pieces:
            self._begun[rank] = self._begun.get(rank, b"") + text
        last = pieces[-1][0]
        return [(last, self._begun.pop(last))]


@dataclass
class LastOutput:
    """What the ranks have written last."""

    at: float = field(default_factory=time.monotonic)  # when it came
    rank: int | None = None  # the rank that wrote last, as far as the output tells
    text: bytes = b""  # its last line
    steps: dict[int | None, int] = field(default_factory=dict)  # by rank

    def note(self, rank: int | None, line: bytes) -> None:
        """Remember that ``rank`` wrote ``line``."""
        if rank is None or not holds_output(line):
            return
        self.rank, self.text = rank, line
        steps = STEP.findall(line)
        if steps:
            self.steps[rank] = int(steps[-1])

    def describe(self, layout: Layout) -> str:
        """Say which rank wrote last, where, and at which step."""
        if self.rank is None:
            return "no rank has produced output"
        host = layout.host_of(self.rank) or socket.gethostname()
        step = self.steps.get(self.rank, max(self.steps.values(), default=None))
        # A line without a step may be of any later one: progress is reported only now and then.
        where = "at" if STEP.search(self.text) else "after"
        where = "" if step is None else f", {where} step {step}"
        line = self.text.decode(errors="replace").strip()
        shown = line if len(line) <= 100 else line[:97] + "..."
        return f"last output from rank {self.rank} on {host}{where}: {shown!r}"
