"""Which tokens of a tower belong to which picture, and where each of them lies in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from elude_steer.errors import ModelError
from elude_steer.models.processor_probe import Area, survey

Show = Callable[[Any], Mapping[str, Any]]  # a picture to what the model would be called with
Shape = tuple[int, int]


@dataclass(frozen=True)
class PatchGrid:
    """Where the patches of one picture lie.

    Attributes:
        boxes: `(tiles, patches, 4)` left, top, right, bottom as fractions of the picture; patches over the padding
            of a tile reach outside 0 to 1. Tiles stand in the order of the tower, patches row by row.
        shape: rows and columns of patches in a tile.
    """

    boxes: np.ndarray
    shape: Shape

    @property
    def tiles(self) -> int:
        """How many tiles the picture is cut into."""
        return len(self.boxes)

    @classmethod
    def of(cls, areas: Sequence[Area], tile: Shape, patch: Shape) -> PatchGrid:
        """The grid of tiles of some height and width that show these areas."""
        shape = tile[0] // patch[0], tile[1] // patch[1]  # a remainder at the right and lower edge is never seen
        down, across = (np.arange(n + 1) * p / side for n, p, side in zip(shape, patch, tile, strict=True))
        return cls(np.stack([_patch_boxes(area, across, down) for area in areas]), shape)


@dataclass(frozen=True, eq=False)
class Layout:
    """How a model is given pictures, and how its tower sees them.

    Attributes:
        patch: height and width of a patch in pixels.
        show: a picture to what the model would be called with.
        shape: rows and columns of patches in a tile; None where it is another one for every picture.
        before: tokens of a tile that stand before its patches (CLS).
    """

    patch: Shape
    show: Show
    shape: Shape | None = None
    before: int = 0
    _known: dict[tuple[int, int], PatchGrid] = field(default_factory=dict)

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Where the patches of a picture of this `(width, height)` lie, tile by tile."""
        if size not in self._known:
            areas, tile = survey(self.tiles, size)
            self._known[size] = PatchGrid.of(areas, tile, self.patch)
        return self._known[size]

    def tiles(self, picture: Any) -> np.ndarray:
        """What a model is given of a picture, `(tiles, 3, height, width)`."""
        raise NotImplementedError

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """How many rows the tower is given for each picture: tiles, or packed patches."""
        raise NotImplementedError

    def shapes(self, inputs: Mapping[str, Any], images: int) -> list[Shape | None]:
        """Rows and columns of a tile of each picture."""
        return [self.shape] * images

    def split(self, q: torch.Tensor, inputs: Mapping[str, Any], images: int) -> list[torch.Tensor]:
        """What a layer of the tower saw, a `(tiles, tokens, …)` tensor a picture, its patches row by row."""
        counts = self.counts(inputs, images)
        if sum(counts) != len(q) or (self.shape and q.shape[1] != math.prod(self.shape) + self.before):
            raise ModelError(
                f"the layer saw {' x '.join(map(str, q.shape[:-1]))} tokens for {sum(counts)} tiles of {self.shape} "
                "patches; which of them is which is not understood."
            )
        return list(q.split(counts))

    def join(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """The other way round: tensors of pictures as the tower has them, one after the other."""
        return torch.cat(list(parts))

    def moved(self, inputs: Mapping[str, Any], picked: Sequence[np.ndarray]) -> torch.Tensor:
        """The inputs' pixels, other ones in the picked patches, `(tiles, patches)` bool a picture."""
        raise NotImplementedError

    def others(self) -> Sequence[Layout]:
        """The same with other orders of patches that towers of this kind may have."""
        return [self]


@dataclass(frozen=True, eq=False)
class Canvases(Layout):
    """A picture as a whole, then fitted into a canvas of tiles; the config lists the canvases."""

    pinpoints: Sequence[Sequence[int]] = ()
    side: int = 0

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Where the patches of a picture of this `(width, height)` lie, tile by tile."""
        areas = [(0.0, 0.0, 1.0, 1.0), *_tile_areas(size, self.pinpoints, self.side)]
        return PatchGrid.of(areas, (self.side, self.side), self.patch)

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """How many tiles each picture has."""
        sizes = [tuple(size) for size in inputs["image_sizes"].tolist()]
        return [1 + math.prod(_tile_rows_columns((w, h), self.pinpoints, self.side)) for h, w in sizes]


@dataclass(frozen=True, eq=False)
class Tiles(Layout):
    """Tiles of one size: a single one a picture, or as many as the processor makes of it."""

    image_token: int | None = None

    def tiles(self, picture: Any) -> np.ndarray:
        """What a model is given of a picture, `(tiles, 3, height, width)`."""
        pixels = _array(self.show(picture))
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
        shape = pixels.shape[-2] // self.patch[0], pixels.shape[-1] // self.patch[1]
        if self.shape is not None and shape != self.shape:
            raise ModelError(f"the processor makes tiles of {shape} and of {self.shape} patches; one size is wanted.")
        return pixels

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """How many tiles each picture has."""
        pixels = inputs["pixel_values"]
        if pixels.dim() == 5:  # a row a picture; tiles that are all zero fill it up and are dropped by the model
            return [int(n) for n in (pixels != 0).flatten(2).any(-1).sum(1)]
        if len(pixels) == images:
            return [1] * images
        # All tiles one after the other: each is worth the same number of words in its prompt.
        words = (inputs["input_ids"] == self.image_token).sum(1) * len(pixels)
        total = int(words.sum()) // len(pixels)
        if len(words) != images or not total or (words % total).any():
            raise ModelError(f"which of {len(pixels)} tiles belong to which of {images} pictures is not understood.")
        return [int(n) for n in words // total]

    def moved(self, inputs: Mapping[str, Any], picked: Sequence[np.ndarray]) -> torch.Tensor:
        """The inputs' pixels, other ones in the picked patches, `(tiles, patches)` bool a picture."""
        pixels = inputs["pixel_values"].clone()
        flat = pixels.view(-1, *pixels.shape[-3:])
        real = (flat != 0).flatten(1).any(-1) if pixels.dim() == 5 else torch.ones(len(flat), dtype=torch.bool)
        masks = np.concatenate(picked).reshape(-1, *(self.shape or ()))
        masks = masks.repeat(self.patch[0], 1).repeat(self.patch[1], 2)  # (tiles, height, width)
        high, wide = masks.shape[1:]
        flat[real.to(flat.device), :, :high, :wide] += torch.from_numpy(masks)[:, None].to(flat)
        return pixels


@dataclass(frozen=True, eq=False)
class Packed(Layout):
    """The patches of all pictures one after the other, in squares that are merged later, maybe in windows of those.

    Attributes:
        merge: side of a square, in patches; the processor's order.
        window: side of a window, in patches; the tower's order. 0 if it has none.
        depth: how often a picture is repeated in time.
    """

    merge: int = 1
    window: int = 0
    depth: int = 1

    def tiles(self, picture: Any) -> np.ndarray:
        """What a model is given of a picture, put together, `(1, 3, height, width)`."""
        inputs = self.show(picture)
        ((rows, columns),) = self._shapes(inputs)
        patches = _array(inputs).reshape(rows * columns, 3, self.depth, *self.patch)[:, :, 0]
        whole = np.empty_like(patches)
        whole[_order(rows, columns, self.merge)] = patches
        whole = whole.reshape(rows, columns, 3, *self.patch).transpose(2, 0, 3, 1, 4)
        return whole.reshape(1, 3, rows * self.patch[0], columns * self.patch[1])

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """How many patches each picture has."""
        return [math.prod(shape) for shape in self._shapes(inputs)]

    def shapes(self, inputs: Mapping[str, Any], images: int) -> list[Shape | None]:
        """Rows and columns of patches of each picture."""
        return list(self._shapes(inputs))

    def split(self, q: torch.Tensor, inputs: Mapping[str, Any], images: int) -> list[torch.Tensor]:
        """What a layer of the tower saw, a `(1, patches, …)` tensor a picture, row by row."""
        flat = q.flatten(0, -2) if q.dim() > 2 else q
        shapes = self._shapes(inputs)
        if len(shapes) != images or sum(self.counts(inputs, images)) != len(flat):
            raise ModelError(
                f"the layer saw {len(flat)} tokens for pictures of {shapes} patches; which is which is unknown."
            )
        parts = flat.split(self.counts(inputs, images))
        orders = [torch.from_numpy(np.argsort(self._seen(*shape))) for shape in shapes]
        return [part[order.to(part.device)][None] for part, order in zip(parts, orders, strict=True)]

    def join(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """The other way round: `(patches of all pictures, …)` in the order of the tower."""
        orders = [torch.from_numpy(self._seen(*shape)) for shape in self._shapes(inputs)]
        return torch.cat([part[0][order.to(part.device)] for part, order in zip(parts, orders, strict=True)])

    def moved(self, inputs: Mapping[str, Any], picked: Sequence[np.ndarray]) -> torch.Tensor:
        """The inputs' pixels, other ones in the picked patches, `(1, patches)` bool a picture."""
        shapes = self._shapes(inputs)
        rows = [own[0][_order(*shape, self.merge)] for own, shape in zip(picked, shapes, strict=True)]
        pixels: torch.Tensor = inputs["pixel_values"]
        return pixels + torch.from_numpy(np.concatenate(rows))[:, None].to(pixels)

    def others(self) -> Sequence[Layout]:
        """Without windows, and with them where the config has some."""
        return [replace(self, window=0), self] if self.window else [self]

    def _shapes(self, inputs: Mapping[str, Any]) -> list[Shape]:
        found = [tuple(int(n) for n in row) for row in inputs["image_grid_thw"].tolist()]
        if any(frames != 1 for frames, _, _ in found):
            raise ModelError("pictures of several frames are not understood; give single pictures.")
        return [(rows, columns) for _, rows, columns in found]

    def _seen(self, rows: int, columns: int) -> np.ndarray:
        return _order(rows, columns, self.merge, self.window)


def layout_of(config: Any, show: Show) -> Layout:
    """The layout of a model, from what its config says and from what its processor makes of a picture."""
    from PIL import Image

    vision = config.vision_config
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    patch = _pair(vision.patch_size)
    if pinpoints is not None:
        side = vision.image_size
        return Canvases(patch, show, (side // patch[0], side // patch[1]), pinpoints=pinpoints, side=side)
    inputs = show(Image.new("RGB", (64, 48), (90, 120, 150)))
    pixels = inputs["pixel_values"]
    if pixels.dim() == 2 and "image_grid_thw" in inputs:
        merge, depth = getattr(vision, "spatial_merge_size", 1), getattr(vision, "temporal_patch_size", 1)
        if pixels.shape[1] == 3 * depth * math.prod(patch):
            window = (getattr(vision, "window_size", None) or 0) // patch[0] // merge * merge
            return Packed(patch, show, merge=merge, window=window, depth=depth)
    if pixels.dim() in (4, 5) and pixels.shape[-3] == 3:
        token = getattr(config, "image_token_id", None)
        token = getattr(config, "image_token_index", None) if token is None else token
        shape = pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1]
        return Tiles(patch, show, shape, image_token=token)
    raise ModelError(
        f"{getattr(config, 'model_type', 'this model')} is given pixels of shape {tuple(pixels.shape)}, and how they "
        "make patches is not understood."
    )


def confirmed(
    layout: Layout, inputs: Mapping[str, Any], images: int, seen: Callable[[torch.Tensor], torch.Tensor]
) -> Layout:
    """The layout that holds when it is tried: other pixels in some patches change those patches' tokens and no others.

    Args:
        layout: what seems to be.
        inputs: of a few pictures of different shapes.
        images: their number.
        seen: pixels to the tokens that the first block of the tower is given, with the rest of `inputs`.
    """
    start, rng = seen(inputs["pixel_values"]), np.random.default_rng(0)
    shapes = [math.prod(shape or (0,)) for shape in layout.shapes(inputs, images)]
    before = start.shape[1] - shapes[0] if layout.shape else 0
    tiles = layout.counts(inputs, images) if layout.shape else [1] * images
    trials = []
    for _ in range(2):
        picked = [rng.random((n, patches)) < 0.5 for n, patches in zip(tiles, shapes, strict=True)]
        trials.append((picked, (seen(layout.moved(inputs, picked)) != start).any(-1, keepdim=True)))
    tried = [replace(one, before=before) for one in layout.others() if before >= 0]
    fitting = [one for one in tried if all(_agree(one.split(got, inputs, images), own, before) for own, got in trials)]
    if len(fitting) != 1:
        how = "takes patches in an order" if fitting else "mixes or reorders patches before its first block in a way"
        raise ModelError(f"the tower {how} that is not understood; the README lists the models that are.")
    return fitting[0]


def _agree(got: Sequence[torch.Tensor], picked: Sequence[np.ndarray], before: int) -> bool:
    expected = [np.pad(own, ((0, 0), (before, 0))) for own in picked]
    return all(np.array_equal(a[..., 0].cpu().numpy(), b) for a, b in zip(got, expected, strict=True))


def _order(rows: int, columns: int, merge: int, window: int = 0) -> np.ndarray:
    """The patches, counted row by row, in the order of squares, and those in the order of windows."""
    r, c = (axis.ravel() for axis in np.indices((rows, columns)))
    keys = [c, r, c // merge, r // merge]
    keys += [c // window, r // window] if window else []
    return np.lexsort(keys)


def _array(inputs: Mapping[str, Any]) -> np.ndarray:
    found: np.ndarray = inputs["pixel_values"].float().cpu().numpy()
    return found


def _pair(value: int | Sequence[int]) -> Shape:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _tile_rows_columns(size: tuple[int, int], pinpoints: Any, side: int) -> Shape:
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution((size[1], size[0]), pinpoints)
    return height // side, width // side


def _tile_areas(size: tuple[int, int], pinpoints: Any, side: int) -> list[Area]:
    """What part of the picture each grid tile shows: the picture is fitted into the canvas and centred on it."""
    rows, columns = _tile_rows_columns(size, pinpoints, side)
    width, height = size
    canvas_w, canvas_h = columns * side, rows * side
    if canvas_w / width < canvas_h / height:
        new_w, new_h = canvas_w, min(math.ceil(height * (canvas_w / width)), canvas_h)  # rounded as transformers does
    else:
        new_w, new_h = min(math.ceil(width * (canvas_h / height)), canvas_w), canvas_h
    left, top = (canvas_w - new_w) // 2, (canvas_h - new_h) // 2
    return [
        (
            (c * side - left) / new_w,
            (r * side - top) / new_h,
            (c * side + side - left) / new_w,
            (r * side + side - top) / new_h,
        )
        for r in range(rows)
        for c in range(columns)
    ]


def _patch_boxes(area: Area, across: np.ndarray, down: np.ndarray) -> np.ndarray:
    x = area[0] + across * (area[2] - area[0])
    y = area[1] + down * (area[3] - area[1])
    top, left = np.meshgrid(y[:-1], x[:-1], indexing="ij")
    bottom, right = np.meshgrid(y[1:], x[1:], indexing="ij")
    return np.stack([left, top, right, bottom], axis=-1).reshape(-1, 4)  # (patches, 4)
