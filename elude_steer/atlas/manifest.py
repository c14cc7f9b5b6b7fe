"""An atlas's manifest: what it is of, how it was made, and a hash of every file. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elude_steer.errors import AtlasError, SpecError, StorageError, did_you_mean
from elude_steer.utils.files import home, is_leftover, resolve_id, restore, write_file

FORMAT = 1
MANIFEST = "manifest.json"
EMBEDDED_ATLAS = "toyland"  # the atlas that comes with the package


def write_manifest(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the manifest of a folder whose other files are all there; returns it."""
    files = {path.relative_to(folder).as_posix(): _hash(path) for path in _files(folder)}
    manifest = {"format": FORMAT, **content, "files": dict(sorted(files.items()))}
    manifest["checksum"] = _checksum(manifest)
    write_file(folder / MANIFEST, lambda file: file.write(_text(manifest).encode()))
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an atlas, checked against its own checksum."""
    path = folder / MANIFEST
    if not path.is_file():
        raise AtlasError(
            f"'{folder}' is no atlas: it has no {MANIFEST}; `elude-steer atlases list` shows those at hand."
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise AtlasError(f"'{path}' cannot be read ({error.strerror}).") from error
    try:
        manifest = json.loads(raw)
        sound = raw == _text(manifest).encode() and manifest["checksum"] == _checksum(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise AtlasError(_damaged(folder, MANIFEST))
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


def list_atlases() -> Iterator[tuple[str, Path]]:
    """The atlases at hand by name: those under `ELUDE_STEER_HOME/atlases`, then those that come with the package."""
    own = set()
    for path in sorted((home() / "atlases").glob("*")):
        if (path / MANIFEST).is_file() and not is_leftover(path):
            own.add(path.name)
            yield path.name, path
    embedded = Path(resolve_id("toyland/atlas"))
    if (embedded / MANIFEST).is_file() and EMBEDDED_ATLAS not in own:
        yield EMBEDDED_ATLAS, embedded


def find_atlas(name: str | Path) -> Path | None:
    """The folder of an atlas given by path or by name; None for what may be a Hub id."""
    path = Path(name).expanduser()
    for place in (path, home() / "atlases" / path.name):
        restore(place)
    known = dict(list_atlases())
    if (path / MANIFEST).is_file() or (path.is_dir() and str(name) not in known):
        return path
    if str(name) in known:
        return known[str(name)]
    if str(name).count("/") == 1 and not str(name).startswith((".", "~", "/")):
        return None
    raise AtlasError(
        f"no atlas '{name}': it is neither a folder, nor a name under '{home() / 'atlases'}', nor a Hub id "
        f"(user/name).{did_you_mean(str(name), list(known))} `elude-steer atlases list` shows those at hand."
    )


def check_target(folder: Path) -> Path:
    """The absolute path of a folder that an atlas may be written to; raises where anything else would be lost."""
    target = folder.expanduser().absolute()
    restore(target)
    if target.is_symlink():
        raise StorageError(f"'{folder}' is a link; give the folder itself, or a new one.")
    if not target.exists():
        return target
    if not target.is_dir():
        raise StorageError(f"'{folder}' is a file; give a new folder for the atlas.")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise StorageError(f"'{folder}' is where you are, or above it; give a new folder for the atlas.")
    held = next(target.iterdir(), None)
    if held is None:
        return target
    if (target / MANIFEST).is_file():  # an atlas may be replaced, what else lies in its folder may not
        ours = {MANIFEST, *read_manifest(target)["files"]}
        inside = (path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir())
        held = next((target / name for name in inside if name not in ours), None)
    if held is not None:
        raise StorageError(f"'{folder}' holds other files ('{held.name}'), which would be lost; give a new folder.")
    if not os.access(target, os.W_OK):
        raise StorageError(f"'{folder}' is an atlas that cannot be written to; give a new folder.")
    return target


def check_name(name: str) -> str:
    """A name that can be a folder under `ELUDE_STEER_HOME/atlases` and nothing else."""
    if not re.fullmatch(r"[\w][\w .+-]*", name) or name.endswith((" ", ".")):
        raise SpecError(f"name '{name}' cannot be an atlas's; use letters, digits, '-', '_', '.' and spaces.")
    return name


def _damaged(folder: Path, name: str) -> str:
    return f"atlas '{folder}' is damaged: '{name}' is not what was written; copy it again, or build it again."


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def download_atlas(repo_id: str, revision: str | None) -> Path:
    """The folder of an atlas that is on the Hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()
        raise AtlasError(
            f"atlas '{repo_id}' is neither at hand nor on the Hub ({cause[0] if cause else type(error).__name__}); "
            "`elude-steer atlases list` shows those at hand."
        ) from error
