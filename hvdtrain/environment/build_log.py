"""Reading the log of a build: how far it is, and the line that says why it failed."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Stages in order: the text that begins one in the log, and its name.
_STAGES = (
    (re.compile(r"Preparing metadata"), "unpack"),
    (re.compile(r"Running CMake in|-- Could not find CCache|The CXX compiler"), "configure"),
    (re.compile(r"\[\s*(\d+)%\] "), "compile"),
    (re.compile(r"running install_lib|creating '.*\.whl'"), "pack"),
)

# Most telling first. A compiler's or CMake's own error explains what every later line only repeats.
_CAUSES = (
    re.compile(r"No space left on device|Disk quota exceeded"),
    re.compile(r"Killed signal terminated program|virtual memory exhausted|out of memory", re.I),
    re.compile(r"^\S+:\d+(:\d+)?: (fatal )?error:|^\S+\(\d+\): (catastrophic )?error\b"),
    re.compile(r"^(\S+: fatal error|cc1plus: error|clang\S*: error):"),
    re.compile(r"^(nvcc fatal|nvcc error)"),
    re.compile(r"undefined reference to|: cannot find -l|ld returned \d+ exit status"),
    re.compile(r"^CMake Error"),
    re.compile(r"DO NOT MATCH THE HASHES|Expected sha256"),
    re.compile(r"Could not find a version|No matching distribution|Max retries exceeded"),
    re.compile(r"NewConnectionError|ConnectTimeout|Temporary failure in name resolution"),
    re.compile(r"^(\w+\.)*\w*(Error|Exception): "),
    re.compile(r"\berror: |^ERROR: ", re.I),
)

_REMEDIES = (
    (r"No space left|quota", "free space, or point HVDTRAIN_CACHE to a larger file system"),
    (r"Killed signal|memory", "the compiler ran out of memory: try --jobs 1"),
    (r"Python\.h", "apt-get install python3-dev (or python3-devel)"),
    (r"#error C\+\+\d\d|-std=c\+\+20", "use a newer compiler: module load gcc, or set CXX"),
    (r"\bMPI(_|\b)", "check that mpicxx compiles a program, or load another MPI module"),
    (r"Unsupported gpu architecture", "name your GPU's: HOROVOD_BUILD_CUDA_CC_LIST=80,90"),
    (r"nccl", "set HOROVOD_NCCL_HOME to a directory with include/nccl.h and lib/libnccl.so"),
    (r"cuda|nvcc", "load the CUDA toolkit that PyTorch was built for, or set CUDA_HOME"),
    (r"HASHES|sha256", "the archive is not the released one; check the package index"),
    (
        r"Could not find a version|No matching|retries|Connect|resolution",
        "the package index cannot be reached: run this once on a node with access (a login node); "
        "the cache is shared",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a build is, as one line of its log tells."""

    stage: str
    """One of unpack, configure, compile, pack."""
    percent: int | None = None
    """Of the compilation; None outside it."""


def read_progress(line: str) -> Progress | None:
    """Return what ``line`` says about the progress; None if nothing."""
    for pattern, stage in _STAGES:
        found = pattern.search(line)
        if found:
            return Progress(stage, int(found[1]) if found.groups() else None)
    return None


def decisive_line(lines: Sequence[str]) -> str:
    """Return the line that explains a failed build: the first of the most telling kind.

    A CMake error says in its first line only where it is; the message follows and is added.
    """
    stripped = [line.strip() for line in lines]
    for pattern in _CAUSES:
        for number, line in enumerate(stripped):
            if pattern.search(line):
                return _with_message(line, stripped[number + 1 :])
    return next((line for line in reversed(stripped) if line), "the log is empty")


def _with_message(line: str, following: Sequence[str]) -> str:
    """Add the message to a line that ends in a colon or is CMake's."""
    if not (line.startswith("CMake Error") or line.endswith(":")):
        return line
    message = itertools.takewhile(bool, itertools.dropwhile(operator.not_, following))
    return " ".join([line, *itertools.islice(message, 3)])


def remedy_for(line: str) -> str:
    """Return what the user can do about ``line``."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, line, re.IGNORECASE):
            return remedy
    return "the log holds every command and its output; please report it if it makes no sense"
