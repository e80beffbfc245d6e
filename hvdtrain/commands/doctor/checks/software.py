"""Python, frameworks and Horovod: what is here, and what Horovod was built for."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.commands.doctor.checks.loading import Loaded, extension
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.install_horovod.installed import find_installed, wheel_hash
from hvdtrain.commands.install_horovod.plan import nccl_problems
from hvdtrain.commands.install_horovod.wheel_cache import read_json
from hvdtrain.config.strategies import HOROVOD
from hvdtrain.system.machine.frameworks import versions
from hvdtrain.system.machine.toolchain import Toolchain

REBUILD = "hvdtrain install-horovod --rebuild"
PACKAGES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}


def python_finding() -> Finding:
    """Tell which interpreter this is, and which hvdtrain it runs."""
    where = "" if sys.prefix != sys.base_prefix else ", no virtual environment"
    return Finding(
        "Python",
        OK,
        f"{platform.python_version()}, {sys.executable}{where}; hvdtrain {hvdtrain.__version__}, "
        f"{Path(hvdtrain.__file__).parent}",
    )


def framework_findings(toolchain: Toolchain) -> Iterator[Finding]:
    """Judge PyTorch and TensorFlow: either may be absent, both may not."""
    torch, tensorflow = toolchain.torch, toolchain.tensorflow
    remedy = "" if torch or tensorflow else "pip install 'hvdtrain[pytorch]' (or [tensorflow])"
    missing = ABSENT if torch or tensorflow else ERROR
    if torch:
        built = f"for CUDA {torch.cuda}" if torch.cuda else "for the CPU"
        yield Finding("PyTorch", OK, f"{torch.version}, built {built}")
    else:
        yield Finding("PyTorch", missing, "not installed", remedy)
    if tensorflow:
        built = f"for CUDA {tensorflow.cuda}" if tensorflow.cuda else "for the CPU"
        yield Finding("TensorFlow", OK, f"{tensorflow.version}, built {built}")
    else:
        yield Finding("TensorFlow", missing, "not installed", remedy)


def torchvision_version(toolchain: Toolchain) -> str:
    """Return the version of torchvision; empty where PyTorch or torchvision is not installed."""
    return versions("torchvision").get("torchvision", "") if toolchain.torch else ""


def torchvision_finding(version: str, loaded: Loaded, *, mended: bool) -> Finding:
    """Tell whether a script can import torchvision: by itself, or because Horovod's set-up helps.

    Args:
        version: of the distribution.
        loaded: what came of loading its extension.
        mended: whether every Python of the environment mends the import.
    """
    if not loaded.error:
        return Finding("torchvision", OK, f"{version}, with its extension")
    without = f"{version}, its extension does not load beside this PyTorch ({loaded.error})"
    one_index = "install torch and torchvision from one index"
    if mended:  # hvdtrain decodes images and matches boxes by other means
        lacking = "image decoders and box operators, which hvdtrain does without"
        return Finding("torchvision, extension", ABSENT, f"{without}: {lacking}", one_index)
    remedy = f"hvdtrain install-horovod mends the import; or {one_index}"
    return Finding("torchvision", WARNING, f"{without}: `import torchvision` fails", remedy)


@dataclass(frozen=True)
class HorovodFacts:
    """The installed Horovod, and what it meets here."""

    version: str  # of the distribution; empty where it is not installed
    built_for: Mapping[str, str]  # version by framework, as Horovod wrote it down
    here: Mapping[str, str]  # version of each framework that is installed now
    loaded: Mapping[str, Loaded]  # what came of loading each library that it has, by framework
    build: Mapping[str, object] = field(default_factory=dict)  # empty where not hvdtrain built it
    cpu_flags: tuple[str, ...] = ()  # vector instructions that this processor has


def find_horovod(toolchain: Toolchain, wheels: Path, loaded: Mapping[str, Loaded]) -> HorovodFacts:
    """Look at the installed Horovod; ``wheels`` is where the cache keeps its wheels."""
    installed = find_installed(toolchain.site_packages)
    if installed is None:
        return HorovodFacts("", {}, {}, {})
    file = toolchain.site_packages / "horovod" / "metadata.json"
    built_for = {name: text for name, text in read_json(file).items() if name in HOROVOD.requires}
    found = {"pytorch": toolchain.torch, "tensorflow": toolchain.tensorflow}
    return HorovodFacts(
        version=installed.version,
        built_for={name: str(text) for name, text in built_for.items()},
        here={name: framework.version for name, framework in found.items() if framework},
        loaded=loaded,
        build=build_facts(wheels, wheel_hash(installed)),
        cpu_flags=toolchain.cpu_flags,
    )


def build_facts(wheels: Path, sha256: str | None) -> Mapping[str, Any]:
    """Return what the cached wheel with this hash was built from; empty where there is none."""
    for file in sorted(wheels.glob("*/build.json")) if sha256 else ():
        notes = read_json(file)
        if notes.get("sha256") == sha256 and isinstance(notes.get("facts"), dict):
            return dict(notes["facts"])
    return {}


def present_extensions() -> list[str]:
    """Return the frameworks that the installed Horovod has a library for."""
    return [framework for framework in HOROVOD.requires if extension(framework)]


def horovod_findings(facts: HorovodFacts) -> Iterator[Finding]:
    """Judge Horovod: there, built for this processor, and loading with each framework."""
    if not facts.version:
        yield Finding("Horovod", ABSENT, "not installed", "hvdtrain install-horovod")
        return
    yield _processor(facts)
    for framework, loaded in facts.loaded.items():
        yield _library(framework, loaded, facts)
    for framework in facts.here.keys() - facts.loaded.keys():
        yield Finding(
            f"Horovod, {PACKAGES[framework]}",
            WARNING,
            f"Horovod was not built for {PACKAGES[framework]}, which is installed",
            f"hvdtrain install-horovod, to train with --framework {framework} on several ranks",
        )


def gpu_tensor_findings(
    facts: HorovodFacts, toolchain: Toolchain, *, has_nccl: bool, gpus: int
) -> Iterator[Finding]:
    """Tell what Horovod does with tensors on a GPU, and what keeps it from doing better.

    Nothing is told where no framework has such tensors.

    Args:
        facts: the installed Horovod.
        toolchain: what there is to build another one with.
        has_nccl: whether it has GPU operations.
        gpus: how many GPUs are here; a login node often has none.
    """
    frameworks = [one for one in (toolchain.torch, toolchain.tensorflow) if one and one.cuda]
    if not facts.version or not frameworks:
        return
    check = "Horovod, GPU tensors"
    if has_nccl:
        yield Finding(check, OK, "summed on the GPU, by NCCL")
        return
    missing = nccl_problems(tuple(facts.loaded), toolchain)
    evidence = "hvdtrain sums them in host memory; other scripts hang or crash with them"
    if missing:
        evidence, remedy = f"{evidence} (no NCCL: {missing[0].what})", missing[0].remedy
    else:
        remedy = f"{REBUILD} builds it with NCCL"
    yield Finding(check, WARNING if gpus else ABSENT, evidence, remedy)


def _processor(facts: HorovodFacts) -> Finding:
    build = facts.build
    told = f"{facts.version}, built with {build['mpi']}" if build.get("mpi") else facts.version
    flags = build.get("cpu")
    lacking = sorted(set(flags) - set(facts.cpu_flags)) if isinstance(flags, list) else []
    if lacking:
        return Finding(
            "Horovod",
            ERROR,
            f"{told}, for a processor with {', '.join(flag[2:] for flag in lacking)}, which this "
            "one lacks: it would end with an illegal instruction",
            f"{REBUILD} on this kind of host",
        )
    return Finding("Horovod", OK, told)


def _library(framework: str, loaded: Loaded, facts: HorovodFacts) -> Finding:
    name, check = PACKAGES[framework], f"Horovod, {PACKAGES[framework]}"
    built, here = facts.built_for.get(framework), facts.here.get(framework)
    if here is None:
        evidence = f"built for {name} {built or '(version unknown)'}, which is not installed"
        return Finding(check, ABSENT, evidence)
    versions = f"built for {name} {built}, {here} is installed" if built != here else f"for {here}"
    if loaded.error:
        return Finding(check, ERROR, f"it does not load ({versions}): {loaded.error}", REBUILD)
    if built != here:
        return Finding(check, WARNING, f"{versions}; it loads all the same", REBUILD)
    return Finding(check, OK, f"loads, {versions}")
