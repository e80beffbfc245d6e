"""Public names of ``hvdtrain``: documented, typed, imported on first access."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from tests.conftest import ROOT

STUB = Path(hvdtrain.__file__).with_suffix(".pyi")


def test_the_names_are_sorted_and_those_of_the_types() -> None:
    stub = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    typed = {(node.names[0].name, node.module) for node in stub}
    assert typed == {(name, f"hvdtrain.{module}") for name, module in hvdtrain._MODULES.items()}
    assert hvdtrain.__all__ == sorted({"__version__", *(name for name, _ in typed)})
    assert dir(hvdtrain) == hvdtrain.__all__


@pytest.mark.parametrize("name", sorted(set(hvdtrain.__all__) - {"__version__"}))
def test_a_public_name_and_its_methods_are_documented(name: str) -> None:
    public = getattr(hvdtrain, name)
    assert inspect.getdoc(public)
    for method, value in vars(public).items() if inspect.isclass(public) else ():
        is_method = isinstance(value, property) or getattr(value, "__name__", None) == method
        if is_method and not method.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{method}"


def test_the_reference_lists_every_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: hvdtrain\.(\w+)$", page, re.MULTILINE)
    assert sorted([*listed, "__version__"]) == hvdtrain.__all__


def test_the_names_in_the_pages_exist() -> None:
    """Modules and what they define, without importing them: a framework may be missing."""
    pages = [
        *set(ROOT.glob("*.md")) - {ROOT / "CHANGELOG.md"},
        *ROOT.glob("*/*.md"),
        *ROOT.glob("examples/*.py"),
    ]
    text = "\n".join(page.read_text() for page in pages)
    names = set(re.findall(r"\bhvdtrain(?:\.[A-Za-z_0-9]+){2,}", text))
    assert "hvdtrain.system.runtime.walltime.seconds_left" in names
    for name in names:
        path = ROOT / name.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").is_file():
            continue
        source = path.parent.with_suffix(".py")
        assert source.is_file(), name
        defined = {getattr(node, "name", "") for node in ast.parse(source.read_text()).body}
        assert path.name in defined, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hvdtrain' has no attribute 'adaptor'"):
        hvdtrain.adaptor  # type: ignore[attr-defined]  # noqa: B018


def test_names_are_imported_on_first_access() -> None:
    program = (
        "import sys, hvdtrain; names = dir(hvdtrain); before = set(sys.modules)\n"
        "print([name for name in sorted(before) if name.startswith('hvdtrain.')])\n"
        "[getattr(hvdtrain, name) for name in names]\n"
        "heavy = {'torch', 'tensorflow', 'horovod', 'mpi4py', 'matplotlib', 'scipy', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n[]\n", "")
