"""What the demo holds for one visitor: the image, the marked region, and the requested edit."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from elude_steer.demo import html_parts
from elude_steer.errors import ImageError, SpecError
from elude_steer.models.images import MAX_PIXELS, open_image

DISPLAY_SIDE = 480  # pixels of the longer side of an image in the page
_MAX_MARK_LENGTH = 2_000_000  # characters; a mark that the page sends is far shorter
_MAX_WORD_LENGTH, _MAX_PROMPT_LENGTH = 100, 1000  # characters
_MAX_SETTINGS = 30
MAX_WORDS = 8  # concepts to remove, and as many to add


@dataclass(frozen=True)
class ImageFile:
    """A visitor's image: the name and the bytes of its file."""

    name: str
    data: bytes

    @classmethod
    def from_path(cls, path: str | Path, *, max_pixels: int = MAX_PIXELS) -> ImageFile:
        """Read a file; raise if it is no image or has more than `max_pixels` pixels."""
        try:
            image = cls(Path(path).name, Path(path).read_bytes())
        except OSError as error:
            raise ImageError(f"'{Path(path).name}' cannot be read: {error.strerror or error}.") from error
        image.open(max_pixels)
        return image

    def open(self, max_pixels: int = MAX_PIXELS) -> Any:
        """Decode the image; errors name the file without its folder."""
        try:
            return open_image(self.data, max_pixels=max_pixels)
        except ImageError as error:
            raise ImageError(str(error).replace("the given bytes", f"'{Path(self.name).name}'")) from error


@dataclass(frozen=True)
class EditRequest:
    """Everything in the page that determines a caption.

    Attributes:
        image: the image to caption.
        mark: the marked region as a PNG data URI; empty or None if nothing is marked.
        minus: concepts to remove.
        plus: concepts to add.
        prompt: the question to the model; empty for the default one.
        settings: the settings that differ from the atlas's own.
        box: instead of a mark, a region in pixels: left, top, right, bottom.
    """

    image: ImageFile | None
    mark: str | None
    minus: tuple[str, ...]
    plus: tuple[str, ...]
    prompt: str
    settings: Mapping[str, Any]
    box: tuple[float, ...] = ()

    def validate(self) -> None:
        """Raise if no concept is named, if there are too many, or if anything is too long."""
        if len(self.settings) > _MAX_SETTINGS:
            raise SpecError(f"at most {_MAX_SETTINGS} settings can be given.")
        if not self.minus and not self.plus:
            raise SpecError("name a concept to remove or to add: pick one from the list, or type it.")
        if max(len(self.minus), len(self.plus)) > MAX_WORDS:
            raise SpecError(f"at most {MAX_WORDS} concepts can be removed, and {MAX_WORDS} added, at a time here.")
        for word in (*self.minus, *self.plus, *map(str, self.settings)):
            check_length(word)
        if any(len(value) > _MAX_WORD_LENGTH for value in self.settings.values() if isinstance(value, str)):
            raise SpecError(f"the value of a setting may have at most {_MAX_WORD_LENGTH} characters.")
        if len(self.prompt) > _MAX_PROMPT_LENGTH:
            raise SpecError(f"the question may have at most {_MAX_PROMPT_LENGTH:,} characters here.")

    def region_and_settings(self) -> tuple[Any, dict[str, Any]]:
        """The marked region as a mask, or the box, or None; and the settings. A region implies mode place."""
        region = self.box or decode_mark(self.mark)
        return region, {**self.settings, **({} if region is None else {"mode": "place"})}


@dataclass(frozen=True)
class ImageState:
    """A visitor's image and what the page shows about it.

    Attributes:
        image: the image file.
        view: the value of the image viewer, see `image_viewer.js`.
        edit_buttons: HTML of the edits in an example's recipe.
        sub_units: HTML of the sub-units that the last edit changed or read.
        export: HTML of the last edit as a recipe and a Python call.
        loaded_fields: the question and the settings that a recipe filled in; they are reset with the next image.
    """

    image: ImageFile | None = None
    view: Mapping[str, Any] = field(default_factory=dict)
    edit_buttons: str = ""
    sub_units: str = html_parts.table("Sub-units", (), [])
    export: str = html_parts.table("Your edit as a recipe and as Python", (), [])
    loaded_fields: tuple[Any, ...] = ()


def check_length(word: str) -> None:
    """Raise if a text is too long to name a concept, or if it is no text: clients may send anything."""
    if not isinstance(word, str):
        raise SpecError(f"{str(word)[:40]} is no word; name concepts as texts.")
    if "\0" in word:
        raise SpecError("a word has a character that no text can hold (NUL); type it again.")
    if len(word) > _MAX_WORD_LENGTH:
        raise SpecError(f"'{word[:20]}…' has {len(word):,} characters; a concept may have at most {_MAX_WORD_LENGTH}.")


def decode_mark(mark: str | None) -> np.ndarray | None:
    """The region marked with the brush as a boolean mask over the image; None if nothing is marked."""
    if not mark:
        return None
    try:
        if not isinstance(mark, str) or len(mark) > _MAX_MARK_LENGTH:
            raise ValueError("too long")
        data = base64.b64decode(mark.partition(",")[2], validate=True)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if max(image.size) > 4 * DISPLAY_SIDE:
                raise ValueError("too large")
            mask = np.asarray(image.convert("L")) > 127
    except Exception as error:  # Pillow raises errors of many types for what is no complete PNG
        raise ImageError("the marked region did not arrive complete; mark it again.") from error
    return mask if mask.any() else None
