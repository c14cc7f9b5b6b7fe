"""One self-contained HTML page: pictures, captions before and after, where each word fired, settings. No scripts."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elude_steer import __version__
from elude_steer.recipe import Recipe
from elude_steer.running import Ran
from elude_steer.storage import write_file
from elude_steer.vocabulary import FUNCTION_WORDS

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #667; --line: #dfe2e8; --paper: #fff; --card: #f7f8fa;
  --gone: #b3261e; --new: #14713d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #9aa0ad; --line: #333844; --paper: #14161b;
  --card: #1c1f26; --gone: #ff8a80; --new: #6fdc9a; } }
body { margin: 0 auto; max-width: 1080px; padding: 32px 20px 64px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 40px 0 12px; }
p.soft, .soft { color: var(--soft); font-size: 14px; }
section { display: grid; grid-template-columns: minmax(180px, 280px) 1fr; gap: 24px; align-items: start; }
img { width: 100%; border-radius: 8px; display: block; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; white-space: nowrap; }
td, th { padding: 9px 12px 9px 0; border-top: 1px solid var(--line); vertical-align: top; }
tr:first-child td, tr:first-child th { border-top: 0; }
del { color: var(--gone); } ins { color: var(--new); text-decoration: none; font-weight: 600; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 14px; margin-top: 20px; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 8px; }
figcaption { font-size: 13px; padding-top: 6px; } .miss { color: var(--gone); font-size: 14px; }
@media (max-width: 640px) { section { grid-template-columns: 1fr; } }
"""


def write_report(path: Path, done: Sequence[tuple[Recipe, Sequence[Ran]]]) -> Path:
    """Writes the page of some recipes that ran."""
    body = "\n".join(_recipe(recipe, ran) for recipe, ran in done)
    title = ", ".join(recipe.name for recipe, _ in done)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>What a word changes</h1><p class='soft'>elude_steer {__version__}. Struck out: said before; "
        f"green: said now. The glow shows where a word's sub-units fire, the frame where they were changed.</p>"
        f"{body}</body></html>\n"
    )
    write_file(path, lambda file: file.write(page.encode()))
    return path


def _recipe(recipe: Recipe, ran: Sequence[Ran]) -> str:
    if not ran:
        return ""
    first = ran[0].result
    rows = [f"<tr><th>baseline</th><td>{html.escape(first.baseline)}</td></tr>"]
    for one in ran:
        misses = "".join(f"<div class='miss'>{html.escape(told)}</div>" for told in one.missing)
        rows.append(
            f"<tr><th>{html.escape(one.title)}<div class='soft'>{html.escape(_settings(one))}</div></th>"
            f"<td>{marked(one.result.baseline, one.result.caption)}{misses}</td></tr>"
        )
    maps = "".join(
        f"<figure><img alt='where {html.escape(word)} fires' src='{_data(one.result.heatmap(word, side=320))}'>"
        f"<figcaption><b>{html.escape(word)}</b> in {html.escape(one.title)}</figcaption></figure>"
        for one in ran
        for word in one.result.maps
    )
    told = first.provenance
    return (
        f"<h2>{html.escape(recipe.name)}</h2><section><img alt='the picture' src='{_data(first.image)}'>"
        f"<table>{''.join(rows)}</table></section><div class='maps'>{maps}</div>"
        f"<p class='soft'>{html.escape(str(told.get('model')))}, {html.escape(str(told.get('layer')))}, atlas "
        f"{html.escape(str(told.get('atlas')))}; asked: {html.escape(str(told.get('prompt')))}</p>"
    )


def marked(before: str, after: str) -> str:
    """A caption with what is new marked, and what is gone struck out at its end; words like "the" are never marked."""
    known = {*_words(before), *FUNCTION_WORDS, ""}
    new = [f"<ins>{html.escape(w)}</ins>" if _plain(w) not in known else html.escape(w) for w in after.split()]
    said = {*_words(after), *FUNCTION_WORDS, ""}
    gone = dict.fromkeys(word for word in _words(before) if word not in said)
    lost = " ".join(f"<del>{html.escape(word)}</del>" for word in gone)
    return " ".join(new) + (f" <span class='soft'>{lost}</span>" if lost else "")


def _words(text: str) -> list[str]:
    return [_plain(word) for word in text.split()]


def _plain(word: str) -> str:
    return re.sub(r"\W", "", word.lower())


def _settings(one: Ran) -> str:
    parts = []
    for concept in one.result.plan.concepts:
        s = concept.settings
        gain = f"alpha {s.alpha:g}" if concept.role == "plus" else f"gamma {s.gamma:g}"
        gain = f"beta {s.beta:g}" if concept.role == "plus" and s.mode == "place" else gain
        parts.append(f"{concept.word}: {gain}, kappa {s.kappa}, nu {s.nu}")
    return "; ".join(parts)


def _data(image: Any) -> str:
    """A picture inside the page, small ones with their pixels enlarged, large ones no larger than they are shown."""
    data = io.BytesIO()
    scale = max(1, 280 // max(image.size))
    shown = image.convert("RGB").resize((image.width * scale, image.height * scale), 0)
    shown.thumbnail((560, 560))
    shown.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
