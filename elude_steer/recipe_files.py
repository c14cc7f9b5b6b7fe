"""Recipes found and read: a YAML file, or one that comes with the package."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from elude_steer.errors import SpecError, did_you_mean
from elude_steer.specs import AtlasSpec, Recipe
from elude_steer.utils.yaml_schema import parse_document


class Shipped(NamedTuple):
    """One recipe that comes with the package; `kind` is its folder, `summary` its first comment line."""

    kind: str
    name: str
    path: Path
    summary: str


def load_spec(path_or_name: str | Path) -> AtlasSpec:
    """The build spec in a YAML file, or in the shipped recipe of that name.

    Example:
        >>> load_spec("dinov2-base-layer12").clusters.top_k
        400000
    """
    path = find_recipe(path_or_name)
    return parse_spec(_text(path), where=str(path))


def load_recipe(path_or_name: str | Path) -> Recipe:
    """The steering recipe in a YAML file, or the shipped one of that name; its pictures are then full paths."""
    path = find_recipe(path_or_name)
    recipe = parse_recipe(_text(path), str(path))

    def full(name: str | None) -> str | None:
        return name and str((path.parent / name).resolve())

    steps = tuple(replace(step, mask=full(step.mask)) for step in recipe.steps)
    return replace(recipe, image=full(recipe.image), steps=steps)


def check_recipe(path_or_name: str | Path) -> AtlasSpec | Recipe:
    """The document of either kind in a file; one with `steps` at its left edge says what to change."""
    steering = re.search(r"^steps\s*:", _text(find_recipe(path_or_name)), re.MULTILINE)
    return load_recipe(path_or_name) if steering else load_spec(path_or_name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as UTF-8 text: {error}") from error


def find_recipe(path_or_name: str | Path) -> Path:
    """The YAML file of a path or of a shipped recipe's name."""
    # A folder of the same name is no obstacle: `--out NAME` makes one.
    if Path(path_or_name).is_file():
        return Path(path_or_name)
    shipped = {recipe.name: recipe.path for recipe in list_recipes()}
    name = str(path_or_name).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    hint = did_you_mean(Path(name).name, list(shipped))
    raise SpecError(f"'{path_or_name}' is neither a file nor a shipped recipe.{hint} See `elude-steer recipes list`.")


def parse_spec(text: str, where: str = "<text>") -> AtlasSpec:
    """The build spec that a YAML text says; `where` names the text in error messages."""
    return parse_document(AtlasSpec, text, where)


def parse_recipe(text: str, where: str = "<text>") -> Recipe:
    """The steering recipe that a YAML text says; `where` names the text in error messages."""
    recipe = parse_document(Recipe, text, where)
    if not recipe.steps:
        raise SpecError(f"{where}: steps is empty; say at least one edit.")
    for number, step in enumerate(recipe.steps, 1):
        if step.where and step.mask:
            raise SpecError(f"{where}: step {number} has both where and mask; one says where to place.")
    return recipe


def recipes_dir() -> Path:
    """The folder of shipped recipes: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def list_recipes() -> list[Shipped]:
    """Every shipped recipe, sorted by kind and name."""
    root = recipes_dir()
    found = []
    for path in root.glob("*/**/*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.lstrip("#").strip() if first.startswith("#") else ""
        found.append(Shipped(path.relative_to(root).parts[0], path.stem, path, summary))
    return sorted(found)
