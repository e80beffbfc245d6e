"""What docs/site.py adds to the pages: generated tables, and redirects from removed pages."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from hvdtrain.config.declare import declared
from hvdtrain.config.options import Options
from hvdtrain.steps.summary import Summary
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_of_pages", ROOT / "docs" / "site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_list_every_option_and_every_key(site: ModuleType) -> None:
    names = [field.name.replace("_", "-") for field in declared(Options)]
    assert re.findall(r"^\| `--(\S+)`", site.options(), re.MULTILINE) == names
    keys = re.findall(r"^\| `(\w+)`", site.summary(), re.MULTILINE)
    assert "| `world_size` | `int` | Number of ranks. |" in site.summary()
    assert keys == list(Summary.__dataclass_fields__)
    markers = site.MARKER.findall((ROOT / "docs" / "training.md").read_text())
    assert markers == ["options", "summary"]


def test_each_redirect_leads_to_a_heading(site: ModuleType) -> None:
    for name, address in site.MOVED.items():
        assert not (ROOT / "docs" / f"{name}.md").exists()
        page, _, anchor = address.partition("#")
        path = "README.md" if page == "index.html" else f"docs/{page.removesuffix('.html')}.md"
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^\w\s-]", "", heading.lower()).split() for heading in headings]
        assert not anchor or anchor in ["-".join(words) for words in slugs], address
        assert f'url={address}"' in site.redirect(address)
