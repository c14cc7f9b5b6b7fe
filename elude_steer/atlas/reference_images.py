"""Images where a sub-unit or a unit is strongest, with a frame around the patch, and where they come from.

A manifest names the images that an atlas was built from, and anybody can write a manifest. So the files that it names
are opened only for an atlas that was built on this machine, of which `record_build` keeps a note, or if the user names
them. Otherwise nothing is shown but the thumbnails inside the atlas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from PIL import Image, ImageDraw

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.errors import EludeSteerError, ImageError, SpecError, StorageError
from elude_steer.models.images import Item, image_set, open_image
from elude_steer.models.vlm import Vlm
from elude_steer.utils.files import home, write_file
from elude_steer.utils.plotting import fit_within

_FRAME = (255, 214, 64)
_DRAWN = "toyland:"  # scenes that this package draws itself
_JPEG = b"\xff\xd8\xff"
_MAX_PIXELS = 16_000_000  # of a thumbnail
_MAX_IMAGES = 1_000_000  # that are looked through


def record_build(atlas: Atlas) -> None:
    """Remember that an atlas was built on this machine, from the images that its spec names."""
    text = json.dumps({"name": atlas.name, "images": _image_spec(atlas)}, indent=2)
    with suppress(StorageError):  # without the note, the images have to be named again
        write_file(_record_path(atlas), lambda file: file.write(text.encode()), clean=True)


def find_image_source(atlas: Atlas) -> str | None:
    """The images that the spec of an atlas names; None if it names none, or was not built on this machine.

    Scenes that this package draws itself count for every atlas.
    """
    source: str | None = _image_spec(atlas).get("source")
    if source is None or source.startswith(_DRAWN) or _record_path(atlas).is_file():
        return source
    return None


def check_source(atlas: Atlas) -> str:
    """The images that the spec of an atlas names; raise with the cure if there are none that may be opened."""
    source = find_image_source(atlas)
    if source is not None:
        return source
    named = _image_spec(atlas).get("source")
    if named is None:
        raise SpecError("the atlas does not say which images it was built from; give some: --images FOLDER.")
    raise SpecError(
        f"atlas '{atlas.name}' was not built on this machine, so the images that it names are not opened; if you want "
        f"them, say so: --images {quote(str(named))}."
    )


def _image_spec(atlas: Atlas) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = atlas.about.get("spec", {}).get("images", {})
    return spec


def _record_path(atlas: Atlas) -> Path:
    """The note of a build. Its name covers the images, so that no other atlas can name others in its place."""
    digest = hashlib.sha256(atlas.fingerprint.encode())
    digest.update(json.dumps([_image_spec(atlas), atlas.image_ids], sort_keys=True).encode())
    return home() / "built" / f"{digest.hexdigest()}.json"


@dataclass(frozen=True, eq=False)
class ReferenceImages:
    """The reference images of an atlas: its thumbnails, or the probing images if they can be found.

    Attributes:
        atlas: the atlas.
        vlm: its model.
        source: the probing images, as the user names them; None for those of `find_image_source`.
    """

    atlas: Atlas
    vlm: Vlm
    source: Any = None

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
        thumbnail = self.atlas.thumbnail(number)
        if thumbnail is not None and thumbnail.startswith(_JPEG):
            with suppress(ImageError):
                return open_image(thumbnail, max_pixels=_MAX_PIXELS)
        item = self._items.get(self.atlas.image_ids[number])
        if item is None:
            return None
        try:
            return item.read()[0].convert("RGB")
        except (OSError, EludeSteerError):
            return None

    @cached_property
    def _items(self) -> Mapping[str, Item]:
        spec = _image_spec(self.atlas)
        source = find_image_source(self.atlas) if self.source is None else self.source
        if source is None:
            return {}
        wanted = set(self.atlas.image_ids)
        try:
            images = image_set(source, split=spec["split"], column=spec["column"], limit=spec["limit"])
            return {item.id: item for item in islice(images.items(), _MAX_IMAGES) if item.id in wanted}
        except (OSError, EludeSteerError):
            return {}

    def _draw_frame(self, image: Image.Image, tile: int, token: int, side: int) -> Image.Image:
        shown = fit_within(image, side)
        boxes, patch = self.vlm.grid(image.size).boxes, token - self.vlm.layout.before
        if tile < len(boxes) and 0 <= patch < boxes.shape[1]:
            left, top, right, bottom = boxes[tile, patch] * ([shown.width, shown.height] * 2)
            ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline=_FRAME, width=2)
        return shown
