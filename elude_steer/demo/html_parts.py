"""Pieces of HTML for the demo's page. Every text from outside is escaped here."""

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
    """Baseline and steered caption side by side, with notes below."""
    cards = "".join(
        f'<div class="card {name}"><h3>{name}</h3><p>{text}</p></div>' for name, text in mark_changes(result).items()
    )
    count = len({edit.sub_unit for concept in result.plan.concepts for edit in concept.edits})
    both = "the caption" if result.baseline is None else "both captions"
    summary = f"{count} sub-units changed, {both} in {result.seconds:.2f} s"
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in (summary, *result.notes))
    # The exact time makes every answer a new text, so that screen readers announce each one.
    return f'<div class="captions" role="status" data-seconds="{result.seconds:.9f}">{cards}</div>{notes}'


def hint(text: str) -> str:
    """What to do next, shown in the place of the captions."""
    return f'<div class="captions" role="status"><p class="hint">{html.escape(text)}</p></div>'


def error_message(error: Exception) -> str:
    """An error as a sentence in the page."""
    # The time makes a repeated error a new text, so that the page shows and screen readers announce it again.
    return f'<div class="complaint" role="alert" data-at="{time.monotonic_ns()}">{html.escape(str(error))}</div>'


def table(title: str, headers: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]) -> str:
    """A table whose rows can be clicked.

    Args:
        title: the caption.
        headers: names of the columns.
        rows: for each row the data that a click sends to the page, and the cells.
    """
    if not rows:
        return f'<p class="note">{html.escape(title)}: nothing yet.</p>'
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headers)
    body = []
    for data, cells in rows:
        first = f"<td>{button(str(cells[0]), data)}</td>"
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


def button(text: str, data: Mapping[str, Any], *, image: Image.Image | None = None, pressed: bool = False) -> str:
    """A button that shows a text, or an image in its place.

    Args:
        text: the label, or the image's description.
        data: what a click sends to the page.
        image: the image on the button.
        pressed: whether the button appears as chosen.
    """
    row = html.escape(json.dumps(dict(data)), quote=True)
    name = html.escape(text, quote=True)
    face = f'<img alt="{name}" src="{data_uri(image, quick=True)}">' if image is not None else name
    state = ' aria-pressed="true"' if pressed else ""
    return f'<button type="button" data-row="{row}" title="{name}"{state}>{face}</button>'


def button_row(title: str, buttons: Sequence[str]) -> str:
    """Buttons side by side; empty without buttons."""
    if not buttons:
        return ""
    return f'<div class="choices" role="group" aria-label="{html.escape(title, quote=True)}">{"".join(buttons)}</div>'


def image_strip(title: str, images: Sequence[Image.Image]) -> str:
    """Images side by side below a title."""
    shown = "".join(
        f'<img alt="{html.escape(title, quote=True)}: {number}" src="{data_uri(image, quick=True)}">'
        for number, image in enumerate(images, 1)
    )
    empty = '<p class="note">The images are not available: the atlas has no thumbnails of them.</p>'
    return f'<h3>{html.escape(title)}</h3><div class="strip">{shown or empty}</div>'


def code_block(title: str, text: str, files: Mapping[str, str | None] | None = None) -> str:
    """A text with a button to copy it.

    Args:
        title: the heading.
        text: the text.
        files: files that a second button saves, by name: a data URI, or None for the text itself.
    """
    data = html.escape(json.dumps(dict(files or {})), quote=True)
    save = f'<button type="button" data-save="{data}">Save</button>' if files else ""
    return (
        f'<div class="code"><div class="codehead"><h3>{html.escape(title)}</h3>'
        f'<button type="button" data-copy>Copy</button>{save}</div>'
        f'<pre tabindex="0" aria-label="{html.escape(title, quote=True)}"><code>{html.escape(text)}</code></pre></div>'
    )
