"""Which tokens of a tower belong to which image, and which part of the image each of them shows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from elude_steer.errors import ModelError
from elude_steer.models.processor_probe import Area, locate_tiles

ProcessImage = Callable[[Any], Mapping[str, Any]]  # an image to the inputs of the model
Shape = tuple[int, int]
_GRIDS = 64  # sizes of images whose grids are kept
_CHANGING = threading.Lock()


@dataclass(frozen=True)
class PatchGrid:
    """The positions of the patches of one image.

    Attributes:
        boxes: `(tiles, patches, 4)` left, top, right, bottom as fractions of the image; patches on the padding of a
            tile reach outside 0 to 1. Tiles are in the order of the tower, patches row by row.
        shape: rows and columns of patches in a tile.
    """

    boxes: np.ndarray
    shape: Shape

    @property
    def tiles(self) -> int:
        """The number of tiles that the image is cut into."""
        return len(self.boxes)

    @classmethod
    def from_areas(cls, areas: Sequence[Area], tile: Shape, patch: Shape) -> PatchGrid:
        """Create the grid of tiles that show these areas; `tile` and `patch` are height and width in pixels."""
        shape = tile[0] // patch[0], tile[1] // patch[1]  # the tower ignores a remainder at the right and lower edge
        down, across = (np.arange(n + 1) * p / side for n, p, side in zip(shape, patch, tile, strict=True))
        return cls(np.stack([_patch_boxes(area, across, down) for area in areas]), shape)


@dataclass(frozen=True, eq=False)
class Layout:
    """How the processor of a model cuts images into patches, and in which order the tower receives them.

    Attributes:
        patch: height and width of a patch in pixels.
        process: turns an image into the inputs of the model.
        shape: rows and columns of patches in a tile; None if they differ between images.
        before: number of tokens before the patches of a tile (CLS).
    """

    patch: Shape
    process: ProcessImage
    shape: Shape | None = None
    before: int = 0
    _grids: dict[tuple[int, int], PatchGrid] = field(default_factory=dict)

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Return the positions of the patches of an image of this `(width, height)`, tile by tile."""
        grid = self._grids.get(size)
        if grid is None:
            grid = self._make_grid(size)
            with _CHANGING:
                self._grids[size] = grid
                while len(self._grids) > _GRIDS:
                    del self._grids[next(iter(self._grids))]
        return grid

    def _make_grid(self, size: tuple[int, int]) -> PatchGrid:
        areas, tile = locate_tiles(self.tiles, size)
        return PatchGrid.from_areas(areas, tile, self.patch)

    def tiles(self, image: Any) -> np.ndarray:
        """Return the pixels that the model receives for an image, `(tiles, 3, height, width)`."""
        raise NotImplementedError

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """Return the number of rows of the tower's input for each image: tiles, or packed patches."""
        raise NotImplementedError

    def shapes(self, inputs: Mapping[str, Any], images: int) -> list[Shape | None]:
        """Return rows and columns of patches in a tile of each image."""
        return [self.shape] * images

    def split(self, q: torch.Tensor, inputs: Mapping[str, Any], images: int) -> list[torch.Tensor]:
        """Split tokens of a tower layer by image, one `(tiles, tokens, …)` tensor each, patches row by row."""
        counts = self.counts(inputs, images)
        if sum(counts) != len(q) or (self.shape and q.shape[1] != math.prod(self.shape) + self.before):
            raise ModelError(
                f"the layer has {' x '.join(map(str, q.shape[:-1]))} tokens for {sum(counts)} tiles of {self.shape} "
                "patches; which token belongs to which patch is unknown."
            )
        return list(q.split(counts))

    def join(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Undo `split`: join the tensors of images in the order of the tower."""
        return torch.cat(list(parts))

    def change_pixels(self, inputs: Mapping[str, Any], selected: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the inputs' pixels, changed in the selected patches, a `(tiles, patches)` bool mask per image."""
        raise NotImplementedError

    def variants(self) -> Sequence[Layout]:
        """Return this layout with each order of patches that towers of this kind may have."""
        return [self]


@dataclass(frozen=True, eq=False)
class Canvases(Layout):
    """A tile with the complete image, then the image on a canvas of tiles; the config lists the canvases."""

    pinpoints: Sequence[Sequence[int]] = ()
    side: int = 0

    def _make_grid(self, size: tuple[int, int]) -> PatchGrid:
        areas = [(0.0, 0.0, 1.0, 1.0), *_tile_areas(size, self.pinpoints, self.side)]
        return PatchGrid.from_areas(areas, (self.side, self.side), self.patch)

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """Return the number of tiles of each image."""
        sizes = [tuple(size) for size in inputs["image_sizes"].tolist()]
        # Of a prompt with several images, LLaVA-OneVision sees only the first tile of each.
        prompts = [int(n) for n in inputs["batch_num_images"]] if "batch_num_images" in inputs else [1] * len(sizes)
        alone = [n == 1 for n in prompts for _ in range(n)]
        return [
            1 + (math.prod(_tile_rows_columns((w, h), self.pinpoints, self.side)) if one else 0)
            for (h, w), one in zip(sizes, alone, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Tiles(Layout):
    """Tiles of one size: one per image, or as many as the processor makes."""

    image_token: int | None = None

    def tiles(self, image: Any) -> np.ndarray:
        """Return the pixels that the model receives for an image, `(tiles, 3, height, width)`."""
        pixels = _array(self.process(image))
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
        shape = pixels.shape[-2] // self.patch[0], pixels.shape[-1] // self.patch[1]
        if self.shape is not None and shape != self.shape:
            raise ModelError(
                f"the processor makes tiles of {shape} and of {self.shape} patches; they must have one size."
            )
        return pixels

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """Return the number of tiles of each image."""
        pixels = inputs["pixel_values"]
        if pixels.dim() == 5:  # a row per image, filled up with tiles of zeros, which the model drops
            return [int(n) for n in (pixels != 0).flatten(2).any(-1).sum(1)]
        if len(pixels) == images:
            return [1] * images
        # All tiles one after the other: each takes the same number of tokens in the prompt.
        tokens = (inputs["input_ids"] == self.image_token).sum(1) * len(pixels)
        total = int(tokens.sum()) // len(pixels)
        if len(tokens) != images or not total or (tokens % total).any():
            raise ModelError(f"which of {len(pixels)} tiles belong to which of {images} images is unknown.")
        return [int(n) for n in tokens // total]

    def change_pixels(self, inputs: Mapping[str, Any], selected: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the inputs' pixels, changed in the selected patches, a `(tiles, patches)` bool mask per image."""
        pixels = inputs["pixel_values"].clone()
        flat = pixels.view(-1, *pixels.shape[-3:])
        real = (flat != 0).flatten(1).any(-1) if pixels.dim() == 5 else torch.ones(len(flat), dtype=torch.bool)
        masks = np.concatenate(selected).reshape(-1, *(self.shape or ()))
        masks = masks.repeat(self.patch[0], 1).repeat(self.patch[1], 2)  # (tiles, height, width)
        height, width = masks.shape[1:]
        flat[real.to(flat.device), :, :height, :width] += torch.from_numpy(masks)[:, None].to(flat)
        return pixels


@dataclass(frozen=True, eq=False)
class Packed(Layout):
    """The patches of all images one after the other, in squares that are merged later, and perhaps in windows.

    Attributes:
        merge: side of a square in patches; the processor orders patches by squares.
        window: side of a window in patches; the tower orders patches by windows. 0 without windows.
        depth: how often an image is repeated in time.
    """

    merge: int = 1
    window: int = 0
    depth: int = 1

    def tiles(self, image: Any) -> np.ndarray:
        """Return the pixels that the model receives for an image, put together, `(1, 3, height, width)`."""
        inputs = self.process(image)
        ((rows, columns),) = self._shapes(inputs)
        patches = _array(inputs).reshape(rows * columns, 3, self.depth, *self.patch)[:, :, 0]
        ordered = np.empty_like(patches)
        ordered[_order(rows, columns, self.merge)] = patches
        ordered = ordered.reshape(rows, columns, 3, *self.patch).transpose(2, 0, 3, 1, 4)
        return ordered.reshape(1, 3, rows * self.patch[0], columns * self.patch[1])

    def counts(self, inputs: Mapping[str, Any], images: int) -> list[int]:
        """Return the number of patches of each image."""
        return [math.prod(shape) for shape in self._shapes(inputs)]

    def shapes(self, inputs: Mapping[str, Any], images: int) -> list[Shape | None]:
        """Return rows and columns of patches of each image."""
        return list(self._shapes(inputs))

    def split(self, q: torch.Tensor, inputs: Mapping[str, Any], images: int) -> list[torch.Tensor]:
        """Split tokens of a tower layer by image, one `(1, patches, …)` tensor each, row by row."""
        flat = q.flatten(0, -2) if q.dim() > 2 else q
        shapes = self._shapes(inputs)
        if len(shapes) != images or sum(self.counts(inputs, images)) != len(flat):
            raise ModelError(
                f"the layer has {len(flat)} tokens for images of {shapes} patches; which is which is unknown."
            )
        parts = flat.split(self.counts(inputs, images))
        orders = [torch.from_numpy(np.argsort(self._tower_order(*shape))) for shape in shapes]
        return [part[order.to(part.device)][None] for part, order in zip(parts, orders, strict=True)]

    def join(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Undo `split`: return `(patches of all images, …)` in the order of the tower."""
        orders = [torch.from_numpy(self._tower_order(*shape)) for shape in self._shapes(inputs)]
        return torch.cat([part[0][order.to(part.device)] for part, order in zip(parts, orders, strict=True)])

    def change_pixels(self, inputs: Mapping[str, Any], selected: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the inputs' pixels, changed in the selected patches, a `(1, patches)` bool mask per image."""
        shapes = self._shapes(inputs)
        rows = [mask[0][_order(*shape, self.merge)] for mask, shape in zip(selected, shapes, strict=True)]
        pixels: torch.Tensor = inputs["pixel_values"]
        return pixels + torch.from_numpy(np.concatenate(rows))[:, None].to(pixels)

    def variants(self) -> Sequence[Layout]:
        """Return the layout without windows, and with them if the config has any."""
        return [replace(self, window=0), self] if self.window else [self]

    def _shapes(self, inputs: Mapping[str, Any]) -> list[Shape]:
        found = [tuple(int(n) for n in row) for row in inputs["image_grid_thw"].tolist()]
        if any(frames != 1 for frames, _, _ in found):
            raise ModelError("images of several frames are not supported; give single images.")
        return [(rows, columns) for _, rows, columns in found]

    def _tower_order(self, rows: int, columns: int) -> np.ndarray:
        return _order(rows, columns, self.merge, self.window)


def find_layout(config: Any, process: ProcessImage) -> Layout:
    """Find the layout of a model from its config and from the output of its processor."""
    from PIL import Image

    vision = config.vision_config
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    patch = _pair(vision.patch_size)
    if pinpoints is not None:
        side = vision.image_size
        return Canvases(patch, process, (side // patch[0], side // patch[1]), pinpoints=pinpoints, side=side)
    inputs = process(Image.new("RGB", (64, 48), (90, 120, 150)))
    pixels = inputs["pixel_values"]
    if pixels.dim() == 2 and "image_grid_thw" in inputs:
        merge, depth = getattr(vision, "spatial_merge_size", 1), getattr(vision, "temporal_patch_size", 1)
        if pixels.shape[1] == 3 * depth * math.prod(patch):
            window = (getattr(vision, "window_size", None) or 0) // patch[0] // merge * merge
            return Packed(patch, process, merge=merge, window=window, depth=depth)
    if pixels.dim() in (4, 5) and pixels.shape[-3] == 3:
        token = getattr(config, "image_token_id", None)
        token = getattr(config, "image_token_index", None) if token is None else token
        shape = pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1]
        return Tiles(patch, process, shape, image_token=token)
    raise ModelError(
        f"{getattr(config, 'model_type', 'this model')} takes pixels of shape {tuple(pixels.shape)}; how they become "
        "patches is unknown."
    )


def confirm_layout(
    layout: Layout, inputs: Mapping[str, Any], images: int, embed: Callable[[torch.Tensor], torch.Tensor]
) -> Layout:
    """Test a layout and return the variant that is right: changed pixels change the tokens of their patches only.

    Args:
        layout: the layout to test.
        inputs: the model's inputs for a few images of different shapes.
        images: number of images.
        embed: turns pixels, with the rest of `inputs`, into the tokens that the tower's first block receives.
    """
    start, rng = embed(inputs["pixel_values"]), np.random.default_rng(0)
    shapes = [math.prod(shape or (0,)) for shape in layout.shapes(inputs, images)]
    before = start.shape[1] - shapes[0] if layout.shape else 0
    tiles = layout.counts(inputs, images) if layout.shape else [1] * images
    trials = []
    for _ in range(2):
        selected = [rng.random((n, patches)) < 0.5 for n, patches in zip(tiles, shapes, strict=True)]
        changed = (embed(layout.change_pixels(inputs, selected)) != start).any(-1, keepdim=True)
        trials.append((selected, changed))
    matching = []
    for variant in layout.variants() if before >= 0 else []:
        variant = replace(variant, before=before)
        if all(_agree(variant.split(changed, inputs, images), selected, before) for selected, changed in trials):
            matching.append(variant)
    if len(matching) != 1:
        problem = "orders patches" if matching else "mixes or reorders patches before its first block"
        raise ModelError(f"the tower {problem} in a way that is not supported; see the guide 'Use your own model'.")
    return matching[0]


def _agree(changed: Sequence[torch.Tensor], selected: Sequence[np.ndarray], before: int) -> bool:
    expected = [np.pad(mask, ((0, 0), (before, 0))) for mask in selected]
    return all(np.array_equal(a[..., 0].cpu().numpy(), b) for a, b in zip(changed, expected, strict=True))


def _order(rows: int, columns: int, merge: int, window: int = 0) -> np.ndarray:
    """Return the patches, numbered row by row, ordered by squares, and the squares ordered by windows."""
    r, c = (axis.ravel() for axis in np.indices((rows, columns)))
    keys = [c, r, c // merge, r // merge]
    keys += [c // window, r // window] if window else []
    return np.lexsort(keys)


def _array(inputs: Mapping[str, Any]) -> np.ndarray:
    pixels: np.ndarray = inputs["pixel_values"].float().cpu().numpy()
    return pixels


def _pair(value: int | Sequence[int]) -> Shape:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _tile_rows_columns(size: tuple[int, int], pinpoints: Any, side: int) -> Shape:
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution((size[1], size[0]), pinpoints)
    return height // side, width // side


def _tile_areas(size: tuple[int, int], pinpoints: Any, side: int) -> list[Area]:
    """Return the part of the image that each tile of the canvas shows; the image is scaled to fit and centred."""
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
