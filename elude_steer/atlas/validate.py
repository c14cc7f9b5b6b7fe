"""Read the files of an atlas, and refuse what cannot be: the one place where bytes of a stranger become tensors.

The header of each file is checked before memory is taken for it: names, types and shapes, against the manifest and
against the size of the file. Then the values: numbers that point somewhere point to something, and every input
dimension of every unit has an owner. What is left to check is the layer itself; see `weights.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.manifest_rules import (
    CALIBRATION,
    FAMILIARITY,
    IMAGES,
    LABEL_NAMES,
    LABEL_SCORES,
    MEMBERSHIPS,
    READ,
    REFERENCES,
    is_plain,
    is_texts,
    read_bounded_json,
    thumbnail_number,
    unsound,
)
from elude_steer.errors import StorageError
from elude_steer.utils.files import read_tensors

Tensors = Mapping[str, torch.Tensor]

_MAX_HEADER = 2**16  # bytes; ours have less than 2000
_BYTES = {"U8": 1, "I32": 4, "I64": 8, "F16": 2, "F32": 4}
_WHOLE, _REAL = ("I32", "I64"), ("F32",)

# The tensors of each file: types, and shapes in named sizes. S sub-units of U units, I input dimensions in B bytes; the
# sizes that the manifest does not tell are those of the first tensor that has them.
_LAYOUTS: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    MEMBERSHIPS: {"units": (("I32",), "S"), "members": (("U8",), "SB"), "rho": (_REAL, "U"), "sizes": (("I32",), "S")},
    REFERENCES: {
        f"{kind}.{name}": (types, size + shape)
        for kind, size, keep in (("sub_units", "S", "k"), ("units", "U", "l"))
        for name, types, shape in (
            ("activation", _REAL, ""),
            ("values", _REAL, keep),
            ("images", ("I32",), keep),
            ("tiles", ("I32",), keep),
            ("tokens", ("I32",), keep),
        )
    },
    LABEL_SCORES: {"words": (_WHOLE, "Sk"), "scores": (_REAL, "Sk"), "groups": (_WHOLE, "S")},
    FAMILIARITY: {
        "mean": (_REAL, "I"),
        "deviation": (_REAL, "I"),
        "directions": (("F16",), "kI"),
        "limit": (_REAL, ""),
    },
    CALIBRATION: {
        "words": (_WHOLE, "W"),
        "weights": (("F16",), "WS"),
        "scale": (_REAL, "W"),
        "bias": (_REAL, "W"),
        "levels": (_REAL, "W2"),
        "directions": (("F16", "F32"), "WU"),
        "fit": (_REAL, ""),
        "peaks": (("I32",), ""),
    },
}
_ADDED = {"peaks"}  # tensors that older atlases lack


@dataclass(frozen=True, eq=False)
class Content:
    """What the files of an atlas hold.

    Attributes:
        tensors: the tensors of each safetensors file, by its name; files that the atlas does not have are absent.
        images: the ids of the images that references point to.
        labels: the content of `labels.json`; None if the atlas has no labels.
    """

    tensors: Mapping[str, dict[str, torch.Tensor]]
    images: tuple[str, ...]
    labels: Mapping[str, Any] | None


def read_content(folder: Path, about: Mapping[str, Any]) -> Content:
    """Read all files that the manifest lists; raise if any of them is not what an atlas can have.

    Args:
        folder: the atlas; its files have the hashes of the manifest.
        about: the manifest, as `read_manifest` returns it.
    """
    present = [name for name in READ if name in about["files"]]
    for name in present:
        if name in _LAYOUTS:
            _check(folder, name, _header_problems(folder / name, _LAYOUTS[name], about))
    tensors = {name: _read(folder, name) for name in present if name in _LAYOUTS}
    images = read_bounded_json(folder, IMAGES)
    labels = read_bounded_json(folder, LABEL_NAMES) if LABEL_NAMES in present else None

    _check(folder, MEMBERSHIPS, _membership_problems(tensors[MEMBERSHIPS], about))
    _check(folder, IMAGES, _image_problems(images, tensors[REFERENCES]))
    _check(folder, "thumbnails", _thumbnail_problems(about["files"], len(images)))
    _check(folder, REFERENCES, _reference_problems(tensors[REFERENCES], len(images)))
    words = None
    if labels is not None:
        scores = tensors[LABEL_SCORES]
        _check(folder, LABEL_NAMES, _name_problems(labels))
        words = len(labels["vocabulary"])
        _check(folder, LABEL_SCORES, _score_problems(scores, words))
        _check(folder, LABEL_NAMES, _label_problems(labels, scores["words"]))
    if FAMILIARITY in tensors:
        _check(folder, FAMILIARITY, _familiarity_problems(tensors[FAMILIARITY]))
    if CALIBRATION in tensors:
        _check(folder, CALIBRATION, _calibration_problems(tensors[CALIBRATION], words))
    return Content(tensors, tuple(images), labels)


def _check(folder: Path, name: str, problems: Iterator[str]) -> None:
    if (problem := next(problems, None)) is not None:
        raise unsound(folder, name, problem)


def _read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(folder / name)
    except StorageError as error:
        raise unsound(folder, name, "no safetensors file") from error


# Headers


def _header_problems(
    path: Path, layout: Mapping[str, tuple[tuple[str, ...], str]], about: Mapping[str, Any]
) -> Iterator[str]:
    """What is wrong with the tensors that a safetensors file announces; reads nothing but its header."""
    header, data = _read_header(path)
    if header is None:
        yield "its header is no header of safetensors"
        return
    header.pop("__metadata__", None)
    if missing := [name for name in layout if name not in header and name not in _ADDED]:
        yield f"it has no '{missing[0]}'"
    if unknown := [name for name in header if name not in layout]:
        yield f"it has {ascii(unknown[0])[:60]}, which no atlas has"
    sizes = {"S": about["sub_units"], "U": about["d_out"], "I": about["d_in"], "B": -(-about["d_in"] // 8), "2": 2}
    total = 0
    for name, (types, shape) in layout.items():
        if name not in header:
            continue
        entry = header[name]
        found, dtype = _shape(entry), entry.get("dtype") if isinstance(entry, dict) else None
        if found is None or dtype not in types:
            yield f"'{name}' must be a tensor of {' or '.join(types)}"
            return
        expected = [
            sizes.setdefault(size, found[place] if place < len(found) else 0) for place, size in enumerate(shape)
        ]
        if found != expected or 0 in found:
            yield f"'{name}' has shape {ascii(found)[:60]}, which does not fit the others: it must be {expected}"
            return
        total += math.prod(found) * _BYTES[dtype]
    if total != data:
        yield f"its tensors need {total:,} bytes, and it has {data:,}"


def _read_header(path: Path) -> tuple[dict[str, Any] | None, int]:
    """The header of a safetensors file, None if it has none, and the number of bytes behind it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data = path.stat().st_size - 8 - length
        if not 0 < length <= _MAX_HEADER or data < 0:
            return None, 0
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            return None, 0
    return (header if isinstance(header, dict) else None), data


def _shape(entry: Any) -> list[int] | None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        return None
    return shape


# Values


def _membership_problems(tensors: Tensors, about: Mapping[str, Any]) -> Iterator[str]:
    units, members = tensors["units"].numpy(), tensors["members"].numpy()
    first = np.flatnonzero(np.diff(units, prepend=-1))  # the first sub-unit of each unit, if they are in order
    if units[0] != 0 or len(first) != about["d_out"] or (units[first] != np.arange(about["d_out"])).any():
        yield f"'units' must name the units 0 to {about['d_out'] - 1} in ascending order, each at least once"
        return
    everything = np.full(members.shape[1], 255, np.uint8)
    everything[-1] = (255 << -about["d_in"] % 8) & 255  # the first dimension of a byte is its highest bit
    if (members[:, -1] & ~everything[-1]).any():
        yield f"'members' has bits behind the {about['d_in']} input dimensions"
    kind = np.uint64 if members.shape[1] % 8 == 0 else np.uint8  # eight bytes at a time, where rows have as many
    without = (np.bitwise_or.reduceat(members.view(kind), first, axis=0) != everything.view(kind)).any(1)
    if without.any():
        yield f"input dimensions of unit {int(without.argmax())} belong to none of its sub-units"
    if tensors["sizes"].min() < 0:
        yield "'sizes' has negative numbers"
    yield from _not_finite(tensors, "rho")


def _image_problems(images: Any, references: Tensors) -> Iterator[str]:
    if not is_texts(images):
        yield "it must be a list of ids, each of one line"
        return
    if len(set(images)) != len(images):
        yield "an id is there twice"
    if len(images) > (most := sum(references[f"{kind}.images"].numel() for kind in ("sub_units", "units"))):
        yield f"{len(images):,} images are more than the {most:,} references to them"


def _thumbnail_problems(files: Mapping[str, str], images: int) -> Iterator[str]:
    numbers = {name: number for name in files if (number := thumbnail_number(name)) is not None}
    for name, number in numbers.items():
        if number >= images or name != f"thumbnails/{number:06d}.jpg":
            yield f"there is no image for '{name}'"


def _reference_problems(tensors: Tensors, images: int) -> Iterator[str]:
    for kind in ("sub_units", "units"):
        yield from _not_finite(tensors, f"{kind}.activation", f"{kind}.values")
        yield from _out_of_range(tensors, f"{kind}.images", images)
        yield from _out_of_range(tensors, f"{kind}.tiles", 2**31)
        yield from _out_of_range(tensors, f"{kind}.tokens", 2**31)


def _name_problems(labels: Any) -> Iterator[str]:
    if not isinstance(labels, dict) or set(labels) != {"about", "vocabulary", "labels"}:
        yield "it must have 'about', 'vocabulary' and 'labels'"
        return
    if not is_texts(labels["vocabulary"]) or not all(word.strip() for word in labels["vocabulary"]):
        yield "'vocabulary' must be a list of words"
    elif not 0 < len(labels["vocabulary"]) == len(set(labels["vocabulary"])):
        yield "'vocabulary' must have at least one word, and each word once"
    if not is_plain(labels["about"]):
        yield "'about' must be names with texts or numbers"
    if not is_texts(labels["labels"]):
        yield "'labels' must be a list of words"


def _score_problems(tensors: Tensors, vocabulary: int) -> Iterator[str]:
    words, groups, scores = (tensors[name].numpy() for name in ("words", "groups", "scores"))
    if words.min() < -1 or words.max() >= vocabulary:
        yield f"'words' must be numbers below {vocabulary}, the size of the vocabulary; -1 for none"
        return
    named = words >= 0
    if (named != named[:, :1]).any():
        yield "'words' must be numbers of words for all of a sub-unit's words, or -1 for all"
    if (named & ~np.isfinite(scores)).any():
        yield "'scores' has values that are not finite"
    if groups.min() < 0:
        yield "'groups' has negative numbers"
        return
    if (groups > np.arange(len(groups))).any() or (groups[groups] != groups).any():
        yield "'groups' must be the number of the first sub-unit of each group"


def _label_problems(labels: Mapping[str, Any], words: torch.Tensor) -> Iterator[str]:
    names = [*labels["vocabulary"], ""]  # -1 is no label
    if labels["labels"] != [names[word] for word in words[:, 0].tolist()]:
        yield f"'labels' must be the first word of each sub-unit in '{LABEL_SCORES}'"


def _familiarity_problems(tensors: Tensors) -> Iterator[str]:
    yield from _not_finite(tensors, *_LAYOUTS[FAMILIARITY])
    if tensors["deviation"].min() <= 0:
        yield "'deviation' must be above 0"
    if tensors["limit"] < 0:
        yield "'limit' must be at least 0"


def _calibration_problems(tensors: Tensors, vocabulary: int | None) -> Iterator[str]:
    yield from _not_finite(tensors, *(name for name in tensors if name not in ("words", "peaks")))
    yield from _out_of_range(tensors, "words", 2**31 if vocabulary is None else vocabulary)
    if len(tensors["words"].unique()) != len(tensors["words"]):
        yield "a word is there twice"
    if _largest(tensors["weights"]) > 1:
        yield "'weights' must be shares of the largest, from -1 to 1"
    if tensors["scale"].min() < 0:
        yield "'scale' must be at least 0"
    if not 0 <= float(tensors["fit"]) <= 1:
        yield "'fit' must be a share, from 0 to 1"
    if "peaks" in tensors and tensors["peaks"] < 1:
        yield "'peaks' must be at least 1"


def _not_finite(tensors: Tensors, *names: str) -> Iterator[str]:
    for name in names:
        if not math.isfinite(_largest(tensors[name])):
            yield f"'{name}' has values that are not finite"


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor, or one that is not finite; the bits without the sign have the same order."""
    values = tensor.numpy()
    bits: Any = values.view(np.uint16 if values.itemsize == 2 else np.uint32)
    top = (bits & (0x7FFF if values.itemsize == 2 else 0x7FFFFFFF)).max()
    return float(top.view(values.dtype))


def _out_of_range(tensors: Tensors, name: str, end: int) -> Iterator[str]:
    values = tensors[name].numpy()
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        yield f"'{name}' has {low if low < 0 else high}, and its numbers are from 0 to {end - 1}"
