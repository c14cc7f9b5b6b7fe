"""Find where a processor puts the parts of an image, with test images whose colours encode positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from elude_steer.errors import ModelError

Area = tuple[float, float, float, float]  # left, top, right, bottom as fractions of the image
_DARK, _LIGHT = 16, 240
_MIN_PIXELS = 4  # length of a side below which colours cannot encode positions


def locate_tiles(
    process: Callable[[Image.Image], np.ndarray], size: tuple[int, int]
) -> tuple[list[Area], tuple[int, int]]:
    """Find the part of an image that each tile shows, whether the processor stretches, fits, crops, cuts or pads.

    Args:
        process: turns an image into the tiles that the model receives, `(tiles, 3, height, width)`.
        size: width and height of the image.

    Returns:
        An area per tile, which reaches outside 0 to 1 where the tile is padded, and the tiles' height and width.
    """
    if min(size) < _MIN_PIXELS:
        raise ModelError(f"an image of {size[0]} x {size[1]} pixels is too small to find the positions of its patches.")
    dark, light, ramp = (process(Image.fromarray(pixels)) for pixels in _test_images(size))
    if not dark.shape == light.shape == ramp.shape:
        raise ModelError("the processor cuts images depending on their content; the positions of patches are unknown.")
    span = light - dark
    valid = np.abs(span) > 0.5 * np.abs(span).max()  # False on padding
    position = (ramp - dark) / np.where(valid, span, 1)  # (tiles, 3, height, width), 0 at the left or top, 1 at the end
    valid = valid.all(1)
    height, width = ramp.shape[-2:]
    across = _tile_ends([_fit_line(x[0], mask, size[0]) for x, mask in zip(position, valid, strict=True)], width)
    down = _tile_ends([_fit_line(x[1].T, mask.T, size[1]) for x, mask in zip(position, valid, strict=True)], height)
    areas = [(x[0], y[0], x[1], y[1]) for x, y in zip(across, down, strict=True)]
    return areas, (height, width)


def _test_images(size: tuple[int, int]) -> list[np.ndarray]:
    """A dark image, a light one, and one with red and blue rising from left to right and green from top to bottom."""
    x, y = (_DARK + (_LIGHT - _DARK) * (np.arange(side) + 0.5) / side for side in size)
    across, down = (np.arange(side) * 0.618 % 1 for side in size)  # dithering, finer than the steps of a colour
    red, green = (x + down[:, None]).astype(np.uint8), (y[:, None] + across).astype(np.uint8)
    ramp = np.stack([red, green, red], -1)
    return [np.full_like(ramp, _DARK), np.full_like(ramp, _LIGHT), ramp]


def _fit_line(position: np.ndarray, valid: np.ndarray, pixels: int) -> tuple[float, float]:
    """Fit a line to `(rows, n)` positions; return the image fraction per tile pixel and at the middle of the tile."""
    columns = np.flatnonzero(valid.any(0))
    if len(columns) < 2:
        raise ModelError("the processor makes a tile that shows nothing of the image; its layout is unknown.")
    values = (position * valid).sum(0)[columns] / valid.sum(0)[columns]
    edge = 2.5 / pixels  # resampling is distorted at the edges of an image
    inner = (values > edge) & (values < 1 - edge)
    if inner.sum() < _MIN_PIXELS:
        inner[:] = True
    step, start = np.polyfit(columns[inner] + 0.5, values[inner], 1)
    error = np.where(valid, position - (start + step * (np.arange(position.shape[1]) + 0.5)), 0)[:, columns[inner]]
    if step <= 0 or np.abs(error).max() > 0.03 + 1.5 / pixels:
        raise ModelError("the processor bends, turns or shuffles images; the positions of patches are unknown.")
    return float(step), float(start + step * position.shape[1] / 2)


def _tile_ends(lines: Sequence[tuple[float, float]], pixels: int) -> list[tuple[float, float]]:
    """Return where tiles of this many pixels begin and end, as fractions of the image."""
    steps, ends = np.array([step for step, _ in lines]), []
    for step, middle in lines:
        # Tiles of about the same scale are cut from one scaled image, at whole pixels of it.
        alike = steps[np.abs(steps / step - 1) < 0.03]
        length = max(1, round(1 / float(alike.mean())))  # of the scaled image
        begin = round(middle * length - pixels / 2)
        ends.append((begin / length, (begin + pixels) / length))
    return ends
