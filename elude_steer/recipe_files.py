"""Finding and reading recipes: YAML files, and those that come with the package."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from elude_steer.errors import SpecError, did_you_mean
from elude_steer.specs import AtlasSpec, Recipe
from elude_steer.utils.yaml_schema import parse_document


class ShippedRecipe(NamedTuple):
    """A recipe that comes with the package; `kind` is its folder, `summary` its first comment line."""

    kind: str
    name: str
    path: Path
    summary: str


def load_spec(path_or_name: str | Path) -> AtlasSpec:
    """Read the build spec in a YAML file, or the shipped one of that name.

    Example:
        >>> load_spec("dinov2-base-layer12").clusters.top_k
        400000
    """
    path = find_recipe(path_or_name)
    return parse_spec(_read_text(path), source=str(path))


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read the steering recipe in a YAML file, or the shipped one of that name; its images become full paths."""
    path = find_recipe(path_or_name)
    recipe = parse_recipe(_read_text(path), str(path))

    def full_path(name: str | None) -> str | None:
        return name and str((path.parent / name).resolve())

    steps = tuple(replace(step, mask=full_path(step.mask)) for step in recipe.steps)
    return replace(recipe, image=full_path(recipe.image), steps=steps)


def load_any_recipe(path_or_name: str | Path) -> AtlasSpec | Recipe:
    """Read a document of either kind; one with `steps` at its left edge is a steering recipe."""
    is_steering = re.search(r"^steps\s*:", _read_text(find_recipe(path_or_name)), re.MULTILINE)
    return load_recipe(path_or_name) if is_steering else load_spec(path_or_name)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as UTF-8 text: {error}") from error


def find_recipe(path_or_name: str | Path) -> Path:
    """The path of a YAML file, given by its path or by a shipped recipe's name."""
    # A folder of the same name, which `--out NAME` makes, does not hide the recipe.
    if Path(path_or_name).is_file():
        return Path(path_or_name)
    shipped = {recipe.name: recipe.path for recipe in list_recipes()}
    name = str(path_or_name).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    hint = did_you_mean(Path(name).name, list(shipped))
    raise SpecError(f"'{path_or_name}' is neither a file nor a shipped recipe.{hint} See `elude-steer recipes list`.")


def parse_spec(text: str, source: str = "<text>") -> AtlasSpec:
    """Read a build spec from YAML text; `source` names the text in error messages."""
    return parse_document(AtlasSpec, text, source)


def parse_recipe(text: str, source: str = "<text>") -> Recipe:
    """Read a steering recipe from YAML text; `source` names the text in error messages."""
    recipe = parse_document(Recipe, text, source)
    if not recipe.steps:
        raise SpecError(f"{source}: steps is empty; give at least one edit.")
    for number, step in enumerate(recipe.steps, 1):
        if step.where and step.mask:
            raise SpecError(f"{source}: step {number} has both where and mask; give only one.")
    return recipe


def recipes_dir() -> Path:
    """The folder of shipped recipes: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def list_recipes() -> list[ShippedRecipe]:
    """All shipped recipes, sorted by kind and name."""
    root = recipes_dir()
    found = []
    for path in root.glob("*/**/*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.lstrip("#").strip() if first.startswith("#") else ""
        found.append(ShippedRecipe(path.relative_to(root).parts[0], path.stem, path, summary))
    return sorted(found)
