"""Search inputs that break a promise: ``python -m tests.fuzz.search TARGET SECONDS SEED FOLDER``.

With atheris it keeps inputs that reach new lines; without, it mutates valid inputs only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

try:
    import atheris
except ImportError:
    atheris = None

MODULES = ["hvdtrain", "yaml"]  # whose coverage counts, also those that are imported later

with atheris.instrument_imports(MODULES) if atheris else contextlib.nullcontext():
    from tests.fuzz.guard import check, prepare
    from tests.fuzz.mutate import mutate
    from tests.fuzz.targets import TARGETS, Target

MEMORY = 8 * 2**30  # address space
MAX_BYTES = 2**15  # bytes of an input
SHRINKING = 20  # seconds to try smaller inputs for each finding
HANG = 150  # seconds of an input after which libFuzzer ends the process


def error_of(target: Target, data: bytes, folder: Path) -> Exception | None:
    """Return the error that breaks the promise for an input."""
    try:
        check(target, data, folder)
    except Exception as error:
        return error
    return None


def signature(error: Exception | None) -> str:
    """Return the type of an error and the line of the project that raised it; empty: none."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if "/hvdtrain/" in frame.filename][-1:] or frames[-1:]
    where = "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last)
    return f"{type(error).__name__} at {where}"


def smaller(data: bytes, breaks: Callable[[bytes], bool]) -> bytes:
    """Return a part of ``data`` that still ``breaks``."""
    size = len(data) // 2
    while size:
        for start in range(0, len(data), size):
            if breaks(shorter := data[:start] + data[start + size :]):
                data = shorter
                break
        else:
            size //= 2
    return data


class Search:
    """The inputs so far, and one input of each kind of finding."""

    def __init__(self, target: Target, seconds: float, out: Path) -> None:
        self.target, self.out = target, out
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.inputs = 0
        self.found: set[str] = set()

    def take(self, data: bytes) -> None:
        """Check an input; end the process when the time is over."""
        self.inputs += 1
        error = error_of(self.target, data, self.folder)
        kind = signature(error)
        if kind and kind not in self.found:
            self.found.add(kind)
            path = self.out / hashlib.sha256(data).hexdigest()[:12]
            path.write_bytes(data)  # at once: a smaller one may not end
            path.with_suffix(".traceback").write_text("".join(traceback.format_exception(error)))
            print(f"{self.target.name}: {kind}: {path}", flush=True)
            end = min(self.end, time.monotonic() + SHRINKING)

            def breaks(part: bytes) -> bool:
                if time.monotonic() >= end:
                    return False
                return signature(error_of(self.target, part, self.folder)) == kind

            path.write_bytes(smaller(data, breaks))
        if time.monotonic() > self.end:
            rate = self.inputs / (time.monotonic() - self.began)
            number = len(self.found)
            print(f"{self.target.name}: {self.inputs} inputs, {rate:.0f}/s, {number} findings")
            sys.stdout.flush()
            os._exit(1 if self.found else 0)


def main(name: str, seconds: str, seed: str, out: str) -> None:
    """Search until the time is over."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    target = TARGETS[name]
    seeds, corpus = target.seeds(), Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    prepare(target, corpus / "first")
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)
    search = Search(target, float(seconds), Path(out))

    def mutated(data: bytes, size: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, size))
        return mutate(data or random.choice(seeds), random)[:size]

    if atheris:
        options = [f"-seed={seed}", f"-max_len={MAX_BYTES}", f"-timeout={HANG}", "-verbosity=0"]
        options += ["-rss_limit_mb=0", f"-artifact_prefix={out}/"]
        arguments = [sys.argv[0], *options, str(corpus)]
        atheris.Setup(arguments, search.take, custom_mutator=mutated)
        atheris.Fuzz()
    random = Random(seed)
    while True:
        search.take(mutate(random.choice(seeds), random))


if __name__ == "__main__":
    main(*sys.argv[1:])
