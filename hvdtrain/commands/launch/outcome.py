"""The outcome of a job: the launcher's exit code, and evidence against it.

If a host dies while its network stays up (a reboot, the end of a virtual machine, of Open MPI's
daemon there or of the ssh to it), the mpirun of Open MPI 5 reports the lost host, ends its ranks in
the middle of the job, and returns 0, sometimes 255. So a code of 0 counts only if mpirun has
reported no lost host, and rank 0 of a training of hvdtrain has left the mark of an orderly end.
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

# Messages of mpirun: the first on standard error, the second on standard output.
LOSS = re.compile(rb"has lost communication with a remote daemon|daemon failed to report back")
HOST = re.compile(rb"Remote daemon: .* on node (\S+)|Remote host: +(\S+)")
NOTICE = 1000  # bytes of its message, enough for the host
UNRELIABLE = (EXIT_OK, 255)  # exit codes of mpirun then


class JobOutcome:
    """Evidence on a job's end besides its launcher's exit code; open while the launcher runs."""

    def __init__(self) -> None:
        self.mark = EndMark()
        # By stream: the end of the output, or mpirun's message about a lost host.
        self._notices: dict[int, bytes] = {}
        self._last = b"\n"  # the last byte of output
        self.reason_reported = False  # whether a rank has reported why it ends

    def __enter__(self) -> Self:
        self.mark.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.mark.__exit__()

    def read(self, stream: int, data: bytes) -> None:
        """Search the next piece of one of the launcher's streams for a lost host or a reason."""
        self._last = data[-1:]
        text = self._notices.get(stream, b"") + data
        self.reason_reported = self.reason_reported or bool(REASON.search(text))
        loss = LOSS.search(text)
        self._notices[stream] = text[loss.start() :][:NOTICE] if loss else text[-NOTICE:]

    @property
    def lost_host(self) -> str | None:
        """The host that mpirun reports as lost; empty: it does not name it; None: none is lost."""
        for notice in self._notices.values():
            if LOSS.search(notice):
                host = HOST.search(notice)
                return (host[1] or host[2]).decode(errors="replace") if host else ""
        return None

    def exit_code(self, code: int, checkpoints: Path | None, *, stop_requested: bool) -> int:
        """Return the job's exit code.

        Args:
            code: the launcher's.
            stop_requested: whether the ranks were requested to save and stop.
            checkpoints: the directory from which the same command would resume.

        Raises:
            HvdtrainError: the job is incomplete, whatever ``code`` is.
        """
        mark, lost = self.mark.read(), self.lost_host
        if not (lost is not None and code in UNRELIABLE) and (code or mark in (None, EXIT_OK)):
            return code
        # Ranks that mpirun itself ends may have saved in time, but are not finished.
        if mark == EXIT_PREEMPTED and stop_requested:
            return mark
        failure = "rank 0 ended early"
        if lost is not None:
            failure = f"host {lost} was lost" if lost else "a host was lost"
        if self._last != b"\n":  # mpirun's message ends with a blank
            sys.stderr.write("\n")
        raise HvdtrainError(f"{failure} (exit code of mpirun: {code}). {_resume_hint(checkpoints)}")


def _resume_hint(checkpoints: Path | None) -> str:
    status = ProcessStatus()
    if checkpoints is not None:
        from hvdtrain.steps.checkpoint import newest_name

        if newest := newest_name(checkpoints):
            status.checkpoint = str(checkpoints / newest)
    return status.resume_hint()
