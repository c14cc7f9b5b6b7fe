"""Files in COCO's formats: which classes are in each image, what people wrote about it, and words for the classes."""

from __future__ import annotations

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.caption_reader import CaptionReader
from elude_steer.utils.files import read_bytes

_MAX_BYTES = 2**29  # of a file; the largest of COCO has 470 MB
LARGE = 0.01  # share of the image; captions seldom mention smaller objects
_INSTANCES, _CAPTIONS = "instances_val2017.json", "captions_val2017.json"
_SYNONYMS = Path(__file__).with_name("coco_synonyms.txt")

# Orange is more often a colour than a fruit: it counts only after an article, and before neither a noun nor a colour.
_ORANGE = (
    r"(?:(?<=\ban )|(?<=\bone )|(?<=\bthe ))orange(?=\W*$|\s*[.,;:!?]|\s+(?:and|or|on|in|next|with|beside|near|is|from)"
    r"\b(?!\s+(?:black|white|yellow|red|blue|green|brown|gr[ae]y|pink|purple|orange)\b))"
)


class AnnotatedImage(NamedTuple):
    """An image's file, its classes, and how many of them are large."""

    file: str
    objects: frozenset[str]
    large: int


@cache
def coco_reader() -> CaptionReader:
    """Reads captions for COCO's 80 classes."""
    return CaptionReader.from_file(_SYNONYMS, patterns={"orange": _ORANGE})


def read_instances(path: Path, reader: CaptionReader | None = None) -> tuple[list[AnnotatedImage], CaptionReader]:
    """The images of a file of instances with their classes, sorted by file, and what reads captions for the classes.

    Args:
        path: a file such as `instances_val2017.json`.
        reader: knows the classes; a category may have the name of a class or a synonym. By default it is COCO's if all
            categories are COCO's, and else one that knows nothing but the names of the categories.
    """
    content = read_json_lists(path, ("images", "annotations", "categories"), _INSTANCES)
    try:
        names = {row["id"]: str(row["name"]).strip().lower() for row in content["categories"]}
        reader = reader or _find_reader(names.values())
        unknown = sorted(name for name in names.values() if not reader.concepts.get(name))
        if unknown:
            what = "none of COCO's 80 classes" if reader is coco_reader() else "not in the file of synonyms"
            raise SpecError(f"'{path}' has a category '{unknown[0][:60]}', which is {what}.")
        areas: defaultdict[Any, Counter[str]] = defaultdict(Counter)
        for row in content["annotations"]:
            areas[row["image_id"]][reader.concepts[names[row["category_id"]]]] += row["area"]
        images = []
        for row in content["images"]:
            by_class, min_area = areas[row["id"]], LARGE * row["width"] * row["height"]
            large = sum(area >= min_area for area in by_class.values())
            images.append(AnnotatedImage(plain_name(row["file_name"], path), frozenset(by_class), large))
    except (KeyError, TypeError, OverflowError) as error:
        problem = f"an entry is malformed ({repr(error)[:80]})"
        raise SpecError(f"'{path}' is no COCO instances file: {problem}; give one such as {_INSTANCES}.") from error
    return sorted(images), reader


def _find_reader(names: Iterable[str]) -> CaptionReader:
    if all(coco_reader().concepts.get(name) for name in names):
        return coco_reader()
    return CaptionReader("\n".join(f"{name}:" for name in names))


def existing_images(images: Sequence[AnnotatedImage], folder: Path, source: Path) -> list[AnnotatedImage]:
    """Those of the images of a file of instances that are in the folder; raises if none is, warns if some are not."""
    found = [image for image in images if (folder / image.file).is_file()]
    if images and not found:
        raise ImageError(
            f"none of the {len(images)} images of '{source.name}', such as '{min(images).file}', is in folder "
            f"'{folder}'; give the folder of the same year and split."
        )
    if len(found) < len(images):
        warnings.warn(
            f"{len(images) - len(found)} images of '{source.name}' are not in folder '{folder}' and were left out.",
            EludeSteerWarning,
            stacklevel=2,
        )
    return found


def read_captions(path: Path) -> dict[str, list[str]]:
    """The captions of each file that a file in the format of COCO's captions names."""
    content = read_json_lists(path, ("images", "annotations"), _CAPTIONS)
    try:
        names = {row["id"]: plain_name(row["file_name"], path) for row in content["images"]}
        captions: dict[str, list[str]] = {}
        for row in content["annotations"]:
            captions.setdefault(names[row["image_id"]], []).append(str(row["caption"]))
    except (KeyError, TypeError) as error:
        raise SpecError(f"'{path}' is no file of captions: an entry is malformed ({repr(error)[:80]}).") from error
    return captions


def read_json_lists(path: Path, keys: Sequence[str], example: str) -> dict[str, Any]:
    """Read a JSON file of COCO's formats, which must have a list under each of these keys.

    Args:
        path: the file.
        keys: the lists that it must have.
        example: the name of such a file, for the error.
    """
    expected = f"give one such as {example}"
    try:
        content = json.loads(read_bytes(path, _MAX_BYTES))
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror or error}; {expected}.") from error
    except ValueError as error:  # not JSON, or not even text
        raise SpecError(f"'{path}' is not JSON; {expected}.") from error
    except RecursionError as error:
        raise SpecError(f"'{path}' is nested too deeply; {expected}.") from error
    for key in keys:
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise SpecError(f"'{path}' has no list '{key}'; {expected}.")
    return dict(content)


def plain_name(name: Any, path: Path) -> str:
    """The name of an image in a file of annotations; raise if it leaves the folder of the images, or is no name."""
    text = name if isinstance(name, str) else ""
    parts = PurePath(text).parts
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(name)[:60])
    if not parts or not text.isprintable() or any(len(part.encode()) > 255 for part in parts) or len(text) > 1000:
        raise SpecError(f"'{path}' has an image '{shown}', which is not the name of a file; give names that are.")
    if PurePath(text).is_absolute() or ".." in parts:
        raise SpecError(f"'{path}' names the image '{shown}', which lies outside its folder; give names inside it.")
    return text
