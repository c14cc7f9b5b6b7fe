"""Pieces of HTML for the demo's page. Every text from outside is escaped here."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from elude_steer.demo.access import hide_folders
from elude_steer.steering.result import SteeredCaption, mark_changes, unseen_words
from elude_steer.utils.plotting import data_uri

_TITLES = {"baseline": "Without the edit", "steered": "Steered, it says"}


class Html(str):
    """Text of a table's cell that is HTML already."""

    __slots__ = ()


def captions(result: SteeredCaption, *, with_baseline: bool = False) -> str:
    """The steered caption; below, which words the image shows, and notes.

    Args:
        result: the captions.
        with_baseline: whether the baseline stands beside the steered caption. It is not needed where the page shows it
            above: `page_state.js` strikes the words of `data-gone` through there.
    """
    cards = "".join(
        f'<div class="card {name}"><h3>{_TITLES[name]}</h3><p>{text}</p></div>'
        for name, text in mark_changes(result).items()
        if with_baseline or name == "steered"
    )
    both = "the caption" if result.baseline is None else "both captions"
    missed = unseen_words(result.plan, result.seen)
    # What these notes say stands beside the words already.
    others = [one for one in result.notes if not one.startswith(tuple(f"'{word}' is not seen" for word in missed))]
    notes = "".join(map(note, (f"{_count_sub_units(result)}, {both} in {result.seconds:.2f} s", *others)))
    notes = _sightings(result, missed) + notes
    # The exact time makes every answer a new text, so that screen readers announce each one.
    gone = html.escape(json.dumps([] if with_baseline else result.gone), quote=True)
    data = f'data-seconds="{result.seconds:.9f}" data-gone="{gone}"'
    return f'<div class="captions" role="status" {data}>{cards}</div>{notes}'


def _count_sub_units(result: SteeredCaption) -> str:
    kinds = {kind: {edit.sub_unit for edit in result.plan.edits if edit.kind == kind} for kind in ("scale", "read")}
    if not kinds["read"]:
        return f"{len(kinds['scale'])} sub-units changed"
    changed = f"{len(kinds['scale'])} sub-units changed, " if kinds["scale"] else ""
    return f"{changed}{len(kinds['read'])} sub-units read"


def _sightings(result: SteeredCaption, missed: Sequence[str]) -> str:
    """For each word to remove, whether the image shows it, and how much of what it reaches where it is."""
    lines, needed = [], {concept.word: concept.settings.seen for concept in result.plan.concepts}
    for word, share in result.seen.items():
        unseen = word in missed
        kind, found = ("unseen", "not seen") if unseen else ("seen", "seen")
        more = (
            f" \N{MIDDLE DOT} left as it is; seen means at least {needed[word]:.0%}. To change it anyway, mark a "
            "region, or lower 'seen' in the settings."
        )
        lines.append(
            f'<li class="{kind}"><b>{html.escape(word)}</b> <span class="badge">{found}: {max(0.0, share):.0%}</span>'
            f"{more if unseen else ''}</li>"
        )
    title = "Seen in the image, as a share of what a word reaches where it is"
    return f'<ul class="sightings" aria-label="{title}" title="{title}">{"".join(lines)}</ul>' if lines else ""


def clickable_caption(caption: str, find_word: Callable[[str], str | None]) -> str:
    """The caption without edits, in which words can be clicked.

    Args:
        caption: the caption.
        find_word: the word that a click on a text sends, or None if the text is no button.
    """
    parts, texts, start = [], caption.split(), 0
    while start < len(texts):
        lengths = (count for count in (3, 2, 1) if start + count <= len(texts))
        found = ((count, find_word(" ".join(texts[start : start + count]))) for count in lengths)
        count, word = next((pair for pair in found if pair[1] is not None), (1, None))
        text = " ".join(texts[start : start + count])
        plain = f"<span>{html.escape(text)}</span>"
        parts.append(plain if word is None else button(text, {"word": word}, title=f"Remove {word}"))
        start += count
    help = "Click a word to remove it; click it again to put something else there."
    help = help if "<button" in "".join(parts) else "The atlas knows none of these words."
    return f'<div class="plain" role="status"><h3>The model says</h3><p>{" ".join(parts)}</p>{note(help)}</div>'


def no_caption(*, coming: bool) -> str:
    """What stands in the place of the caption while there is none."""
    text = "…" if coming else "Choose an image first."
    return f'<div class="plain"><h3>The model says</h3><p>{text}</p></div>'


def note(text: str) -> str:
    """A small sentence; empty without a text."""
    return f'<p class="note">{html.escape(text)}</p>' if text else ""


def hint(text: str) -> str:
    """What to do next, shown in the place of the captions."""
    return f'<div class="captions" role="status"><p class="hint">{html.escape(text)}</p></div>'


def error_message(error: Exception) -> str:
    """An error as a sentence in the page."""
    # The time makes a repeated error a new text, so that the page shows and screen readers announce it again.
    text = html.escape(hide_folders(str(error)))
    return f'<div class="complaint" role="alert" data-at="{time.monotonic_ns()}">{text}</div>'


def table(title: str, headers: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]) -> str:
    """A table whose rows can be clicked.

    Args:
        title: the caption.
        headers: names of the columns.
        rows: for each row the data that a click sends to the page, and the cells; `Html` is not escaped.
    """
    if not rows:
        return f'<p class="note">{html.escape(title)}: nothing yet.</p>'
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headers)
    body = []
    for data, cells in rows:
        first = f"<td>{button(str(cells[0]), data)}</td>"
        rest = "".join(
            f'<td class="{"n" if isinstance(cell, int | float) else "t"}">'
            f"{cell if isinstance(cell, Html) else html.escape(str(cell))}</td>"
            for cell in cells[1:]
        )
        body.append(f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="rows" tabindex="0" role="region" aria-label="{html.escape(title, quote=True)}"><table>'
        f"<caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def button(
    text: str,
    data: Mapping[str, Any],
    *,
    image: Image.Image | None = None,
    pressed: bool = False,
    title: str | None = None,
) -> str:
    """A button that shows a text, or an image in its place.

    Args:
        text: the label, or the image's description.
        data: what a click sends to the page.
        image: the image on the button.
        pressed: whether the button appears as chosen.
        title: what it says when the pointer rests on it; by default the text.
    """
    row = html.escape(json.dumps(dict(data)), quote=True)
    name = html.escape(text, quote=True)
    face = f'<img alt="{name}" src="{data_uri(image, quick=True)}">' if image is not None else name
    state = ' aria-pressed="true"' if pressed else ""
    title = name if title is None else html.escape(title, quote=True)
    return f'<button type="button" data-row="{row}" title="{title}"{state}>{face}</button>'


def button_row(title: str, buttons: Sequence[str]) -> str:
    """Buttons side by side; empty without buttons."""
    if not buttons:
        return ""
    return f'<div class="choices" role="group" aria-label="{html.escape(title, quote=True)}">{"".join(buttons)}</div>'


def named_buttons(title: str, buttons: Sequence[str]) -> str:
    """Buttons side by side after their title; empty without buttons."""
    row = button_row(title, buttons)
    return row and f'<div class="named"><span aria-hidden="true">{html.escape(title)}</span>{row}</div>'


def folded_buttons(title: str, buttons: Sequence[str]) -> str:
    """Buttons that a click on their title shows; empty without buttons."""
    row = button_row(title, buttons)
    return row and f'<details class="folded"><summary>{html.escape(title)}</summary>{row}</details>'


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
