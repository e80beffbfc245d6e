"""Makes one site of README, the pages and whatever they link to (mkdocs.yml calls it).

The pages are written to be read in the repository, so they link to files outside this folder: these
become pages of the site, other texts as they are, code as a listing, folders as a list of files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".pbs": "bash", ".yaml": "yaml", ".cfg": "ini"}


def in_site(path: str) -> str:
    """Return where ``path``, relative to the repository, stands in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in {".md", *PICTURES}:
        return path
    return f"code/{path.replace('.', '-')}.md"


def links_of(path: str) -> list[str]:
    """Return what a page links to, relative to the repository."""
    found = LINK.findall((ROOT / path).read_text())
    return [os.path.normpath(PurePosixPath(path).parent / link) for link in found]


def listing(path: str) -> str:
    """Return the page that shows a file or a folder which is not a page itself."""
    place = ROOT / path
    if place.is_dir():
        files = sorted(one.name for one in place.iterdir() if one.name[0] not in "._")
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in files)
    language = LANGUAGES.get(place.suffix, "text")
    wide = "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---\n"
    return f"{wide}# {path}\n\n````{language}\n{place.read_text()}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README and all that is linked from it or from a page, and so on."""
    waiting = ["README.md", *(f"docs/{one.src_uri}" for one in files.documentation_pages())]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        place = ROOT / path
        if not place.exists():
            raise PluginError(f"a page links to {path}, which does not exist")
        if path.endswith(".md"):
            waiting += links_of(path)
        if path.startswith("docs/"):
            continue
        if place.suffix in PICTURES:
            added = File.generated(config, path, content=place.read_bytes())
        else:
            text = place.read_text() if path.endswith(".md") else listing(path)
            added = File.generated(config, in_site(path), content=text)
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let the links of a page lead to where their files stand in the site."""
    here = page.file.src_uri
    if here.startswith("code/"):
        return markdown
    path = here if (ROOT / here).exists() else f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        target = in_site(os.path.normpath(PurePosixPath(path).parent / match[1]))
        return os.path.relpath(target, PurePosixPath(here).parent)

    return LINK.sub(moved, markdown)
