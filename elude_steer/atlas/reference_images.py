"""Pictures of what a sub-unit, or a whole unit, fires for: its strongest instances with the patch marked."""

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
    """The reference pictures of an atlas: its thumbnails, or the probing images themselves where they are at hand."""

    atlas: Atlas
    vlm: Vlm

    def for_sub_unit(self, sub_unit: int, count: int = 8, side: int = 120) -> list[Image.Image]:
        """The pictures where a sub-unit fires most, strongest first; none where they are nowhere to be found."""
        return self._strip(self.atlas.references, sub_unit, count, side)

    def for_unit(self, unit: int, count: int = 8, side: int = 120) -> list[Image.Image]:
        """The same for a whole unit, as it was before the split."""
        return self._strip(self.atlas.unit_references, unit, count, side)

    def _strip(self, references: References, row: int, count: int, side: int) -> list[Image.Image]:
        found = []
        columns = (references.images[row], references.tiles[row], references.tokens[row])
        for image, tile, token in zip(*(column[:count].tolist() for column in columns), strict=True):
            read = self._picture(image)
            if read is not None:
                picture, size = read
                found.append(self._draw_frame(picture, size, tile, token, side))
        return found

    def _picture(self, image: int) -> tuple[Image.Image, tuple[int, int]] | None:
        """A reference picture, and the size of the one that the model saw."""
        small = self.atlas.folder / "thumbnails" / f"{image:06d}.jpg" if self.atlas.folder else None
        if small is not None and small.is_file():
            picture = open_image(small)
            return picture, picture.size  # the same shape, so the same tiles
        item = self._items.get(self.atlas.image_ids[image])
        if item is None:
            return None
        try:
            picture = item.read()[0].convert("RGB")
        except (OSError, EludeSteerError):
            return None
        return picture, picture.size

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

    def _draw_frame(self, picture: Image.Image, size: tuple[int, int], tile: int, token: int, side: int) -> Image.Image:
        shown = fit_within(picture, side)
        boxes, patch = self.vlm.grid(size).boxes, token - self.vlm.layout.before
        if tile < len(boxes) and 0 <= patch < boxes.shape[1]:
            left, top, right, bottom = boxes[tile, patch] * ([shown.width, shown.height] * 2)
            ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline=_FRAME, width=2)
        return shown
