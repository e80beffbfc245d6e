"""``hvdtrain install-horovod`` into a new environment: a wheel is proven before it is installed."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import sysconfig
import threading
import time
import venv
import zipfile
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod.plan import InstallOptions, make_plan
from hvdtrain.commands.install_horovod.toolchain import find
from hvdtrain.commands.install_horovod.verb import Session
from hvdtrain.commands.install_horovod.wheel_cache import WheelCache
from hvdtrain.errors import HvdtrainError
from hvdtrain.system.files import cache_root
from tests.conftest import environment

OUTER = Path(sysconfig.get_path("platlib"))


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Into an environment that has an older Horovod and sees the packages of this one."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    venv.create(tmp_path / "env", symlinks=True)
    site = tmp_path / "env" / OUTER.relative_to(sys.prefix)
    (site / "outer.pth").write_text(f"{OUTER}\n")
    make_wheel(tmp_path / "old.whl", "old = True")
    with zipfile.ZipFile(tmp_path / "old.whl") as old:
        old.extractall(site)
    toolchain = dataclasses.replace(
        find(os.environ),
        python=tmp_path / "env" / "bin" / "python",
        prefix=tmp_path / "env",
        site_packages=site,
    )
    plan = make_plan(toolchain, InstallOptions(frameworks="pytorch"))
    assert plan.problems == ()
    return Session(toolchain, plan, WheelCache(tmp_path / "cache"), dict(os.environ))


def make_wheel(path: Path, program: str) -> Path:
    """A wheel of Horovod whose ``horovod.torch`` is ``program``."""
    info = "horovod-0.28.1.dist-info"
    files = {
        "horovod/__init__.py": "",
        "horovod/torch/__init__.py": f"{program}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
    return path


def tree(session: Session) -> dict[str, bytes]:
    """Every file of the environment."""
    root = session.toolchain.prefix
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def store(session: Session, wheel: Path) -> None:
    named = wheel.with_name("horovod-0.28.1-py3-none-any.whl")
    wheel.rename(named)
    session.cache.store(session.build.key, named, {})


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("raise ImportError('broken on purpose')", "ImportError: broken on purpose"),
        ("import sys; sys.exit(0)", "proof for pytorch failed"),
        ("", "pip could not install"),
    ],
)
def test_a_wheel_that_fails_its_proof_leaves_the_environment_untouched(
    session: Session, tmp_path: Path, program: str, cause: str
) -> None:
    wheel = make_wheel(tmp_path / "new.whl", program)
    if not program:
        wheel.write_bytes(b"no archive")
    store(session, wheel)
    before = tree(session)
    with pytest.raises(HvdtrainError, match=cause):
        session.install()
    assert tree(session) == before
    assert not session.trial.exists()


def test_sigterm_during_the_proof_leaves_the_environment_untouched(
    session: Session, tmp_path: Path
) -> None:
    note = tmp_path / "started"
    program = f"import pathlib, time; pathlib.Path({str(note)!r}).touch(); time.sleep(300)"
    store(session, make_wheel(tmp_path / "new.whl", program))
    before = tree(session)

    def stop() -> None:
        while not note.exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        session.install()
    assert tree(session) == before
    assert not session.trial.exists()


def test_a_wheel_that_works_takes_the_place_of_the_old_one(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = find(os.environ)
    real = Session(
        here, make_plan(here, InstallOptions()), WheelCache(cache_root(os.environ)), os.environ
    )
    wheel = real.cache.find(real.build.key)
    if wheel is None:
        pytest.skip("the cache has no wheel for this environment: hvdtrain install-horovod")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{sys.prefix}/lib")  # not below the new environment
    session.cache.store(session.build.key, wheel.path, wheel.facts)
    data = session.install().data
    assert data["done"] == "taken from the cache"
    assert data["proof"]["pytorch"]["size"] == 2
    assert (session.toolchain.site_packages / "horovod" / "metadata.json").is_file()
    assert (session.toolchain.site_packages / "hvdtrain_torchvision.pth").is_file()
    assert not session.trial.exists()
    assert session.install().data["done"] == "nothing"
