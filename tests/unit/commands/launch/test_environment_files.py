"""All that an environment needs is part of its copy, and its path is found where it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.commands.launch.environment_files import Change, list_files
from hvdtrain.errors import UsageError
from tests.environments import PACKAGES, PYTHON, make_editable, make_environment

NUMBER = PYTHON.removeprefix("python")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment of one module."""
    return make_environment(tmp_path / "conda")


def write(path: Path, content: str | bytes = "") -> Path:
    """Write a file, and its folders; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def changes(prefix: Path) -> list[Change]:
    """Return the changes of a copy."""
    contents = list_files(prefix)
    return contents.changes(sorted(contents.spellings()))


def test_a_link_to_a_folder_elsewhere_is_refused(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (prefix / "models").symlink_to(tmp_path / "models")
    with pytest.raises(UsageError, match=r"is a link to the directory .*models, which is not part"):
        list_files(prefix)


def test_an_editable_install_without_packages_is_refused(prefix: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    make_editable(prefix, project, "edited.pth", f"{project}/src\n")
    with pytest.raises(UsageError, match="is installed in editable mode, and its packages are not"):
        list_files(prefix)


def test_all_that_an_editable_install_makes_importable_is_copied(
    prefix: Path, tmp_path: Path
) -> None:
    """Modules, packages, those without __init__.py, extensions; but not data and documents."""
    project = tmp_path / "project"
    for name in ("module.py", "package/__init__.py", "spaced/part.py", "fast.abi3.so"):
        write(project / name)
    for name in ("data/images.bin", "runs/checkpoint", "my-data/script.py", "README.md"):
        write(project / name)
    make_editable(prefix, project, "edited.pth", f"{project}\n")
    copied = {name for name in list_files(prefix).files if name.startswith(".editable/0/")}
    assert {name.removeprefix(".editable/0/") for name in copied} == {
        *("module.py", "package/__init__.py", "spaced/part.py", "fast.abi3.so")
    }
    assert Change(f"{PACKAGES}/edited.pth", str(project), ".editable/0") in changes(prefix)


def test_the_finder_of_setuptools_lists_packages_and_modules(prefix: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("lib/package/__init__.py", "lib/single.py", "lib/other.py", "test/__init__.py"):
        write(project / name)
    finder = "__editable___project_1_finder.py"
    text = f"MAPPING = {{'package': '{project}/lib/package', 'single': '{project}/lib/single'}}\n"
    make_editable(prefix, project, finder, text)
    copied = {name for name in list_files(prefix).files if name.startswith(".editable/")}
    assert copied == {".editable/0/lib/package/__init__.py", ".editable/0/lib/single.py"}


def test_scripts_of_all_spellings_are_adapted_and_binaries_are_not(
    prefix: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(prefix.parent)
    write(prefix / "bin" / "plain", f"#!{prefix}/bin/python\n")
    write(prefix / "bin" / "linked", f"#!{link}/conda/bin/python\n")
    write(prefix / "bin" / "foreign", "#!/usr/bin/python3\n")
    write(prefix / "bin" / "mpicc", b"\x7fELF" + str(prefix).encode() + b"\0")
    write(prefix / PACKAGES / "source.pth", f"{prefix}/src/package\n")
    assert {(change.file, change.old) for change in changes(prefix)} == {
        ("bin/plain", str(prefix)),
        ("bin/linked", f"{link}/conda"),
        (f"{PACKAGES}/source.pth", str(prefix)),
    }


def test_the_longer_path_is_replaced_first(tmp_path: Path) -> None:
    """The environment may be in the project, or the project in the environment."""
    project = tmp_path / "project"
    prefix = make_environment(project / "env")
    write(project / "package" / "__init__.py")
    make_editable(prefix, project, "edited.pth", f"{project}\n{prefix}/src/more\n")
    assert [change.old for change in changes(prefix)] == [str(prefix), str(project)]


def test_caches_and_other_environments_of_conda_are_left(prefix: Path) -> None:
    write(prefix / "envs" / "other" / "file")
    write(prefix / "lib" / "envs" / "file")
    write(prefix / "pkgs" / "file", "text")
    (prefix / "linked").symlink_to(prefix / "pkgs" / "file")
    contents = list_files(prefix)
    assert sorted(contents.files) == ["lib/envs/file", f"{PACKAGES}/module.py", "linked"]
    assert not contents.links


def test_files_of_conda_with_placeholders(prefix: Path) -> None:
    placeholder = "/opt/" + 250 * "x"
    write(prefix / "lib" / "text.sh")
    write(prefix / "lib" / "library.so")
    paths = [
        {"_path": "lib/text.sh", "prefix_placeholder": placeholder, "file_mode": "text"},
        {"_path": "lib/library.so", "prefix_placeholder": placeholder, "file_mode": "binary"},
        {"_path": "lib/gone", "prefix_placeholder": placeholder, "file_mode": "text"},
        {"_path": f"{PACKAGES}/module.py"},
    ]
    write(prefix / "conda-meta/x.json", json.dumps({"paths_data": {"paths": paths}}))
    assert changes(prefix) == [
        Change(
            "lib/library.so", str(prefix), binary=True, spare=len(placeholder) - len(str(prefix))
        ),
        Change("lib/text.sh", str(prefix)),
    ]


def base_of(tmp_path: Path, *settings: str) -> Path:
    """Create a virtual environment of an interpreter that is not part of the system."""
    base, prefix = tmp_path / "base", tmp_path / "venv"
    write(base / "bin" / PYTHON, b"\x7fELF\0libpython.so.1\0libc.so.6\0")
    library = base / "lib" / PYTHON
    for name in ("os.py", "test/test_os.py", "config/libpython.a", "site-packages/extra.py"):
        write(library / name)
    write(library / "lib-dynload" / "_ssl.so", b"\x7fELF\0libssl.so.3\0")
    write(base / "lib" / "libssl.so.3", b"\x7fELF\0libcrypto.so.3\0")
    for name in ("libcrypto.so.3", "libpython.so.1", "libmkl.so.2"):
        write(base / "lib" / name, b"\x7fELF\0")
    write(base / "include" / PYTHON / "Python.h")
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(base / "bin" / PYTHON)
    lines = [f"home = {base}/bin", f"version = {NUMBER}.1", *settings]
    write(prefix / "pyvenv.cfg", "\n".join(lines))
    return prefix


def test_the_interpreter_is_copied_with_the_libraries_and_headers_that_it_needs(
    tmp_path: Path,
) -> None:
    contents = list_files(base_of(tmp_path))
    copied = {name.removeprefix(".base/") for name in contents.files if name.startswith(".base/")}
    assert copied == {
        *(f"bin/{PYTHON}", f"lib/{PYTHON}/os.py", f"lib/{PYTHON}/lib-dynload/_ssl.so"),
        *("lib/libssl.so.3", "lib/libcrypto.so.3", "lib/libpython.so.1"),
        f"include/{PYTHON}/Python.h",
    }
    assert contents.links == {"bin/python": f"../.base/bin/{PYTHON}"}
    assert contents.libraries == (".base/lib",)


def test_system_site_packages_are_copied(tmp_path: Path) -> None:
    """An interpreter of the site, e.g. of a module, has its packages there."""
    prefix = base_of(tmp_path, "include-system-site-packages = true")
    assert f".base/lib/{PYTHON}/site-packages/extra.py" in list_files(prefix).files


def test_an_interpreter_without_a_library_is_refused(tmp_path: Path) -> None:
    prefix = base_of(tmp_path)
    (tmp_path / "base" / "lib" / PYTHON / "os.py").unlink()
    with pytest.raises(UsageError, match=r"has no python.*: create the environment anew"):
        list_files(prefix)
