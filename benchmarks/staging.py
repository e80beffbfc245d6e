"""What ranks read from a shared file system, and seconds to the first step, with --stage-env.

python -m benchmarks.staging [--environment PREFIX] [--ranks 2 8 16] [--repeats 3]
                             [--milliseconds 2] [--one-server] [--local DIR]

Two hosts, which are network namespaces, start a training of MNIST from the shared environment and
from copies of it, in turn, in the reverse order each second time. Each host sees the environment
and its interpreter by way of scripts/slow_files.c, which counts what is opened and read, also by
mpirun and launch, and delays each open; it has nothing in memory at the start. With --one-server,
opens wait for each other, as at one metadata server. The archive is on a disk that both hosts see.
Seconds are from the start of ``hvdtrain launch``, packing and staging included, to the first line
of --metrics. --local is where the hosts have their own disks. hvdtrain itself is that of this
checkout and is not counted. Needs root: apt-get install fuse3 libfuse3-dev pkg-config.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ratios import SCRIPTS
from hvdtrain.commands.launch.staging import members
from tests.cluster import hosts
from tests.cluster.hosts import TwoHosts
from tests.conftest import environment, until

WAYS = {"shared": (), "staged": ("--stage-env",)}
LIBRARIES = ("pkg-config", "--cflags", "--libs", "fuse3")
SHOWN = 2000  # characters of the output of a run that failed
PATIENCE = 900.0  # seconds for a run


@dataclass(frozen=True)
class Figures:
    """A run: files and bytes per rank, and seconds until the first step."""

    opened: float
    megabytes: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.opened:9,.0f} files opened and {self.megabytes:9,.1f} MB read per rank, "
            f"{self.seconds:6.1f} s to the first step"
        )


class SlowHosts(TwoHosts):
    """Two hosts that see some directories by way of a slow file system."""

    def __init__(self, folder: Path, local: Path, directories: Sequence[Path]) -> None:
        """Prepare the hosts.

        Args:
            folder: for their files.
            local: a directory in which each has its disk.
            directories: what they share.
        """
        super().__init__(folder)
        self.local, self.directories = local, directories
        self.disk = folder / "disk"
        self.own = {number: local / f"disk{number}" for number in self.names}
        self.shared = {number: folder / f"shared{number}" for number in self.names}
        for path in (self.disk, *self.own.values(), *self.shared.values()):
            path.mkdir()
        self._program = folder / "slow_files"
        flags = subprocess.run(LIBRARIES, check=True, capture_output=True, text=True).stdout.split()
        source = str(SCRIPTS / "slow_files.c")
        subprocess.run(["cc", "-O2", source, "-o", str(self._program), *flags], check=True)

    def prepare(self) -> None:
        """Start the hosts; each process there mounts what its host sees."""
        self.start()
        lines = [f"mount --bind '{self.local}/disk'$1 '{self.disk}'"]
        for path in self.directories:
            lines.append(f"mount --bind '{self.folder}/shared'$1'{path}' '{path}'")
        self.set_up(" && ".join(lines))

    @contextlib.contextmanager
    def mounted(self, delay: Sequence[str]) -> Iterator[None]:
        """Mount what the hosts share, with the delay of an open; nothing of it is in memory."""
        daemons = []
        try:
            for mount in self.shared.values():
                words = [str(self._program), "/", str(mount), *delay]
                daemons.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            for mount in self.shared.values():
                until((mount / ".counters").exists)
            yield
        finally:
            for mount in self.shared.values():
                subprocess.run(["umount", str(mount)], check=False)
            for daemon in daemons:
                daemon.wait()

    def counters(self) -> tuple[int, int]:
        """Return the files opened and the bytes read on both hosts."""
        texts = [(mount / ".counters").read_text().split() for mount in self.shared.values()]
        return sum(int(text[0]) for text in texts), sum(int(text[1]) for text in texts)


def measure(
    two: SlowHosts, prefix: Path, ranks: int, options: Sequence[str], delay: Sequence[str]
) -> Figures:
    """Run a training up to its first step."""
    metrics, python = two.folder / "metrics.jsonl", str(prefix / "bin" / "python")
    metrics.unlink(missing_ok=True)
    slots = ",".join(f"{two.address(number)}:{ranks // 2}" for number in two.names)
    launch = [python, "-m", "hvdtrain.cli", "launch", "-n", str(ranks), "--hosts", slots, *options]
    training = ["-m", "hvdtrain.mnist", "--model=small", "--num-steps=1", "--log-every=1"]
    words = [*launch, "--", python, *training, f"--metrics={metrics}", "--quiet"]
    path = f"{two.folder}/bin:{prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    variables = {**two.variables, "PATH": path, "TMPDIR": str(two.disk), "OMP_NUM_THREADS": "1"}
    variables["HVDTRAIN_CACHE"] = str(two.folder / "cache")
    with two.mounted(delay):
        with tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            run = subprocess.Popen(
                two.on(1, *words),
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                while run.poll() is None and not _has_step(metrics):
                    if time.monotonic() - began > PATIENCE:
                        raise SystemExit(f"there was no step in {PATIENCE:.0f} s")
                    time.sleep(0.01)
                seconds = time.monotonic() - began
                if run.wait(PATIENCE):
                    output.seek(0)
                    raise SystemExit(
                        f"the run ended with {run.returncode}: {output.read()[-SHOWN:]}"
                    )
            finally:
                two.kill(*two.names)
                run.wait()
        opened, read = two.counters()
    return Figures(opened / ranks, read / 1e6 / ranks, seconds)


def _has_step(metrics: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        lines = metrics.read_text().splitlines(keepends=True)
        return any("step" in json.loads(line) for line in lines if line.endswith("\n"))
    return False


def compare(two: SlowHosts, prefix: Path, ranks: int, options: argparse.Namespace) -> None:
    """Measure both ways in turn, and print medians."""
    figures: dict[str, list[Figures]] = {way: [] for way in WAYS}
    delay = [str(options.milliseconds), *([str(two.folder)] if options.one_server else [])]
    for number in range(options.repeats):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            figures[way].append(measure(two, prefix, ranks, WAYS[way], delay))
            text = f"{number + 1}/{options.repeats} {ranks:2} ranks {way}: {figures[way][-1]}"
            print(text, flush=True)
    for way, runs in figures.items():
        median = Figures(
            statistics.median(run.opened for run in runs),
            statistics.median(run.megabytes for run in runs),
            statistics.median(run.seconds for run in runs),
        )
        print(f"{ranks:2} ranks {way}, median: {median}", flush=True)


def main() -> None:
    """Measure each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, default=Path(sys.prefix), metavar="PREFIX")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=2.0, help="delay of each open")
    parser.add_argument("--one-server", action="store_true", help="serve one open at a time")
    parser.add_argument("--local", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    options = parser.parse_args()
    missing = [name for name in ("cc", "pkg-config", "fusermount3") if not shutil.which(name)]
    if reason := hosts.lacks() or (missing and f"{missing[0]} is missing"):
        raise SystemExit(reason)
    prefix = options.environment.absolute()
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir=options.local) as local,
    ):
        folder = Path(name)
        sizes = [member.size for member, _ in members(prefix)]
        print(f"{prefix}: {len(sizes):,} files, {sum(sizes) / 1e6:,.0f} MB", flush=True)
        shared = [prefix]
        base = subprocess.run(
            [str(prefix / "bin" / "python"), "-c", "import sys; print(sys.base_prefix)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        if base != str(prefix) and not base.startswith("/usr"):
            shared.append(Path(base))
        two = SlowHosts(folder, Path(local), shared)
        try:
            two.prepare()
            for ranks in options.ranks:
                compare(two, prefix, ranks, options)
        finally:
            two.stop()


if __name__ == "__main__":
    main()
