"""Which PyTorch and TensorFlow are installed.

Neither is imported: both say their version in small files, and importing them takes seconds and
may touch a GPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

TENSORFLOW_NAMES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "intel-tensorflow",
    "tf-nightly",
)


@dataclass(frozen=True)
class Torch:
    """An installed PyTorch."""

    version: str
    """With its local part, such as 2.13.0+cpu."""
    cuda: str | None
    """The CUDA version it was built for; None for a CPU build."""
    identity: str
    """What tells two builds of one version apart: CUDA, HIP and the commit."""
    root: Path
    """Directory of the package."""


@dataclass(frozen=True)
class TensorFlow:
    """An installed TensorFlow."""

    version: str
    """Version of the distribution."""
    cuda: bool
    """Whether it was built for CUDA."""
    root: Path
    """Directory of the package."""

    def extra_includes(self) -> tuple[Path, ...]:
        """Return header directories that its own flags leave out (since about 2.20)."""
        external = self.root / "include" / "external"
        found = (external / "highwayhash", external / "farmhash_archive" / "src")
        return tuple(path for path in found if path.is_dir())


def package_root(name: str) -> Path | None:
    """Return the directory of an importable package without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def find_torch() -> Torch | None:
    """Find PyTorch by its ``version.py``."""
    root = package_root("torch")
    if root is None or not (root / "version.py").is_file():
        return None
    facts = literals((root / "version.py").read_text())
    version = str(facts.get("__version__", "unknown"))
    cuda = facts.get("cuda")
    identity = f"cuda={cuda} hip={facts.get('hip')} commit={facts.get('git_version')}"
    return Torch(version, str(cuda) if cuda else None, identity, root)


def find_tensorflow() -> TensorFlow | None:
    """Find TensorFlow by its distribution, whichever name that has."""
    root = package_root("tensorflow")
    for name in TENSORFLOW_NAMES if root else ():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert root is not None
        info = root / "python" / "platform" / "build_info.py"
        text = info.read_text() if info.is_file() else ""
        cuda = re.search(r"'is_cuda_build',\s*True|'is_cuda_build':\s*True", text) is not None
        return TensorFlow(version, cuda, root)
    return None


def literals(source: str) -> dict[str, object]:
    """Return the module-level names of ``source`` that are bound to plain values."""
    found: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant):
            found[targets[0].id] = value.value
    return found
