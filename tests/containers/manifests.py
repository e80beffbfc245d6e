"""What the files of containers/ say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "containers"


def manifests(name: str) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def services() -> dict[str, Any]:
    """The services of compose.yaml."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """What a container's manifest sets."""
    return {one["name"]: one["value"] for one in container.get("env", [])}


def job(container: Mapping[str, Any], more: Mapping[str, str] | None = None) -> list[str]:
    """The command of a container, its `$(NAME)` filled in as Kubernetes does."""
    known = {**variables(container), **(more or {})}
    words = [*container["command"], *container.get("args", [])]
    for name, value in known.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words
