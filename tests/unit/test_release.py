"""A release has one version, and the pages that help texts name exist."""

from __future__ import annotations

import re

import pytest

from hvdtrain import __version__, cli
from hvdtrain.system.output import text
from tests.conftest import ROOT


def test_one_version_everywhere() -> None:
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited == [__version__]
    assert changes[0] == __version__


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_page_that_the_help_names_exists(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    for page in re.findall(r"\S*/\w+\.md", capsys.readouterr().out):
        assert (ROOT / page.strip("(`)")).is_file()


def test_outside_a_clone_a_page_is_where_the_wheel_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text.page("launch") == "docs/launch.md"
    monkeypatch.setattr(text, "PACKAGE", text.INSTALLED / "hvdtrain")
    assert text.page("launch") == str(text.INSTALLED / "launch.md")
