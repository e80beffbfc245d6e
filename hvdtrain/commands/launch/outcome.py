"""How a job has ended: the launcher's exit code, and what stands against it.

Where a host dies and its network stays up (a reboot, the end of a virtual machine, of Open MPI's
daemon there or of the ssh to it), the mpirun of Open MPI 5 says that it has lost the host, ends
its ranks in the middle of the job, and returns 0, now and then 255. So a code of 0 counts only if
mpirun has said nothing of the kind, and rank 0, of a training of ours, that it has ended in order.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Self

from hvdtrain.commands.launch.rank_output import REASON
from hvdtrain.errors import EXIT_OK, EXIT_PREEMPTED, HvdtrainError
from hvdtrain.system.runtime.end_mark import EndMark
from hvdtrain.system.runtime.exit import ProcessStatus

# mpirun's own words: the first on standard error, the second on standard output.
LOSS = re.compile(rb"has lost communication with a remote daemon|daemon failed to report back")
HOST = re.compile(rb"Remote daemon: .* on node (\S+)|Remote host: +(\S+)")
NOTICE = 1000  # bytes of what it says, enough for the host
UNRELIABLE = (EXIT_OK, 255)  # what mpirun returns then


class Outcome:
    """What is known of a job besides its launcher's exit code; open while the launcher runs."""

    def __init__(self) -> None:
        self.mark = EndMark()
        # By stream: the end of what was written, or mpirun's words on a host that is lost.
        self._notices: dict[int, bytes] = {}
        self._last = b"\n"  # the last byte that was written
        self.reason_given = False  # whether a rank has said why it ends

    def __enter__(self) -> Self:
        self.mark.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.mark.__exit__()

    def read(self, stream: int, data: bytes) -> None:
        """Look for a lost host in the next piece of one of the launcher's two streams."""
        self._last = data[-1:]
        text = self._notices.get(stream, b"") + data
        self.reason_given = self.reason_given or bool(REASON.search(text))
        loss = LOSS.search(text)
        self._notices[stream] = text[loss.start() :][:NOTICE] if loss else text[-NOTICE:]

    @property
    def lost_host(self) -> str | None:
        """The host that mpirun has lost; empty: one that it does not name; None: none."""
        for notice in self._notices.values():
            if LOSS.search(notice):
                host = HOST.search(notice)
                return (host[1] or host[2]).decode(errors="replace") if host else ""
        return None

    def exit_code(self, code: int, checkpoints: Path | None, *, stop_asked: bool) -> int:
        """Return the job's exit code.

        Args:
            code: the launcher's.
            stop_asked: whether the ranks were asked to save and stop.
            checkpoints: the directory from which the same command would go on.

        Raises:
            HvdtrainError: the job has not come to its end, whatever ``code`` says.
        """
        mark, lost = self.mark.read(), self.lost_host
        if not (lost is not None and code in UNRELIABLE) and (code or mark in (None, EXIT_OK)):
            return code
        # Where mpirun ends the ranks by itself they may have saved in time, and are not finished.
        if mark == EXIT_PREEMPTED and stop_asked:
            return mark
        what = "rank 0 has not come to its end"
        if lost is not None:
            what = f"host {lost} was lost" if lost else "a host was lost"
        if self._last != b"\n":  # mpirun ends its words with a blank
            sys.stderr.write("\n")
        raise HvdtrainError(f"{what} (exit code of mpirun: {code}). {_how_to_go_on(checkpoints)}")


def _how_to_go_on(checkpoints: Path | None) -> str:
    status = ProcessStatus()
    if checkpoints is not None:
        from hvdtrain.steps.checkpoint import newest_name

        if newest := newest_name(checkpoints):
            status.checkpoint = str(checkpoints / newest)
    return status.how_to_go_on()
