"""Installed frameworks and modules, found without importing them.

Versions are read from small files, as an import takes seconds and may initialize a GPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TENSORFLOWS = ["tensorflow", "tensorflow-cpu", "tensorflow-gpu", "intel-tensorflow", "tf-nightly"]


@dataclass(frozen=True)
class Torch:
    """An installed PyTorch."""

    version: str  # with local part, e.g. 2.13.0+cpu
    cuda: str | None  # the CUDA version it was built for; None for a CPU build
    identity: str  # distinguishes builds of a version: CUDA, HIP and commit
    root: Path  # directory of the package


@dataclass(frozen=True)
class TensorFlow:
    """An installed TensorFlow."""

    version: str  # version of the distribution
    cuda: str | None  # the CUDA version it was built for; None for a CPU build
    root: Path  # directory of the package

    def extra_includes(self) -> tuple[Path, ...]:
        """Return header directories missing in TensorFlow's compile flags (since about 2.20)."""
        external = self.root / "include" / "external"
        folders = (external / "highwayhash", external / "farmhash_archive" / "src")
        return tuple(folder for folder in folders if folder.is_dir())


def find_module(name: str) -> Path | None:
    """Return the directory of a package or the file of a module; None if not installed.

    Importing ``horovod.torch`` would import torch and MPI; only its files are inspected.
    """
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if not rest:
        return Path(folders[0] if folders else str(spec.origin))
    if not folders:  # a script of that name
        return None
    for folder in folders:  # several of a namespace, e.g. nvidia
        path = Path(folder, *rest)
        if (path / "__init__.py").is_file():
            return path
        if files := sorted(path.parent.glob(f"{path.name}.*")):
            return files[0]
    return None


def is_installed(name: str) -> bool:
    """Return whether the module ``name`` is installed, without importing it."""
    return find_module(name) is not None


def find_torch() -> Torch | None:
    """Find PyTorch by its ``version.py``."""
    root = find_module("torch")
    if root is None or not (root / "version.py").is_file():
        return None
    facts = literals((root / "version.py").read_text())
    version = str(facts.get("__version__", "unknown"))
    cuda = facts.get("cuda")  # None in a CPU build
    identity = f"cuda={cuda} hip={facts.get('hip')} commit={facts.get('git_version')}"
    return Torch(version, str(cuda) if cuda else None, identity, root)


def find_tensorflow() -> TensorFlow | None:
    """Find TensorFlow by its distribution, under any of its names."""
    root = find_module("tensorflow")
    version = next(iter(versions(*TENSORFLOWS).values()), None)
    if root is None or version is None:
        return None
    info = root / "python" / "platform" / "build_info.py"
    text = info.read_text() if info.is_file() else ""
    built = re.search(r"'is_cuda_build'[,:]\s*True", text)
    cuda = re.search(r"'cuda_version'[,:]\s*'([\d.]+)'", text)
    return TensorFlow(version, (cuda[1] if cuda else "unknown") if built else None, root)


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the distributions ``names`` that are installed."""
    installed = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def literals(source: str) -> dict[str, object]:
    """Return the module-level constants of ``source`` by name, however they are annotated."""
    constants: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant):
            constants[targets[0].id] = value.value
    return constants
