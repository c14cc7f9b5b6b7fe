"""Images where a sub-unit or a unit is strongest, with a frame around the patch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from PIL import Image, ImageDraw

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.errors import EludeSteerError
from elude_steer.models.images import Item, image_set, open_image
from elude_steer.models.vlm import Vlm
from elude_steer.utils.plotting import fit_within

_FRAME = (255, 214, 64)


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """The reference images of an atlas: its thumbnails, or the probing images if they can be found."""

    atlas: Atlas
    vlm: Vlm

    def for_sub_unit(self, sub_unit: int, count: int = 8, side: int = 120) -> list[Image.Image]:
        """The images where a sub-unit is strongest, strongest first; images that cannot be found are left out."""
        return self._draw(self.atlas.references, sub_unit, count, side)

    def for_unit(self, unit: int, count: int = 8, side: int = 120) -> list[Image.Image]:
        """The same for a unit before the split."""
        return self._draw(self.atlas.unit_references, unit, count, side)

    def _draw(self, references: References, row: int, count: int, side: int) -> list[Image.Image]:
        drawn = []
        columns = (references.images[row], references.tiles[row], references.tokens[row])
        for number, tile, token in zip(*(column[:count].tolist() for column in columns), strict=True):
            image = self._read_image(number)
            if image is not None:
                drawn.append(self._draw_frame(image, tile, token, side))
        return drawn

    def _read_image(self, number: int) -> Image.Image | None:
        """A reference image: its thumbnail, which has the same shape and so the same tiles, or the image itself."""
        thumbnail = self.atlas.folder / "thumbnails" / f"{number:06d}.jpg" if self.atlas.folder else None
        if thumbnail is not None and thumbnail.is_file():
            return open_image(thumbnail)
        item = self._items.get(self.atlas.image_ids[number])
        if item is None:
            return None
        try:
            return item.read()[0].convert("RGB")
        except (OSError, EludeSteerError):
            return None

    @cached_property
    def _items(self) -> Mapping[str, Item]:
        spec = self.atlas.about.get("spec", {}).get("images", {})
        if not spec.get("source"):
            return {}
        try:
            images = image_set(spec["source"], split=spec["split"], column=spec["column"], limit=spec["limit"])
            return {item.id: item for item in images.items()}
        except (OSError, EludeSteerError):
            return {}

    def _draw_frame(self, image: Image.Image, tile: int, token: int, side: int) -> Image.Image:
        shown = fit_within(image, side)
        boxes, patch = self.vlm.grid(image.size).boxes, token - self.vlm.layout.before
        if tile < len(boxes) and 0 <= patch < boxes.shape[1]:
            left, top, right, bottom = boxes[tile, patch] * ([shown.width, shown.height] * 2)
            ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline=_FRAME, width=2)
        return shown
