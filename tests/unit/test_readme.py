"""What README shows of a script is the script."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_the_lines_shown_stand_in_the_example_in_that_order() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    shown = [line for line in block[1].splitlines() if line and line.split()[0] != "..."]
    script = (ROOT / "examples" / "digits_distributed.py").read_text().splitlines()
    assert [line for line in script if line in shown] == shown
    steps = re.findall(r"# step (\d)$", block[1], re.MULTILINE)
    assert "".join(steps) == "12345678"


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in pages if f"(docs/{page.name})" not in readme] == []
    for page in [ROOT / "README.md", *pages]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
