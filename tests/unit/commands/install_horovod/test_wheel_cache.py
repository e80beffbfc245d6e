"""The cache of wheels."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from hvdtrain.commands.install_horovod.wheel_cache import WheelCache


def test_a_stored_wheel_is_found_unless_it_was_changed(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "cache")
    built = tmp_path / "horovod-0.28.1-cp311.whl"
    assert cache.find("k") is None
    for content in (b"wheel", b"another"):  # it replaces the first
        built.write_bytes(content)
        stored = cache.store("k", built, {"torch": "2.13.0"})
        assert cache.find("k") == stored
        assert stored.sha256 == hashlib.sha256(content).hexdigest()
        assert sorted(p.name for p in stored.path.parent.iterdir()) == ["build.json", built.name]
    stored.path.write_bytes(b"whee")
    assert cache.find("k") is None


def test_a_wheel_that_is_half_stored_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Path, data: str) -> int:
        assert self.name == "build.json"
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    built = tmp_path / "horovod.whl"
    built.touch()
    with pytest.raises(KeyboardInterrupt):
        WheelCache(tmp_path).store("k", built, {})
    assert WheelCache(tmp_path).find("k") is None
    assert not (tmp_path / "wheels").exists()


def test_an_archive_with_another_hash_is_ignored(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.archive.parent.mkdir(parents=True)
    cache.archive.write_bytes(b"something else")
    assert not cache.has_archive()


def test_a_session_waits_for_another(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with WheelCache(tmp_path).session("k"):
            entered.set()

    with WheelCache(tmp_path).session("another"):
        waiter = threading.Thread(target=enter)
        waiter.start()
        assert not entered.wait(0.3)
    waiter.join(10)
    assert entered.is_set()
