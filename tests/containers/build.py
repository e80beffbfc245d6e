"""Build an image of containers/Dockerfile without a container runtime, and train in it.

    sudo python3 -m tests.containers.build            # from the clone; needs debootstrap
    sudo python3 -m tests.containers.build --compile  # Horovod too, not from ~/.cache/hvdtrain

A bare Debian of debootstrap stands for the base image; each stage is an overlay on the one that it
is FROM, and each instruction is run in it as it stands in the Dockerfile. Then the image's user
runs `hvdtrain doctor`, a short training and ssh. All of it is in namespaces of its own, in a
folder that is gone at the end. Not tried are the runtime itself and the digest of the base image.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.containers.dockerfile import Instruction, Stage, fill_in, needed, pairs, parse

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "containers" / "Dockerfile"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as in Debian's image
INSIDE = "HVDTRAIN_TRY"  # the folder, once the namespaces are there
MACHINE = "/machine"  # where files of this machine that its pip needs are seen in the root
TRIALS = (
    "hvdtrain doctor",
    "mpirun -n 2 python -m hvdtrain.mnist --num-steps 20",
    # ssh from one host of a job to another: its key, the host's, and the PATH that it finds.
    "cd .ssh && ssh-keygen -q -t rsa -N '' -f id_rsa && cp id_rsa.pub authorized_keys"
    " && { /usr/sbin/sshd -De & } && ssh -oBatchMode=yes localhost mpirun --version",
)
LAST = 30  # lines of what a step that failed has said


@dataclass
class Container:
    """The state of a stage: its files, and what its instructions have set."""

    root: Path  # the merged view
    layers: list[Path]  # newest first
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"

    def path(self, name: str) -> Path:
        """Return where ``name`` lies, taken from the working directory."""
        return self.root / self.inside(name).lstrip("/")

    def inside(self, name: str) -> str:
        """Return the absolute path of ``name``, as it is seen in the container."""
        return str(Path(self.folder) / name)


def main() -> int:
    """Try it, inside of namespaces of its own."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.containers.build", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--target", default="cpu", help="the stage to build (cpu)")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker's"
    )
    parser.add_argument("--compile", action="store_true", help="compile Horovod in any case")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="room for 6 GB (%(default)s)"
    )
    options = parser.parse_args()
    given = dict(one.split("=", 1) for one in options.build_arg)
    stages = parse(DOCKERFILE.read_text(), given)
    if options.target not in stages:
        parser.error(f"--target {options.target}: choose from {', '.join(stages)}")
    if missing := [name for name in ("debootstrap", "unshare", "ip") if not shutil.which(name)]:
        parser.error(f"{missing[0]} is missing: apt-get install debootstrap util-linux iproute2")
    if os.geteuid() != 0:
        parser.error("mounts need root: sudo python3 -m tests.containers.build")
    if folder := os.environ.get(INSIDE):
        return Try(Path(folder), stages, given, options.compile).run(options.target)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-try-", dir=options.folder) as folder:
        # Mounts are made in there alone, so that none is left when the folder is removed.
        namespaces = ("--mount", "--pid", "--ipc", "--uts", "--mount-proc")
        unshare = ("unshare", *namespaces, "--fork", "--kill-child")
        words = [*unshare, sys.executable, "-m", "tests.containers.build", *sys.argv[1:]]
        return subprocess.run(words, env={**os.environ, INSIDE: folder}).returncode


class Try:
    """A build in ``folder``."""

    def __init__(
        self, folder: Path, stages: Mapping[str, Stage], given: Mapping[str, str], fresh: bool
    ) -> None:
        """Nothing happens yet; ``given`` are the build arguments, ``fresh`` compiles Horovod."""
        self.folder, self.stages, self.given, self.fresh = folder, stages, given, fresh
        self.built: dict[str, Container] = {}
        self.settings, self.files = pip_settings()

    def run(self, target: str) -> int:
        """Build ``target``, then try what is in it."""
        began = time.monotonic()
        try:
            for name in needed(self.stages, target):
                self.build(name)
            image = self.built[target]
            size = sum(megabytes(layer) for layer in image.layers)
            print(
                f"\n{target} is built: {size:,.0f} MB, {time.monotonic() - began:.0f} s", flush=True
            )
            for trial in TRIALS:
                print(f"\n{image.user} in {image.folder} $ {trial}", flush=True)
                self.shell(image, trial)
        except subprocess.CalledProcessError as failed:
            lines = (failed.output or "").splitlines()[-LAST:]
            print("\n".join(lines), f"exit code {failed.returncode}", sep="\n", file=sys.stderr)
            return 1
        print(f"\nall of it worked, {time.monotonic() - began:.0f} s")
        return 0

    def build(self, name: str) -> None:
        """Carry out the instructions of one stage."""
        stage = self.stages[name]
        print(f"\nFROM {stage.base} AS {name}", flush=True)
        container = self.begin(stage)
        self.built[name] = container
        for one in stage.instructions:
            print(one.shown, flush=True)
            began = time.monotonic()
            self.carry_out(one, container)
            if one.word in ("RUN", "COPY"):
                print(f"    {time.monotonic() - began:.1f} s", flush=True)
        print(f"  {name}: {megabytes(container.layers[0]):,.0f} MB of its own", flush=True)

    def begin(self, stage: Stage) -> Container:
        """Lay an empty layer on what the stage is FROM."""
        below = self.built.get(stage.base) or self.bootstrap(stage.base)
        root, upper, work = (self.folder / stage.name / kind for kind in ("root", "upper", "work"))
        for place in (root, upper, work):
            place.mkdir(parents=True)
        lower = ":".join(map(str, below.layers))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount("-t", "overlay", "overlay", "-o", options, str(root))
        mount("-t", "proc", "proc", str(root / "proc"))
        mount("-t", "sysfs", "-o", "ro", "sysfs", str(root / "sys"))
        mount("-t", "devpts", "-o", "newinstance,ptmxmode=666", "devpts", str(root / "dev/pts"))
        mount("-t", "tmpfs", "-o", "size=1g,mode=1777", "tmpfs", str(root / "dev/shm"))
        return Container(
            root, [upper, *below.layers], dict(below.environ), dict(below.arguments), below.user,
            below.folder,
        )  # fmt: skip

    def bootstrap(self, image: str) -> Container:
        """Return a bare Debian of the release that the image's tag names."""
        match = re.match(r"(?:\S*/)?debian:([a-z]+)", image)
        if not match:
            raise SystemExit(f"{image} is no Debian that debootstrap could make")
        release, base = match[1], self.folder / "base"
        print(f"  debootstrap --variant=minbase {release}", flush=True)
        began = time.monotonic()
        say(["debootstrap", "--variant=minbase", release, str(base)])
        # What a container runtime puts there.
        shutil.copy("/etc/resolv.conf", base / "etc")
        (base / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
        print(f"    {time.monotonic() - began:.1f} s", flush=True)
        return Container(base, [base])

    def carry_out(self, one: Instruction, container: Container) -> None:
        """Do what an instruction says."""
        known = {**container.arguments, **container.environ}
        text = fill_in(one.text, known)
        if one.word == "ARG":
            name = one.text.partition("=")[0]
            values = {
                **pairs(one, known),
                **({name: self.given[name]} if name in self.given else {}),
            }
            container.arguments |= values
        elif one.word == "ENV":
            container.environ |= pairs(one, known)
        elif one.word == "USER":
            container.user = text
        elif one.word == "WORKDIR":
            container.folder = container.inside(text)
            container.path(".").mkdir(parents=True, exist_ok=True)
        elif one.word == "COPY":
            self.copy(one, text.split(), container)
        elif one.word == "RUN":
            with self.mounted(one, container):
                self.shell(container, one.text, quiet=True)

    def copy(self, one: Instruction, words: list[str], container: Container) -> None:
        """Copy files of the clone, or of another stage; of a folder, what is in it."""
        *sources, target = words
        origin = self.built[one.flags["from"]].root if "from" in one.flags else ROOT
        for source in sources:
            there, here = origin / source.lstrip("/"), container.path(target)
            if there.is_dir():
                leave = shutil.ignore_patterns("__pycache__")
                shutil.copytree(there, here, dirs_exist_ok=True, symlinks=True, ignore=leave)
            else:
                into = target.endswith("/") or len(sources) > 1 or here.is_dir()
                here = here / there.name if into else here
                here.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(there, here)

    @contextlib.contextmanager
    def mounted(self, one: Instruction, container: Container) -> Iterator[None]:
        """Mount what the instruction asks for, and the files of this machine that pip needs."""
        places = {f"{MACHINE}{file}": Path(file) for file in self.files}
        if cache := dict(w.split("=", 1) for w in one.flags.get("mount", "").split(",") if w):
            target = cache["target"]
            assert cache["type"] == "cache" and target.startswith("/root/.cache/"), one.shown
            fresh = self.fresh and target.endswith("/hvdtrain")
            home = self.folder if fresh else Path.home()
            places[target] = home / target.removeprefix("/root/")
            places[target].mkdir(parents=True, exist_ok=True)
        for inside, outside in places.items():
            here = container.path(inside)
            (here if outside.is_dir() else here.parent).mkdir(parents=True, exist_ok=True)
            if not outside.is_dir():
                here.touch()
            mount("--bind", str(outside), str(here))
        try:
            yield
        finally:
            for inside in places:
                subprocess.run(["umount", str(container.path(inside))], check=True)
            shutil.rmtree(container.path(MACHINE), ignore_errors=True)

    def shell(self, container: Container, command: str, quiet: bool = False) -> None:
        """Run a line of shell in the container, as its user."""
        user, _, group = container.user.partition(":")
        home = "/root" if user == "0" else home_of(container, user)
        outside = {**self.settings, **container.arguments} if quiet else {}
        variables = {"HOME": home, **outside, **container.environ}
        words = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
        words += ["sh", "-c", f"cd {shlex.quote(container.folder)} && {command}"]
        line = ["chroot", f"--userspec={user}:{group or user}", str(container.root), *words]
        if quiet:
            say(line)
        else:  # what is tried needs no network, and opens no port of this machine
            alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
            subprocess.run([*alone, *line], check=True, stdin=subprocess.DEVNULL)


def say(words: list[str]) -> None:
    """Run a command; on a terminal show its newest line, and keep all for when it fails."""
    began, shown, heard = time.monotonic(), sys.stdout.isatty(), []
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, text=True, errors="replace", **streams) as process:
        assert process.stdout is not None
        for line in process.stdout:
            heard.append(line)
            if shown:
                room = shutil.get_terminal_size().columns - 12
                newest = line.rstrip().rpartition("\r")[2][:room]
                print(
                    f"\r\033[K    {time.monotonic() - began:4.0f} s  {newest}", end="", flush=True
                )
    if shown:
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, "".join(heard))


def pip_settings() -> tuple[dict[str, str], list[str]]:
    """Return the settings of this machine's pip as variables, and the files that they name."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    variables, files = {}, set()
    for line in told.stdout.splitlines():
        name, _, value = line.partition("=")
        text = str(shlex.split(value)[0])
        for scheme, path in re.findall(r"(file://|(?<![^\s]))(/[^\s]+)", text):
            if Path(path).exists():
                # The pages of an index lead to files beside its folder.
                files.add(str(Path(path).parent if scheme else path))
                text = text.replace(f"{scheme}{path}", f"{scheme}{MACHINE}{path}")
        variables[f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}"] = text
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return {**variables, **proxies}, sorted(files)


def home_of(container: Container, user: str) -> str:
    """Return the home directory of a user by its number."""
    lines = (container.root / "etc/passwd").read_text().splitlines()
    return next(line.split(":")[5] for line in lines if line.split(":")[2] == user)


def megabytes(folder: Path) -> float:
    """Return the size of what is in a folder."""
    told = subprocess.run(["du", "-smx", str(folder)], capture_output=True, text=True, check=True)
    return float(told.stdout.split()[0])


def mount(*words: str) -> None:
    """Mount something; it goes with the namespace."""
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
