"""Edits of requests as plans: words or the name of a recipe in, a plan ready for the layer out, each made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError, did_you_mean
from elude_steer.recipe_files import check_files, list_recipes, load_recipe
from elude_steer.server.access import RefusedError
from elude_steer.server.requests import EditRequest
from elude_steer.specs import Recipe
from elude_steer.steering.intervention import PreparedPlan
from elude_steer.steering.plan import Plan
from elude_steer.steering.run_recipe import step_settings
from elude_steer.steering.steerer import Steerer

Value = TypeVar("Value")
_PLANS, _PREPARED = 512, 64  # that are kept; a prepared plan holds the weights of its sub-units


class Memo(Generic[Value]):
    """The values of the keys that were asked for last; one thread at a time may use it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not here."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        while len(self._values) > self.size:
            self._values.popitem(last=False)
        return value


@dataclass(frozen=True, eq=False)
class Edit:
    """An edit that was asked for: its plan, and notes on it."""

    plan: Plan
    notes: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """The key of its plan."""
        return self.plan.key

    def check_fits(self, size: tuple[int, int]) -> None:
        """Raise if a box of the edit lies outside an image of this width and height."""
        for region in (self.plan.where, *(concept.where for concept in self.plan.concepts)):
            if region is not None:
                region.check_inside(size)

    def report(self, seen: Mapping[str, float], notes: Sequence[str]) -> dict[str, Any]:
        """What a response says of the edit: what it is, what was seen in the image, and what else to know.

        Args:
            seen: for each word looked for, its reading in the image as a share of what it reaches where it is.
            notes: on the image.
        """
        lines, described = self._description
        concepts = [
            {**one, "seen": round(seen[one["word"]], 3)} if one["word"] in seen else dict(one) for one in described
        ]
        all_notes = [_in_json(note) for note in dict.fromkeys((*self.notes, *notes))]
        return {"plan": list(lines), "concepts": concepts, "notes": all_notes}

    @cached_property
    def _description(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The lines of the plan and its concepts, which are the same in every response."""
        concepts: list[dict[str, Any]] = []
        for concept in self.plan.concepts:
            one: dict[str, Any] = {"word": concept.word, "role": concept.role, "mode": concept.settings.mode}
            if concept.detector is not None:
                one |= {"read_by": concept.detector.word, "similarity": round(concept.detector.similarity, 3)}
            else:
                one["sub_units"] = len(concept.edits)
            concepts.append(one)
        return str(self.plan).splitlines(), concepts


class Edits:
    """Makes the edits of requests. Plans are made in one thread, and prepared in another."""

    def __init__(self, steerer: Steerer[Atlas], recipes: Mapping[str, Recipe]) -> None:
        self.steerer, self.recipes = steerer, recipes
        self._plans: Memo[Edit] = Memo(_PLANS)
        self._prepared: Memo[PreparedPlan | None] = Memo(_PREPARED)

    def plan(self, request: EditRequest | None) -> Edit | None:
        """The edit that a request asks for; raises for words or settings that the atlas does not take."""
        return None if request is None else self._plans.get(request.key, lambda: self._plan(request))

    def prepare(self, edit: Edit | None) -> PreparedPlan | None:
        """The weights of an edit's sub-units."""
        if edit is None:
            return None
        return self._prepared.get(edit.key, lambda: self.steerer.gather_weights(edit.plan))

    def _plan(self, request: EditRequest) -> Edit:
        if request.recipe is None:
            plan, notes = self.steerer.prepare_plan(request.minus, request.plus, request.where, request.settings)
            return Edit(plan, tuple(notes))
        # Names of recipes are looked up among those that were read at the start: a request names no file.
        recipe = self.recipes.get(request.recipe)
        if recipe is None:
            names = list(self.recipes)
            known = ", ".join(names[:20]) or "none"
            raise RefusedError(
                f"there is no recipe of that name here.{did_you_mean(request.recipe, names)} There are: {known}.",
                param="steer.recipe",
            )
        if request.step > len(recipe.steps):
            raise RefusedError(
                f"recipe '{request.recipe}' has {len(recipe.steps)} edits; send a step from 1 to {len(recipe.steps)}.",
                param="steer.step",
            )
        step = recipe.steps[request.step - 1]
        plan, notes = self.steerer.prepare_plan(step.minus, step.plus, step.region, step_settings(step))
        return Edit(plan, tuple(notes))


def _in_json(note: str) -> str:
    """A note with the fields of `steer` in the place of the options of the command line."""
    for option, name in (("`--force`", '"force": true'), ("`--minus`", '"minus"'), ("`--where`", '"where"')):
        note = note.replace(option, name)
    return note


def read_recipes(atlas: str, files: Sequence[str] = ()) -> dict[str, Recipe]:
    """The recipes that requests can name: the shipped ones for an atlas, and files of whoever starts the server."""
    found = {}
    for listed in list_recipes():
        if listed.kind == "steering" and (recipe := load_recipe(listed.path)).atlas == atlas:
            found[listed.name] = recipe
    for file in files:
        recipe = load_recipe(file)
        check_files(replace(recipe, image=None))  # its masks; its image is not needed
        name = Path(file).stem
        if name in found and file != name:
            raise SpecError(f"there are two recipes '{name}'; rename '{file}'.")
        found[name] = recipe
    return found
