"""An atlas's manifest: what it is of, how it was made, and a hash of every file. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elude_steer.errors import AtlasError, closest
from elude_steer.storage import home, write_file

FORMAT = 1
NAME = "manifest.json"


def write_manifest(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the manifest of a folder whose other files are all there; returns it."""
    files = {path.relative_to(folder).as_posix(): _hash(path) for path in _files(folder)}
    manifest = {"format": FORMAT, **content, "files": dict(sorted(files.items()))}
    manifest["checksum"] = _checksum(manifest)
    write_file(folder / NAME, lambda file: file.write(_text(manifest).encode()))
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an atlas, checked against its own checksum."""
    path = folder / NAME
    if not path.is_file():
        raise AtlasError(f"'{folder}' is no atlas: it has no {NAME}; `elude-steer atlases list` shows those at hand.")
    try:
        raw = path.read_bytes()
        manifest = json.loads(raw)
        sound = raw == _text(manifest).encode() and manifest["checksum"] == _checksum(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise AtlasError(_damaged(folder, NAME))
    if manifest["format"] != FORMAT:
        raise AtlasError(
            f"atlas '{folder}' has format {manifest['format']}, this version reads {FORMAT}; "
            "`pip install -U elude-steer`, or build it again."
        )
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises where a file of the atlas is missing or not the one that was written."""
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise AtlasError(f"atlas '{folder}' lacks its file '{name}'; copy it again, or build it again.")
        if _hash(path) != expected:
            raise AtlasError(_damaged(folder, name))


def atlases() -> Iterator[tuple[str, Path]]:
    """The atlases at hand by name: those under `ELUDE_STEER_HOME/atlases`."""
    for path in sorted((home() / "atlases").glob("*")):
        if (path / NAME).is_file():
            yield path.name, path


def find_atlas(name: str | Path) -> Path | None:
    """The folder of an atlas given by path or by name; None for what may be a Hub id."""
    path, known = Path(name).expanduser(), dict(atlases())
    if (path / NAME).is_file() or (path.is_dir() and str(name) not in known):
        return path
    if str(name) in known:
        return known[str(name)]
    if str(name).count("/") == 1 and not str(name).startswith((".", "~", "/")):
        return None
    raise AtlasError(
        f"no atlas '{name}': it is neither a folder, nor a name under '{home() / 'atlases'}', nor a Hub id "
        f"(user/name).{closest(str(name), list(known))} `elude-steer atlases list` shows those at hand."
    )


def _damaged(folder: Path, name: str) -> str:
    return f"atlas '{folder}' is damaged: '{name}' is not what was written; copy it again, or build it again."


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
