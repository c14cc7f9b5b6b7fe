"""What commands refuse before they load torch: wrong concepts, settings, files, atlases and models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elude_steer.specs import AtlasSpec, Recipe


def split_words(texts: Sequence[str]) -> list[str]:
    """The concepts of a repeated option, several of which may stand in one text, separated by commas."""
    return [word for text in texts for word in text.split(",")]


def check_images(source: str | None) -> None:
    """Raise if a folder or list of images is not there; those of the Hub are looked for later."""
    from elude_steer.errors import ImageError
    from elude_steer.models.images import image_set
    from elude_steer.models.sources.patterns import list_shards, names_shards

    if source is None or source.startswith(("hf:", "hf-stream:")):
        return
    if names_shards(source):  # listed later, because that takes a while
        list_shards(source)
        return
    if not source.strip() or source.startswith("toyland:") or "://" in source or os.path.isfile(source):  # noqa: PTH113, see `_is_dir`
        image_set(source, limit=1)
    elif not _is_dir(source):
        raise ImageError(f"there is no folder or file '{source}' with images; check the path.")


def check_edit(
    atlas: str,
    minus: Any,
    plus: Any,
    where: Any = None,
    settings: Mapping[str, Any] | None = None,
    size: tuple[int, int] | None = None,
) -> list[Any]:
    """Read the concepts of an edit without their sub-units; raise for all that is wrong without a model.

    Args:
        atlas: the atlas, whose default settings count.
        minus: concepts to remove.
        plus: concepts to add.
        where: a box, or the file of a mask.
        settings: those of the edit.
        size: width and height of the image, if the box must lie in it.
    """
    from elude_steer.atlas.manifest import read_defaults

    return _read_edit(read_defaults(atlas), minus, plus, where, settings, size)


def _read_edit(
    defaults: Mapping[str, Any],
    minus: Any,
    plus: Any,
    where: Any,
    settings: Mapping[str, Any] | None,
    size: tuple[int, int] | None,
) -> list[Any]:
    from elude_steer.steering.plan import read_concepts
    from elude_steer.steering.regions import Region

    region = Region.from_value(where)
    if region is not None and size is not None:
        region.check_inside(size)
    return read_concepts(minus, plus, region, settings, defaults)


def check_steps(recipe: Recipe, atlas: str | None = None, size: tuple[int, int] | None = None) -> None:
    """Raise for a step of a recipe that no model could make; an atlas that is not there yet has no settings."""
    from dataclasses import asdict

    from elude_steer.atlas.manifest import list_atlases, read_defaults
    from elude_steer.errors import EludeSteerError, SpecError

    if atlas is None and recipe.atlas in dict(list_atlases()):
        atlas = recipe.atlas
    defaults = {} if atlas is None else read_defaults(atlas)
    problems = []
    for number, step in enumerate(recipe.steps, 1):
        try:
            _read_edit(defaults, step.minus, step.plus, step.region, asdict(step.settings), size)
        except EludeSteerError as error:
            problems.append(f"recipe '{recipe.name}', step {number}: {error}")
    if problems:
        raise SpecError(problems)


def check_grid(grid: Mapping[str, Sequence[Any]] | None) -> None:
    """Raise for a setting or value of a grid that does not exist."""
    from elude_steer.steering.settings import merge_settings

    for name, values in (grid or {}).items():
        for value in values:
            merge_settings({name: value})


def check_coco(annotations: str, folder: str) -> None:
    """Raise if COCO's annotations or images are not there."""
    from elude_steer.errors import ImageError

    if not os.path.isfile(annotations):  # noqa: PTH113, see `_is_dir`
        raise ImageError(f"there is no file '{annotations}' with COCO's annotations, such as instances_val2017.json.")
    if not _is_dir(folder):
        raise ImageError(f"there is no folder '{folder}' with COCO's images, such as val2017.")


def check_photos(source: str) -> None:
    """Refuse photos without captions: `source` is a folder with `captions.json`, or such a file."""
    from elude_steer.errors import ImageError

    path = Path(source).expanduser()
    path = path / "captions.json" if _is_dir(str(path)) else path
    if not os.path.isfile(path):  # noqa: PTH113, see `_is_dir`
        raise ImageError(
            f"--scenes photos:{source} needs '{path}', which is not there: captions of the photos beside it, in the "
            "format of COCO's captions_val2017.json."
        )


def check_spec(name: str, changes: Sequence[str]) -> AtlasSpec:
    """Read a build spec with changes; raise for all problems of both."""
    from elude_steer.recipe_files import load_spec
    from elude_steer.utils.yaml_schema import override

    return override(load_spec(name), changes)


def check_variations(spec: AtlasSpec, vary: Mapping[str, Sequence[str]]) -> None:
    """Raise for a setting to vary that has no values, or values that the spec does not take."""
    from elude_steer.errors import SpecError
    from elude_steer.utils.yaml_schema import override

    for name, values in vary.items():
        if not values or not name:
            raise SpecError(f"--vary {name or '='} has no values; write {name or 'clusters.selection'}=V,V.")
        for value in values:
            override(spec, [f"{name}={value}"])


def _is_dir(name: str) -> bool:
    return os.path.isdir(Path(name).expanduser())  # noqa: PTH112, Path raises on a text that is too long for a name
