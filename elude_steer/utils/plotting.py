"""Images drawn from arrays: heatmaps, collages of references, charts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont


class Grid(Protocol):
    """The patches of an image: `boxes` is `(tiles, patches, 4)`, `shape` the rows and columns of a tile."""

    @property
    def boxes(self) -> np.ndarray: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def tiles(self) -> int: ...  # noqa: D102


# Colours of the glow from dark over orange to white: (share, red, green, blue).
_GLOW = np.array(
    [(0.0, 20, 0, 40), (0.35, 150, 20, 90), (0.65, 240, 110, 30), (0.85, 255, 200, 60), (1.0, 255, 250, 220)]
)

_RED, _BLUE = (205, 60, 40), (70, 110, 190)
_TEXT, _SOFT_TEXT, _GRID_LINE = (30, 33, 40), (80, 86, 96), (228, 230, 235)
_COLOURS = [_RED, _BLUE, (40, 140, 90), (150, 80, 170), (200, 130, 20), (90, 95, 105), (20, 140, 160)]
_FRAME = (120, 235, 255)
# Each sub-unit has its own patches, and together they cover nearly all: frame those that many sub-units change.
_FRAMED_SHARE = 0.25


def heatmap(
    image: Any, grid: Grid, activity: np.ndarray, changed: np.ndarray | None = None, *, side: int = 480
) -> Image.Image:
    """Draw a glow over an image where something fires; frame the changed patches and darken the others.

    Args:
        image: A PIL image.
        grid: The image's patches.
        activity: `(tiles, patches)`, not negative. The largest value glows most; 1 or more counts as fully on.
        changed: `(tiles, patches)`, the share of sub-units that change a patch, from 0 to 1. Patches from a quarter on
            are framed. If there are none, nothing is framed or darkened.
        side: Pixels of the longer side.
    """
    shown = fit_within(image, side)
    heat = spread_over_image(grid, activity, shown.size)
    heat = heat / max(1.0, float(heat.max()))
    glow = np.stack([np.interp(heat, _GLOW[:, 0], _GLOW[:, channel]) for channel in (1, 2, 3)], -1)
    weight = np.clip(1.4 * heat**1.2, 0, 0.7)[..., None]  # the image stays visible under the glow
    colour, grey = np.asarray(shown, float), np.asarray(shown.convert("L").convert("RGB"), float)
    lit = 0.8 * colour + 0.2 * grey
    inside = None
    if changed is not None:
        inside = spread_over_image(grid, changed.astype(float), shown.size, smooth=False) >= _FRAMED_SHARE
    if inside is None or not inside.any():
        return _to_image(lit * (1 - weight) + glow * weight)
    blended = _to_image(np.where(inside[..., None], lit, 0.6 * grey) * (1 - weight) + glow * weight)
    _draw_frame(blended, inside, max(1, round(side / 200)))
    return blended


def fit_within(image: Any, side: int) -> Image.Image:
    """Resize an image to RGB with a longer side of `side` pixels."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def data_uri(image: Image.Image, *, quick: bool = False) -> str:
    """An image as a data URI, for pages that need no other file.

    Args:
        image: The image.
        quick: Encode as JPEG instead of PNG: not exact, in a hundredth of the time.
    """
    data, kind = io.BytesIO(), "jpeg" if quick else "png"
    image.save(data, kind, **({"quality": 92} if quick else {"optimize": True}))
    return f"data:image/{kind};base64," + base64.b64encode(data.getvalue()).decode()


def _to_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.round().astype(np.uint8))


def spread_over_image(grid: Grid, values: np.ndarray, size: tuple[int, int], *, smooth: bool = True) -> np.ndarray:
    """Spread values of patches over an image, `(height, width)`; where tiles overlap, take their mean."""
    width, height = size
    total, count = np.zeros((height, width)), np.zeros((height, width))
    resampling = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    for boxes, tile in zip(grid.boxes, values.reshape(grid.tiles, *grid.shape), strict=True):
        left, top = boxes[0, :2] * size
        right, bottom = boxes[-1, 2:] * size
        area = (round(left), round(top), round(right), round(bottom))
        stretched = Image.fromarray(tile.astype(np.float32)).resize(
            (max(1, area[2] - area[0]), max(1, area[3] - area[1])), resampling
        )
        canvas, cover = Image.new("F", size), Image.new("F", size)
        canvas.paste(stretched, area[:2])
        cover.paste(1.0, area)
        total += np.asarray(canvas)
        count += np.asarray(cover)
    return np.clip(total / np.maximum(count, 1), 0, None)


def _draw_frame(image: Image.Image, inside: np.ndarray, width: int) -> None:
    """Draw a light and a dark line along the inner edge of an area, to be visible on any image."""
    within_light, within_dark = _shrink(inside, width), _shrink(inside, width + 1)
    pixels = np.array(image)
    pixels[inside & ~within_light] = _FRAME
    pixels[within_light & ~within_dark] = (10, 30, 50)
    image.paste(Image.fromarray(pixels))


def _shrink(inside: np.ndarray, by: int) -> np.ndarray:
    """Remove `by` pixels at the edge of an area; beyond the image counts as outside."""
    for _ in range(by):
        wide = np.pad(inside, 1)
        inside = inside & wide[:-2, 1:-1] & wide[2:, 1:-1] & wide[1:-1, :-2] & wide[1:-1, 2:]
    return inside


def collage(rows: Sequence[tuple[str, Sequence[Any]]], *, cell: int = 96, columns: int = 8) -> Image.Image:
    """Rows of small images, each row under its title."""
    head = 20
    sheet = Image.new("RGB", (columns * (cell + 4) + 4, max(1, len(rows)) * (cell + head + 4)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (title, images) in enumerate(rows):
        top = number * (cell + head + 4)
        draw.text((6, top + 3), title, fill=(30, 30, 30), font=font)
        for column, image in enumerate(images[:columns]):
            sheet.paste(image.convert("RGB").resize((cell, cell)), (4 + column * (cell + 4), top + head))
    return sheet


def add_title(image: Image.Image, title: str) -> Image.Image:
    """Add a line of text above an image."""
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
    """Plot points on axes that fit them.

    Args:
        points: Pairs of x and y.
        x: Label of the x axis.
        y: Label of the y axis.
        marked: Indices of points to draw in red.
        names: Names of the points; they are listed at the right, and each point gets its number.
        side: Pixels of the plot's side.
        y_min: The y axis begins at this value or below.
    """
    left, top, inner = 64, 24, side - 96
    chart = Image.new("RGB", (side + (260 if names else 0), side), "white")
    draw, font = ImageDraw.Draw(chart), ImageFont.load_default(14)
    xs, ys = zip(*points, strict=True)
    across, up = _ticks(xs), _ticks(ys if y_min is None else (*ys, y_min))

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        shares = [(v - t[0]) / (t[-1] - t[0]) for v, t in zip(point, (across, up), strict=True)]
        return left + shares[0] * inner, top + (1 - shares[1]) * inner

    for tick in across:
        place = to_pixels((tick, up[0]))[0]
        draw.line((place, top, place, top + inner), fill=_GRID_LINE)
        draw.text((place, top + inner + 8), f"{tick:.4g}", fill=_SOFT_TEXT, font=font, anchor="ma")
    for tick in up:
        place = to_pixels((across[0], tick))[1]
        draw.line((left, place, left + inner, place), fill=_GRID_LINE)
        draw.text((left - 10, place), f"{tick:.4g}", fill=_SOFT_TEXT, font=font, anchor="rm")
    draw.text((left + inner / 2, side - 26), x, fill=_TEXT, font=font, anchor="ma")
    label = Image.new("RGB", (200, 22), "white")
    ImageDraw.Draw(label).text((100, 2), y, fill=_TEXT, font=font, anchor="ma")
    chart.paste(label.rotate(90, expand=True), (2, top + inner // 2 - 100))
    places = [to_pixels(point) for point in points]
    order = [i for i in range(len(points)) if i not in set(marked)] + list(marked)
    taken = list(places)
    for number in order:
        (px, py), ink = places[number], _RED if number in marked else _BLUE
        if names:
            tag = _place_number(places[number], taken, (left, top, left + inner, top + inner))
            taken.append(tag)
            draw.line((px, py, *tag), fill=ink)
            draw.text(tag, str(number + 1), fill=ink, font=font, anchor="mm", stroke_width=3, stroke_fill="white")
        radius = 6 if number in marked else 4
        draw.ellipse((px - radius, py - radius, px + radius, py + radius), fill=ink, outline="white")
    for number, name in enumerate(names):
        draw.text((side - 4, top + 22 * number), f"{number + 1}  {name}", fill=_TEXT, font=font, anchor="la")
    return chart


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, evenly spaced, from the smallest value or below to the largest or above."""
    low, high = min(values), max(values)
    span = max(high - low, 0.05 * max(abs(low), abs(high)), 1e-9)
    rough = span / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(float(power * round_) for round_ in (1, 2, 2.5, 5, 10) if power * round_ >= rough)
    first, last = int(np.floor(low / step + 1e-4)), int(np.ceil(high / step - 1e-4))
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _place_number(
    point: tuple[float, float], taken: Sequence[tuple[float, float]], frame: tuple[float, float, float, float]
) -> tuple[float, float]:
    """The nearest place for the number of a point, inside the frame and away from `taken` places."""
    left, top, right, bottom = frame
    for distance in range(16, 200, 8):
        for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False) - np.pi / 2:
            tag = (float(point[0] + distance * np.cos(angle)), float(point[1] + distance * np.sin(angle)))
            inside = left + 8 < tag[0] < right - 8 and top + 8 < tag[1] < bottom - 8
            if inside and all(np.hypot(tag[0] - a, tag[1] - b) >= 15 for a, b in taken):
                return tag
    return point


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    size: tuple[int, int] = (760, 460),
    shares: bool = False,
) -> Image.Image:
    """Draw lines through points, each with its name at its end.

    Args:
        series: the points of each line.
        x: the label of the x axis.
        y: the label of the y axis.
        size: width and height in pixels.
        shares: whether the y axis goes from 0 to 1; otherwise both axes are logarithmic, and points are positive.
    """
    left, top, right, bottom = 64, 20, size[0] - 190, size[1] - 56
    chart = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(chart), ImageFont.load_default(13)
    scale = (lambda value: value) if shares else np.log10
    logs = {name: scale(np.asarray(points, float)) for name, points in series.items()}
    values = np.concatenate([*logs.values(), *([[[np.nan, 0.0], [np.nan, 1.0]]] if shares else [])])
    low = np.nanmin(values, 0)
    high = np.maximum(np.nanmax(values, 0), low + 0.1)
    spans = np.array([right - left, top - bottom])

    def to_pixels(point: np.ndarray) -> tuple[float, float]:
        share = (point - low) / (high - low) * spans
        return left + float(share[0]), bottom + float(share[1])

    for value in sorted({float(point[0]) for points in series.values() for point in points}):
        across = to_pixels(np.array([scale(np.float64(value)), low[1]]))[0]
        draw.line((across, top, across, bottom), fill=_GRID_LINE)
        draw.text((across, bottom + 6), f"{value:g}", fill=_SOFT_TEXT, font=font, anchor="ma")
    powers = range(int(np.ceil(low[1])), int(np.floor(high[1])) + 1)
    marks = {share / 5: f"{share / 5:g}" for share in range(6)} if shares else {n: f"{10.0**n:g}" for n in powers}
    for mark, text in marks.items():
        up = to_pixels(np.array([low[0], mark]))[1]
        draw.line((left, up, right, up), fill=_GRID_LINE)
        draw.text((left - 8, up), text, fill=_SOFT_TEXT, font=font, anchor="rm")
    draw.text(((left + right) / 2, size[1] - 28), x, fill=_TEXT, font=font, anchor="ma")
    draw.text((left - 8, top - 14), y, fill=_TEXT, font=font, anchor="la")
    heights: list[float] = []
    for number, (name, points) in enumerate(sorted(logs.items(), key=lambda item: -item[1][-1][1])):
        colour = _COLOURS[number % len(_COLOURS)]
        line = [to_pixels(point) for point in points]
        draw.line(line, fill=colour, width=2)
        for px, py in line:
            draw.ellipse((px - 3, py - 3, px + 3, py + 3), fill=colour)
        heights.append(max(line[-1][1], heights[-1] + 16 if heights else 0))  # names never cover each other
        draw.text((right + 10, heights[-1]), name, fill=colour, font=font, anchor="lm")
    return chart


def histogram(
    values: Sequence[float],
    title: str,
    *,
    bins: int = 24,
    size: tuple[int, int] = (460, 260),
    axis_values: Sequence[float] = (),
) -> Image.Image:
    """Draw the distribution of values as bars; whole numbers get one bar each if there is room.

    Args:
        values: The values; those that are not finite are left out.
        title: The line above.
        bins: Number of bars.
        size: Width and height in pixels.
        axis_values: Values that the axis must cover too, so that several histograms can share an axis.
    """
    width, height = size
    chart = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(chart), ImageFont.load_default(13)
    draw.text((12, 8), title, fill=_TEXT, font=ImageFont.load_default(15))
    finite = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    if not len(finite):
        draw.text((width / 2, height / 2), "nothing", fill=_SOFT_TEXT, font=font, anchor="mm")
        return chart
    covered = [*finite, *(value for value in axis_values if np.isfinite(value))]
    low, high = float(min(covered)), float(max(covered))
    is_whole = bool((finite == finite.round()).all()) and high - low < 2 * bins
    edges = np.arange(low - 0.5, high + 1) if is_whole else np.linspace(low, high if high > low else low + 1, bins + 1)
    counts, _ = np.histogram(finite, edges)
    left, bottom, top = 48, height - 34, 40
    step = (width - left - 16) / len(counts)
    for number, count in enumerate(counts.tolist()):
        x = left + number * step
        draw.rectangle((x + 1, bottom - (bottom - top) * count / counts.max(), x + step - 1, bottom), fill=_BLUE)
    draw.line((left, bottom, width - 16, bottom), fill=_SOFT_TEXT)
    draw.text((left - 6, top), str(int(counts.max())), fill=_SOFT_TEXT, font=font, anchor="rm")
    draw.text((left, bottom + 6), f"{low:.3g}", fill=_SOFT_TEXT, font=font, anchor="la")
    draw.text((width - 16, bottom + 6), f"{high:.3g}", fill=_SOFT_TEXT, font=font, anchor="ra")
    draw.text(((left + width) / 2, bottom + 6), f"mean {finite.mean():.3g}", fill=_SOFT_TEXT, font=font, anchor="ma")
    return chart
