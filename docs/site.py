"""Build one site from README, the pages and all files that they link to (a hook of mkdocs.yml).

The pages are written to be read in the repository, so they link to files outside this folder: these
become pages of the site, other texts as they are, code as a listing, folders as a list of files.
Tables of options and of summary keys are generated where a page has a marker.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this clone, not an installed one
from hvdtrain.config.options import Options  # noqa: E402
from hvdtrain.steps.summary import Summary  # noqa: E402

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".pbs": "bash", ".yaml": "yaml", ".cfg": "ini"}

MARKER = re.compile(r"^<!-- (options|summary) -->$", re.MULTILINE)


def table(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = "|".join(["---"] * (header.count("|") + 1))
    return "\n".join(f"| {line} |" for line in (header, rule, *lines))


def options() -> str:
    """Return the options that all trainers share, with values, default and help text."""
    rows = []
    for field in dataclasses.fields(Options):
        if text := field.metadata.get("help"):
            values = [f"`{choice}`" for choice in field.metadata["choices"]]
            default = "" if field.default in (None, "", False) else f"`{field.default}`"
            name = field.name.replace("_", "-")
            rows.append((f"`--{name}`", text, ", ".join(values), default))
    return table("option | meaning | values | default", rows)


def summary() -> str:
    """Return the keys of a summary, with their types and docstrings."""
    body = ast.parse(inspect.getsource(Summary)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else ""
            texts[node.target.id] = inspect.cleandoc(text).replace("``", "`")
    rows = [
        (
            f"`{field.name}`",
            f"`{str(field.type).removesuffix(' | None').replace('Count', 'int')}`",
            texts[field.name],
        )
        for field in dataclasses.fields(Summary)
    ]
    return table("key | type | meaning", rows)


def in_site(path: str) -> str:
    """Return where ``path``, relative to the repository, is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in {".md", *PICTURES}:
        return path
    return f"code/{path.replace('.', '-')}.md"


def links_of(path: str) -> list[str]:
    """Return what a page links to, relative to the repository."""
    links = LINK.findall((ROOT / path).read_text())
    return [os.path.normpath(PurePosixPath(path).parent / link) for link in links]


def listing(path: str) -> str:
    """Return the page that shows a file or a folder which is not a page itself."""
    file = ROOT / path
    if file.is_dir():
        files = sorted(entry.name for entry in file.iterdir() if entry.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in files)
    language = LANGUAGES.get(file.suffix, "text")
    wide = "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---\n"
    return f"{wide}# {path}\n\n````{language}\n{file.read_text()}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, and all files that it or a page links to, recursively."""
    waiting = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        file = ROOT / path
        if not file.exists():
            raise PluginError(f"a page links to {path}, which does not exist")
        if path.endswith(".md"):
            waiting += links_of(path)
        if path.startswith("docs/"):
            continue
        if file.suffix in PICTURES:
            added = File.generated(config, path, content=file.read_bytes())
        else:
            text = file.read_text() if path.endswith(".md") else listing(path)
            added = File.generated(config, in_site(path), content=text)
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Adapt the links of a page to the site, and generate its tables."""
    here = page.file.src_uri
    if here.startswith("code/"):
        return markdown
    path = here if (ROOT / here).exists() else f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        target = in_site(os.path.normpath(PurePosixPath(path).parent / match[1]))
        return os.path.relpath(target, PurePosixPath(here).parent)

    tables = {"options": options, "summary": summary}
    markdown = LINK.sub(moved, markdown)
    return MARKER.sub(lambda match: tables[match[1]](), markdown)
