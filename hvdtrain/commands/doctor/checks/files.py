"""The file systems that a training uses: their kind, whether hosts share them, room, clock."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.system.files import FULL
from hvdtrain.system.machine.limits import GIB
from hvdtrain.system.output.text import size

# Kinds that hosts share, as /proc/self/mountinfo names them; FUSE tells more after a dot.
SHARED = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "gfs2"),
    *("glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3"),
    *("virtiofs", "wekafs"),
}
LEAST_FREE = GIB // 10  # a checkpoint of ResNet-50 with its momenta takes 0.2 GiB
FEW_FREE = 5 * GIB
BLOCK = 4096  # bytes written to see whether one can
SKEW = 1.0  # seconds; make, checkpoints and logs compare times of this order


@dataclass(frozen=True)
class Place:
    """A directory that a training writes to or reads from."""

    name: str  # what it is for, such as ``current directory``
    path: Path  # where it is
    kind: str  # its file system
    free: int  # bytes that this user can still write
    files_free: int | None  # files that can still be made; None: they are not counted
    trouble: str  # why this user cannot write there; empty where it can
    ahead: float | None  # seconds by its clock; None where nothing could be written

    @property
    def shared(self) -> bool:
        """Whether other hosts see it too, as far as its kind tells."""
        return self.kind in SHARED


def find_places(environ: Mapping[str, str], current: Path) -> Iterator[Place]:
    """Look at the current directory, the home and the temporary one; each file system once."""
    wanted = (
        ("current directory", current),
        ("home", Path(environ.get("HOME") or "~").expanduser()),
        ("temporary", Path(environ.get("TMPDIR") or tempfile.gettempdir())),
    )
    seen: set[Path] = set()
    for name, path in wanted:
        if path not in seen and path.is_dir():
            seen.add(path)
            yield find_place(name, path)


def find_place(name: str, path: Path) -> Place:
    """Look at one directory; writes a small file and removes it."""
    room = os.statvfs(path)
    ahead, trouble = None, ""
    try:
        with tempfile.NamedTemporaryFile(prefix=".hvdtrain-doctor-", dir=path) as file:
            file.write(bytes(BLOCK))
            file.flush()
            os.fsync(file.fileno())  # a quota may be noticed no sooner
            before = time.time()
            os.utime(file.fileno())  # now, by the clock of the file system
            ahead = Path(file.name).stat().st_mtime - (before + time.time()) / 2
    except OSError as error:
        trouble = error.strerror or str(error)
    return Place(
        name=name,
        path=path,
        kind=kind_of(path.resolve(), Path("/proc/self/mountinfo").read_text()),
        free=room.f_bavail * room.f_frsize,
        files_free=room.f_favail if room.f_files else None,
        trouble=trouble,
        ahead=ahead,
    )


def kind_of(path: Path, mountinfo: str) -> str:
    """Return the kind of file system of ``path``: that of the last mount on the longest prefix.

    Source: ``proc(5)``, mountinfo, which writes spaces as octal numbers.
    """
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        fields, _, behind = line.partition(" - ")
        mounted = Path(fields.split()[4].replace("\\040", " "))
        length = len(mounted.parts)
        if path.is_relative_to(mounted) and length >= best:
            best, kind = length, behind.split()[0]
    return kind


def place_findings(places: Sequence[Place], hosts: int) -> Iterator[Finding]:
    """Judge room, kind and clock; ``hosts`` is how many hosts the job has."""
    for place in places:
        yield _room(place, hosts)
    yield clock_finding({str(p.path): p.ahead for p in places if p.ahead is not None})


def _room(place: Place, hosts: int) -> Finding:
    shared = "shared by hosts" if place.shared else "of this host alone"
    told = f"{place.path}: {place.kind}, {shared}, {size(place.free)} free"
    state = WARNING if place.name == "home" else ERROR
    if place.trouble:
        room = "free space, or " if place.trouble in map(os.strerror, FULL) else ""
        remedy = f"{room}use another directory (cd, TMPDIR)"
        return Finding(place.name, state, f"{told}; {place.trouble}", remedy)
    if place.free < LEAST_FREE or place.files_free == 0:
        what = "no more files" if place.files_free == 0 else "full"
        remedy = "free space, or work on another file system (--checkpoint-dir, TMPDIR)"
        return Finding(place.name, state, f"{told}: {what}", remedy)
    if place.free < FEW_FREE:
        return Finding(place.name, WARNING, told, "checkpoints may fill it; free space")
    if place.name == "current directory" and hosts > 1 and not place.shared:
        remedy = (
            f"{hosts} hosts: keep --checkpoint-dir and --data on a file system that all of them "
            "see (hvdtrain doctor -n proves which do)"
        )
        return Finding(place.name, WARNING, told, remedy)
    return Finding(place.name, OK, told)


def clock_finding(ahead: Mapping[str, float]) -> Finding:
    """Judge the clocks of file systems against this host's.

    Args:
        ahead: seconds that each is ahead, by the directory that was written to.
    """
    if not ahead:
        return Finding("clock", ABSENT, "no directory could be written to compare with")
    path, worst = max(ahead.items(), key=lambda pair: abs(pair[1]))
    if abs(worst) > SKEW:
        told = f"that of {path} is {abs(worst):.1f} s {'ahead' if worst > 0 else 'behind'}"
        remedy = "have the clocks set (chrony, NTP): dates of checkpoints and logs mislead"
        return Finding("clock", WARNING, told, remedy)
    return Finding("clock", OK, f"as the file systems' (within {abs(worst) * 1000:.0f} ms)")
