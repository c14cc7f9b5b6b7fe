"""Pieces of HTML for the demo's page; whatever comes from outside is escaped here."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from elude_steer.steering.result import SteeredCaption, mark_changes
from elude_steer.utils.plotting import data_uri


def captions(result: SteeredCaption) -> str:
    """Baseline and steered caption side by side, with notes under them."""
    cards = "".join(
        f'<div class="card {name}"><h3>{name}</h3><p>{text}</p></div>'
        for name, text in zip(("baseline", "steered"), mark_changes(result), strict=True)
    )
    count = len({edit.sub_unit for concept in result.plan.concepts for edit in concept.edits})
    done = f"{count} sub-units changed, both captions in {result.seconds:.2f} s"
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in (done, *result.notes))
    # Two answers are never the same text, so that a screen reader tells of each.
    return f'<div class="captions" role="status" data-seconds="{result.seconds:.9f}">{cards}</div>{notes}'


def hint(text: str) -> str:
    """What to do next, where captions will be."""
    return f'<div class="captions" role="status"><p class="hint">{html.escape(text)}</p></div>'


def complaint(error: Exception) -> str:
    """An error as a sentence in the page."""
    # The same complaint twice is two texts, so that it is seen, and told by a screen reader, to have come again.
    return f'<div class="complaint" role="alert" data-at="{time.monotonic_ns()}">{html.escape(str(error))}</div>'


def table(title: str, headers: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]) -> str:
    """A table whose rows can be chosen; each comes with what the page is told then."""
    if not rows:
        return f'<p class="note">{html.escape(title)}: nothing yet.</p>'
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headers)
    body = []
    for told, cells in rows:
        first = f"<td>{choice(str(cells[0]), told)}</td>"
        rest = "".join(
            f'<td class="{"n" if isinstance(cell, int | float) else "t"}">{html.escape(str(cell))}</td>'
            for cell in cells[1:]
        )
        body.append(f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="rows" tabindex="0" role="region" aria-label="{html.escape(title, quote=True)}"><table>'
        f"<caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def choice(text: str, told: Mapping[str, Any], *, picture: Image.Image | None = None, chosen: bool = False) -> str:
    """A button, with a picture on it or without, and what the page is told when it is pressed."""
    data = html.escape(json.dumps(dict(told)), quote=True)
    name = html.escape(text, quote=True)
    face = f'<img alt="{name}" src="{data_uri(picture, quick=True)}">' if picture is not None else name
    state = ' aria-pressed="true"' if chosen else ""
    return f'<button type="button" data-row="{data}" title="{name}"{state}>{face}</button>'


def choices(title: str, buttons: Sequence[str]) -> str:
    """Buttons in a row; nothing where there are none."""
    if not buttons:
        return ""
    return f'<div class="choices" role="group" aria-label="{html.escape(title, quote=True)}">{"".join(buttons)}</div>'


def strip(title: str, pictures: Sequence[Image.Image]) -> str:
    """Pictures beside each other under a title."""
    shown = "".join(
        f'<img alt="{html.escape(title, quote=True)}: {number}" src="{data_uri(picture, quick=True)}">'
        for number, picture in enumerate(pictures, 1)
    )
    none = '<p class="note">the pictures are not at hand: the atlas has no thumbnails of them.</p>'
    return f'<h3>{html.escape(title)}</h3><div class="strip">{shown or none}</div>'


def code(title: str, text: str, files: Mapping[str, str | None] | None = None) -> str:
    """A text to copy, and to save where there are files: names, and their contents as addresses; None is the text."""
    data = html.escape(json.dumps(dict(files or {})), quote=True)
    save = f'<button type="button" data-save="{data}">Save</button>' if files else ""
    return (
        f'<div class="code"><div class="codehead"><h3>{html.escape(title)}</h3>'
        f'<button type="button" data-copy>Copy</button>{save}</div>'
        f'<pre tabindex="0" aria-label="{html.escape(title, quote=True)}"><code>{html.escape(text)}</code></pre></div>'
    )
