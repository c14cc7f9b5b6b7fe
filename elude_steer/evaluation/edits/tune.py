"""Find good settings for one image or for many; save them as a recipe or as the atlas's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import check_not_shipped, list_atlases
from elude_steer.errors import SpecError
from elude_steer.evaluation.edits import KINDS, Kind, parse_scenes
from elude_steer.evaluation.edits.benchmark import World, toyland_world
from elude_steer.evaluation.edits.coco import coco_world
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.edits.sweep import (
    By,
    Point,
    best_point,
    check_criterion,
    single_image_world,
    sweep,
    try_settings,
)
from elude_steer.models.images import open_image
from elude_steer.models.vlm import PROMPT
from elude_steer.specs import Recipe, SteeringSpec, StepSpec
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import IMAGE_ENDINGS, check_file, check_new_recipe, write_file, write_image
from elude_steer.utils.plotting import scatter
from elude_steer.utils.yaml_schema import dump_document

# The default grids: of an atlas whose own mode is place, and of one whose mode is scale.
_PLACE = {"strength": (0.5, 1, 1.5, 2), "fit": (0.2, 0.3, 0.4)}
_SCALE = {"kappa": (12, 24), "nu": (6, 10, 16)}
GRIDS: Mapping[tuple[str, str], Mapping[str, Sequence[Any]]] = {
    **{("place", kind): _PLACE for kind in get_args(Kind)},
    **{("scale", kind): {"gamma": (-15, -50), **_SCALE} for kind in ("remove", "absent")},
    **{("scale", kind): {"alpha": (5, 20), **_SCALE} for kind in ("replace", "two", "place", "add")},
}


def default_grid(steerer: Steerer, kind: str) -> Mapping[str, Sequence[Any]]:
    """The settings to try for a kind of edit, if the caller gives none."""
    return GRIDS[str(steerer.defaults.get("mode") or "scale"), kind]


@dataclass(frozen=True, repr=False)
class TuningResult:
    """The settings that were tried, best first. Its `repr` is a table.

    Attributes:
        best: the best settings, as keyword arguments of `Steerer.steer`.
        rows: the settings with their scores, best first.
        columns: the keys of each row, in the order of the table.
        notes: remarks as sentences.
    """

    best: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        more = len(self.rows) - 10
        return "\n".join([self.table(10), *([f"and {more} more"] if more > 0 else []), *self.notes])

    def table(self, limit: int) -> str:
        """The first `limit` rows as aligned text."""
        lines = [list(self.columns)]
        for row in self.rows[:limit]:
            lines.append([f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in self.columns])
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def tune(
    steerer: Steerer,
    target: Any,
    *,
    minus: str | None = None,
    plus: str | None = None,
    kind: Kind = "remove",
    grid: Mapping[str, Sequence[Any]] | None = None,
    by: By = "harmonic",
    min_kept: float = 0.9,
    prompt: str = PROMPT,
) -> TuningResult:
    """Try a grid of settings on one image, or on a world of images with known objects.

    Args:
        steerer: the model and the atlas to tune.
        target: an image (a path, the bytes of a file, or a PIL image), or a `World`.
        minus: for an image, the concept to remove.
        plus: for an image, the concept to put in its place.
        kind: for a world, the edits to try: see `Kind`. For an image, `plus` decides.
        grid: setting -> values to try; by default a dozen points that suit the edit (`GRIDS`).
        by: what the best settings maximize: `harmonic`, `clean`, `success` or `kept`.
        min_kept: for a world, the share of the other objects and places that the best settings must keep.
        prompt: the question.

    Example:
        >>> result = tune(steerer, "dog.png", minus="dog", grid={"gamma": [-15, -50], "nu": [8, "all"]})
        >>> steerer.steer("dog.png", minus=["dog"], **result.best).caption
    """
    if kind not in get_args(Kind):
        raise SpecError(f"kind is {kind!r}; an edit is {KINDS}.")
    if isinstance(target, World):
        if minus is not None or plus is not None:
            raise SpecError(
                "minus and plus are for one image; a world brings its own concepts: tune(steerer, world, kind=…)."
            )
        return _sweep_world(steerer, target, kind, grid, by=by, min_kept=min_kept, prompt=prompt)[0]
    if minus is None:
        raise SpecError("name the concept to remove: tune(steerer, image, minus='dog').")
    if kind == "replace" and plus is None:
        raise SpecError("kind is 'replace', so plus is needed: tune(steerer, image, minus='dog', plus='biker').")
    old, new = _single_word("minus", minus), None if plus is None else _single_word("plus", plus)
    return tune_on_image(steerer, open_image(target), old, new, grid, by=by, prompt=prompt)


def tune_on_image(
    steerer: Steerer,
    image: Any,
    minus: str,
    plus: str | None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    by: By = "harmonic",
    prompt: str = PROMPT,
    write: Path | None = None,
    path: str | None = None,
) -> TuningResult:
    """Try every point of a grid on one image.

    Args:
        steerer: the model and the atlas to tune.
        image: a PIL image.
        minus: the concept to remove.
        plus: the concept to put in its place, if any.
        grid: setting -> values to try; by default one of `GRIDS`.
        by: what the best settings maximize.
        prompt: the question.
        write: where to write the best settings as a recipe.
        path: the image's file, which the recipe names; `-` is standard input, which it cannot name.
    """
    if write is not None:
        write = check_new_recipe(write)
    grid = default_grid(steerer, "remove" if plus is None else "replace") if grid is None else grid
    baseline, trials = try_settings(steerer, image, minus, plus, grid, by=by, prompt=prompt)
    rows = [
        {
            **trial.settings,
            "success": trial.outcome.success,
            "kept": trial.outcome.kept,
            "caption": trial.outcome.caption,
        }
        for trial in trials
    ]
    notes = [f"baseline: {baseline}"]
    best = trials[0]
    word = best.outcome.task.minus
    if word not in single_image_world(image, baseline, [word]).cases[0].objects:
        notes.append(f"the baseline does not say '{word}', so its absence proves nothing; use a word of the baseline.")
    if not best.outcome.success:
        notes.append("no point of the grid achieved the edit; try a larger strength or kappa, or another mode.")
    if write is not None:
        step = StepSpec((minus,), (plus,) if plus else (), settings=SteeringSpec(**best.settings))
        source = None if path in (None, "-") else str(Path(str(path)).resolve())
        text = dump_document(Recipe(write.stem, atlas_reference(steerer), (step,), source))
        write_file(write, lambda file: file.write(text.encode()))
        notes.append(f"the best settings as a recipe: {write}")
    return TuningResult(best.settings, rows, (*grid, "success", "kept", "caption"), tuple(notes))


def tune_on_world(
    steerer: Steerer,
    kind: Kind,
    scenes: str,
    coco: tuple[str, str] | None,
    count: int,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    by: By = "harmonic",
    plot: Path | None = None,
    save_to_atlas: bool = False,
) -> TuningResult:
    """Try every point of a grid on many images with known objects.

    Args:
        steerer: the model and the atlas to tune.
        kind: the edits to try.
        scenes: `toyland:SEED`, or `photos:FOLDER` (see `photo_world`).
        coco: an annotation file and a folder of images, to use in place of toyland's scenes.
        count: number of images.
        grid: setting -> values to try; by default one of `GRIDS`.
        by: what the best settings maximize.
        plot: where to save a plot of success against kept.
        save_to_atlas: whether the best settings become the atlas's defaults.
    """
    if save_to_atlas:
        _writable_folder(steerer)
    if plot is not None:
        plot = check_file(plot, IMAGE_ENDINGS)
    world = coco_world(*coco, limit=count) if coco else _world(scenes, count)
    result, points = _sweep_world(steerer, world, kind, grid, by=by)
    notes = [*result.notes]
    if plot is not None:
        coordinates = [(point.score.kept, point.score.success) for point in points]
        write_image(plot, scatter(coordinates, x="kept", y="success", marked=[0]))
        notes.append(f"plot of success against kept: {plot}")
    if save_to_atlas:
        notes.append(f"new default settings of atlas '{steerer.atlas.name}': {save_settings(steerer, result.best)}")
    return replace(result, notes=tuple(notes))


def _world(scenes: str, count: int) -> World:
    kind, where = parse_scenes(scenes)
    return toyland_world(int(where), count) if kind == "toyland" else photo_world(where, limit=count)


def _sweep_world(
    steerer: Steerer,
    world: World,
    kind: Kind,
    grid: Mapping[str, Sequence[Any]] | None,
    *,
    by: By,
    min_kept: float = 0.9,
    prompt: str = PROMPT,
) -> tuple[TuningResult, list[Point]]:
    """The result, and its points in the same order."""
    check_criterion(by)
    grid = default_grid(steerer, kind) if grid is None else grid
    points = sweep(steerer, world, kind, grid, prompt=prompt)
    best = best_point(points, by, min_kept=min_kept)
    order = sorted(points, key=lambda point: (point is not best, -getattr(point.score, by)))
    columns: tuple[str, ...] = ("success", "kept", "harmonic", "clean", "invented")
    if best.score.well_formed is not None:  # the world has a grammar
        columns = (*columns, "well_formed")
    rows = [{**point.settings, **{name: getattr(point.score, name) for name in columns}} for point in order]
    notes = []
    if best.score.kept < min_kept:
        notes.append(f"no point of the grid keeps {min_kept:.0%} of everything else; the first row keeps most.")
    return TuningResult(best.settings, rows, (*grid, *columns), tuple(notes)), order


def save_settings(steerer: Steerer[Atlas], settings: Mapping[str, Any]) -> Path:
    """Save the atlas with these settings as its defaults; refuse for an atlas that is shipped with the package."""
    folder = _writable_folder(steerer)
    about = dict(steerer.atlas.about)
    about["spec"] = {**about["spec"], "steering": {**about["spec"].get("steering", {}), **settings}}
    return replace(steerer.atlas, about=about).save(folder, steerer.atlas.thumbnails())


def _single_word(role: str, value: Any) -> str:
    """One word, also if it comes in a list, as `Steerer.steer` takes it."""
    words = list(value) if isinstance(value, list | tuple) else [value]
    if len(words) != 1:
        raise SpecError(f"{role} is {value!r}; settings are tried for one concept at a time: {role}='dog'.")
    return words[0]


def _writable_folder(steerer: Steerer[Atlas]) -> Path:
    return check_not_shipped(steerer.atlas.name, steerer.atlas.folder)


def atlas_reference(steerer: Steerer[Atlas]) -> str:
    """The text that loads this atlas again: its name, or its folder if the name means another atlas."""
    folder = steerer.atlas.folder
    named = dict(list_atlases()).get(steerer.atlas.name)
    return steerer.atlas.name if folder is None or named == folder else str(folder.resolve())
