"""Measure the size and the words of the project; ``make check`` holds them to ``house.json``.

The file is a ratchet: ``--write`` lowers figures only. A figure is raised with its reason, which
stands beside it: what the same commit removes elsewhere, or the allowance that an issue grants::

    python .ci/house.py                      # the table, and what is above the file's figures
    python .ci/house.py --write              # lower the file's figures to the measured ones
    python .ci/house.py --raise 'REASON'     # raise those that are above
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = Path(__file__).with_name("house.json")
RAISED = "raised"  # key of the reasons in that file
HELP = ROOT / "tests/unit/golden/help/hvdtrain.resnet.txt"
# Conversational words for data; each has a noun in the field's English (docs/architecture.md).
BANNED = {
    *("told", "said", "asked", "place", "places", "alone", "everyone", "own", "given", "made"),
    *("course", "courses", "ladder", "lever", "levers", "kit", "bench", "somebody", "whatever"),
}
FRAMEWORK = re.compile(r"_?(pytorch|tensorflow|torch|tf)_?")  # in the path of a file
VAGUE = {"one", "found", "some", "thing", "things", "what", "why", "it", "its", "such", "other"}


def trees(folder: str) -> dict[Path, ast.Module]:
    """Return the parsed files of ``folder`` by their path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}


def bound(tree: ast.Module) -> Iterator[str]:
    """Yield each name that ``tree`` binds: variables, parameters, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def modules(package: dict[Path, ast.Module]) -> dict[str, Path]:
    """Return the files by the names under which they are imported."""
    names = {}
    for path in package:
        parts = path.with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield each name that ``tree`` imports, and those in it that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # a verb's or a strategy's module


def one_importer(package: dict[Path, ast.Module]) -> int:
    """Count the modules that a single other one imports."""
    names = modules(package)
    users: dict[Path, set[Path]] = defaultdict(set)
    for path, tree in package.items():
        for name in imported(tree):
            if name in names and names[name] != path:
                users[names[name]].add(path)
    return sum(len(users[path]) == 1 for path in package if path.name != "__init__.py")


def lengths(package: dict[Path, ast.Module]) -> list[int]:
    """Return the lines of each function."""
    return sorted(
        int(node.end_lineno or 0) - node.lineno + 1
        for tree in package.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def stars(tree: ast.Module) -> int:
    """Count the literal sequences that are unpacked where they stand, ``f(*(a, b), c=d)``."""
    return sum(
        isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List))
        for node in ast.walk(tree)
    )


def names_for_two(package: dict[Path, ast.Module]) -> list[str]:
    """Return the classes of one name that are not one thing in two frameworks."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, tree in package.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(FRAMEWORK.sub("", str(path)))
    return sorted(name for name, paths in homes.items() if len(paths) > 1)


def words(pages: list[Path]) -> int:
    """Count the words of ``pages``."""
    return sum(len(page.read_text().split()) for page in pages)


def measure() -> dict[str, int]:
    """Return every figure that may not rise, by what it counts."""
    package, tests = trees("hvdtrain"), trees("tests")
    names = Counter(name for tree in package.values() for name in bound(tree))
    pages = sorted((ROOT / "docs").glob("*.md"))
    lines = lengths(package)
    return {
        "lines of the package": _lines(package),
        "files of the package": len(package),
        "lines of tests": _lines(tests),
        "pages": len(pages),
        "words of the pages": words(pages),
        "options of a trainer": len(re.findall("^  --", _read(HELP), re.M)),
        "dict[str, Any]": sum(_read(path).count("dict[str, Any]") for path in package),
        "banned identifiers": sum(names[name] for name in BANNED),
        "vague identifiers": sum(names[name] for name in VAGUE),
        "classes of one name": len(names_for_two(package)),
        "star-tuples in calls": sum(map(stars, package.values())),
        "modules with one importer": one_importer(package),
        "requirements of a bare install": len(_requirements()),
        "functions, median": int(statistics.median(lines)),
        "functions, 90th percentile": lines[len(lines) * 9 // 10],
        "functions, longest": lines[-1],
    }


def _requirements() -> list[str]:
    block = re.search(r"^install_requires =\n((?: .*\n|\n)+)", _read("setup.cfg"), re.M)
    return block[1].split("\n    ") if block else []


def _read(path: str | Path) -> str:
    return (ROOT / path).read_text()


def _lines(files: dict[Path, ast.Module]) -> int:
    return sum(len(_read(path).splitlines()) for path in files)


def main(arguments: list[str]) -> int:
    """Print the table, or write the file; return 1 if a figure is above that of the file."""
    figures = measure()
    limits = json.loads(_read(FIGURES))
    above = [name for name, figure in figures.items() if figure > limits.get(name, figure)]
    match arguments:
        case ["--raise", reason]:
            _write(figures, limits[RAISED] | dict.fromkeys(above, reason))
            return 0
        case ["--write"] if not above:
            _write(figures, limits[RAISED])
            return 0
    for name, figure in figures.items():
        mark = f"  above {limits[name]:,}" if name in above else ""
        print(f"{name:32}{figure:8,}{mark}")
    if above:
        print("\nRemove as much elsewhere, or: python .ci/house.py --raise 'REASON'")
    return int(bool(above))


def _write(figures: dict[str, int], reasons: dict[str, str]) -> None:
    FIGURES.write_text(json.dumps({**figures, RAISED: reasons}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
