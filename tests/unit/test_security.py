"""SECURITY.md names tests for each promise; no call in the package executes what it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

TREES = {path: ast.parse(path.read_text()) for path in (ROOT / "hvdtrain").rglob("*.py")}
SERIALIZERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
EXECUTES = {
    *("eval", "exec", "os.system", "os.popen", "subprocess.getoutput"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "torch.load", "hvd.broadcast_object"),
    *("dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object"),
    *("keras.models.load_model", "keras.saving.load_model"),
}
# With this argument.
SAFE = {"torch.load": "weights_only=True", "keras.models.load_model": "safe_mode=True"}
# mpi4py's methods for Python objects, of the variables that may be its communicators.
COMMUNICATORS = r"\b(world|comm|COMM_WORLD|_communicator)\."
OBJECTS = "allgather|allreduce|alltoall|bcast|gather|i?recv|reduce|scatter|i?send|sendrecv"


def test_each_promise_has_tests_and_they_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(promises) == 7
    for promise in promises:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", promise)
        assert tests, promise
        for path, name in tests:
            functions = ast.parse((ROOT / "tests" / path).read_text()).body
            assert name in {getattr(function, "name", "") for function in functions}, (path, name)


def dangers(tree: ast.Module) -> Iterator[str]:
    """Yield each import and call in ``tree`` that may execute data, or start a shell."""
    imported = {}  # full names, by those in this file
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(module), names=names):
                imported |= {
                    alias.asname or alias.name: f"{module}.{alias.name}" for alias in names
                }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from SERIALIZERS & {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                yield from SERIALIZERS & {module.partition(".")[0]}
            case ast.Call(func=function, keywords=keywords):
                name, options = ast.unparse(function), {ast.unparse(word) for word in keywords}
                first, dot, rest = name.partition(".")
                full = imported.get(first, first) + dot + rest
                if {name, full} & EXECUTES and SAFE.get(full) not in options:
                    yield full
                yield from options & {"shell=True", "allow_pickle=True", "weights_only=False"}
                if re.search(f"{COMMUNICATORS}({OBJECTS})$", name):
                    yield name


def test_the_package_neither_unpickles_nor_evaluates_nor_starts_a_shell() -> None:
    found = {str(path): list(dangers(tree)) for path, tree in TREES.items()}
    assert {path: names for path, names in found.items() if names} == {}
    sample = (
        "import pickle\nworld.bcast(1)\nrun(x, shell=True)\ntorch.load(f)\neval(x)\n"
        "from torch import load\nload(f)\nimport torch as t\nt.load(f)\n"
        "from keras.models import load_model as read\nread(f)\n"
    )
    assert len(list(dangers(ast.parse(sample)))) == 8
