"""Which rank wrote a line: the marks of each launcher, read off and written again in one form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
LONGEST = 4096  # bytes of a block


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
    if (whole and not RULE.startswith(begun)) or len(begun) > LONGEST:
        return text, b""
    return text[:end], begun


@dataclass
class Untangler:
    """Puts the pieces of one stream together again, line by line and rank by rank."""

    dialect: str
    """Whose marks to look for."""
    _raw: bytes = b""
    _begun: dict[int | None, bytes] = field(default_factory=dict)

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """The lines that ``data`` completes, with their rank; None: the launcher's own words."""
        *whole, self._raw = (self._raw + data).split(b"\n")
        lines: list[tuple[int | None, bytes]] = []
        for line in whole:
            lines += self._line(line)
        return lines

    def end(self) -> list[tuple[int | None, bytes]]:
        """What is left without an end of its line when the stream closes."""
        lines = self._line(self._raw) if self._raw else []
        self._raw = b""
        return [*lines, *((rank, text) for rank, text in self._begun.items() if text)]

    def _line(self, line: bytes) -> list[tuple[int | None, bytes]]:
        """Only the last piece of a line has come to its end; the others wait for theirs."""
        before, *marked = MARKS[self.dialect].split(line)
        pieces: list[tuple[int | None, bytes]] = [(None, before)] if before or not marked else []
        pieces += [(int(rank), text) for rank, text in zip(marked[::2], marked[1::2], strict=True)]
        for rank, text in pieces:
            self._begun[rank] = self._begun.get(rank, b"") + text
        last = pieces[-1][0]
        return [(last, self._begun.pop(last))]
