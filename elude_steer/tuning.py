"""Finding good settings: what a sweep found as a table, a picture, a recipe, or the atlas's own defaults."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from elude_steer.coco import coco_world
from elude_steer.documents import dump_document
from elude_steer.edits import World, toyland_world
from elude_steer.errors import SpecError, StorageError
from elude_steer.figures import scatter
from elude_steer.manifest import atlases
from elude_steer.recipe import Recipe, SteeringSpec, StepSpec
from elude_steer.steering import Steerer
from elude_steer.storage import write_file
from elude_steer.sweep import best, sweep, try_settings


@dataclass(frozen=True)
class Found:
    """What a sweep found, best first, and what is worth knowing about it."""

    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def table(self, limit: int) -> str:
        """The best rows as text."""
        lines = [list(self.columns)]
        for row in self.rows[:limit]:
            lines.append([f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in self.columns])
        wide = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, wide, strict=True)).rstrip() for line in lines
        )


def tune_picture(
    steerer: Steerer,
    picture: Any,
    minus: str,
    plus: str | None,
    grid: Mapping[str, Sequence[Any]],
    *,
    write: Path | None = None,
    image: str | None = None,
) -> Found:
    """Every point of a grid on one picture; the best can be written as a recipe."""
    if write is not None and write.exists():
        raise StorageError(f"'{write}' is already there; give another name.")
    baseline, tried = try_settings(steerer, picture, minus, plus, grid)
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
    if not tried[0].outcome.success:
        notes.append("no point of the grid did what was asked for; try larger kappa or beta, or another mode.")
    if write is not None:
        step = StepSpec((minus,), (plus,) if plus else (), settings=SteeringSpec(**tried[0].settings))
        where = None if image in (None, "-") else str(Path(str(image)).resolve())
        text = dump_document(Recipe(write.stem, _atlas_name(steerer), (step,), where))
        write_file(write, lambda file: file.write(text.encode()))
        notes.append(f"the best as a recipe: {write}")
    return Found(rows, (*grid, "success", "kept", "caption"), tuple(notes))


def tune_world(
    steerer: Steerer,
    kind: Any,
    scenes: str,
    coco: tuple[str, str] | None,
    count: int,
    grid: Mapping[str, Sequence[Any]],
    *,
    by: str = "harmonic",
    plot: Path | None = None,
    keep: bool = False,
) -> Found:
    """Every point of a grid on many pictures with known objects; the best can become the atlas's own settings."""
    if keep:
        _own_folder(steerer)
    world = coco_world(*coco, limit=count) if coco else _scenes(scenes, count)
    with tqdm(total=count, desc="sweeping", unit=" pictures", disable=None) as bar:
        points = sweep(steerer, world, kind, grid, step=bar.update)
    chosen = best(points, by)
    order = sorted(points, key=lambda point: (point is not chosen, -getattr(point.score, by)))
    columns = ("success", "kept", "harmonic", "clean", "invented", "well_formed")
    rows = [{**point.settings, **{name: getattr(point.score, name) for name in columns}} for point in order]
    notes = []
    if plot is not None:
        data = io.BytesIO()
        drawn = [(point.score.kept, point.score.success) for point in points]
        scatter(drawn, x="kept", y="success", marked=[points.index(chosen)]).save(data, "PNG")
        write_file(plot, lambda file: file.write(data.getvalue()))
        notes.append(f"success against kept: {plot}")
    if keep:
        notes.append(f"now the settings of atlas '{steerer.atlas.name}': {keep_settings(steerer, chosen.settings)}")
    return Found(rows, (*grid, *columns), tuple(notes))


def keep_settings(steerer: Steerer, settings: Mapping[str, Any]) -> Path:
    """Writes the atlas again with these settings as its own; one that comes with the package is left as it is."""
    folder = _own_folder(steerer)
    about = dict(steerer.atlas.about)
    about["spec"] = {**about["spec"], "steering": {**about["spec"].get("steering", {}), **settings}}
    thumbnails = {path.name: path.read_bytes() for path in sorted((folder / "thumbnails").glob("*.jpg"))}
    return replace(steerer.atlas, about=about).save(folder, thumbnails or None)


def _own_folder(steerer: Steerer) -> Path:
    folder = steerer.atlas.folder
    if folder is None or Path(__file__).parent in folder.resolve().parents:
        raise StorageError(
            f"atlas '{steerer.atlas.name}' comes with the package and stays as it is; copy it, or pass the settings."
        )
    return folder


def _atlas_name(steerer: Steerer) -> str:
    """What finds this very atlas again: its name, or its folder where the name means another one."""
    folder = steerer.atlas.folder
    known = dict(atlases()).get(steerer.atlas.name)
    return steerer.atlas.name if folder is None or known == folder else str(folder.resolve())


def _scenes(source: str, count: int) -> World:
    kind, _, seed = source.partition(":")
    if kind != "toyland" or not seed.isdecimal():
        raise SpecError(f"--scenes is '{source}'; it is toyland:SEED, or use --coco with annotations and pictures.")
    return toyland_world(int(seed), count)
