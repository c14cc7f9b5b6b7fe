"""Placement: where objects go in a scene, so that their relation is visible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from elude_steer.toyland.world import JUMPERS, OBJECTS, ROOFS

SIDE = 96  # pixels, a tile of the captioner
NAMES = tuple(OBJECTS)
APART = 6  # smallest number of pixels between a pair and a third object
_CELL, _COLUMNS = 64, 12  # side of a cell and number of columns of the sprite sheet


@dataclass
class PlacedThing:
    """An object with its position in the image."""

    name: str
    sprite: Image.Image
    left: int
    top: int
    jumping: bool = False

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in pixels."""
        return self.left, self.top, self.left + self.sprite.width, self.top + self.sprite.height


def place_things(
    rng: np.random.Generator, names: list[str], size: tuple[int, int], relation: str | None, jumping: bool | None
) -> tuple[str | None, list[PlacedThing]] | None:
    """Place objects so that their relation is visible.

    Args:
        rng: source of randomness.
        names: the objects; the first two may swap.
        size: width and height of the image.
        relation: relation of the first two objects; None chooses one.
        jumping: whether the first object jumps, if it can; None chooses.

    Returns:
        The relation and the placed objects; None if they do not fit into the image.
    """
    width, height = size
    relation = _choose_relation(rng, names, relation)
    upper, lower = (1, 0) if relation == "under" else (0, 1)
    base = (
        rng.uniform(34, 52)
        if len(names) < 2
        else rng.uniform(30, 42)
        if len(names) < 3 or width > SIDE
        else rng.uniform(26, 33)
    )
    sizes = [base * rng.uniform(0.88, 1.12) for _ in names]
    if relation in ("on", "above", "under"):
        sizes[upper] = max(22, sizes[upper] * rng.uniform(0.65, 0.85))
    first_jumps = jumping if jumping is not None else rng.random() < 0.25
    first_jumps = first_jumps and relation in (None, "next to") and bool(names) and names[0] in JUMPERS
    placed = []
    for i, (name, side) in enumerate(zip(names, sizes, strict=True)):
        jumps = first_jumps and i == 0
        placed.append(PlacedThing(name, _sprite(rng, name, int(side), jumps), 0, 0, jumps))
    if placed:
        _arrange(rng, placed, relation, upper, lower, size)
    inside = all(b[0] >= 0 and b[1] >= 0 and b[2] <= width and b[3] <= height for b in (p.box for p in placed))
    return (relation, placed) if inside else None


def _choose_relation(rng: np.random.Generator, names: list[str], relation: str | None) -> str | None:
    """Choose the relation of the first two objects; a roof may go above, and is then mentioned second."""
    if len(names) < 2:
        return None
    if relation is not None:
        return relation
    roof = next((i for i in (0, 1) if names[i] in ROOFS), None)
    if roof is not None and rng.random() < 0.6:
        if roof == 0:
            names[0], names[1] = names[1], names[0]
        return "under"
    relation = ("next to", "next to", "on", "above")[rng.integers(4)]
    # A roof is never mentioned as above something: that is always "under" the roof.
    return "next to" if relation == "above" and names[0] in ROOFS else relation


def _arrange(
    rng: np.random.Generator,
    placed: list[PlacedThing],
    relation: str | None,
    upper: int,
    lower: int,
    size: tuple[int, int],
) -> None:
    width, height = size
    floor = int(height * rng.uniform(0.74, 0.97))
    first = placed[0]
    if relation is None:
        first.left = int(rng.integers(0, max(1, width - first.sprite.width + 1)))
        first.top = floor - first.sprite.height
        right = first.box[2]
    elif relation == "next to":
        second = placed[1]
        gap = int(rng.integers(0, 9 if width == SIDE else 30))
        total = first.sprite.width + gap + second.sprite.width
        first.left = int(rng.integers(0, max(1, width - total + 1)))
        second.left = first.left + first.sprite.width + gap
        first.top = floor - first.sprite.height
        second.top = floor - second.sprite.height + int(rng.integers(-5, 6))
        right = second.box[2]
    else:
        above, below = placed[upper], placed[lower]
        below.left = int(rng.integers(0, max(1, width - below.sprite.width + 1)))
        below.top = floor - below.sprite.height
        middle = below.left + below.sprite.width / 2 + below.sprite.width * rng.uniform(-0.15, 0.15)
        above.left = int(np.clip(middle - above.sprite.width / 2, 0, width - above.sprite.width))
        rise = -int(above.sprite.height * rng.uniform(0.15, 0.3)) if relation == "on" else int(rng.integers(10, 20))
        above.top = below.top - above.sprite.height - rise
        right = max(above.box[2], below.box[2])
    if first.jumping:
        first.top -= int(rng.integers(14, 22))
    if len(placed) > 2:
        third = placed[2]
        third.top = floor - third.sprite.height + int(rng.integers(-4, 5))
        left = min(p.left for p in placed[:2])
        room = left - third.sprite.width - APART  # far enough from the pair to see which two belong together
        if relation != "next to" and rng.random() < 0.5 and room >= 0:
            third.left = int(rng.integers(0, room + 1))
        else:
            third.left = right + int(rng.integers(APART, APART + 7))


def _sprite(rng: np.random.Generator, name: str, size: int, jumping: bool) -> Image.Image:
    sprite = load_sprites()[NAMES.index(name)]
    scale = size / max(sprite.size)
    sprite = sprite.resize(
        (max(8, round(sprite.width * scale)), max(8, round(sprite.height * scale))), Image.Resampling.BILINEAR
    )
    if rng.random() < 0.5:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    angle = rng.uniform(-6, 6) + (rng.choice([-18, 18]) if jumping else 0)
    return sprite.rotate(angle, Image.Resampling.BILINEAR, expand=True)


@cache
def load_sprites() -> list[Image.Image]:
    """All sprites, cropped to what is drawn: the objects in their order, then the clutter."""
    with Image.open(Path(__file__).parent / "data" / "sprites.png") as file:
        sheet = file.convert("RGBA")
    sprites = []
    for y in range(0, sheet.height, _CELL):
        for x in range(0, _COLUMNS * _CELL, _CELL):
            cell = sheet.crop((x, y, x + _CELL, y + _CELL))
            box = cell.getchannel("A").getbbox()
            if box:
                sprites.append(cell.crop(box))
    return sprites
