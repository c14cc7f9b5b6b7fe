"""The shell of every HTML report: one self-contained page without scripts."""

from __future__ import annotations

import html

_VIEWPORT = "width=device-width, initial-scale=1"


def escape(text: object) -> str:
    """Escape text for use between tags or inside a quoted attribute."""
    return html.escape(str(text), quote=True)


def image_tag(source: str, description: str) -> str:
    """An `<img>` element; the description is escaped, the source (a data URI) is not."""
    return f'<img alt="{escape(description)}" src="{source}">'


def page(title: str, body: str, *, style: str = "") -> str:
    """A complete HTML document.

    Args:
        title: Plain text for the browser's tab; it is escaped.
        body: HTML of the page, escaped by the caller.
        style: CSS of the page.

    Example:
        >>> page("report", "<h1>Report</h1>").splitlines()[0]
        '<!doctype html>'
    """
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><meta name="viewport" content="{_VIEWPORT}">'
    if style:
        head += f"<style>{style}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
