"""Finding good settings: what a sweep found as a table, a picture, a recipe, or the atlas's own defaults."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import list_atlases
from elude_steer.errors import SpecError, StorageError
from elude_steer.evaluation.edits.benchmark import Kind, World, toyland_world
from elude_steer.evaluation.edits.coco import coco_world
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
from elude_steer.utils.files import write_file
from elude_steer.utils.plotting import scatter
from elude_steer.utils.yaml_schema import dump_document

# What is tried where nobody says what: what decides a removal is gamma, what decides a replacement is beta.
GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "remove": {"gamma": (-15, -50), "kappa": (12, 24), "nu": (6, 10, 16)},
    "replace": {"beta": (10, 20), "kappa": (12, 24), "nu": (6, 10, 16)},
}


@dataclass(frozen=True, repr=False)
class TuningResult:
    """What a sweep found, best first, and what is worth knowing about it.

    Attributes:
        best: the settings that won, as `Steerer.steer` takes them.
        rows: settings and what they reach, the best first.
        columns: what a row has, in the order of the table.
        notes: in sentences.
    """

    best: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        more = len(self.rows) - 10
        return "\n".join([self.table(10), *([f"and {more} more"] if more > 0 else []), *self.notes])

    def table(self, limit: int) -> str:
        """The best rows as text."""
        lines = [list(self.columns)]
        for row in self.rows[:limit]:
            lines.append([f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in self.columns])
        wide = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, wide, strict=True)).rstrip() for line in lines
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
    """Tries a grid of settings on one picture and its words, or on a world of pictures with known objects.

    Args:
        steerer: what is tuned.
        target: a picture (a path, the bytes of a file, or a PIL picture), or a `World`.
        minus: for a picture, the word that should go.
        plus: for a picture, the word that should come in its place.
        kind: for a world, which edits: `remove` or `replace`. For a picture plus decides.
        grid: setting -> values to try; by default a dozen points that suit the edit (`GRIDS`).
        by: what the best has most of: `harmonic`, `clean`, `success` or `kept`.
        min_kept: for a world, the share of all else that the best has to keep.
        prompt: the question.

    Example:
        >>> found = tune(steerer, "dog.png", minus="dog", grid={"gamma": [-15, -50], "nu": [8, "all"]})
        >>> steerer.steer("dog.png", minus=["dog"], **found.best).caption
    """
    if kind not in GRIDS:
        raise SpecError(f"kind is {kind!r}; an edit is 'remove' or 'replace'.")
    if isinstance(target, World):
        if minus is not None or plus is not None:
            raise SpecError("minus and plus are for one picture; a world has words of its own: tune(world, kind=…).")
        return _on_world(steerer, target, kind, grid, by=by, min_kept=min_kept, prompt=prompt)[0]
    if minus is None:
        raise SpecError("say what should go: tune(image, minus='dog').")
    if kind == "replace" and plus is None:
        raise SpecError("kind is 'replace', and nothing says by what: tune(image, minus='dog', plus='biker').")
    old, new = _one("minus", minus), None if plus is None else _one("plus", plus)
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
    """Every point of a grid on one picture; the best can be written as a recipe."""
    if write is not None and write.exists():
        raise StorageError(f"'{write}' is already there; give another name.")
    grid = GRIDS["remove" if plus is None else "replace"] if grid is None else grid
    baseline, tried = try_settings(steerer, image, minus, plus, grid, by=by, prompt=prompt)
    rows = [
        {
            **one.settings,
            "success": one.outcome.success,
            "kept": one.outcome.kept,
            "caption": one.outcome.caption,
        }
        for one in tried
    ]
    notes = [f"baseline: {baseline}"]
    old = tried[0].outcome.task.minus
    if old not in single_image_world(image, baseline, [old]).cases[0].objects:
        notes.append(
            f"the baseline does not say '{old}', so that it is gone means nothing; use a word of the baseline."
        )
    if not tried[0].outcome.success:
        notes.append("no point of the grid did what was asked for; try larger kappa or beta, or another mode.")
    if write is not None:
        step = StepSpec((minus,), (plus,) if plus else (), settings=SteeringSpec(**tried[0].settings))
        where = None if path in (None, "-") else str(Path(str(path)).resolve())
        text = dump_document(Recipe(write.stem, atlas_reference(steerer), (step,), where))
        write_file(write, lambda file: file.write(text.encode()))
        notes.append(f"the best as a recipe: {write}")
    return TuningResult(tried[0].settings, rows, (*grid, "success", "kept", "caption"), tuple(notes))


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
    """Every point of a grid on many pictures with known objects; the best can become the atlas's own settings."""
    if save_to_atlas:
        _own_folder(steerer)
    world = coco_world(*coco, limit=count) if coco else _scenes(scenes, count)
    found, points = _on_world(steerer, world, kind, grid, by=by)
    notes = [*found.notes]
    if plot is not None:
        data = io.BytesIO()
        drawn = [(point.score.kept, point.score.success) for point in points]
        scatter(drawn, x="kept", y="success", marked=[0]).save(data, "PNG")
        write_file(plot, lambda file: file.write(data.getvalue()))
        notes.append(f"success against kept: {plot}")
    if save_to_atlas:
        notes.append(f"now the settings of atlas '{steerer.atlas.name}': {save_settings(steerer, found.best)}")
    return replace(found, notes=tuple(notes))


def _on_world(
    steerer: Steerer,
    world: World,
    kind: Kind,
    grid: Mapping[str, Sequence[Any]] | None,
    *,
    by: By,
    min_kept: float = 0.9,
    prompt: str = PROMPT,
) -> tuple[TuningResult, list[Point]]:
    """What was found, and the points themselves in the same order."""
    check_criterion(by)
    grid = GRIDS[kind] if grid is None else grid
    with tqdm(total=len(world.cases), desc="sweeping", unit=" pictures", disable=None) as bar:
        points = sweep(steerer, world, kind, grid, prompt=prompt, step=bar.update)
    chosen = best_point(points, by, min_kept=min_kept)
    order = sorted(points, key=lambda point: (point is not chosen, -getattr(point.score, by)))
    columns: tuple[str, ...] = ("success", "kept", "harmonic", "clean", "invented")
    if chosen.score.well_formed is not None:  # there is a grammar
        columns = (*columns, "well_formed")
    rows = [{**point.settings, **{name: getattr(point.score, name) for name in columns}} for point in order]
    notes = []
    if chosen.score.kept < min_kept:
        notes.append(f"no point of the grid keeps {min_kept:.0%} of all else; the first is the one that keeps most.")
    return TuningResult(chosen.settings, rows, (*grid, *columns), tuple(notes)), order


def save_settings(steerer: Steerer[Atlas], settings: Mapping[str, Any]) -> Path:
    """Writes the atlas again with these settings as its own; one that comes with the package is left as it is."""
    folder = _own_folder(steerer)
    about = dict(steerer.atlas.about)
    about["spec"] = {**about["spec"], "steering": {**about["spec"].get("steering", {}), **settings}}
    thumbnails = {path.name: path.read_bytes() for path in sorted((folder / "thumbnails").glob("*.jpg"))}
    return replace(steerer.atlas, about=about).save(folder, thumbnails or None)


def _one(role: str, given: Any) -> str:
    """One word, also where it comes in a list, as `Steerer.steer` takes it."""
    words = list(given) if isinstance(given, list | tuple) else [given]
    if len(words) != 1:
        raise SpecError(f"{role} is {given!r}; settings are tried for one word at a time: {role}='dog'.")
    return words[0]


def _own_folder(steerer: Steerer[Atlas]) -> Path:
    folder = steerer.atlas.folder
    if folder is None or Path(__file__).parents[2] in folder.resolve().parents:
        raise StorageError(
            f"atlas '{steerer.atlas.name}' comes with the package and stays as it is; copy it, or pass the settings."
        )
    return folder


def atlas_reference(steerer: Steerer[Atlas]) -> str:
    """What finds this very atlas again: its name, or its folder where the name means another one."""
    folder = steerer.atlas.folder
    known = dict(list_atlases()).get(steerer.atlas.name)
    return steerer.atlas.name if folder is None or known == folder else str(folder.resolve())


def _scenes(source: str, count: int) -> World:
    kind, _, seed = source.partition(":")
    if kind != "toyland" or not seed.isdecimal():
        raise SpecError(f"--scenes is '{source}'; it is toyland:SEED, or use --coco with annotations and pictures.")
    return toyland_world(int(seed), count)
