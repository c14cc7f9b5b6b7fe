"""Collages as in the paper: the sixteen strongest images of a unit, beside the four strongest of each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageOps

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import find_methods
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.measure import strongest_images, strongest_of_units
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.utils.files import check_folder, write_image

_CELL, _GAP, _LINE = 96, 6, 3  # pixels
_UNIT_COLOUR, _PART_COLOUR, _TEXT = "#ffb000", "#dc267f", "#222222"


def draw_collages(
    setup: TableSetup,
    out: str | Path,
    *,
    method: str = "ELUDe (gap)",
    seed: int | None = None,
    units: Sequence[int] | None = None,
    count: int = 7,
) -> list[Path]:
    """Write a picture of some units and their parts, `unit-31.png` and so on; returns their paths.

    Args:
        setup: the backbone and the images; those to measure on are shown.
        out: the folder to write to.
        method: whose parts are shown: an atlas or another split of units.
        seed: the draw of tokens, by default the first.
        units: numbers of units; by default, for each number of parts from one on, the first unit that has so many.
        count: how many units by default.
    """
    (chosen,) = find_methods([method])
    if chosen.kind not in ("atlas", "split", "classes", "units"):
        raise SpecError(f"the latents of '{method}' are no parts of units; a collage shows ELUDe or another split.")
    folder, bench = check_folder(out), Bench(setup)
    number = setup.find_seeds(None if seed is None else [seed])[0]
    parts_of = bench.dictionary(chosen, number).units.cpu()
    whole, parts = strongest_of_units(bench), strongest_images(bench, chosen, number)
    sizes = torch.bincount(parts_of, minlength=len(whole)).tolist()
    for unit in units or ():
        if not 0 <= unit < len(whole):
            raise SpecError(f"there is no unit {unit}; the layer has units 0 to {len(whole) - 1}.")
    if units is None:
        units = [sizes.index(size) for size in sorted(set(sizes))[:count]]
    items = {item.index: item for item in bench.held_out.items}

    def read(index: int) -> Image.Image:
        return items[index].read()[0]

    paths = []
    for unit in units:
        rows = (parts_of == unit).nonzero()[:, 0].tolist()
        picture = _draw(f"unit {unit}", whole[unit], [parts[row] for row in rows], read)
        paths.append(folder / f"unit-{unit}.png")
        write_image(paths[-1], picture)
    return paths


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
