"""Finding and reading recipes: YAML files, and those that come with the package."""

from __future__ import annotations

import io
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from elude_steer.errors import SpecError, StorageError, did_you_mean
from elude_steer.specs import AtlasSpec, Recipe
from elude_steer.utils.files import check_file, check_folder, read_bytes, write_file
from elude_steer.utils.yaml_schema import parse_document

_MAX_STEPS, _MAX_BYTES, _MAX_IMAGE = 500, 4_000_000, 100_000_000
# How a file begins that `recipes copy` takes for an image: another one would be a stranger's under a stranger's name.
_IMAGE_STARTS = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM|II\*\0|MM\0\*|P[1-6]\s|....ftypavi[fs]", re.DOTALL
)
_IMAGE_NAME = re.compile(r"[^.].*\.(?:png|jpe?g|webp|bmp|gif|tiff?|ppm|avif)", re.IGNORECASE)


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
    text = read_text(path)
    if _steering_keys(text) > 0:
        raise SpecError(
            f"'{path_or_name}' says what to change, not how to build an atlas: `elude-steer run {path_or_name}`."
        )
    return parse_spec(text, source=str(path))


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read the steering recipe in a YAML file, or the shipped one of that name; its images become full paths."""
    path = find_recipe(path_or_name)
    text = read_text(path)
    if _steering_keys(text) < 0:
        raise SpecError(
            f"'{path_or_name}' says how to build an atlas, not what to change: `elude-steer build {path_or_name}`."
        )
    recipe = parse_recipe(text, str(path))

    def full_path(name: str | None) -> str | None:
        return name and str((path.parent / name).resolve())

    steps = tuple(replace(step, mask=full_path(step.mask)) for step in recipe.steps)
    return replace(recipe, image=full_path(recipe.image), steps=steps)


def load_any_recipe(path_or_name: str | Path) -> AtlasSpec | Recipe:
    """Read a document of either kind."""
    is_steering = _steering_keys(read_text(find_recipe(path_or_name))) > 0
    return load_recipe(path_or_name) if is_steering else load_spec(path_or_name)


def _steering_keys(text: str) -> int:
    """How many more keys of a steering recipe than of a build spec YAML text has."""
    keys = set(re.findall(r"^[{ ]*(\w+)\s*:", text, re.MULTILINE))
    recipe, spec = ({field.name for field in fields(kind)} for kind in (Recipe, AtlasSpec))
    return len(keys & (recipe - spec)) - len(keys & (spec - recipe))


def require_image(recipe: Recipe) -> None:
    """Raise if a recipe names no image."""
    if recipe.image is None:
        command = f"elude-steer run {quote(recipe.name)} --image FILE"
        raise SpecError(f"recipe '{recipe.name}' has no image; give one: `{command}`.")


def check_files(recipe: Recipe) -> None:
    """Raise if the image or a mask of a loaded recipe is not there."""
    files = {"image": recipe.image, **{f"steps[{n}].mask": step.mask for n, step in enumerate(recipe.steps)}}
    missing = [(key, name) for key, name in files.items() if name is not None and not _is_file(name)]
    if missing:
        raise SpecError(
            [f"recipe '{recipe.name}': {key}: there is no file '{name}'; correct the path." for key, name in missing]
        )


def copy_recipe(path_or_name: str | Path, target: str | Path) -> list[Path]:
    """Copy a recipe, and its image and masks beside it, so that the copy can be changed and run.

    Args:
        path_or_name: a file, or the name of a shipped recipe.
        target: a folder (there already, or with a `/` at its end), or a new file.

    Returns:
        The files that were written, the recipe first.
    """
    source = find_recipe(path_or_name)
    text = read_text(source)
    if str(target).endswith("/") or Path(target).expanduser().is_dir():
        path = check_folder(target) / source.name
        if source.suffix not in (".yaml", ".yml"):
            raise SpecError(f"'{source}' does not end in .yaml; give the copy a file name that does.")
    else:
        path = check_file(target, (".yaml", ".yml"))
    copies = {path: b""}
    names = _image_names(parse_recipe(text, str(source))) if _steering_keys(text) > 0 else ()
    for name in names:
        image = source.parent / name
        if image.is_file():
            data = _read_image(source, name)
            if copies.setdefault(path.parent / image.name, data) != data:
                raise SpecError(f"'{source}' names two files '{image.name}', and a copy has one; rename one of them.")
            text = re.sub(rf"((?:image|mask): *['\"]?){re.escape(name)}", lambda m, n=image.name: m[1] + n, text)  # type: ignore[misc]
    copies[path] = text.encode()
    new = {place: data for place, data in copies.items() if not (place.is_file() and place.read_bytes() == data)}
    for place in copies:
        if os.path.lexists(place) and (place in new or place == path):
            raise StorageError(f"'{place}' already exists; give another folder or name.")
    for place, data in reversed(new.items()):  # the recipe last, when what it needs is there
        write_file(place, lambda file, data=data: file.write(data))  # type: ignore[misc]
    return list(new)


def _read_image(recipe: Path, name: str) -> bytes:
    """The image or mask of a recipe, to be copied; raise if it is none, or lies outside the recipe's folder."""
    path, ours = recipe.parent / name, recipes_dir() in recipe.resolve().parents
    said = f"'{recipe}' names the file {ascii(name)[:80]}, which is not copied:"
    if not ours and recipe.resolve().parent not in path.resolve().parents:
        raise SpecError(f"{said} it lies outside the recipe's folder; copy it by hand if it is yours.")
    try:
        data = read_bytes(path, _MAX_IMAGE)
    except OSError as error:
        raise SpecError(f"{said} it cannot be read ({error.strerror}); copy it by hand.") from error
    if not _IMAGE_NAME.fullmatch(path.name) or not _IMAGE_STARTS.match(data):
        raise SpecError(f"{said} it is no PNG, JPEG or other image; correct the recipe.")
    return data


def _image_names(recipe: Recipe) -> tuple[str, ...]:
    """The files that a recipe names, as it names them."""
    names = (recipe.image, *(step.mask for step in recipe.steps))
    return tuple(dict.fromkeys(name for name in names if name))


def read_text(path: Path) -> str:
    """The text of a recipe."""
    try:
        # As Python reads a file of text: all ends of lines become one.
        return io.TextIOWrapper(io.BytesIO(read_bytes(path, _MAX_BYTES)), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{path} cannot be read as UTF-8 text: {reason}") from error


def _is_file(name: str | Path) -> bool:
    return os.path.isfile(name)  # noqa: PTH113, Path raises on a text that is too long for a name


def find_recipe(path_or_name: str | Path) -> Path:
    """The path of a YAML file, given by its path or by a shipped recipe's name."""
    # A folder of the same name, which `--out NAME` makes, does not hide the recipe.
    if _is_file(path_or_name):
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
    if len(recipe.steps) > _MAX_STEPS:
        raise SpecError(f"{source}: has {len(recipe.steps):,} steps; at most {_MAX_STEPS} fit into one recipe.")
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
