"""What the demo shows, as text and HTML: captions, reasons, recipes, the Python call. Nothing here knows Gradio."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from elude_steer.documents import dump_document, parse_document
from elude_steer.errors import SpecError
from elude_steer.labels import Match
from elude_steer.plans import Plan, Settings
from elude_steer.recipe import Recipe, SteeringSpec, StepSpec, list_recipes, load_recipe
from elude_steer.results import SteeredCaption, compared
from elude_steer.steering import Steerer

# One line each, for people who have not read the paper.
HINTS: Mapping[str, str] = {
    "mode": "place works on a region and can put things there; scale, the paper's, multiplies what already fires",
    "kappa": "sub-units a word stands for",
    "nu": "patches of each tile that are changed; larger for large things and for places",
    "gamma": "what the sub-units of removed words are multiplied by",
    "alpha": "what those of added words are multiplied by (scale)",
    "beta": "how strongly added words are set (place)",
    "fill": "sub-units of the surroundings that take a removed word's place (place); 0 leaves a hole",
}


def captions(result: SteeredCaption) -> str:
    """Baseline and steered caption side by side, with notes under them."""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in result.notes)
    return f'<div class="captions" role="status">{compared(result)}</div>{notes}'


def complaint(error: Exception) -> str:
    """An error as a sentence in the page."""
    return f'<div class="complaint" role="alert">{html.escape(str(error))}</div>'


def matches(plan: Plan) -> list[list[Any]]:
    """The rows of "why": word, label, found by, similarity, score, unit and part of every edited sub-unit."""
    rows = []
    for concept in plan.concepts:
        sign = "+" if concept.role == "plus" else "-"
        for edit in concept.edits:
            row = [f"{sign}{concept.word}", edit.label, round(edit.similarity, 2), round(edit.score, 1), edit.unit]
            rows.append([*row, edit.sub_unit])
    return rows


def found(rows: Sequence[Match]) -> list[list[Any]]:
    """The rows of a search in the explorer."""
    return [[m.label, round(m.similarity, 2), round(m.score, 1), m.unit, m.sub_unit] for m in rows]


def python_call(
    image: str | None, minus: Sequence[str], plus: Sequence[str], given: Mapping[str, Any], atlas: str
) -> str:
    """The call that does the same."""
    parts = [repr(image or "photo.png")]
    parts += [f"minus={list(minus)!r}"] if minus else []
    parts += [f"plus={list(plus)!r}"] if plus else []
    parts += [f"{name}={value!r}" for name, value in given.items()]
    parts += [f"atlas={atlas!r}"] if atlas != "toyland" else []
    return f"import elude_steer as es\n\nes.steer({', '.join(parts)}).caption"


def recipe_text(
    image: str | None, minus: Sequence[str], plus: Sequence[str], given: Mapping[str, Any], atlas: str
) -> str:
    """The present state as a recipe."""
    step = StepSpec(tuple(minus), tuple(plus), settings=SteeringSpec(**given))
    return dump_document(Recipe("from-the-demo", atlas, (step,), image))


def read_recipe(text: str) -> Recipe:
    """A recipe that somebody gives to the page."""
    recipe = parse_document(Recipe, text, "the recipe")
    if not recipe.steps:
        raise SpecError("the recipe has no steps; it needs at least one, with minus or plus words.")
    return recipe


def pictures_of(atlas: str) -> list[Path]:
    """The pictures of the shipped recipes for an atlas."""
    recipes = [load_recipe(one.name) for one in list_recipes() if one.kind == "steering"]
    found = [Path(one.image) for one in recipes if one.atlas == atlas and one.image]
    return [path for path in dict.fromkeys(found) if path.is_file()]


def changed(steerer: Steerer, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the atlas's own."""
    own = Settings.of(steerer.defaults)
    known = {field.name for field in fields(Settings)}
    return {name: value for name, value in values.items() if name in known and value != getattr(own, name)}
