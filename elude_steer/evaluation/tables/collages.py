"""Collages as in the paper: the sixteen strongest images of a unit, beside the four strongest of each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageOps

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import Method, find_methods
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.measure import strongest_images, strongest_of_units
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.utils.files import check_folder, write_image

_CELL, _GAP, _LINE = 96, 6, 3  # pixels
_UNIT_COLOUR, _PART_COLOUR, _TEXT = "#ffb000", "#dc267f", "#222222"


@dataclass(frozen=True, eq=False)
class Collage:
    """An image of a unit beside its parts.

    Attributes:
        unit: number of the unit.
        parts: how many parts it has.
        image: the image.
    """

    unit: int
    parts: int
    image: Image.Image


def draw_collages(
    setup: TableSetup,
    out: str | Path,
    *,
    method: str = "ELUDe (gap)",
    seed: int | None = None,
    units: Sequence[int] | None = None,
    count: int = 7,
) -> list[Path]:
    """Write an image of each unit and its parts, `unit-31.png` and so on; returns their paths.

    Args:
        setup: the backbone and the images; those to measure on are shown.
        out: the folder to write to.
        method: whose parts are shown: an atlas or another split of units.
        seed: the draw of tokens, by default the first.
        units: numbers of units; by default, the first unit with one part, with two parts, and so on.
        count: how many units by default.
    """
    require_parts(method)
    folder, paths = check_folder(out), []
    for found in make_collages(setup, method=method, seed=seed, units=units, count=count):
        paths.append(folder / f"unit-{found.unit}.png")
        write_image(paths[-1], found.image)
    return paths


def make_collages(
    setup: TableSetup,
    *,
    method: str = "ELUDe (gap)",
    seed: int | None = None,
    units: Sequence[int] | None = None,
    count: int = 7,
    most: int | None = None,
) -> list[Collage]:
    """Collages of some units; see `draw_collages`.

    Args:
        setup: the backbone and the images.
        method: whose parts are shown.
        seed: the draw of tokens, by default the first.
        units: numbers of units; by default, units with different numbers of parts.
        count: how many units by default.
        most: the largest number of parts of a shown unit; numbers are then spread from two to `most`. None takes the
            smallest numbers.
    """
    chosen, bench = require_parts(method), Bench(setup)
    number = setup.find_seeds(None if seed is None else [seed])[0]
    parts_of = bench.dictionary(chosen, number).units.cpu()
    whole, parts = strongest_of_units(bench), strongest_images(bench, chosen, number)
    sizes = torch.bincount(parts_of, minlength=len(whole)).tolist()
    for unit in units or ():
        if not 0 <= unit < len(whole):
            raise SpecError(f"there is no unit {unit}; the layer has units 0 to {len(whole) - 1}.")
    if units is None:
        units = [sizes.index(size) for size in _choose_sizes(sorted(set(sizes)), count, most)]
    items = {item.index: item for item in bench.held_out.items}

    def read(index: int) -> Image.Image:
        return items[index].read()[0]

    found = []
    for unit in units:
        rows = (parts_of == unit).nonzero()[:, 0].tolist()
        image = _draw(f"unit {unit}", whole[unit], [parts[row] for row in rows], read)
        found.append(Collage(unit, len(rows), image))
    return found


def require_parts(name: str) -> Method:
    """The method of this name; raises for one whose latents are no parts of units."""
    (method,) = find_methods([name])
    if not method.splits_units:
        raise SpecError(f"the latents of '{name}' are not parts of units; choose ELUDe or another split.")
    return method


def _choose_sizes(sizes: Sequence[int], count: int, most: int | None) -> Sequence[int]:
    """Numbers of parts that are shown: the smallest, or spread from two to `most`."""
    if most is None:
        return sizes[:count]
    some = [size for size in sizes if 1 < size <= most] or sizes[:1]
    count = min(count, len(some))
    return [some[round(number * (len(some) - 1) / max(1, count - 1))] for number in range(count)]


def _draw(title: str, whole: torch.Tensor, parts: Sequence[torch.Tensor], read: Callable[[int], Any]) -> Image.Image:
    """The panel of the unit at the left, and those of its parts in two rows at the right."""
    left = _panel(whole[:16].tolist(), 4, _UNIT_COLOUR, title, read)
    right = [_panel(part[:4].tolist(), 2, _PART_COLOUR, f"part {n + 1}", read) for n, part in enumerate(parts)]
    columns = -(-len(right) // 2)
    width, height = right[0].size
    sheet = Image.new("RGB", (left.width + _GAP + columns * (width + _GAP), max(left.height, 2 * height)), "white")
    sheet.paste(left, (0, 0))
    for number, panel in enumerate(right):
        column, row = number % columns, number // columns
        sheet.paste(panel, (left.width + _GAP + column * (width + _GAP), row * height))
    return sheet


def _panel(images: Sequence[int], side: int, colour: str, title: str, read: Callable[[int], Any]) -> Image.Image:
    """A framed square of `side` x `side` images with a title above; cells without an image stay grey."""
    head, inner = 18, side * _CELL + (side - 1) * 2
    panel = Image.new("RGB", (inner + 4 * _LINE, head + inner + 4 * _LINE), "white")
    pen = ImageDraw.Draw(panel)
    pen.text((2, 2), title, fill=_TEXT)
    pen.rectangle((0, head, panel.width - 1, panel.height - 1), outline=colour, width=_LINE)
    for number in range(side * side):
        x, y = number % side * (_CELL + 2) + 2 * _LINE, number // side * (_CELL + 2) + 2 * _LINE + head
        if number < len(images) and images[number] >= 0:
            cell = ImageOps.fit(read(images[number]).convert("RGB"), (_CELL, _CELL), Image.Resampling.BICUBIC)
        else:
            cell = Image.new("RGB", (_CELL, _CELL), "#dddddd")
        panel.paste(cell, (x, y))
    return panel
