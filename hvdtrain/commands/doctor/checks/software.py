"""Python, frameworks and Horovod: installed versions, and the versions Horovod was built for.

Also the agreement of three MPIs: of mpirun, of mpi4py and of Horovod.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hvdtrain
from hvdtrain.commands.doctor.checks.loading import Loaded
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.install_horovod.build import find_installed, wheel_hash
from hvdtrain.commands.install_horovod.plan import NAMES, nccl_problems
from hvdtrain.commands.install_horovod.toolchain import Toolchain
from hvdtrain.commands.launch.launcher_choice import OPEN_MPI as OPEN_MPIS
from hvdtrain.commands.launch.launcher_choice import REMEDY, MpiLauncher, find_mpi
from hvdtrain.config.strategies import HOROVOD
from hvdtrain.errors import UsageError

REBUILD = "hvdtrain install-horovod --rebuild"
OPEN_MPI = "Open MPI"
# Family by dialect: a launcher starts ranks of its family; one that is absent here, e.g. srun,
# starts ranks of any.
FAMILIES = dict.fromkeys(("mpich", "intel", "pals"), "MPICH") | dict.fromkeys(OPEN_MPIS, OPEN_MPI)
# Without pip's cache, which may have a build for another MPI.
MPI4PY = "pip install --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py"


def python_finding() -> Finding:
    """Return the versions and paths of Python and hvdtrain."""
    outside = "" if sys.prefix != sys.base_prefix else ", no virtual environment"
    return Finding(
        "Python",
        OK,
        f"{platform.python_version()}, {sys.executable}{outside}; hvdtrain {hvdtrain.__version__}, "
        f"{Path(hvdtrain.__file__).parent}",
    )


def framework_findings(toolchain: Toolchain) -> Iterator[Finding]:
    """Judge PyTorch and TensorFlow: at least one must be installed."""
    installed = toolchain.frameworks
    remedy = "" if installed else "pip install 'hvdtrain[pytorch]' (or [tensorflow])"
    for name, title in NAMES.items():
        if framework := installed.get(name):
            built = f"for CUDA {framework.cuda}" if framework.cuda else "for the CPU"
            yield Finding(title, OK, f"{framework.version}, built {built}")
        else:
            yield Finding(title, ABSENT if installed else ERROR, "not installed", remedy)


def torchvision_finding(version: str, loaded: Loaded, *, mended: bool) -> Finding:
    """Judge whether a script can import torchvision, unaided or ``mended`` by install-horovod."""
    if not loaded.error:
        return Finding("torchvision", OK, f"{version}, with its extension")
    evidence = f"{version}, its extension does not load with this PyTorch ({loaded.error})"
    one_index = "install torch and torchvision from one index"
    if mended:  # hvdtrain decodes images and matches boxes by other means
        missing = "no image decoders and box operators, which hvdtrain does not use"
        return Finding("torchvision, extension", ABSENT, f"{evidence}: {missing}", one_index)
    remedy = f"hvdtrain install-horovod repairs the import; or {one_index}"
    return Finding("torchvision", WARNING, f"{evidence}: `import torchvision` fails", remedy)


@dataclass(frozen=True)
class HorovodFacts:
    """The installed Horovod and its environment."""

    version: str  # of the distribution; empty if it is not installed
    built_for: Mapping[str, str]  # version by framework, as recorded by Horovod
    installed: Mapping[str, str]  # version of each framework that is installed now
    loaded: Mapping[str, Loaded]  # result of loading each of its libraries, by framework
    build: Mapping[str, object] = field(default_factory=dict)  # empty if not built by hvdtrain
    cpu_flags: tuple[str, ...] = ()  # vector instructions of this processor


def find_horovod(toolchain: Toolchain, wheels: Path, loaded: Mapping[str, Loaded]) -> HorovodFacts:
    """Return the facts of the installed Horovod; ``wheels``: directory of cached wheels."""
    installed = find_installed(toolchain.site_packages)
    if installed is None:
        return HorovodFacts("", {}, {}, {})
    file = toolchain.site_packages / "horovod" / "metadata.json"
    built_for = {name: text for name, text in read_json(file).items() if name in HOROVOD.requires}
    return HorovodFacts(
        version=installed.version,
        built_for={name: str(text) for name, text in built_for.items()},
        installed={name: library.version for name, library in toolchain.frameworks.items()},
        loaded=loaded,
        build=build_facts(wheels, wheel_hash(installed)),
        cpu_flags=toolchain.cpu_flags,
    )


def build_facts(wheels: Path, sha256: str | None) -> Mapping[str, object]:
    """Return the build facts of the cached wheel with this hash; empty if there is none."""
    for file in sorted(wheels.glob("*/build.json")) if sha256 else ():
        record = read_json(file)
        facts = record.get("facts")
        if record.get("sha256") == sha256 and isinstance(facts, dict):
            return facts
    return {}


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in ``path``; empty if it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def horovod_findings(facts: HorovodFacts) -> Iterator[Finding]:
    """Judge Horovod: installed, built for this processor, and loading with each framework."""
    if not facts.version:
        yield Finding("Horovod", ABSENT, "not installed", "hvdtrain install-horovod")
        return
    yield _processor(facts)
    for framework, loaded in facts.loaded.items():
        yield _library(framework, loaded, facts)
    for framework in facts.installed.keys() - facts.loaded.keys():
        evidence = f"Horovod was not built for {NAMES[framework]}, which is installed"
        remedy = f"hvdtrain install-horovod; needed for --framework {framework} on several ranks"
        yield Finding(f"Horovod, {NAMES[framework]}", WARNING, evidence, remedy)


def gpu_tensor_findings(
    facts: HorovodFacts, toolchain: Toolchain, *, has_nccl: bool, gpus: int
) -> Iterator[Finding]:
    """Judge how Horovod reduces tensors on a GPU; nothing if no framework has such tensors.

    A login node often has no GPUs: then their reduction in host memory is no problem.
    """
    libraries = toolchain.frameworks.values()
    if not facts.version or not any(library.cuda for library in libraries):
        return
    check = "Horovod, GPU tensors"
    if has_nccl:
        yield Finding(check, OK, "reduced on the GPU, by NCCL")
        return
    missing = nccl_problems(tuple(facts.loaded), toolchain)
    evidence = "hvdtrain reduces them in host memory; other scripts hang or crash with them"
    if missing:
        evidence, remedy = f"{evidence} (no NCCL: {missing[0].cause})", missing[0].remedy
    else:
        remedy = f"{REBUILD} builds it with NCCL"
    yield Finding(check, WARNING if gpus else ABSENT, evidence, remedy)


def _processor(facts: HorovodFacts) -> Finding:
    build = facts.build
    version = f"{facts.version}, built with {build['mpi']}" if build.get("mpi") else facts.version
    flags = build.get("cpu")
    missing = sorted(set(flags) - set(facts.cpu_flags)) if isinstance(flags, list) else []
    if not missing:
        return Finding("Horovod", OK, version)
    evidence = (
        f"{version}, for a processor with {', '.join(flag[2:] for flag in missing)}; this one "
        "would raise SIGILL (illegal instruction)"
    )
    return Finding("Horovod", ERROR, evidence, f"{REBUILD} on this kind of host")


def _library(framework: str, loaded: Loaded, facts: HorovodFacts) -> Finding:
    name, check = NAMES[framework], f"Horovod, {NAMES[framework]}"
    built, installed = facts.built_for.get(framework), facts.installed.get(framework)
    if installed is None:
        evidence = f"built for {name} {built or '(version unknown)'}, which is not installed"
        return Finding(check, ABSENT, evidence)
    versions = f"for {installed}"
    if built != installed:
        versions = f"built for {name} {built}, {installed} is installed"
    if loaded.error:
        return Finding(check, ERROR, f"it does not load ({versions}): {loaded.error}", REBUILD)
    if built != installed:
        return Finding(check, WARNING, f"{versions}; it loads nevertheless", REBUILD)
    return Finding(check, OK, f"loads, {versions}")


@dataclass(frozen=True)
class MpiFacts:
    """The MPIs of this environment."""

    launcher: MpiLauncher | None  # of `hvdtrain launch`; None if there is none
    error: str  # on identifying it
    environment_mpirun: str  # the mpirun of this Python's environment, on the PATH or not
    mpi4py: Loaded  # result of loading mpi4py
    horovod: Mapping[str, Loaded]  # result of loading each library of Horovod, by framework


def find_mpis(
    environ: Mapping[str, str], mpi4py: Loaded, horovod: Mapping[str, Loaded]
) -> MpiFacts:
    """Return the MPIs: the launcher's, and those loaded with mpi4py and Horovod."""
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher, problem = None, ""
    try:
        launcher = find_mpi(environ)
    except UsageError as error:
        problem = str(error)
    return MpiFacts(launcher, problem, str(mpirun) if mpirun.is_file() else "", mpi4py, horovod)


def mpi_findings(facts: MpiFacts) -> Iterator[Finding]:
    """Judge each MPI, then their agreement."""
    yield _launcher(facts)
    if facts.mpi4py.error:
        remedy = f"pip install 'hvdtrain[mpi]', or load the module of your MPI and {MPI4PY}"
        yield Finding("mpi4py", ERROR, f"it does not load: {facts.mpi4py.error}", remedy)
    else:
        libraries = "; ".join(f"{identity}, {path}" for path, identity in facts.mpi4py.mpi)
        yield Finding("mpi4py", OK, f"uses {libraries or 'no MPI'}")
    users = {"mpi4py": facts.mpi4py}
    users |= {f"Horovod ({NAMES[name]})": loaded for name, loaded in facts.horovod.items()}
    yield agreement(facts, {name: loaded for name, loaded in users.items() if loaded.mpi})


def _launcher(facts: MpiFacts) -> Finding:
    mpi = facts.launcher
    if mpi is None:
        remedy = (
            f"put {facts.environment_mpirun} on the PATH: activate this environment"
            if facts.environment_mpirun
            else REMEDY
        )
        evidence = facts.error.removesuffix(f": {REMEDY}") or "none on the PATH"
        return Finding("mpirun", ERROR, evidence, remedy)
    name = FAMILIES.get(mpi.dialect, mpi.dialect)
    return Finding("mpirun", OK, f"{name} {mpi.version}, {mpi.program}")


def agreement(facts: MpiFacts, users: Mapping[str, Loaded]) -> Finding:
    """Judge whether the MPIs that ``users`` have loaded, by their names, are the launcher's."""
    check = "MPI agreement"
    if not users:
        return Finding(check, ABSENT, "no library uses MPI")
    libraries = {name: loaded.mpi[0] for name, loaded in users.items()}
    summary = "; ".join(
        f"{', '.join(name for name in libraries if libraries[name] == library)}: "
        f"{library[1]}, {library[0]}"
        for library in dict.fromkeys(libraries.values())
    )
    mpi = facts.launcher
    starter = FAMILIES.get(mpi.dialect, "") if mpi else ""
    families = {
        OPEN_MPI if identity.startswith(OPEN_MPI) else "MPICH"
        for _, identity in libraries.values()
        if not identity.startswith("unknown")
    }
    if mpi and starter and families - {starter}:
        evidence = f"{mpi.program} starts ranks of {starter}, each in a world of 1 ({summary})"
        remedy = f"put the mpirun of that MPI first on the PATH, or {REBUILD} with this one first"
        return Finding(check, ERROR, evidence, remedy)
    if len(families) > 1:
        return Finding(check, ERROR, f"two MPIs in one process: {summary}", f"{REBUILD}; {MPI4PY}")
    if len({path for path, _ in libraries.values()}) > 1:
        return Finding(check, WARNING, f"two copies of one MPI: {summary}", f"{REBUILD}; {MPI4PY}")
    path, identity = next(iter(libraries.values()))
    version = identity.rpartition(" ")[2]
    if mpi and starter == OPEN_MPI and mpi.version not in ("", version):
        evidence = f"mpirun is {mpi.version}, the library {version} ({path}): may work"
        remedy = f"use the mpirun that belongs to the library, or {REBUILD}"
        return Finding(check, WARNING, evidence, remedy)
    names = ", ".join(["mpirun"] * bool(starter) + [*users])
    if mpi is None:
        return Finding(check, ABSENT, f"no mpirun to compare with; {names}: {identity}")
    return Finding(check, OK, f"{names}: {identity}")
