"""Backdrops: the places of toyland, drawn with random details for every scene."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]


def draw_place(place: str, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Draw a place without any objects."""
    image = Image.new("RGB", size)
    _PLACES[place](image, ImageDraw.Draw(image), rng)
    return image


def _pick(rng: np.random.Generator, low: int, high: int | None = None) -> int:
    return int(rng.integers(low, high))


def _vary(colour: Colour, rng: np.random.Generator, by: int = 14) -> Colour:
    r, g, b = (int(np.clip(c + _pick(rng, -by, by + 1), 0, 255)) for c in colour)
    return r, g, b


def _gradient(image: Image.Image, top: Colour, bottom: Colour, start: int, stop: int) -> None:
    steps = np.linspace(0, 1, max(2, stop - start))[:, None, None]
    band = (np.array(top) * (1 - steps) + np.array(bottom) * steps).astype(np.uint8)
    image.paste(Image.fromarray(np.repeat(band, image.width, axis=1)), (0, start))


def _horizon(image: Image.Image, rng: np.random.Generator, low: float = 0.45, high: float = 0.62) -> int:
    return int(image.height * rng.uniform(low, high))


def _beach(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    sea, w, h = _horizon(image, rng, 0.3, 0.42), image.width, image.height
    sand = sea + int(h * rng.uniform(0.12, 0.22))
    _gradient(image, _vary((120, 190, 245), rng), _vary((205, 232, 250), rng), 0, sea)
    draw.rectangle((0, sea, w, sand), fill=_vary((38, 128, 190), rng))
    for _ in range(5):
        x, y = _pick(rng, 0, w), _pick(rng, sea, sand)
        draw.line((x, y, x + 12, y), fill=(190, 225, 240))
    draw.rectangle((0, sand, w, h), fill=_vary((240, 214, 150), rng))
    draw.line((0, sand, w, sand), fill=(250, 245, 230), width=2)
    for _ in range(w // 3):
        draw.point((_pick(rng, 0, w), _pick(rng, sand, h)), fill=(205, 175, 110))
    if rng.random() < 0.6:
        x = _pick(rng, 0, w)
        draw.ellipse((x, 4, x + 12, 16), fill=(255, 236, 130))


def _tree(draw: ImageDraw.ImageDraw, x: int, floor: int, tall: int, leaf: Colour) -> None:
    draw.rectangle((x - tall // 10, floor - tall // 2, x + tall // 10, floor), fill=(112, 78, 46))
    draw.ellipse((x - tall // 3, floor - tall, x + tall // 3, floor - tall // 3), fill=leaf)


def _park(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng), image.width, image.height
    _gradient(image, _vary((150, 208, 250), rng), (222, 240, 252), 0, line)
    draw.rectangle((0, line, w, h), fill=_vary((112, 190, 84), rng))
    for _ in range(max(2, w // 40)):
        _tree(draw, _pick(rng, 0, w), line + 3, _pick(rng, 18, 30), _vary((72, 150, 66), rng))
    bend = _pick(rng, 0, w)
    draw.polygon([(bend, line), (bend + 4, line), (bend + 24, h), (bend - 14, h)], fill=(218, 200, 160))
    for _ in range(w // 4):
        x, y = _pick(rng, 0, w), _pick(rng, line + 3, h)
        draw.line((x, y, x, y - 2), fill=(84, 160, 62))


def _room(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng, 0.6, 0.72), image.width, image.height
    paper = _vary((232, 214, 190), rng)
    draw.rectangle((0, 0, w, line), fill=paper)
    for x in range(_pick(rng, 0, 12), w, 12):
        draw.line((x, 0, x, line), fill=tuple(c - 14 for c in paper), width=2)
    draw.rectangle((0, line, w, h), fill=_vary((164, 116, 74), rng))
    for y in range(line + 6, h, 8):
        draw.line((0, y, w, y), fill=(136, 94, 58))
    draw.rectangle((0, line - 3, w, line), fill=(250, 246, 238))
    x, y = _pick(rng, 4, w - 32), _pick(rng, 6, 14)
    draw.rectangle((x, y, x + 26, y + 24), fill=(176, 220, 248), outline=(250, 250, 250), width=2)
    draw.line((x + 13, y, x + 13, y + 24), fill=(250, 250, 250), width=2)
    draw.line((x, y + 12, x + 26, y + 12), fill=(250, 250, 250), width=2)


def _street(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng, 0.5, 0.62), image.width, image.height
    _gradient(image, (170, 196, 220), (214, 224, 232), 0, line)
    x = -_pick(rng, 0, 14)
    while x < w:
        wide, top = _pick(rng, 18, 32), int(line * rng.uniform(0.05, 0.45))
        draw.rectangle((x, top, x + wide, line), fill=_vary((134, 134, 146), rng, 24))
        for wx in range(x + 3, x + wide - 4, 7):
            for wy in range(top + 4, line - 4, 8):
                draw.rectangle((wx, wy, wx + 3, wy + 4), fill=(232, 222, 160) if rng.random() < 0.5 else (84, 94, 112))
        x += wide + 1
    draw.rectangle((0, line, w, line + 5), fill=(184, 184, 184))
    draw.rectangle((0, line + 5, w, h), fill=_vary((84, 86, 92), rng, 8))
    middle = (line + 5 + h) // 2
    for x in range(_pick(rng, 0, 16), w, 22):
        draw.rectangle((x, middle - 1, x + 11, middle + 1), fill=(240, 236, 200))


def _snow(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng), image.width, image.height
    _gradient(image, _vary((176, 194, 214), rng), (222, 230, 240), 0, line)
    for _ in range(max(3, w // 24)):
        x, tall = _pick(rng, 0, w), _pick(rng, 14, 26)
        draw.polygon([(x, line - tall), (x - tall // 3, line + 2), (x + tall // 3, line + 2)], fill=(84, 122, 112))
        draw.polygon(
            [(x, line - tall), (x - tall // 7, line - tall // 2), (x + tall // 7, line - tall // 2)],
            fill=(246, 250, 252),
        )
    draw.rectangle((0, line, w, h), fill=_vary((244, 248, 252), rng, 4))
    for _ in range(w // 3):
        x, y = _pick(rng, 0, w), _pick(rng, 0, h)
        draw.ellipse((x, y, x + 1, y + 1), fill=(255, 255, 255) if y < line else (210, 222, 236))


def _desert(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng), image.width, image.height
    _gradient(image, _vary((246, 186, 116), rng), (252, 226, 176), 0, line + 8)
    for layer in range(3):
        xs = np.arange(0, w + 8, 8)
        ys = line + layer * (h - line) / 3.2 + 6 * np.sin(xs / rng.uniform(14, 30) + rng.uniform(0, 6))
        points = [(0, h), *zip(xs.tolist(), ys.tolist(), strict=True), (w, h)]
        draw.polygon(points, fill=_vary(((226, 150, 80), (214, 134, 66), (200, 118, 54))[layer], rng, 8))


def _forest(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng, 0.6, 0.72), image.width, image.height
    _gradient(image, _vary((40, 84, 56), rng), _vary((70, 120, 78), rng), 0, line)
    for _ in range(w // 9):
        x, wide = _pick(rng, 0, w), _pick(rng, 3, 7)
        draw.rectangle((x, 0, x + wide, line + _pick(rng, 0, 6)), fill=_vary((74, 52, 36), rng, 10))
    for _ in range(w // 8):
        x, y, r = _pick(rng, 0, w), _pick(rng, -6, line // 2), _pick(rng, 8, 15)
        draw.ellipse((x - r, y - r // 2, x + r, y + r // 2), fill=_vary((34, 92, 48), rng))
    draw.rectangle((0, line, w, h), fill=_vary((62, 74, 40), rng))
    for _ in range(w // 3):
        draw.point((_pick(rng, 0, w), _pick(rng, line, h)), fill=(112, 98, 52))


def _night(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w, h = _horizon(image, rng, 0.6, 0.75), image.width, image.height
    _gradient(image, _vary((8, 12, 40), rng, 6), _vary((34, 40, 92), rng, 8), 0, line)
    for _ in range(w // 4):
        x, y = _pick(rng, 0, w), _pick(rng, 0, line)
        draw.point((x, y), fill=(250, 250, 220))
    x, y = _pick(rng, 6, w - 18), _pick(rng, 4, 14)
    draw.ellipse((x, y, x + 13, y + 13), fill=(250, 244, 206))
    draw.ellipse((x + 4, y - 2, x + 16, y + 11), fill=(14, 18, 52))
    draw.rectangle((0, line, w, h), fill=_vary((22, 30, 46), rng, 6))


def _wall(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> int:
    line, w, h = _horizon(image, rng, 0.72, 0.82), image.width, image.height
    brick = _vary((178, 122, 102) if rng.random() < 0.6 else (172, 168, 162), rng)
    draw.rectangle((0, 0, w, line), fill=brick)
    for row, y in enumerate(range(0, line, 8)):
        draw.line((0, y, w, y), fill=tuple(max(0, c - 34) for c in brick))
        for x in range(-8 + (row % 2) * 8, w, 16):
            draw.line((x, y, x, min(y + 8, line)), fill=tuple(max(0, c - 34) for c in brick))
    draw.rectangle((0, line, w, h), fill=_vary((156, 154, 150), rng, 8))
    return line


def _graffiti(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    line, w = _wall(image, draw, rng), image.width
    paints = [(250, 60, 130), (60, 220, 240), (250, 220, 40), (120, 240, 90), (150, 80, 250), (250, 130, 30)]
    for _ in range(max(5, w // 16)):
        colour, x, y = paints[_pick(rng, len(paints))], _pick(rng, 0, w), _pick(rng, 4, line - 4)
        steps = rng.normal(0, 9, (7, 2)).cumsum(0) + np.array([x, y])
        steps[:, 1] = np.clip(steps[:, 1], 1, line - 2)
        draw.line([(float(a), float(b)) for a, b in steps], fill=colour, width=_pick(rng, 2, 5), joint="curve")
    for _ in range(max(2, w // 40)):
        x, y, r = _pick(rng, 0, w), _pick(rng, 6, line - 6), _pick(rng, 5, 10)
        draw.ellipse((x - r, y - r, x + r, y + r), outline=paints[_pick(rng, len(paints))], width=3)


def _clean_wall(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator) -> None:
    _wall(image, draw, rng)


_PLACES: dict[str, Callable[[Image.Image, ImageDraw.ImageDraw, np.random.Generator], object]] = {
    "beach": _beach,
    "park": _park,
    "room": _room,
    "street": _street,
    "snow": _snow,
    "desert": _desert,
    "forest": _forest,
    "night": _night,
    "clean wall": _clean_wall,
    "graffiti": _graffiti,
}
