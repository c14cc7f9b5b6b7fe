"""The report of recipes as one HTML page: images, captions before and after, where concepts fire, settings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from elude_steer import __version__
from elude_steer.specs import Recipe, Settings
from elude_steer.steering.plan import Concept
from elude_steer.steering.result import render_captions, render_maps
from elude_steer.steering.run_recipe import StepResult
from elude_steer.steering.settings import format_setting
from elude_steer.utils.files import REPORT_ENDINGS, check_file, write_file
from elude_steer.utils.html import page
from elude_steer.utils.plotting import data_uri, fit_within

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6270; --line: #dfe2e8; --paper: #fff;
  --missed: #b3261e; --met: #14713d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #a2a9b6; --line: #333844; --paper: #14161b;
  --missed: #ff8a80; --met: #6fdc9a; } }
body { margin: 0 auto; max-width: 1120px; padding: 40px 20px 64px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 26px; margin: 0 0 8px; } h2 { font-size: 20px; margin: 0 0 16px; }
h3 { font-size: 16px; margin: 0 0 6px; } p { margin: 0 0 6px; }
.soft { color: var(--soft); font-size: 13px; } .lead { max-width: 760px; }
article { margin-top: 36px; padding-top: 24px; border-top: 2px solid var(--line); }
.recipe { display: grid; grid-template-columns: 240px minmax(0, 1fr); gap: 32px; align-items: start; }
.image { margin: 0; max-width: 340px; } .image img { width: 100%; border-radius: 8px; display: block; }
.image figcaption { padding-top: 8px; }
.edit { display: grid; grid-template: auto 1fr / minmax(0, 1fr) 332px; gap: 4px 28px; padding: 14px 0;
  break-inside: avoid; border-top: 1px solid var(--line); } .edit:first-child { border-top: 0; padding-top: 0; }
.maps { grid-row: span 2; } .missed, .met { margin-top: 10px; font-weight: 600; }
.missed { color: var(--missed); } .met { color: var(--met); }
@media (max-width: 900px) { .edit { grid-template: none / minmax(0, 1fr); } .maps { grid-row: auto; } }
@media (max-width: 640px) { .recipe { grid-template-columns: minmax(0, 1fr); gap: 20px; } body { padding-top: 24px; } }
"""


def write_report(path: Path, recipes: Sequence[tuple[Recipe, Sequence[StepResult]]]) -> Path:
    """Write the page of some recipes and their results."""
    path = check_file(path, REPORT_ENDINGS)
    body = "\n".join(_recipe(recipe, results) for recipe, results in recipes if results)
    title = ", ".join(recipe.name for recipe, _ in recipes)
    verdict = _verdict([one for _, results in recipes for one in results])
    content = (
        f'<h1>What a word changes</h1><p class="lead">{verdict}</p>'
        '<p class="lead soft">Words that are gone are struck through, new ones marked green. In the maps, the glow is '
        "where the sub-units of a word fire, as a share of what is fully on for them; the patches they were changed on "
        f"are framed, the others in the dark. elude_steer {__version__}.</p>{body}"
    )
    write_file(path, lambda file: file.write(page(title, content, style=_STYLE).encode()))
    return path


def _verdict(results: Sequence[StepResult]) -> str:
    expecting = [one for one in results if _expects(one)]
    edits = f"{len(results)} edit{'' if len(results) == 1 else 's'}"
    if not expecting:
        return f"{edits}."
    met = sum(not one.missing for one in expecting)
    return f"{edits}; {met} of {len(expecting)} did what the recipe expects."


def _expects(one: StepResult) -> bool:
    return bool(one.step.expect.gone or one.step.expect.new or one.missing)


def _recipe(recipe: Recipe, results: Sequence[StepResult]) -> str:
    first = results[0].result
    about = {name: str(first.provenance.get(name)) for name in ("model", "layer", "atlas", "prompt")}
    about["model"] = _short_name(about["model"])
    lines = "<br>".join(html.escape(f"{name}: {value}") for name, value in about.items())
    return (
        f'<article><h2>{html.escape(recipe.name)}</h2><div class="recipe">'
        f'<figure class="image"><img alt="the image" src="{data_uri(fit_within(first.image, 480))}">'
        f'<figcaption><p>{html.escape(first.baseline or "")}</p><p class="soft">{lines}</p></figcaption></figure>'
        f"<div>{''.join(map(_edit, results))}</div></div></article>"
    )


def _edit(one: StepResult) -> str:
    verdict = '<p class="met">As expected.</p>' if _expects(one) else ""
    if one.missing:
        verdict = f'<p class="missed">Not as expected: {html.escape("; ".join(one.missing))}.</p>'
    notes = "".join(f'<p class="soft">{html.escape(note)}</p>' for note in one.result.notes)
    settings = "<br>".join(html.escape(_settings(concept)) for concept in one.result.plan.concepts)
    return (
        f'<section class="edit"><div><h3>{html.escape(one.title)}</h3>'
        f"{render_captions(one.result)}{verdict}{notes}</div>"
        f'<div class="maps">{render_maps(one.result, side=160, density=2)}</div>'
        f'<p class="soft">{settings}</p></section>'
    )


def _settings(concept: Concept) -> str:
    """The settings that count for a concept, and all that differ from the paper's."""
    settings, paper = asdict(concept.settings), asdict(Settings())
    if concept.is_regional:
        names = ("mode", "strength", "fit", "seen", "force")
        shown = [name for name in names if name in ("mode", "strength", "fit") or settings[name] != paper[name]]
    else:
        gain = "alpha" if concept.role == "plus" else "gamma"
        shown = ["mode", gain, "kappa", "nu"]
        shown += [name for name in ("per", "by", "min_similarity") if settings[name] != paper[name]]
    return f"{concept.word}: " + ", ".join(format_setting(name, settings[name]) for name in shown)


def _short_name(model: str) -> str:
    """The name of a model; for a folder only its last two parts, because its path is private."""
    parts = Path(model).parts
    return "/".join(parts[-2:]) if Path(model).is_absolute() else model
