"""Which patches an edit touches: those that the user marks, those where a concept fires most, or a free place.

A region is a set of patches of one image. `Region` is one that the user marks, and `ImagePatches` says which patches of
one image a marked region covers. A free place is a block of patches that the calibrated words claim least.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elude_steer.errors import AtlasError, SpecError
from elude_steer.models.images import open_image

if TYPE_CHECKING:
    import torch

    from elude_steer.models.patch_layout import PatchGrid
    from elude_steer.models.vlm import Vlm

# Each part of a region reads at least this share of the peak somewhere: other parts are stray patches. A second dog is
# a part of its own, and stays.
CORE = 0.6
FREE_SIDE = 3 / 8  # side of a free place, as a share of that of the image; a quarter or a half measures worse
FREE_CLAIM = 1.0  # a free place is claimed less than this multiple of the image's mean; beyond, captions invent more
_WHERE = "where is a box (left, top, right, bottom in pixels), a mask, or the file of a mask."


@dataclass(frozen=True)
class Region:
    """A part of an image that the user marks: a box in pixels, or a mask that is stretched over the image.

    Attributes:
        box: left, top, right, bottom.
        mask: its rows as strings of `0` and `1`, so that plans can be compared and saved.
    """

    box: tuple[float, float, float, float] | None = None
    mask: tuple[str, ...] | None = None

    @classmethod
    def from_value(cls, where: Any) -> Region | None:
        """A region from a box, an array, or a black and white image (or its file); None stays None."""
        if where is None or isinstance(where, Region):
            return where
        if isinstance(where, str | os.PathLike):
            if not os.path.isfile(where):  # noqa: PTH113, a string that is too long for a file name is no file
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
            raise SpecError("the mask marks nothing; make the region white, or leave the mask out.")
        return cls(mask=tuple((row + np.uint8(48)).tobytes().decode() for row in marked.astype(np.uint8)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Region | None:
        """The region that `dataclasses.asdict` wrote; None stays None."""
        if values is None:
            return None
        box, mask = values["box"], values["mask"]
        return cls(tuple(box) if box else None, tuple(mask) if mask else None)

    def check_inside(self, size: tuple[int, int]) -> None:
        """Raise if the box lies outside an image of this width and height; a mask is stretched over any image."""
        if self.box is None:
            return
        left, top, right, bottom = self.box
        if left >= size[0] or top >= size[1] or right <= 0 or bottom <= 0:
            raise SpecError(f"the box {self.box} lies outside the image, which is {size[0]} x {size[1]} pixels.")

    def covered_patches(self, boxes: np.ndarray, size: tuple[int, int], min_share: float = 0.5) -> np.ndarray:
        """Patches with at least half of their area in the region, `(tiles, patches)` bool.

        A tile whose patches are too large for that gives the patch with the largest share, so that no tile that shows
        the region is left out.

        Args:
            boxes: `(tiles, patches, 4)` as fractions of the image.
            size: width and height of the image.
            min_share: the share of a patch that must lie inside.
        """
        share = self._share(boxes, size)
        if share.max() <= 0:
            what = f"the box {self.box}" if self.box else "what the mask marks"
            raise SpecError(f"{what} lies outside the image, which is {size[0]} x {size[1]} pixels.")
        best = share.max(-1, keepdims=True)
        # The tolerance keeps rounding from losing exact halves. A tile with less than a tenth of the best share
        # shows hardly anything of the region and does not count.
        return (share >= np.minimum(min_share, best) - 1e-9) & (best >= 0.1 * share.max())

    def _share(self, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        if self.box is not None:
            boxes = boxes.clip(0, 1)  # a patch on the edge counts with the part that shows the image
            left, top, right, bottom = np.array(self.box) / [size[0], size[1], size[0], size[1]]
            width = np.clip(np.minimum(boxes[..., 2], right) - np.maximum(boxes[..., 0], left), 0, None)
            height = np.clip(np.minimum(boxes[..., 3], bottom) - np.maximum(boxes[..., 1], top), 0, None)
            inside = (left < 1) & (top < 1) & (right > 0) & (bottom > 0)
            area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
            return width * height / np.maximum(area, 1e-12) * inside
        mask = np.array([np.frombuffer(row.encode(), np.uint8) == ord("1") for row in self.mask or ()])
        rows, columns = mask.shape
        total = np.pad(mask.astype(float).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        x0, x1 = (np.clip(boxes[..., i], 0, 1) * columns for i in (0, 2))
        y0, y1 = (np.clip(boxes[..., i], 0, 1) * rows for i in (1, 3))
        marked = (
            _area_above(total, y1, x1)
            - _area_above(total, y0, x1)
            - _area_above(total, y1, x0)
            + _area_above(total, y0, x0)
        )
        return marked / np.maximum((x1 - x0) * (y1 - y0), 1e-9)


def _area_above(total: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The area that a mask marks above and to the left of some points, from its sums; exact between its cells too."""
    top, left = np.minimum(y.astype(int), len(total) - 2), np.minimum(x.astype(int), total.shape[1] - 2)
    down, right = y - top, x - left
    upper = total[top, left] * (1 - right) + total[top, left + 1] * right
    lower = total[top + 1, left] * (1 - right) + total[top + 1, left + 1] * right
    return upper * (1 - down) + lower * down


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """The patches of one image: which of them a region covers, and in how many rows and columns they stand.

    Attributes:
        vlm: the model that sees the image.
        size: gives width and height of the image; called only where they are needed.
        known_shape: rows and columns, where they are known already.
        known_tiles: the number of tiles that the model sees, if it sees fewer than of the same image alone.
        known_grid: the grid of the image alone, where it is known already.
    """

    vlm: Vlm
    size: Callable[[], tuple[int, int]]
    known_shape: tuple[int, int] | None = None
    known_tiles: int | None = None
    known_grid: PatchGrid | None = None

    def __call__(self, region: Region) -> np.ndarray:
        """Patches that a region covers, `(tiles, patches)` bool."""
        return region.covered_patches(self._grid.boxes[: self.known_tiles], self.size())

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of patches in a tile."""
        return self.known_shape or self.vlm.patch_shape or self._grid.shape

    @property
    def boxes(self) -> np.ndarray | None:
        """Where the patches lie, `(tiles, patches, 4)` as fractions of the image; None if its size is unknown."""
        try:
            return self._grid.boxes[: self.known_tiles]
        except AtlasError:
            return None

    @property
    def _grid(self) -> PatchGrid:
        return self.vlm.grid(self.size()) if self.known_grid is None else self.known_grid


def overview_tile(boxes: np.ndarray) -> int:
    """The tile that shows the largest part of an image; of equal ones the first."""
    shown = boxes.clip(0, 1)
    low, high = shown[..., :2].min(1), shown[..., 2:].max(1)  # (tiles, 2) each
    return int((high - low).prod(-1).round(6).argmax())


def patches_inside(boxes: np.ndarray) -> np.ndarray:
    """Which patches have their centre in the image, not in the padding: `(patches,)` bool for boxes `(patches, 4)`."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    return ((centre > 0) & (centre < 1)).all(-1)


def find_connected_region(readings: torch.Tensor, fit: float, shape: tuple[int, int]) -> torch.Tensor:
    """The patches that read at least `fit` of the peak, in parts that reach `CORE` of it: `(tiles, patches)` bool.

    This is a threshold with hysteresis, as in edge detection. Parts are the connected patches of a tile, also by their
    corners.

    Args:
        readings: `(tiles, patches)` of a detector.
        fit: the share; 0 takes every patch.
        shape: rows and columns of a tile's patches.
    """
    from elude_steer.method.concept_fit import find_region

    region = find_region(readings.flatten(), fit).reshape(readings.shape)
    if not 0 < fit < CORE:
        return region
    import torch
    from scipy.ndimage import label

    neighbours = np.zeros((3, 3, 3), bool)
    neighbours[1] = True  # all eight in the tile, none in the tiles beside it
    parts = label(region.cpu().numpy().reshape(-1, *shape), neighbours)[0]
    core = (readings >= CORE * readings.max()).cpu().numpy().reshape(parts.shape)
    kept = np.isin(parts, parts[core & (parts > 0)]).reshape(readings.shape)
    return torch.from_numpy(kept).to(region.device)


def measure_claims(readings: torch.Tensor) -> torch.Tensor:
    """How much the words claim each patch of an image, `(patches,)`.

    A word claims patches where it reads more than on average: a beach that is everywhere claims nothing.

    Args:
        readings: `(patches, W)` of the detectors of all words.
    """
    return (readings - readings.mean(0)).clamp_min(0).sum(-1)


def find_free_blocks(claims: np.ndarray, usable: np.ndarray, limits: Sequence[float]) -> list[np.ndarray]:
    """The blocks of patches that are claimed least, one after the other, none on another: `(rows, columns)` bool each.

    Args:
        claims: `(rows, columns)` of `measure_claims`.
        usable: `(rows, columns)` bool, the patches that may be in a block.
        limits: for each block the share of the image's mean claim that it must stay below; otherwise it is empty.
    """
    high, wide = (max(1, round(FREE_SIDE * side)) for side in claims.shape)
    windows = np.lib.stride_tricks.sliding_window_view
    means = windows(claims.astype(float), (high, wide)).mean((2, 3))
    usable, blocks = usable.copy(), []
    for limit in limits:
        possible = np.where(windows(usable, (high, wide)).all((2, 3)), means, np.inf)
        top, left = np.unravel_index(possible.argmin(), possible.shape)  # of equal blocks the first
        block = np.zeros(claims.shape, bool)
        claim = possible[top, left]
        if claim == 0 or (np.isfinite(claim) and claim < limit * claims.mean(dtype=float)):
            block[top : top + high, left : left + wide] = True
        usable &= ~block
        blocks.append(block)
    return blocks


def cover_block(block: np.ndarray, tile: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The patches of all tiles that show a block of patches of one tile, `(tiles, patches)` bool.

    Args:
        block: `(patches,)` bool.
        tile: `(patches, 4)` the patches of the block's tile, as fractions of the image.
        boxes: `(tiles, patches, 4)` those of all tiles.
    """
    if not block.any():
        return np.zeros(boxes.shape[:2], bool)
    inside = tile[block].clip(0, 1)
    (left, top), (right, bottom) = inside[:, :2].min(0).tolist(), inside[:, 2:].max(0).tolist()
    return Region(box=(left, top, right, bottom)).covered_patches(boxes, (1, 1))


def strongest_mask(activations: torch.Tensor, nu: int | str, per: str) -> torch.Tensor:
    """Where each of m activations is among its nu largest, in each tile or in the image: `(tiles, patches, m)` bool."""
    import torch

    tiles, patches, m = activations.shape
    flat = activations if per == "tile" else activations.reshape(1, tiles * patches, m)
    if nu == "all" or int(nu) >= flat.shape[1]:
        return torch.ones_like(activations, dtype=torch.bool)
    # The sort is stable: of equal patches the first counts, and in a square image a tile may repeat the whole image.
    top = flat.sort(dim=1, descending=True, stable=True).indices[:, : int(nu)]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, top, True).reshape(tiles, patches, m)
