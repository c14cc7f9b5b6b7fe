"""Arrays in, pictures out: where a word fires, collages of references, charts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont


class Grid(Protocol):
    """Where an image's patches lie: `boxes` is `(tiles, patches, 4)`, `shape` the rows and columns of a tile."""

    @property
    def boxes(self) -> np.ndarray: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def tiles(self) -> int: ...  # noqa: D102


# From nothing over orange to white hot, as (share, red, green, blue).
_GLOW = np.array(
    [(0.0, 20, 0, 40), (0.35, 150, 20, 90), (0.65, 240, 110, 30), (0.85, 255, 200, 60), (1.0, 255, 250, 220)]
)

_COLOURS = [(205, 60, 40), (70, 110, 190), (40, 140, 90), (150, 80, 170), (200, 130, 20), (90, 95, 105), (20, 140, 160)]
_FRAME = (120, 235, 255)
_FRAMED = 0.25  # each sub-unit has patches of its own, and together they touch nearly all: frame what many touch


def heatmap(
    image: Any, grid: Grid, fires: np.ndarray, touched: np.ndarray | None = None, *, side: int = 480
) -> Image.Image:
    """A picture under a glow where something fires; what was mostly changed is framed, the rest in the dark.

    Args:
        image: a PIL picture.
        grid: where the patches lie.
        fires: `(tiles, patches)` not negative; the largest glows most, and at least 1 counts as fully on.
        touched: `(tiles, patches)` which share was changed, from 0 to 1; patches from a quarter on are framed. Where
            there are none, nothing is framed or darkened.
        side: pixels of the longer side.
    """
    shown = fit_within(image, side)
    heat = spread_over_image(grid, fires, shown.size)
    heat = heat / max(1.0, float(heat.max()))
    glow = np.stack([np.interp(heat, _GLOW[:, 0], _GLOW[:, channel]) for channel in (1, 2, 3)], -1)
    weight = np.clip(1.4 * heat**1.2, 0, 0.7)[..., None]  # the thing that glows can still be made out
    colour, grey = np.asarray(shown, float), np.asarray(shown.convert("L").convert("RGB"), float)
    lit = 0.8 * colour + 0.2 * grey
    inside = (
        None if touched is None else spread_over_image(grid, touched.astype(float), shown.size, smooth=False) >= _FRAMED
    )
    if inside is None or not inside.any():
        return _picture(lit * (1 - weight) + glow * weight)
    blended = _picture(np.where(inside[..., None], lit, 0.6 * grey) * (1 - weight) + glow * weight)
    _frame(blended, inside, max(1, round(side / 200)))
    return blended


def fit_within(image: Any, side: int) -> Image.Image:
    """A picture in RGB whose longer side has so many pixels."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def data_uri(image: Image.Image, *, quick: bool = False) -> str:
    """A picture as an address that holds all of it, for pages that need no other file.

    Args:
        image: the picture.
        quick: not every bit of it, but in a hundredth of the time (JPEG instead of PNG).
    """
    data, kind = io.BytesIO(), "jpeg" if quick else "png"
    image.save(data, kind, **({"quality": 92} if quick else {"optimize": True}))
    return f"data:image/{kind};base64," + base64.b64encode(data.getvalue()).decode()


def _picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.round().astype(np.uint8))


def spread_over_image(grid: Grid, values: np.ndarray, size: tuple[int, int], *, smooth: bool = True) -> np.ndarray:
    """Values of patches as a map over the picture, `(height, width)`: the mean of the tiles that show a place."""
    width, height = size
    total, seen = np.zeros((height, width)), np.zeros((height, width))
    how = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    for boxes, tile in zip(grid.boxes, values.reshape(grid.tiles, *grid.shape), strict=True):
        left, top = boxes[0, :2] * size
        right, bottom = boxes[-1, 2:] * size
        area = (round(left), round(top), round(right), round(bottom))
        stretched = Image.fromarray(tile.astype(np.float32)).resize(
            (max(1, area[2] - area[0]), max(1, area[3] - area[1])), how
        )
        canvas, cover = Image.new("F", size), Image.new("F", size)
        canvas.paste(stretched, area[:2])
        cover.paste(1.0, area)
        total += np.asarray(canvas)
        seen += np.asarray(cover)
    return np.clip(total / np.maximum(seen, 1), 0, None)


def _frame(image: Image.Image, inside: np.ndarray, width: int) -> None:
    """Draws a line along the inner edge of an area, light with dark beside it, so that it shows on any picture."""
    line, beside = _shrunk(inside, width), _shrunk(inside, width + 1)
    pixels = np.array(image)
    pixels[inside & ~line] = _FRAME
    pixels[line & ~beside] = (10, 30, 50)
    image.paste(Image.fromarray(pixels))


def _shrunk(inside: np.ndarray, by: int) -> np.ndarray:
    """An area without so many pixels at its edge; what lies outside the picture is outside."""
    for _ in range(by):
        wide = np.pad(inside, 1)
        inside = inside & wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
    return inside


def collage(rows: Sequence[tuple[str, Sequence[Any]]], *, cell: int = 96, columns: int = 8) -> Image.Image:
    """Rows of small pictures, each under its title."""
    head = 20
    picture = Image.new("RGB", (columns * (cell + 4) + 4, max(1, len(rows)) * (cell + head + 4)), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    for number, (title, images) in enumerate(rows):
        top = number * (cell + head + 4)
        draw.text((6, top + 3), title, fill=(30, 30, 30), font=font)
        for column, image in enumerate(images[:columns]):
            picture.paste(image.convert("RGB").resize((cell, cell)), (4 + column * (cell + 4), top + head))
    return picture


def add_title(image: Image.Image, title: str) -> Image.Image:
    """A picture with a line of text above it."""
    head, font = 26, ImageFont.load_default(16)
    sheet = Image.new("RGB", (image.width + 8, image.height + head), "white")
    ImageDraw.Draw(sheet).text((4, 3), title, fill=(30, 30, 30), font=font)
    sheet.paste(image, (4, head))
    return sheet


def scatter(
    points: Sequence[tuple[float, float]],
    *,
    x: str,
    y: str,
    marked: Sequence[int] = (),
    names: Sequence[str] = (),
    side: int = 520,
    y_min: float | None = None,
) -> Image.Image:
    """Points on axes that fit them, some of them marked; with names they bear numbers, told at the right.

    The axis of y begins at `y_min` or below, where that is given.
    """
    left, top, inner = 64, 24, side - 96
    picture = Image.new("RGB", (side + (260 if names else 0), side), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    xs, ys = zip(*points, strict=True)
    across, up = _ticks(xs), _ticks(ys if y_min is None else (*ys, y_min))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        shares = [(v - t[0]) / (t[-1] - t[0]) for v, t in zip(point, (across, up), strict=True)]
        return left + shares[0] * inner, top + (1 - shares[1]) * inner

    for tick in across:
        place = at((tick, up[0]))[0]
        draw.line((place, top, place, top + inner), fill=(228, 230, 235))
        draw.text((place, top + inner + 8), f"{tick:.4g}", fill=(80, 86, 96), font=font, anchor="ma")
    for tick in up:
        place = at((across[0], tick))[1]
        draw.line((left, place, left + inner, place), fill=(228, 230, 235))
        draw.text((left - 10, place), f"{tick:.4g}", fill=(80, 86, 96), font=font, anchor="rm")
    draw.text((left + inner / 2, side - 26), x, fill=(30, 33, 40), font=font, anchor="ma")
    label = Image.new("RGB", (200, 22), "white")
    ImageDraw.Draw(label).text((100, 2), y, fill=(30, 33, 40), font=font, anchor="ma")
    picture.paste(label.rotate(90, expand=True), (2, top + inner // 2 - 100))
    places = [at(point) for point in points]
    order = [i for i in range(len(points)) if i not in set(marked)] + list(marked)
    taken = list(places)
    for number in order:
        (px, py), ink = places[number], (205, 60, 40) if number in marked else (70, 110, 190)
        if names:
            tag = _free(places[number], taken, (left, top, left + inner, top + inner))
            taken.append(tag)
            draw.line((px, py, *tag), fill=ink)
            draw.text(tag, str(number + 1), fill=ink, font=font, anchor="mm", stroke_width=3, stroke_fill="white")
        radius = 6 if number in marked else 4
        draw.ellipse((px - radius, py - radius, px + radius, py + radius), fill=ink, outline="white")
    for number, name in enumerate(names):
        draw.text((side - 4, top + 22 * number), f"{number + 1}  {name}", fill=(30, 33, 40), font=font, anchor="la")
    return picture


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, evenly spaced, from the smallest value or below to the largest or above."""
    low, high = min(values), max(values)
    span = max(high - low, 0.05 * max(abs(low), abs(high)), 1e-9)
    rough = span / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(float(power * round_) for round_ in (1, 2, 2.5, 5, 10) if power * round_ >= rough)
    first, last = int(np.floor(low / step + 1e-4)), int(np.ceil(high / step - 1e-4))
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _free(
    point: tuple[float, float], taken: Sequence[tuple[float, float]], frame: tuple[float, float, float, float]
) -> tuple[float, float]:
    """The nearest place for a number beside a point, inside the frame and apart from all that is taken."""
    left, top, right, bottom = frame
    for far in range(16, 200, 8):
        for turn in np.linspace(0, 2 * np.pi, 16, endpoint=False) - np.pi / 2:
            tag = (float(point[0] + far * np.cos(turn)), float(point[1] + far * np.sin(turn)))
            inside = left + 8 < tag[0] < right - 8 and top + 8 < tag[1] < bottom - 8
            if inside and all(np.hypot(tag[0] - a, tag[1] - b) >= 15 for a, b in taken):
                return tag
    return point


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, size: tuple[int, int] = (760, 460)
) -> Image.Image:
    """Lines through positive points on logarithmic axes, a name at the end of each."""
    left, top, right, bottom = 64, 20, size[0] - 190, size[1] - 56
    picture = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    logs = {name: np.log10(np.asarray(points, float)) for name, points in series.items()}
    every = np.concatenate(list(logs.values()))
    low, high = every.min(0), np.maximum(every.max(0), every.min(0) + 0.1)
    spans = np.array([right - left, top - bottom])

    def at(point: np.ndarray) -> tuple[float, float]:
        share = (point - low) / (high - low) * spans
        return left + float(share[0]), bottom + float(share[1])

    for value in sorted({float(points[0]) for own in series.values() for points in own}):
        across = at(np.array([np.log10(value), low[1]]))[0]
        draw.line((across, top, across, bottom), fill=(228, 230, 235))
        draw.text((across, bottom + 6), f"{value:g}", fill=(80, 86, 96), font=font, anchor="ma")
    for power in range(int(np.ceil(low[1])), int(np.floor(high[1])) + 1):
        up = at(np.array([low[0], power]))[1]
        draw.line((left, up, right, up), fill=(228, 230, 235))
        draw.text((left - 8, up), f"{10.0**power:g}", fill=(80, 86, 96), font=font, anchor="rm")
    draw.text(((left + right) / 2, size[1] - 28), x, fill=(30, 33, 40), font=font, anchor="ma")
    draw.text((left - 8, top - 14), y, fill=(30, 33, 40), font=font, anchor="la")
    heights: list[float] = []
    for number, (name, points) in enumerate(sorted(logs.items(), key=lambda item: -item[1][-1][1])):
        colour = _COLOURS[number % len(_COLOURS)]
        line = [at(point) for point in points]
        draw.line(line, fill=colour, width=2)
        for px, py in line:
            draw.ellipse((px - 3, py - 3, px + 3, py + 3), fill=colour)
        heights.append(max(line[-1][1], heights[-1] + 16 if heights else 0))  # names never cover each other
        draw.text((right + 10, heights[-1]), name, fill=colour, font=font, anchor="lm")
    return picture


def histogram(
    values: Sequence[float],
    title: str,
    *,
    bins: int = 24,
    size: tuple[int, int] = (460, 260),
    within: Sequence[float] = (),
) -> Image.Image:
    """How often values occur, as bars over an axis with their range; whole numbers have a bar each where they can.

    The axis has room for the values `within` too, so that charts of several kinds of values have one.
    """
    width, height = size
    picture = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    draw.text((12, 8), title, fill=(30, 33, 40), font=ImageFont.load_default(15))
    known = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    if not len(known):
        draw.text((width / 2, height / 2), "nothing", fill=(80, 86, 96), font=font, anchor="mm")
        return picture
    low, high = (float(end([*known, *(value for value in within if np.isfinite(value))])) for end in (min, max))
    whole = bool((known == known.round()).all()) and high - low < 2 * bins
    edges = np.arange(low - 0.5, high + 1) if whole else np.linspace(low, high if high > low else low + 1, bins + 1)
    counts, _ = np.histogram(known, edges)
    left, bottom, top = 48, height - 34, 40
    step = (width - left - 16) / len(counts)
    for number, count in enumerate(counts.tolist()):
        x = left + number * step
        draw.rectangle(
            (x + 1, bottom - (bottom - top) * count / counts.max(), x + step - 1, bottom), fill=(70, 110, 190)
        )
    draw.line((left, bottom, width - 16, bottom), fill=(80, 86, 96))
    draw.text((left - 6, top), str(int(counts.max())), fill=(80, 86, 96), font=font, anchor="rm")
    draw.text((left, bottom + 6), f"{low:.3g}", fill=(80, 86, 96), font=font, anchor="la")
    draw.text((width - 16, bottom + 6), f"{high:.3g}", fill=(80, 86, 96), font=font, anchor="ra")
    draw.text(((left + width) / 2, bottom + 6), f"mean {known.mean():.3g}", fill=(80, 86, 96), font=font, anchor="ma")
    return picture
