"""What the demo answers and shows: captions, maps, reasons, recipes, the Python call. Nothing here knows Gradio."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from elude_steer.documents import dump_document, parse_document
from elude_steer.errors import ImageError, SpecError
from elude_steer.figures import fitted
from elude_steer.images import open_image
from elude_steer.labels import Match
from elude_steer.plans import Plan, Settings
from elude_steer.recipe import Recipe, SteeringSpec, StepSpec, list_recipes, load_recipe
from elude_steer.results import SteeredCaption, compared
from elude_steer.specimens import Specimens
from elude_steer.steering import Steerer

SHOWN = 448  # pixels of the longer side of pictures in the page
TUNABLE = ("mode", "kappa", "nu", "gamma", "alpha", "beta", "fill")
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


class Page:
    """The page's answers to what visitors do; it keeps nothing about them."""

    def __init__(self, steerer: Steerer, examples: Sequence[Path]) -> None:
        self.steerer, self.examples = steerer, tuple(examples)
        self.specimens = Specimens(steerer.atlas, steerer.vlm)
        self.own = Settings.of(steerer.defaults)
        self.words = list(steerer.atlas.named().counts)

    def take(self, source: Any) -> Any:
        """A picture that somebody chose or brought, checked."""
        if source is None:
            raise ImageError("there is no picture yet; choose an example, or bring one of yours.")
        return open_image(source)

    def settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """What stands in the folded settings, as far as it differs from the atlas's own."""
        given = dict(zip(TUNABLE, values, strict=True))
        text = str(given["nu"]).strip()
        given["nu"] = int(text) if text.lstrip("-").isdecimal() else text
        for name in ("kappa", "fill"):
            given[name] = int(given[name]) if given[name] is not None else None
        return {name: value for name, value in changed(self.steerer, given).items() if value is not None}

    def region(self, painted: Any, picture: Any) -> np.ndarray | None:
        """What was marked with the brush, as a mask over the picture; None where nothing was."""
        layers = (painted or {}).get("layers") or []
        marked = [np.asarray(layer.convert("RGBA"))[..., 3] > 0 for layer in layers if layer is not None]
        if not marked or not np.any(marked):
            return None
        mask = np.any(marked, axis=0)
        shown = fitted(picture, SHOWN)
        return mask[: shown.height, : shown.width]

    def steer(self, picture: Any, painted: Any, minus: Sequence[str], plus: Sequence[str], *values: Any) -> Any:
        """Both captions of a picture."""
        image = self.take(picture)
        given = self.settings(values)
        if not minus and not plus:
            raise SpecError("say what should go or come: pick a word, or type one.")
        where = self.region(painted, image)
        if where is not None:
            given["mode"] = "place"
        plan, notes = self.steerer.planned(minus, plus, where, given)
        return self.steerer.explain(image, plan, notes=notes)

    def maps(self, result: Any) -> list[tuple[Image.Image, str]]:
        """The picture with a heat map for each word."""
        named = {c.word: ("+" if c.role == "plus" else "-") + c.word for c in result.plan.concepts}
        return [(result.heatmap(word, side=SHOWN), named[word]) for word in result.maps]


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
