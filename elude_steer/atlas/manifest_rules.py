"""What the JSON files of an atlas may hold, and which files it may have. Needs no torch.

Hashes say that an atlas is as it was written, not that whoever wrote it was honest. So everything that is read is
checked before it is used: here the manifest and the names of files, in `validate.py` the tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elude_steer.errors import AtlasError
from elude_steer.specs import AtlasSpec
from elude_steer.utils.yaml_schema import check_keys

MANIFEST = "manifest.json"
CARD = "README.md"
MEMBERSHIPS, REFERENCES, IMAGES = "memberships.safetensors", "references.safetensors", "images.json"
LABEL_NAMES, LABEL_SCORES = "labels.json", "labels.safetensors"
FAMILIARITY, CALIBRATION = "familiarity.safetensors", "calibration.safetensors"
READ = (MEMBERSHIPS, REFERENCES, IMAGES, LABEL_NAMES, LABEL_SCORES, FAMILIARITY, CALIBRATION)  # all that loading reads
_REQUIRED_FILES = (MEMBERSHIPS, REFERENCES, IMAGES)
_NEVER_READ = (CARD, "streams.safetensors")  # the card, and a file of an older version
ATLAS_FILES = (MANIFEST, *READ, *_NEVER_READ, "thumbnails/*.jpg")  # all that an atlas may have
_THUMBNAIL = re.compile(r"thumbnails/([0-9]{6,9})\.jpg")

MAX_JSON = 64 * 2**20  # bytes of a JSON file; the manifest of 300,000 thumbnails has half of that
_MAX_VALUES = 3_000_000  # brackets and commas of a JSON file; the 1.3 million images of ImageNet have one each
MAX_TEXT = 4096  # characters of a text, as long as the longest path
_MAX_NAME = 255  # bytes of a part of a path; a longer one is an error of the file system
_MAX_COUNT = 2**31 - 1

# Keys that atlases of earlier versions do not have. Of steering, each key may be absent.
_LATER_KEYS = {
    "": ("labels", "calibration", "matcher", "steering", "license"),
    "model": ("autocast",),
    "tokens": ("reuse",),
    "clusters": ("units",),
    "references": ("thumbnails",),
    "steering": (*AtlasSpec.__dataclass_fields__["steering"].default_factory.__dataclass_fields__,),  # type: ignore
}


def unsound(folder: Path, name: str, problem: str) -> AtlasError:
    """The error for an atlas whose files are as they were written, and say what cannot be."""
    return AtlasError(
        f"atlas '{folder}' is not sound: '{name}': {problem}; get another copy from whoever made it, or build it again."
    )


def read_bounded_json(folder: Path, name: str) -> Any:
    """Read a JSON file of an atlas, unless it is too large, nested too deeply, or no JSON."""
    path = folder / name
    if (size := path.stat().st_size) > MAX_JSON:
        raise unsound(folder, name, f"{size:,} bytes are more than {MAX_JSON:,}")
    try:
        return parse_json(folder, name, path.read_bytes())
    except AtlasError:
        raise
    except ValueError as error:
        raise unsound(folder, name, "not JSON") from error


def parse_json(folder: Path, name: str, raw: bytes) -> Any:
    """Parse a JSON file of an atlas, unless it has so many values that they take gigabytes, or is nested too deeply."""
    if (values := sum(map(raw.count, (b"[", b"{", b",")))) > _MAX_VALUES:
        raise unsound(folder, name, f"{values:,} brackets and commas are more than {_MAX_VALUES:,}")
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise unsound(folder, name, "nested too deeply") from error


def check_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise unless a manifest has every key, each with a value that can be, and no key of a later version."""
    unknown_in_spec, spec_problems = check_keys(AtlasSpec, manifest.get("spec"), "spec", _LATER_KEYS)
    if unknown := [*(key for key in manifest if key not in _RULES), *_unknown_inside(manifest), *unknown_in_spec]:
        raise AtlasError(
            f"atlas '{folder}' is of a later format: '{MANIFEST}' has '{_short(unknown[0])}', which this version does "
            "not know; `pip install -U elude-steer`, or build it again."
        )
    if (problem := next(_manifest_problems(manifest, spec_problems), None)) is not None:
        raise unsound(folder, MANIFEST, problem)


def _unknown_inside(manifest: Mapping[str, Any]) -> Iterator[str]:
    parts = {
        "model": ("id", "revision", "kind"),
        "weights_by_dtype": ("built", *_DTYPES),
        "evaluation": ("images", "image_count", "elude_steer", "rows"),
    }
    for name, known in parts.items():
        part = manifest.get(name)
        yield from (f"{name}.{key}" for key in (part if isinstance(part, dict) else ()) if key not in known)


def _manifest_problems(manifest: Mapping[str, Any], spec_problems: Sequence[str]) -> Iterator[str]:
    for key, (accepts, description) in _RULES.items():
        if key not in manifest:
            if key not in _OPTIONAL_KEYS:
                yield f"it has no '{key}'"
        elif not accepts(manifest[key]):
            yield f"'{key}' must be {description}, not {_short(manifest[key])}"
    yield from spec_problems
    yield from (f"'{text[:40]!r}…' is no text of one line" for text in _texts(manifest) if not _is_text(text))
    if manifest["units"] != manifest["d_out"]:
        yield f"'units' is {manifest['units']} and 'd_out' is {manifest['d_out']}; they are the same number"
    if manifest["sub_units"] < manifest["d_out"]:
        yield f"{manifest['sub_units']} sub-units are fewer than the {manifest['d_out']} units that they belong to"
    yield from _file_problems(manifest["files"])


def _file_problems(files: Mapping[str, str]) -> Iterator[str]:
    for name in files:
        if name not in READ and name not in _NEVER_READ and _THUMBNAIL.fullmatch(name) is None:
            yield f"'{_short(name)}' is no file of an atlas"
    yield from (f"it lists no '{name}'" for name in _REQUIRED_FILES if name not in files)
    if (LABEL_NAMES in files) != (LABEL_SCORES in files):
        yield f"it lists one of '{LABEL_NAMES}' and '{LABEL_SCORES}' without the other"


def thumbnail_number(name: str) -> int | None:
    """The image that a file of an atlas is a thumbnail of; None for other files."""
    found = _THUMBNAIL.fullmatch(name)
    return int(found[1]) if found else None


def check_places(folder: Path, files: Mapping[str, str]) -> None:
    """Raise if a file is missing or lies elsewhere, or if there is one that loading could read but no hash covers."""
    root = Path(os.path.realpath(folder))
    # In the Hub's cache, each file of a snapshot is a link to one of the same repository.
    inside = f"{root.parents[1] if is_snapshot(folder) else root}{os.sep}"
    for name in files:
        path = folder / name
        if name == CARD:
            continue
        if not path.is_file():
            raise AtlasError(f"atlas '{folder}' has no file '{name}'; copy or build it again.")
        if not os.path.realpath(path).startswith(inside):
            raise unsound(folder, name, "a link that leads out of the atlas")
    for name in READ:
        if name not in files and os.path.lexists(folder / name):
            raise unsound(folder, name, f"a file that '{MANIFEST}' does not list")


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is one of the Hub's cache: `…/snapshots/` and a commit."""
    real = Path(os.path.realpath(folder))
    return real.parent.name == "snapshots" and is_commit(real.name)


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a complete commit hash, and not a branch or a tag."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def is_texts(values: Any) -> bool:
    """Whether a value is a list of texts of one line."""
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        return False
    if max(map(len, values), default=0) <= _MAX_NAME // 4:  # a character has at most four bytes
        return "".join(values).isprintable()
    return all(map(_is_text, values))


def is_plain(values: Any) -> bool:
    """Whether a value has text keys, and texts of one line, finite numbers, truth values or null behind them."""
    return isinstance(values, dict) and all(
        _is_text(key)
        and (_is_text(value) if isinstance(value, str) else value is None or isinstance(value, bool) or _finite(value))
        for key, value in values.items()
    )


def _is_text(text: str) -> bool:
    """Whether a text can be printed, and be a path: no control characters, no half characters, no endless names."""
    return (
        len(text) <= MAX_TEXT
        and text.isprintable()
        and all(len(part.encode("utf-8", "surrogatepass")) <= _MAX_NAME for part in text.split("/"))
    )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys of `files` and `versions` too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else ascii(value) if not isinstance(value, dict | list) else "a list or keys"
    return text if len(text) <= 60 and text.isprintable() else ascii(text)[:60] + "…"


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_COUNT


def _finite(value: Any) -> bool:
    return (type(value) is int and abs(value) < 10**18) or (type(value) is float and math.isfinite(value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,64}", value) is not None


def _is_model(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_str(value.get("id")):
        return False
    return all(value.get(key) is None or _is_str(value[key]) for key in ("revision", "kind"))


def _is_evaluation(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("rows"), list):
        return False
    if not (_is_str(value.get("images")) and _is_str(value.get("elude_steer")) and _is_count(value.get("image_count"))):
        return False
    return all(
        isinstance(row, dict)
        and {"name", "value"} <= set(row) <= {"measure", "name", "value", "units"}
        and _is_str(row["name"])
        and isinstance(row.get("measure", ""), str)
        and _finite(row["value"])
        # The units before the split may have no number.
        and (row.get("units") is None or _finite(row["units"]) or isinstance(row["units"], float))
        for row in value["rows"]
    )


_DTYPES = ("float32", "bfloat16", "float16")
_OPTIONAL_KEYS = ("class", "weights_by_dtype", "evaluation")
_TEXT = (_is_str, "text")
_COUNT = (_is_count, "a whole number of at least 1")
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda value: type(value) is int, "a whole number"),
    "name": _TEXT,
    "model": (_is_model, "an id and a revision"),
    "class": _TEXT,
    "layer": _TEXT,
    "weights": (_is_hash, "a hash"),
    "weights_by_dtype": (
        lambda value: (
            isinstance(value, dict)
            and value.get("built") in _DTYPES
            and all(_is_hash(value.get(name)) for name in _DTYPES)
        ),
        "the data type of the build and three hashes",
    ),
    "d_in": _COUNT,
    "d_out": _COUNT,
    "units": _COUNT,
    "sub_units": _COUNT,
    "images": _COUNT,
    "instances": _COUNT,
    "backend": (lambda value: value is None or _is_str(value), "text"),
    "spec": (lambda value: isinstance(value, dict), "the sections of a recipe"),
    "versions": (
        lambda value: isinstance(value, dict) and all(v is None or isinstance(v, str) for v in value.values()),
        "names and versions",
    ),
    "evaluation": (_is_evaluation, "the results of an evaluation"),
    "files": (
        lambda value: (
            isinstance(value, dict) and all(_is_hash(digest) and len(digest) == 64 for digest in value.values())
        ),
        "the names of files and their hashes",
    ),
    "checksum": (_is_hash, "a hash"),
}
