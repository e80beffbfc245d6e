"""The installed Horovod, and the repair of torchvision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hvdtrain.commands.install_horovod import installed


def fake_horovod(site: Path, text: str, wheel_sha: str = "abc") -> None:
    """Create the files of an installed Horovod, as pip does."""
    meta = site / "horovod-0.28.1.dist-info"
    meta.mkdir(parents=True, exist_ok=True)
    (site / "horovod").mkdir(exist_ok=True)
    (site / "horovod" / "lib.so").write_text(text)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    info = {"url": "file:///w.whl", "archive_info": {"hashes": {"sha256": wheel_sha}}}
    (meta / "direct_url.json").write_text(json.dumps(info))
    record = f"horovod/lib.so,sha256=x,{len(text)}\n"
    names = ("METADATA", "direct_url.json", "RECORD")
    (meta / "RECORD").write_text(record + "".join(f"{meta.name}/{n},,\n" for n in names))


def test_an_installed_wheel_is_identified_by_its_hash(tmp_path: Path) -> None:
    assert installed.find_installed(tmp_path) is None
    assert installed.wheel_hash(None) is None
    fake_horovod(tmp_path, "lib", "abc")
    distribution = installed.find_installed(tmp_path)
    assert installed.wheel_hash(distribution) == "abc"
    assert installed.is_complete(distribution)
    (tmp_path / "horovod" / "lib.so").write_text("cut")
    assert installed.is_complete(installed.find_installed(tmp_path))
    (tmp_path / "horovod" / "lib.so").write_text("x")
    assert not installed.is_complete(installed.find_installed(tmp_path))


def test_pip_removes_the_repair_of_torchvision_with_horovod(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    info = site / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "INSTALLER").write_text("pip\n")
    names = [f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (site / "other.py").touch()
    for _ in range(2):  # idempotent
        installed.mend_torchvision(site)
    assert installed.is_complete(installed.find_installed(site))
    assert len((info / "RECORD").read_text().splitlines()) == 5
    query = (
        "import sys; print([n for n in sys.modules if n.split('_')[0] in ('hvdtrain', 'torch')])"
    )
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("['hvdtrain_torchvision']\n", "")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "uninstall", "-yq", "horovod"]
    subprocess.run(pip, check=True, timeout=60)
    assert {path.name for path in site.iterdir()} - {"__pycache__"} == {"other.py"}
    result = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
