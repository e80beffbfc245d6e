"""File systems used by a training: their type, whether hosts share them, free space, clock."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.system.files import FULL
from hvdtrain.system.machine.limits import GIB
from hvdtrain.system.output.text import size

# Types that hosts share, as in /proc/self/mountinfo, where FUSE adds its subtype after a dot.
SHARED = re.compile(
    r"9p|afs|beegfs|ceph|cifs|fuse\.(ceph|glusterfs|sshfs)|gfs2|glusterfs|gpfs|lustre|nfs4?|ocfs2|"
    r"orangefs|panfs|pvfs2|smb3|virtiofs|wekafs"
)
MIN_FREE = GIB // 10  # a checkpoint of ResNet-50 with its momenta takes 0.2 GiB
LOW_FREE = 5 * GIB
BLOCK = 4096  # bytes of the trial write
SKEW = 1.0  # seconds; make, checkpoints and logs compare times of this order


@dataclass(frozen=True)
class Directory:
    """A directory that a training writes to or reads from."""

    name: str  # its purpose, e.g. ``current directory``
    path: Path
    kind: str  # type of its file system
    free: int  # bytes available to this user
    files_free: int | None  # number of files that can still be created; None: unlimited
    error: str  # of the trial write; empty if it succeeded
    ahead: float | None  # seconds that its clock is ahead; None if it is not writable


def find_directories(environ: Mapping[str, str], current: Path) -> Iterator[Directory]:
    """Inspect the current, the home and the temporary directory, each path once."""
    candidates = (
        ("current directory", current),
        ("home", Path(environ.get("HOME") or "~").expanduser()),
        ("temporary", Path(environ.get("TMPDIR") or tempfile.gettempdir())),
    )
    seen: set[Path] = set()
    for name, path in candidates:
        if path not in seen and path.is_dir():
            seen.add(path)
            yield inspect_directory(name, path)


def inspect_directory(name: str, path: Path) -> Directory:
    """Inspect one directory; a small file is written and removed."""
    space = os.statvfs(path)
    ahead, message = None, ""
    try:
        with tempfile.NamedTemporaryFile(prefix=".hvdtrain-doctor-", dir=path) as file:
            file.write(bytes(BLOCK))
            file.flush()
            os.fsync(file.fileno())  # a quota may be enforced only here
            before = time.time()
            os.utime(file.fileno())  # now, by the clock of the file system
            ahead = Path(file.name).stat().st_mtime - (before + time.time()) / 2
    except OSError as error:
        message = error.strerror or str(error)
    return Directory(
        name=name,
        path=path,
        kind=kind_of(path.resolve(), Path("/proc/self/mountinfo").read_text()),
        free=space.f_bavail * space.f_frsize,
        files_free=space.f_favail if space.f_files else None,
        error=message,
        ahead=ahead,
    )


def kind_of(path: Path, mountinfo: str) -> str:
    """Return the file system type of ``path``: that of the last mount on the longest prefix.

    Source: ``proc(5)``, mountinfo, which writes spaces as octal numbers.
    """
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        fields, _, filesystem = line.partition(" - ")
        mounted = Path(fields.split()[4].replace("\\040", " "))
        length = len(mounted.parts)
        if path.is_relative_to(mounted) and length >= best:
            best, kind = length, filesystem.split()[0]
    return kind


def directory_findings(directories: Sequence[Directory], hosts: int) -> Iterator[Finding]:
    """Judge space, file system type and clock; ``hosts``: number of hosts of the job."""
    for directory in directories:
        yield _space(directory, hosts)
    yield clock_finding({str(d.path): d.ahead for d in directories if d.ahead is not None})


def _space(directory: Directory, hosts: int) -> Finding:
    name, shared = directory.name, bool(SHARED.fullmatch(directory.kind))
    reach = "shared by hosts" if shared else "local to this host"
    evidence = f"{directory.path}: {directory.kind}, {reach}, {size(directory.free)} free"
    state = WARNING if name == "home" else ERROR
    if directory.error:
        free = "free space, or " if directory.error in map(os.strerror, FULL) else ""
        remedy = f"{free}use another directory (cd, TMPDIR)"
        return Finding(name, state, f"{evidence}; {directory.error}", remedy)
    if directory.free < MIN_FREE or directory.files_free == 0:
        limit = "no more files" if directory.files_free == 0 else "full"
        remedy = "free space, or use another file system (--checkpoint-dir, TMPDIR)"
        return Finding(name, state, f"{evidence}: {limit}", remedy)
    if directory.free < LOW_FREE:
        return Finding(name, WARNING, evidence, "checkpoints may fill it; free space")
    if name == "current directory" and hosts > 1 and not shared:
        remedy = (
            f"{hosts} hosts: put --checkpoint-dir and --data on a shared file system "
            "(hvdtrain doctor -n checks whether all hosts see it)"
        )
        return Finding(name, WARNING, evidence, remedy)
    return Finding(name, OK, evidence)


def clock_finding(ahead: Mapping[str, float]) -> Finding:
    """Judge the seconds that the clocks of file systems are ahead of this host's, by directory."""
    if not ahead:
        return Finding("clock", ABSENT, "no writable directory to compare with")
    path, worst = max(ahead.items(), key=lambda pair: abs(pair[1]))
    if abs(worst) <= SKEW:
        evidence = f"equals the file systems' (within {abs(worst) * 1000:.0f} ms)"
        return Finding("clock", OK, evidence)
    evidence = f"{path}'s is {abs(worst):.1f} s {'ahead' if worst > 0 else 'behind'}"
    remedy = "synchronize the clocks (chrony, NTP): dates of checkpoints and logs are wrong"
    return Finding("clock", WARNING, evidence, remedy)
