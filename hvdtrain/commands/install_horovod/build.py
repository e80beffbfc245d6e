"""Build the wheel: run the recipe's commands, log their output, show their progress; then prove it.

The proof is an allreduce per framework on two ranks of mpirun. Last: the installed wheel, and the
repair of torchvision that is installed with it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import itertools
import json
import logging
import operator
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain.commands.install_horovod import recipe
from hvdtrain.commands.install_horovod.recipe import BuildTarget, Workshop
from hvdtrain.commands.install_horovod.toolchain import BuildMpi, Toolchain
from hvdtrain.commands.install_horovod.wheel_cache import CachedWheel, WheelCache
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.files import file_digest, replacing
from hvdtrain.system.output.stderr import Display
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.command import TIMED_OUT, Command, CommandResult, run
from hvdtrain.workloads import torchvision_mend

log = logging.getLogger(__name__)

# Stages in order: the text at the beginning of each in the log, and its name.
_STAGES = (
    (re.compile(r"Preparing metadata"), "unpack"),
    (re.compile(r"Running CMake in|-- Could not find CCache|The CXX compiler"), "configure"),
    (re.compile(r"\[\s*(\d+)%\] "), "compile"),
    (re.compile(r"running install_lib|creating '.*\.whl'"), "pack"),
)

# Most specific first. The compiler's or CMake's error explains the errors that follow from it.
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
    (r"Unsupported gpu architecture", "set your GPU's, e.g. --cuda-arch 80,90"),
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
class Build:
    """One build of a wheel."""

    target: BuildTarget
    toolchain: Toolchain
    cache: WheelCache  # for the wheel
    environ: Mapping[str, str]  # the environment of this process

    @property
    def facts(self) -> dict[str, object]:
        """Return all properties that affect the binary, as plain values."""
        target, tools, environ = self.target, self.toolchain, self.environ
        mpi, compiler, prefix = tools.mpi, tools.compiler, tools.prefix
        assert mpi and compiler  # otherwise the plan has problems
        facts: dict[str, object] = {
            "recipe": recipe.RECIPE,
            "archive": recipe.HOROVOD_SHA256,
            "tools": recipe.BUILD_TOOLS,
            "python": tools.python_tag,
            "frameworks": sorted(target.frameworks),
            "gpu": target.gpu,
            "mpi": mpi.identity,
            # Relative inside the environment, otherwise the absolute path is part of the binary.
            "mpi_place": [
                str(path.relative_to(prefix) if path.is_relative_to(prefix) else path)
                for path in mpi.libraries
            ],
            "compiler": compiler.identity,
            "cpu": tools.cpu_flags,
            "flags": {
                name: environ[name]
                for name in (*recipe.FLAG_VARIABLES, *recipe.USER_VARIABLES)
                if name in environ
            },
        }
        if tools.torch and "pytorch" in target.frameworks:
            facts["torch"] = [tools.torch.version, tools.torch.identity]
        if tools.tensorflow and "tensorflow" in target.frameworks:
            facts["tensorflow"] = [tools.tensorflow.version, tools.tensorflow.cuda is not None]
        if target.gpu == "nccl" and tools.cuda and tools.nccl:
            home = "package" if tools.cuda.is_package else str(tools.cuda.home)
            facts["cuda"] = [tools.cuda.version, home, *target.cuda_arches]
            facts["nccl"] = [tools.nccl.version, str(tools.foreign_nccl or "")]
        return facts

    @property
    def key(self) -> str:
        """Return the name under which a binary with these facts is cached."""
        text = json.dumps(self.facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def workshop(self) -> Workshop:
        """Return the directories of this build."""
        return Workshop(self.cache.build_root(self.key))

    def steps(self, has_archive: bool) -> list[tuple[str, Command]]:
        """Return the commands in order, each with the name of its stage."""
        python, workshop = self.toolchain.python, self.workshop
        changes = recipe.build_environment(self.target, self.toolchain, workshop, self.environ)
        steps = [("build tools", recipe.tools_command(python, workshop))]
        archive = self.cache.archive
        if not has_archive:
            steps.append(("download", recipe.download_command(python, workshop, changes)))
        steps.append(("compile", recipe.wheel_command(python, workshop, archive, changes)))
        return steps

    def run(self, log_file: Path) -> CachedWheel:
        """Build and cache the wheel; call it within a session of the cache.

        Raises:
            HvdtrainError: a command failed; the message has the log's decisive line and a remedy.
        """
        workshop = self.workshop
        shutil.rmtree(workshop.root, ignore_errors=True)  # of a build that was killed
        try:
            self._prepare()
            with Display() as display, log_file.open("a") as stream:
                for stage, command in self.steps(self.cache.has_archive()):
                    self._run_step(stage, command, display, stream)
            wheels = list(workshop.wheels.glob("horovod-*.whl"))
            if len(wheels) != 1:
                raise HvdtrainError(f"the build produced no wheel; log: {log_file}")
            return self.cache.store(self.key, wheels[0], self.facts)
        finally:
            shutil.rmtree(workshop.root, ignore_errors=True)

    def _prepare(self) -> None:
        """Create the directories, the compiler wrapper, and the link to NCCL's library."""
        workshop, compiler = self.workshop, self.toolchain.compiler
        for path in (workshop.scratch, workshop.nothing, workshop.wheels, workshop.nccl):
            path.mkdir(parents=True)
        assert compiler is not None
        rpaths = recipe.relative_rpaths(self.toolchain)
        workshop.compiler.write_text(recipe.compiler_wrapper(compiler.argv, rpaths))
        workshop.compiler.chmod(0o755)
        workshop.requirement.write_text(recipe.REQUIREMENT)
        if self.toolchain.nccl:
            (workshop.nccl / "libnccl.so").symlink_to(self.toolchain.nccl.library.absolute())
        cuda = self.toolchain.cuda
        if self.target.gpu == "none":
            workshop.start.mkdir()
            (workshop.start / "sitecustomize.py").write_text(recipe.NO_GPU)
        elif cuda and cuda.is_package:
            complete_toolkit(cuda.home, workshop.cuda)

    def _run_step(self, stage: str, command: Command, display: Display, stream: TextIO) -> None:
        """Run one command, log it and show its progress; after the download, cache the archive."""

        def write_line(line: str) -> None:
            stream.write(line + "\n")
            if progress := read_progress(line):
                stream.flush()
                display.show(*progress)

        display.stage(stage)
        stream.write(f"$ {command.show()}\n")
        result = run(command, write_line)
        if not result.ok:
            cause = decisive_line(result.output.splitlines())
            raise HvdtrainError(
                f"the build of Horovod failed ({stage}, exit code {result.exit_code}): {cause}; "
                f"{remedy_for(cause)}; log: {stream.name}"
            )
        if stage == "download":
            fetched = self.workshop.scratch / recipe.HOROVOD_ARCHIVE
            if file_digest(fetched, "sha256") != recipe.HOROVOD_SHA256:
                raise HvdtrainError(f"{fetched.name} is not the released archive: its hash differs")
            self.cache.archive.parent.mkdir(exist_ok=True)
            fetched.rename(self.cache.archive)


def complete_toolkit(home: Path, folder: Path) -> None:
    """Create ``folder`` as a copy, by links, of the toolkit ``home`` with linker names (libX.so).

    nvcc searches ``bin/../lib64``: if ``bin`` were a link, that would be ``home``'s.
    """
    for name in ("bin", "lib64"):
        (folder / name).mkdir(parents=True)
    for path in (*home.iterdir(), *(home / "bin").iterdir()):
        if path.name not in ("bin", "lib"):
            (folder / path.relative_to(home)).symlink_to(path.absolute())
    for library in sorted((home / "lib").iterdir()):  # libX.so, if there is one, comes first
        for name in {library.name, re.sub(r"\.so\..*", ".so", library.name)}:
            if not (folder / "lib64" / name).is_symlink():
                (folder / "lib64" / name).symlink_to(library.absolute())
    (folder / "lib").symlink_to("lib64")


def read_progress(line: str) -> tuple[str, float | None] | None:
    """Return the stage of a line of the log, and the compiled share; None: no progress."""
    for pattern, stage in _STAGES:
        if match := pattern.search(line):
            return stage, int(match[1]) / 100 if match.groups() else None
    return None


def decisive_line(lines: Sequence[str]) -> str:
    """Return the line that explains a failed build: the first of the most specific kind.

    The first line of a CMake error has only its position; the message that follows is added.
    """
    stripped = [line.strip() for line in lines]
    for pattern in _CAUSES:
        for number, line in enumerate(stripped):
            if pattern.search(line):
                return _with_message(line, stripped[number + 1 :])
    return next((line for line in reversed(stripped) if line), "the log is empty")


def _with_message(line: str, following: Sequence[str]) -> str:
    """Add the following message to a line of CMake, or one that ends in a colon."""
    if not (line.startswith("CMake Error") or line.endswith(":")):
        return line
    message = itertools.takewhile(bool, itertools.dropwhile(operator.not_, following))
    return " ".join([line, *itertools.islice(message, 3)])


def remedy_for(line: str) -> str:
    """Return the remedy for the error in ``line``."""
    default = (
        "see the log, which has every command and its output; please report it if it is unclear"
    )
    return next((remedy for text, remedy in _REMEDIES if re.search(text, line, re.I)), default)


PROOF = Path(__file__).with_name("proof_program.py")  # run by its path: see there
RANKS = 2
TIMEOUT = 180.0  # seconds; TensorFlow's import takes half a minute from an uncached shared disk


def proof_command(
    framework: str, mpi: BuildMpi, python: Path, folder: Path, gpu: str, environ: Mapping[str, str]
) -> Command:
    """Return the command of an allreduce over two ranks, with the Horovod in ``folder``.

    More ranks than cores are allowed, for machines with one core. A training's settings
    (HOROVOD_...) are unset, and GPUs are hidden if the build has no GPU operations.
    """
    changes: dict[str, str | None] = {n: None for n in environ if n.startswith("HOROVOD_")}
    if gpu == "none":
        changes["CUDA_VISIBLE_DEVICES"] = ""
    options: tuple[str, ...] = ("-n", str(RANKS))
    if mpi.identity.startswith("Open MPI"):
        options += ("--oversubscribe",)
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = (str(python), "-P", str(PROOF), framework, str(RANKS), str(folder))
    return Command((str(mpi.mpirun), *options, *program), changes)


def read_proof(output: str) -> dict[str, object]:
    """Return the object printed by rank 0; empty if there is none."""
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                result = json.loads(line)
            except ValueError:
                continue
            if isinstance(result, dict) and "max_error" in result:
                return result
    return {}


def prove(commands: Sequence[tuple[str, Command]], log_file: Path) -> dict[str, object]:
    """Run the proof of each framework; return the results.

    Raises:
        HvdtrainError: a result differs from the closed form, or is missing.
    """
    answers: dict[str, object] = {}
    for framework, command in commands:
        start = time.monotonic()
        with terminal.working(f"testing Horovod for {framework}: allreduce on {RANKS} ranks"):
            result = run(command, timeout=TIMEOUT)
        with log_file.open("a") as stream:
            stream.write(f"$ {command.show()}\n{result.output}")
        answer = read_proof(result.output)
        if not (result.ok and answer.get("ok")):
            raise HvdtrainError(f"{_failure(framework, result, answer)}; log: {log_file}")
        seconds = round(time.monotonic() - start, 1)
        answers[framework] = answer | {"seconds": seconds}
        log.info("proven: %s, allreduce on %d ranks, %.1f s", framework, RANKS, seconds)
    return answers


def _failure(framework: str, result: CommandResult, answer: Mapping[str, object]) -> str:
    """Return the message of a failed proof: its end, and the ranks' decisive line."""
    cause = dict(answer) or decisive_line(result.output.splitlines())
    end = f"exit code {result.exit_code}"
    if result.exit_code == TIMED_OUT:
        end = f"no end within {TIMEOUT:.0f} s"
    return f"the proof for {framework} failed: allreduce on {RANKS} ranks, {end} ({cause})"


def find_installed(site_packages: Path) -> importlib.metadata.Distribution | None:
    """Return the Horovod installed in ``site_packages``, bypassing importlib's caches."""
    importlib.invalidate_caches()
    matches = importlib.metadata.distributions(name="horovod", path=[str(site_packages)])
    return next(iter(matches), None)


def wheel_hash(distribution: importlib.metadata.Distribution | None) -> str | None:
    """Return the SHA-256 of the installed wheel file, as recorded by pip.

    Source: the ``direct_url.json`` of the packaging specifications. None if the distribution is
    from an index, or was installed by another tool.
    """
    try:
        text = distribution.read_text("direct_url.json") if distribution else None
        archive = json.loads(text or "{}").get("archive_info", {})
    except (OSError, ValueError, AttributeError):
        return None
    value = archive.get("hashes", {}).get("sha256") or archive.get("hash", "")
    return str(value).removeprefix("sha256=") or None


def is_complete(distribution: importlib.metadata.Distribution | None) -> bool:
    """Return whether every file of the distribution exists with its recorded size."""
    if distribution is None or not distribution.files:
        return False
    for file in distribution.files:
        path = Path(str(file.locate()))
        if file.size is not None and (not path.is_file() or path.stat().st_size != file.size):
            return False
    return True


def mend_file(site_packages: Path) -> Path:
    """Return the path of the .pth file that repairs torchvision's import in the environment."""
    return site_packages / "hvdtrain_torchvision.pth"


def mend_torchvision(site_packages: Path) -> None:
    """Repair torchvision's import in the environment, until Horovod is uninstalled.

    The files are added to Horovod's RECORD, so that pip removes them with Horovod.
    """
    switch = mend_file(site_packages)
    added = {
        f"{switch.stem}.py": Path(torchvision_mend.__file__).read_bytes(),
        switch.name: f"import {switch.stem}\n".encode(),  # Python executes it at start
    }
    distribution = find_installed(site_packages)
    assert distribution is not None and distribution.files
    [file] = [file for file in distribution.files if file.name == "RECORD"]
    record = Path(str(file.locate()))
    lines = record.read_text().splitlines()
    lines = [line for line in lines if line.partition(",")[0] not in added]
    for name, data in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        lines.append(f"{name},sha256={digest.rstrip('=')},{len(data)}")
    text = "".join(f"{line}\n" for line in lines)
    for path, data in (
        (record, text.encode()),
        *((site_packages / name, data) for name, data in added.items()),
    ):
        with replacing(path) as stream:
            stream.write(data)
