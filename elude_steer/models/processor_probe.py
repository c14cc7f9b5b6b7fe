"""Where a processor puts the parts of a picture, found out by showing it pictures whose colours tell places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from elude_steer.errors import ModelError

Area = tuple[float, float, float, float]  # left, top, right, bottom as fractions of the picture
_DARK, _LIGHT = 16, 240
_LEAST = 4  # pixels of a side, below which colours cannot tell places


def survey(show: Callable[[Image.Image], np.ndarray], size: tuple[int, int]) -> tuple[list[Area], tuple[int, int]]:
    """What part of a picture each tile shows, whatever the processor does: stretch, fit, crop, cut or pad.

    Args:
        show: a picture to its tiles as the model is given them, `(tiles, 3, height, width)`.
        size: width and height of the picture.

    Returns:
        An area a tile, which reaches outside 0 to 1 where the tile is padded, and the tiles' height and width.
    """
    if min(size) < _LEAST:
        raise ModelError(f"a picture of {size[0]} x {size[1]} pixels is too small to tell where its patches lie.")
    dark, light, ramp = (show(Image.fromarray(pixels)) for pixels in _pictures(size))
    if not dark.shape == light.shape == ramp.shape:
        raise ModelError("the processor cuts pictures by what they show; where its patches lie is not understood.")
    span = light - dark
    seen = np.abs(span) > 0.5 * np.abs(span).max()
    share = (ramp - dark) / np.where(seen, span, 1)  # (tiles, 3, height, width), 0 at the left or top, 1 at the end
    here = seen.all(1)
    height, width = ramp.shape[-2:]
    across = _ends([_line(own[0], at, size[0]) for own, at in zip(share, here, strict=True)], width)
    down = _ends([_line(own[1].T, at.T, size[1]) for own, at in zip(share, here, strict=True)], height)
    areas = [(x[0], y[0], x[1], y[1]) for x, y in zip(across, down, strict=True)]
    return areas, (height, width)


def _pictures(size: tuple[int, int]) -> list[np.ndarray]:
    """All dark, all light, and one whose red and blue grow from left to right and whose green from top to bottom."""
    x, y = (_DARK + (_LIGHT - _DARK) * (np.arange(side) + 0.5) / side for side in size)
    across, down = (np.arange(side) * 0.618 % 1 for side in size)  # dithered: finer than the steps of a colour
    red, green = (x + down[:, None]).astype(np.uint8), (y[:, None] + across).astype(np.uint8)
    ramp = np.stack([red, green, red], -1)
    return [np.full_like(ramp, _DARK), np.full_like(ramp, _LIGHT), ramp]


def _line(share: np.ndarray, seen: np.ndarray, pixels: int) -> tuple[float, float]:
    """How much of the picture a pixel of a tile is worth, and what share its middle shows, from `(rows, n)` shares."""
    columns = np.flatnonzero(seen.any(0))
    if len(columns) < 2:
        raise ModelError("the processor gives a tile that shows nothing of the picture; its layout is not understood.")
    values = (share * seen).sum(0)[columns] / seen.sum(0)[columns]
    edge = 2.5 / pixels  # resampling is not itself at the ends of a picture
    inner = (values > edge) & (values < 1 - edge)
    if inner.sum() < _LEAST:
        inner[:] = True
    step, start = np.polyfit(columns[inner] + 0.5, values[inner], 1)
    off = np.where(seen, share - (start + step * (np.arange(share.shape[1]) + 0.5)), 0)[:, columns[inner]]
    if step <= 0 or np.abs(off).max() > 0.03 + 1.5 / pixels:
        raise ModelError("the processor bends, turns or shuffles pictures; where its patches lie is not understood.")
    return float(step), float(start + step * share.shape[1] / 2)


def _ends(lines: Sequence[tuple[float, float]], pixels: int) -> list[tuple[float, float]]:
    """Where tiles of so many pixels begin and end."""
    steps, found = np.array([step for step, _ in lines]), []
    for step, middle in lines:
        # Tiles of about the same scale are cut from one picture, and that has whole pixels, as has the place of a cut.
        alike = steps[np.abs(steps / step - 1) < 0.03]
        whole = max(1, round(1 / float(alike.mean())))
        begin = round(middle * whole - pixels / 2)
        found.append((begin / whole, (begin + pixels) / whole))
    return found
