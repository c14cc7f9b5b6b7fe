"""The pages of the demo, one for each atlas: their names, their addresses, and the links between them."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elude_steer.demo.presenter import Presenter


@dataclass(frozen=True)
class Page:
    """One atlas in the demo.

    Attributes:
        presenter: answers the page's requests.
        name: what the links call the atlas; no other page has the same name.
        path: the page's address after the demo's own; empty for the first page.
    """

    presenter: Presenter
    name: str
    path: str

    @property
    def suffix(self) -> str:
        """The ending of the names of the page's functions for programs; the first page's have none."""
        return f"_{self.path.replace('-', '_')}" if self.path else ""


def make_pages(presenters: Sequence[Presenter], reserved: Collection[str] = ()) -> list[Page]:
    """A page for each presenter, in their order.

    Args:
        presenters: at least one. Where they have one name, the later ones get a number.
        reserved: paths that no page may have.
    """
    pages: list[Page] = []
    for presenter in presenters:
        name = _make_unique(presenter.name, {page.name for page in pages}, " ")
        path = _make_unique(_simplify(name), {*reserved, *(page.path for page in pages)}, "-") if pages else ""
        pages.append(Page(presenter, name, path))
    return pages


def page_links(pages: Sequence[Page], shown: Page) -> str:
    """Links to all pages, with the shown one marked; empty if there is only one page."""
    if len(pages) < 2:
        return ""
    links = []
    for page in pages:
        current = ' aria-current="page"' if page is shown else ""
        # Relative, because the page may be served under a path; "." is the first page from every other.
        links.append(f'<a href="{page.path or "."}"{current}>{html.escape(page.name)}</a>')
    return f'<nav aria-label="Atlases"><span>Atlas</span>{"".join(links)}</nav>'


def _simplify(name: str) -> str:
    """A name in the letters that addresses and names of functions may have: `My atlas` becomes `my-atlas`."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "atlas"


def _make_unique(text: str, taken: Collection[str], separator: str) -> str:
    """The text, or with the first number from 2 on with which it is not taken."""
    number, unique = 1, text
    while unique in taken:
        number += 1
        unique = f"{text}{separator}{number}"
    return unique
