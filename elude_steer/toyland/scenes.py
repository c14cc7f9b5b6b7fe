"""Scenes: images of a place with up to three objects and some clutter, with the truth about every pixel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from elude_steer.toyland.backdrops import draw_place
from elude_steer.toyland.placement import NAMES, SIDE, PlacedThing, load_sprites, place_things
from elude_steer.toyland.world import PLACES, Mention, caption

PATCH = 12
CLUTTER = "clutter"


@dataclass(frozen=True)
class Thing:
    """An object in a scene.

    Attributes:
        name: one of `OBJECTS`.
        box: left, top, right and bottom in pixels.
        visible: fraction of it that nothing covers.
        jumping: whether it jumps.
    """

    name: str
    box: tuple[int, int, int, int]
    visible: float
    jumping: bool = False


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and the truth about it.

    Attributes:
        image: RGB, 96 x 96 pixels, or twice as wide or high.
        caption: the correct caption.
        things: the objects, in the order of the caption.
        background: the place.
        relation: relation of the first two objects, or None.
        truth: `(height, width)` uint8: 0 for the place, i for `things[i - 1]`, 255 for clutter.
        clutter: number of objects that the caption does not mention.
    """

    image: Image.Image
    caption: str
    things: tuple[Thing, ...]
    background: str
    relation: str | None
    truth: np.ndarray
    clutter: int

    @property
    def objects(self) -> tuple[str, ...]:
        """The names of the objects, in the order of the caption."""
        return tuple(thing.name for thing in self.things)

    @cached_property
    def patches(self) -> list[list[str]]:
        """What each 12-pixel patch of the image shows: an object, the place, or `clutter`."""
        rows, columns = self.truth.shape[0] // PATCH, self.truth.shape[1] // PATCH
        y, x = np.mgrid[0:rows, 0:columns].reshape(2, -1)
        boxes = np.stack([x / columns, y / rows, (x + 1) / columns, (y + 1) / rows], 1)
        names = self.names_at(boxes)
        return [names[row * columns : (row + 1) * columns] for row in range(rows)]

    def names_at(self, boxes: np.ndarray, min_cover: float = 0.3) -> list[str]:
        """What each box shows: the object or clutter that covers most of it, or else the place.

        Args:
            boxes: `(n, 4)` left, top, right and bottom as fractions of the image, like the boxes of a patch grid.
            min_cover: the fraction of a box that an object has to cover.
        """
        high, wide = self.truth.shape
        edges = np.clip(np.round(boxes * [wide, high, wide, high]).astype(int), 0, [wide, high, wide, high])
        names = []
        for left, top, right, bottom in edges:
            counts = np.bincount(self.truth[top:bottom, left:right].ravel(), minlength=256)
            best = int(counts[1:].argmax()) + 1
            covered = counts[best] >= min_cover * max(1, counts.sum())
            names.append((CLUTTER if best == 255 else self.things[best - 1].name) if covered else self.background)
        return names


def scenes(seed: int, n: int, *, start: int = 0, wide: float = 0.15, clutter: float = 0.4) -> Iterator[Scene]:
    """Draw a series of scenes, one at a time.

    Args:
        seed: seed of the series; scene i of a series is always the same.
        n: number of scenes.
        start: number of the first scene.
        wide: fraction of images that are twice as wide or high as a tile.
        clutter: fraction of scenes with objects that the caption does not mention.

    Example:
        >>> for scene in scenes(seed=3, n=20):
        ...     scene.image.save(f"{scene.caption}.png")
    """
    for number in range(start, start + n):
        yield draw_scene(np.random.default_rng([seed, number]), wide=wide, clutter=clutter)


def draw_scene(
    rng: np.random.Generator,
    *,
    wide: float = 0.15,
    clutter: float = 0.4,
    crowd: float = 0.0,
    things: Sequence[str] | None = None,
    place: str | None = None,
    relation: str | None = None,
    jumping: bool | None = None,
    hidden: Sequence[str] = (),
    hide: float = 0.0,
) -> Scene:
    """Draw one scene; arguments that are None are chosen at random.

    Args:
        rng: source of randomness.
        wide: probability of an image of two tiles.
        clutter: probability of objects that the caption does not mention.
        crowd: probability of forcing three objects, for training on hard scenes.
        things: the objects, in the order of the caption.
        place: one of `PLACES`.
        relation: relation of the first two objects.
        jumping: whether the first object jumps.
        hidden: objects that are not painted; all else stays as it is, and the caption names what is left.
        hide: probability of not painting one of several objects.
    """
    size = (SIDE, SIDE)
    if rng.random() < wide:
        size = (2 * SIDE, SIDE) if rng.random() < 0.7 else (SIDE, 2 * SIDE)
    place = place or list(PLACES)[rng.integers(len(PLACES))]
    if things is None:
        count = rng.choice(4, p=[0.05, 0.3, 0.4, 0.25])
        if crowd and rng.random() < crowd:
            count = 3
        things = [NAMES[i] for i in rng.choice(len(NAMES), count, replace=False)]
    while True:  # until the objects fit into the image
        placement = place_things(rng, list(things), size, relation, jumping)
        if placement is None:
            continue
        placed = placement[1]
        if hide and len(placed) > 1 and rng.random() < hide:
            hidden = [placed[rng.integers(len(placed))].name]
        return _draw(rng, *placement, place, size, clutter, hidden)


def write_scenes(folder: Path, count: int, seed: int, *, coco: bool = False) -> Path:
    """Write scenes as PNG files, with one line of truth for each in `captions.jsonl`.

    Args:
        folder: a new or an empty folder.
        count: number of scenes.
        seed: seed of the series.
        coco: whether to write the truth in COCO's formats too, as `instances.json` and `captions.json`.
    """
    from elude_steer.utils.files import check_folder, new_folder, write_file
    from elude_steer.utils.progress import track

    folder = check_folder(folder, new=True)
    lines, files = [], _CocoFiles()
    with new_folder(folder) as new:
        for number, scene in enumerate(track(scenes(seed, count), "drawing", "scenes", count)):
            name = f"scene-{number:04d}.png"
            scene.image.save(new / name)
            line: dict[str, object] = {
                "file": name,
                "caption": scene.caption,
                "objects": scene.objects,
                "background": scene.background,
            }
            line |= {
                "relation": scene.relation,
                "boxes": [thing.box for thing in scene.things],
                "patches": scene.patches,
            }
            lines.append(json.dumps(line))
            files.add(name, scene)
        write_file(new / "captions.jsonl", lambda file: file.write(("\n".join(lines) + "\n").encode()))
        for name, content in files.to_dict().items() if coco else ():
            text = json.dumps(content, indent=1)
            write_file(new / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    return folder


class _CocoFiles:
    """The truth about scenes in COCO's formats; each object that shows is an instance, with its visible area."""

    def __init__(self) -> None:
        self.images: list[dict[str, object]] = []
        self.instances: list[dict[str, object]] = []
        self.captions: list[dict[str, object]] = []

    def add(self, name: str, scene: Scene) -> None:
        """Add a scene, whose image has this name."""
        image = len(self.images) + 1
        size = {"width": scene.image.width, "height": scene.image.height}
        self.images.append({"id": image, "file_name": name, **size})
        self.captions.append({"id": image, "image_id": image, "caption": scene.caption})
        for number, thing in enumerate(scene.things, 1):
            area, (left, top, right, bottom) = int((scene.truth == number).sum()), thing.box
            if area:
                self.instances.append(
                    {
                        "id": len(self.instances) + 1,
                        "image_id": image,
                        "category_id": NAMES.index(thing.name) + 1,
                        "bbox": [left, top, right - left, bottom - top],
                        "area": area,
                        "iscrowd": 0,
                    }
                )

    def to_dict(self) -> dict[str, dict[str, object]]:
        """The content of each file."""
        categories = [{"id": number, "name": name} for number, name in enumerate(NAMES, 1)]
        return {
            "instances.json": {"images": self.images, "annotations": self.instances, "categories": categories},
            "captions.json": {"images": self.images, "annotations": self.captions},
        }


def _draw(
    rng: np.random.Generator,
    relation: str | None,
    placed: list[PlacedThing],
    place: str,
    size: tuple[int, int],
    clutter: float,
    hidden: Sequence[str],
) -> Scene:
    image = draw_place(place, size, rng)
    truth = np.zeros((size[1], size[0]), np.uint8)
    attempts = int(rng.integers(1, 3)) if rng.random() < clutter else 0
    clutter_count = sum(_draw_clutter(rng, image, truth, [p.box for p in placed]) for _ in range(attempts))
    relation, painted = _leave_out(relation, placed, hidden)
    order = list(range(len(painted)))
    if relation == "on":
        order[:2] = [1, 0]  # an object on another is in front of it
    areas = []
    for i in order:
        thing = painted[i]
        if thing.jumping:
            _draw_jump(image, thing)
        image.paste(thing.sprite, (thing.left, thing.top), thing.sprite)
        solid = np.asarray(thing.sprite.getchannel("A")) > 100
        window = truth[thing.top : thing.top + solid.shape[0], thing.left : thing.left + solid.shape[1]]
        window[solid] = i + 1
        areas.append((i, int(solid.sum())))
    visible = {i: float((truth == i + 1).sum()) / max(1, area) for i, area in areas}
    image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.9, 1.1))
    things = tuple(Thing(p.name, p.box, visible[i], p.jumping) for i, p in enumerate(painted))
    text = caption(relation, [Mention(p.name, p.jumping) for p in painted], place)
    return Scene(image, text, things, place, relation, truth, clutter_count)


def _leave_out(
    relation: str | None, placed: list[PlacedThing], hidden: Sequence[str]
) -> tuple[str | None, list[PlacedThing]]:
    """The objects that are painted, and their relation: two that were no pair are next to each other."""
    painted = [thing for thing in placed if thing.name not in hidden]
    if len(painted) < 2:
        return None, painted
    return relation if painted[:2] == placed[:2] else "next to", painted


def _draw_jump(image: Image.Image, thing: PlacedThing) -> None:
    """Draw what shows a jump: a shadow on the ground below the feet, and lines of movement."""
    draw = ImageDraw.Draw(image, "RGBA")
    left, _, right, bottom = thing.box
    draw.ellipse((left + 3, bottom + 8, right - 3, bottom + 15), fill=(0, 0, 0, 110))
    for x in (left + (right - left) // 3, left + 2 * (right - left) // 3):
        draw.line((x, bottom + 1, x, bottom + 6), fill=(255, 255, 255, 230), width=2)


def _draw_clutter(
    rng: np.random.Generator, image: Image.Image, truth: np.ndarray, taken: Sequence[tuple[int, int, int, int]]
) -> bool:
    """Draw clutter if there is room: an unknown object, or a known one blurred or scrambled. Returns whether it did."""
    kind = int(rng.integers(3))
    sprites = load_sprites()
    number = int(rng.integers(len(NAMES)))
    if NAMES[number] in ("book", "blanket"):  # scrambling does not change a plain red square
        kind = 0
    sprite = sprites[rng.integers(len(NAMES), len(sprites))] if kind == 0 else sprites[number]
    size = int(rng.integers(20, 34))
    sprite = sprite.resize(
        (max(8, sprite.width * size // 64), max(8, sprite.height * size // 64)), Image.Resampling.BILINEAR
    )
    if kind == 1:
        sprite = sprite.filter(ImageFilter.GaussianBlur(size / 4))
    elif kind == 2:
        sprite = _scramble(rng, sprite)
    for _ in range(8):
        x, y = int(rng.integers(0, image.width - sprite.width)), int(rng.integers(0, image.height - sprite.height))
        box = (x, y, x + sprite.width, y + sprite.height)
        if not any(_boxes_overlap(box, other) for other in taken):
            image.paste(sprite, (x, y), sprite)
            window = truth[y : box[3], x : box[2]]
            window[np.asarray(sprite.getchannel("A")) > 60] = 255
            return True
    return False


def _scramble(rng: np.random.Generator, sprite: Image.Image) -> Image.Image:
    step = max(3, max(sprite.size) // 6)
    pieces = [(x, y) for y in range(0, sprite.height - step + 1, step) for x in range(0, sprite.width - step + 1, step)]
    scrambled = Image.new("RGBA", sprite.size, (0, 0, 0, 0))
    for (x, y), number in zip(pieces, rng.permutation(len(pieces)), strict=True):
        sx, sy = pieces[number]
        scrambled.paste(sprite.crop((sx, sy, sx + step, sy + step)), (x, y))
    return scrambled


def _boxes_overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[0] < b[2] - 2 and b[0] < a[2] - 2 and a[1] < b[3] - 2 and b[1] < a[3] - 2
