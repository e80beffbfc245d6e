"""README and the pages: their scripts, commands, links and tables are those of the package."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
from types import ModuleType

import pytest

from hvdtrain import __version__, cli
from hvdtrain.config import command_line
from hvdtrain.config.declare import add_options, declared
from hvdtrain.config.options import Options
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output import text
from tests.commands import Shown, shown
from tests.conftest import ROOT


def test_the_readme_shows_lines_of_the_example_in_order() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    shown = [line for line in block[1].splitlines() if line and line.split()[0] != "..."]
    script = (ROOT / "examples" / "digits_distributed.py").read_text().splitlines()
    assert [line for line in script if line in shown] == shown
    steps = re.findall(r"# step (\d)$", block[1], re.MULTILINE)
    assert "".join(steps) == "12345678"


def test_code_is_not_wider_than_the_site() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > 93] == []  # the width at 1280 pixels


def test_every_page_is_linked_and_every_link_has_a_target() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in pages if f"(docs/{page.name})" not in readme] == []
    for page in [ROOT / "README.md", *pages]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("command", shown(), ids=lambda command: command.text[:70])
def test_every_command_of_the_pages_parses(command: Shown) -> None:
    """Parse it; tests/parallel/test_commands.py runs it."""
    words = shlex.split(command.text.partition(" > ")[0], comments=True)
    if "hvdtrain" in words:
        name, *rest = words[words.index("hvdtrain") + 1 :]
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_options(parser, cli.options_of(name))
        parser.parse_args(rest)
    for module in {"hvdtrain.mnist", "hvdtrain.resnet"} & set(words):
        rest = words[words.index(module) + 1 :]
        if "$" not in command.text:  # a variable of a job script
            kind = importlib.import_module(module).WORKLOAD.options
            command_line.parse("", rest, description="", epilog="", kind=kind)


def test_the_pages_show_commands() -> None:
    pages = {command.page for command in shown()}
    assert {"README.md", "docs/launch.md", "homework/README.md", "jobs/README.md"} <= pages
    assert len(shown()) > 50


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


# The site


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
    assert keys == list(Summary.__dataclass_fields__)
    markers = site.MARKER.findall((ROOT / "docs" / "training.md").read_text())
    assert markers == ["options", "summary"]
