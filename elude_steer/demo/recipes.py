"""Recipes in the demo: shipped examples, uploaded recipes, and the visitor's edit as a recipe or a Python call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import yaml

from elude_steer.atlas.manifest import EMBEDDED_ATLAS
from elude_steer.demo.session import EditRequest
from elude_steer.errors import SpecError
from elude_steer.models.vlm import PROMPT
from elude_steer.recipe_files import list_recipes, load_recipe, parse_recipe
from elude_steer.specs import Recipe, Settings, SteeringSpec, StepSpec
from elude_steer.utils.yaml_schema import dump_document

SIGNS = {"minus": "\N{MINUS SIGN} ", "plus": "+ "}
_MAX_RECIPE_LENGTH = 20_000  # characters; YAML is slow to parse


@dataclass(frozen=True)
class Example:
    """A shipped recipe with its image."""

    path: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        """The file name without the atlas's name, which all examples share."""
        return self.path.stem.removeprefix(f"{self.recipe.atlas}-")


def shipped_examples(atlas: str) -> list[Example]:
    """The shipped recipes for an atlas whose images are on this machine."""
    recipes = [load_recipe(listed.name) for listed in list_recipes() if listed.kind == "steering"]
    return [
        Example(Path(recipe.image), recipe)
        for recipe in recipes
        if recipe.atlas == atlas and recipe.image and Path(recipe.image).is_file()
    ]


def edit_name(step: StepSpec) -> str:
    """An edit in signs and words: `− dog + biker`."""
    words = [("minus", word) for word in step.minus] + [("plus", word) for word in step.plus]
    return " ".join(SIGNS[role] + word for role, word in words) or "nothing"


def recipe_text(image: str, request: EditRequest, atlas: str, *, mask: str | None = None) -> str:
    """An edit as a recipe. It names no image: its first lines give the command that passes one."""
    step = StepSpec(request.minus, request.plus, mask=mask, settings=SteeringSpec(**request.settings))
    document = Recipe("from-the-demo", atlas, (step,), prompt=request.prompt or PROMPT)
    lines = [f"# {edit_name(step)}, from the demo.", "#", f"#   elude-steer run steering.yaml --image {quote(image)}"]
    # A line break in a word or a file name would end the comment.
    comments = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]
    return "\n".join([*comments, "", dump_document(document, brief=True)])


def python_call(image: str, request: EditRequest, atlas: str, *, mask: str | None = None) -> str:
    """An edit as a Python call."""
    arguments = [repr(image)]
    arguments += [f"minus={list(request.minus)!r}"] if request.minus else []
    arguments += [f"plus={list(request.plus)!r}"] if request.plus else []
    arguments += [f"where={mask!r}"] if mask else []
    arguments += [f"{name}={value!r}" for name, value in request.settings.items()]
    arguments += [f"prompt={request.prompt!r}"] if request.prompt not in ("", PROMPT) else []
    arguments += [f"atlas={atlas!r}"] if atlas != EMBEDDED_ATLAS else []
    return f"import elude_steer as es\n\nes.steer({', '.join(arguments)}).caption"


def read_recipe(path: str | Path) -> Recipe:
    """Read an uploaded recipe. The paths in it are the visitor's: they are never opened on this machine."""
    try:
        if Path(path).stat().st_size > _MAX_RECIPE_LENGTH:
            raise SpecError(f"the recipe has more than {_MAX_RECIPE_LENGTH:,} characters; upload one with fewer edits.")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("the recipe cannot be read as UTF-8 text; upload a YAML file.") from error
    recipe = parse_recipe(text, "the recipe")
    steps = tuple(replace(step, mask=step.mask and Path(step.mask).name) for step in recipe.steps)
    return replace(recipe, image=None, steps=steps)


def describe_removed(path: str | Path) -> list[str]:
    """A sentence about settings of older versions in a recipe that `read_recipe` has read; they have no effect."""
    # The base loader makes only texts: no objects, and no errors for values that `read_recipe` accepts.
    steps = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["steps"]  # noqa: S506  # nosec B506
    removed = {name: Settings.removed[name] for name in steps[0].get("settings") or {} if name in Settings.removed}
    reasons = ", ".join(dict.fromkeys(removed.values()))
    return [f"No longer a setting: {', '.join(sorted(removed))} ({reasons})."] if removed else []


def describe_ignored(
    recipe: Recipe, fields: Collection[str], atlas_settings: Settings, atlas: str, max_strength: float = 3.0
) -> list[str]:
    """Sentences about what the page ignores in a recipe's first edit: settings without a field, another atlas.

    Args:
        recipe: the recipe.
        fields: settings that have a field in the page.
        atlas_settings: the settings that hold where the recipe names none.
        atlas: name of the page's atlas.
        max_strength: the largest strength of the page.
    """
    settings = {name: value for name, value in vars(recipe.steps[0].settings).items() if value is not None}
    ignored = {name for name, value in settings.items() if value != getattr(atlas_settings, name)} - set(fields)
    if recipe.max_new_tokens != Recipe.max_new_tokens:
        ignored.add("max_new_tokens")
    notes = [f"Ignored, because this page has no field for it: {', '.join(sorted(ignored))}."] if ignored else []
    if settings.get("strength", 0) > max_strength:
        notes.append(f"The strength of the recipe is {settings['strength']:g}; this page goes up to {max_strength:g}.")
    written_for = Path(recipe.atlas).name
    if atlas not in (recipe.atlas, written_for):
        notes.append(f"The recipe was written for atlas '{written_for}'; this page uses '{atlas}'.")
    return notes
