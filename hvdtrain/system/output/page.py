"""HTML pages of one look: ``base.html`` has the frame, the style and the tables of all pages.

A page is a single file without references to the network, and its text is escaped, as names of
tensors and files are untrusted. Its content security policy admits only its own style and script.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.system.files import replacing
from hvdtrain.system.output.tables import Table

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A section of a page: notes, and optionally a plot (data URI), tables and diagrams."""

    title: str
    notes: Sequence[str] = ()
    plot: str = ""
    tables: Sequence[Table] = ()
    diagrams: Sequence[Any] = ()


def render(template: Path, **values: Any) -> str:
    """Return the text of a page, whose template extends ``base.html``."""
    import jinja2  # of the extra ``studies``

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, FOLDER]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["digest"] = digest
    created = time.strftime("%d %B %Y, %H:%M")
    page = environment.get_template(template.name)
    return page.render(created=created, version=__version__, **values)


def digest(text: str) -> str:
    """Return the source expression of a content security policy that admits ``text``."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write(target: Path, text: str) -> None:
    """Write a page atomically.

    Raises:
        UsageError, HvdtrainError: it cannot be written.
    """
    with replacing(target) as file:
        # Lone surrogates, in names of files or tensors, cannot be encoded.
        file.write(text.encode(errors="replace"))
