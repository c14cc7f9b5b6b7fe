"""Where something is placed: a box or a mask over a picture, and the patches that lie in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elude_steer.errors import SpecError
from elude_steer.models.images import open_image

_WHERE = "where is a box (left, top, right, bottom in pixels), a mask, or the file of a mask."


@dataclass(frozen=True)
class Region:
    """Where something is placed: a box in pixels, or a mask that is stretched over the picture.

    Attributes:
        box: left, top, right, bottom.
        mask: its rows as text of `0` and `1`, so that plans can be compared and saved.
    """

    box: tuple[float, float, float, float] | None = None
    mask: tuple[str, ...] | None = None

    @classmethod
    def from_value(cls, where: Any) -> Region | None:
        """A region from a box, an array or a black and white picture (or its file); None stays None."""
        if where is None or isinstance(where, Region):
            return where
        if isinstance(where, str | os.PathLike):
            if not os.path.isfile(where):  # noqa: PTH113, a text that is too long for a name is no file
                raise SpecError(f"{_WHERE} There is no file '{where}'.")
            where = open_image(where)
        try:
            array = np.asarray(where.convert("L") if hasattr(where, "convert") else where)
        except ValueError:  # rows of different lengths
            array = np.empty(0)
        numbers = np.issubdtype(array.dtype, np.number)
        if numbers and array.shape == (4,):
            left, top, right, bottom = (float(value) for value in array)
            if not np.isfinite(array).all() or left >= right or top >= bottom:
                raise SpecError(f"the box {tuple(array.tolist())} is empty; give left, top, right, bottom in pixels.")
            return cls(box=(left, top, right, bottom))
        if array.ndim != 2 or not array.size or not (numbers or array.dtype == bool):
            raise SpecError(_WHERE)
        marked = array > (array.max() / 2 if array.dtype == np.uint8 else 0)
        if not marked.any():
            raise SpecError("the mask marks nothing; mark the region white, or give none.")
        return cls(mask=tuple((row + np.uint8(48)).tobytes().decode() for row in marked.astype(np.uint8)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Region | None:
        """The region that `dataclasses.asdict` wrote; None stays None."""
        if values is None:
            return None
        box, mask = values["box"], values["mask"]
        return cls(tuple(box) if box else None, tuple(mask) if mask else None)

    def covered_patches(self, boxes: np.ndarray, size: tuple[int, int], least: float = 0.5) -> np.ndarray:
        """Which patches lie in the region by at least half, `(tiles, patches)` bool.

        In a tile whose patches are too large for that, the one that lies in it most: what a tile shows of the region
        is never left out.

        Args:
            boxes: `(tiles, patches, 4)` as fractions of the picture.
            size: width and height of the picture.
            least: the share of a patch that must lie inside.
        """
        share = self._share(boxes, size)
        if share.max() <= 0:
            what = f"the box {self.box}" if self.box else "what the mask marks"
            raise SpecError(f"{what} lies outside the picture, which is {size[0]} x {size[1]} pixels.")
        best = share.max(-1, keepdims=True)
        # Half is half, whatever rounding makes of it; a tile's best must hold a fair part of what it shows at all.
        return (share >= np.minimum(least, best) - 1e-9) & (best >= 0.1 * share.max())

    def _share(self, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        if self.box is not None:
            boxes = boxes.clip(0, 1)  # of a patch on the edge counts what shows the picture
            left, top, right, bottom = np.array(self.box) / [size[0], size[1], size[0], size[1]]
            wide = np.clip(np.minimum(boxes[..., 2], right) - np.maximum(boxes[..., 0], left), 0, None)
            high = np.clip(np.minimum(boxes[..., 3], bottom) - np.maximum(boxes[..., 1], top), 0, None)
            inside = (left < 1) & (top < 1) & (right > 0) & (bottom > 0)
            area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
            return wide * high / np.maximum(area, 1e-12) * inside
        mask = np.array([np.frombuffer(row.encode(), np.uint8) == ord("1") for row in self.mask or ()])
        rows, columns = mask.shape
        total = np.pad(mask.astype(float).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        x0, x1 = (np.clip(boxes[..., i], 0, 1) * columns for i in (0, 2))
        y0, y1 = (np.clip(boxes[..., i], 0, 1) * rows for i in (1, 3))
        marked = _above(total, y1, x1) - _above(total, y0, x1) - _above(total, y1, x0) + _above(total, y0, x0)
        return marked / np.maximum((x1 - x0) * (y1 - y0), 1e-9)


def _above(total: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What a mask marks above and to the left of some points, from its sums: exact between its cells too."""
    top, left = np.minimum(y.astype(int), len(total) - 2), np.minimum(x.astype(int), total.shape[1] - 2)
    down, right = y - top, x - left
    upper = total[top, left] * (1 - right) + total[top, left + 1] * right
    lower = total[top + 1, left] * (1 - right) + total[top + 1, left + 1] * right
    return upper * (1 - down) + lower * down
