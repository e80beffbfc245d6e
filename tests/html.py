"""HTML pages as tests read them."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re

VOID = ("meta", "img", "br", "input", "rect", "line", "path", "polygon")


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and its scripts; all elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @property
    def tags(self) -> set[str]:
        """Return the kinds of its elements."""
        return {tag for tag, _ in self.elements}

    @property
    def images(self) -> list[dict[str, str | None]]:
        """Return the attributes of its images."""
        return [attributes for tag, attributes in self.elements if tag == "img"]

    def check_self_contained(self) -> None:
        """Check that it loads nothing, and that its policy admits its own style and script only."""
        assert not self.tags & {"link", "iframe", "object", "embed"}
        for _, attributes in self.elements:
            assert not attributes.keys() & {"href", "action", "style"}
            assert not any(name.startswith("on") for name in attributes)
            assert (attributes.get("src") or "data:").startswith("data:")
        assert "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:" in self.page
        for kind in ("style", "script"):
            (admitted,) = re.findall(rf"{kind}-src '(.*?)'", self.page)
            for text in re.findall(f"<{kind}>(.*?)</{kind}>", self.page, re.DOTALL):
                digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                assert admitted == f"sha256-{digest}"
