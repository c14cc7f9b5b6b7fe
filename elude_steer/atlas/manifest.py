"""The manifest of an atlas: its model and layer, how it was built, and a hash of every file. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elude_steer.atlas.manifest_rules import (
    ATLAS_FILES,
    CARD,
    MANIFEST,
    MAX_JSON,
    check_manifest,
    check_places,
    is_commit,
    is_snapshot,
    parse_json,
    unsound,
)
from elude_steer.errors import AtlasError, SpecError, StorageError, did_you_mean
from elude_steer.specs import ModelSpec, Settings
from elude_steer.utils.files import WORLDS, home, is_leftover, resolve_id, restore, write_file
from elude_steer.utils.hub import is_cached, is_hub_id, why_unreachable

FORMAT = 1
COPY_FIRST = "copy its folder, and use the copy"
EMBEDDED_ATLAS = "toyland"  # of those that come with the package, the default


def write_manifest(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return the manifest of a folder that holds all other files already."""
    files = {path.relative_to(folder).as_posix(): _hash(path) for path in _files(folder)}
    manifest = {"format": FORMAT, **content, "files": dict(sorted(files.items()))}
    manifest["checksum"] = _checksum(manifest)
    write_file(folder / MANIFEST, lambda file: file.write(_text(manifest).encode()))
    return manifest


def replace_card(folder: Path, content: Mapping[str, Any], card: str) -> dict[str, Any]:
    """Write another card into an atlas, and its manifest with other content; no other file is touched.

    Args:
        folder: the atlas.
        content: the manifest, as it was read or with changes.
        card: the text of the card.
    """
    write_file(folder / CARD, lambda file: file.write(card.encode()))
    manifest = {name: value for name, value in content.items() if name not in ("files", "checksum")}
    manifest["files"] = dict(sorted({**content["files"], CARD: _hash(folder / CARD)}.items()))
    manifest["checksum"] = _checksum(manifest)
    write_file(folder / MANIFEST, lambda file: file.write(_text(manifest).encode()))
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an atlas; check it against its checksum, and everything it says."""
    path = folder / MANIFEST
    if not path.is_file():
        raise AtlasError(
            f"'{folder}' is not an atlas: it has no {MANIFEST}; `elude-steer atlases list` shows the installed ones."
        )
    try:
        if (size := path.stat().st_size) > MAX_JSON:
            raise unsound(folder, MANIFEST, f"{size:,} bytes are more than {MAX_JSON:,}")
        raw = path.read_bytes()
    except OSError as error:
        raise AtlasError(f"'{path}' cannot be read ({error.strerror}).") from error
    try:
        manifest = parse_json(folder, MANIFEST, raw)
        sound = _is_text_of(manifest, raw) and manifest["checksum"] == _checksum(manifest)
    except RecursionError as error:
        raise unsound(folder, MANIFEST, "nested too deeply") from error
    except AtlasError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise AtlasError(_damaged(folder, MANIFEST))
    found = manifest.get("format")
    if type(found) is int and found != FORMAT:
        raise AtlasError(
            f"atlas '{folder}' has format {str(found)[:20]}, this version reads {FORMAT}; "
            "`pip install -U elude-steer`, or build it again."
        )
    check_manifest(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise if a file of the atlas is missing, lies elsewhere or has changed since it was written.

    The card may differ: people edit it on the Hub, and nothing is read from it.
    """
    check_places(folder, manifest["files"])
    for name, expected in manifest["files"].items():
        if name != CARD and _hash(folder / name) != expected:
            raise AtlasError(_damaged(folder, name))


def list_atlases() -> Iterator[tuple[str, Path]]:
    """Names and folders of the atlases under `ELUDE_STEER_HOME/atlases` and of those that come with the package."""
    names = set()
    for path in sorted((home() / "atlases").glob("*")):
        if (path / MANIFEST).is_file() and not is_leftover(path):
            names.add(path.name)
            yield path.name, path
    for world in list_shipped():
        if world not in names:
            yield world, Path(resolve_id(f"{world}/atlas"))


def list_shipped() -> list[str]:
    """Names of the atlases that come with the package, the default one first."""
    return [world for world in WORLDS if (Path(resolve_id(f"{world}/atlas")) / MANIFEST).is_file()]


def other_shipped_atlases(name: str, folder: Path | None) -> list[str]:
    """Names of the other atlases that come with the package, for one of them; none for an atlas of the user's own."""
    shipped = {world: Path(resolve_id(f"{world}/atlas")) for world in WORLDS}
    if folder is None or folder.resolve() not in [path.resolve() for path in shipped.values()]:
        return []
    return [world for world, path in shipped.items() if world != name and (path / MANIFEST).is_file()]


def find_atlas(name: str | Path) -> Path | None:
    """The folder of an atlas from its path or name; None for what may be a Hub id."""
    path = Path(name).expanduser()
    for place in (path, home() / "atlases" / path.name):
        restore(place)
    installed = dict(list_atlases())
    if (path / MANIFEST).is_file() or (path.is_dir() and str(name) not in installed):
        return path
    if str(name) in installed:
        return installed[str(name)]
    if is_hub_id(str(name)):
        if not is_cached(str(name)) and (problem := why_unreachable()):
            raise AtlasError(
                f"atlas '{name}' is neither installed nor in the cache of the Hub's files, and {problem}; "
                "`elude-steer atlases list` shows the installed ones."
            )
        return None
    raise AtlasError(
        f"there is no atlas '{name}': it is neither a folder, nor a name under '{home() / 'atlases'}', nor a Hub id "
        f"(user/name).{did_you_mean(str(name), list(installed))} `elude-steer atlases list` shows the installed ones."
    )


def locate_atlas(atlas: str) -> tuple[str, int]:
    """An atlas's folder and when it was written, so that one that was built again is loaded again."""
    folder = find_atlas(atlas)
    if folder is None or not (manifest := folder.resolve() / MANIFEST).is_file():
        return atlas, 0  # on the Hub, or nowhere
    return str(manifest.parent), manifest.stat().st_mtime_ns


def read_defaults(name: str | Path) -> Mapping[str, Any]:
    """The default settings for edits of an atlas, from its manifest alone; raises if its model has no captions.

    An atlas that is not on this machine has none yet.
    """
    folder = find_atlas(name)
    if folder is None:
        return {}
    manifest = read_manifest(folder)
    check_captions(manifest)
    return default_settings(manifest)


def default_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for edits in a manifest, without those that an older version had."""
    defaults: Mapping[str, Any] = manifest.get("spec", {}).get("steering", {})
    return {name: value for name, value in defaults.items() if name not in Settings.removed}


def check_captions(manifest: Mapping[str, Any]) -> ModelSpec:
    """Return the model of an atlas; raise if it is not one that writes captions."""
    spec = ModelSpec(**manifest["spec"]["model"])
    if spec.kind != "vlm":
        raise AtlasError(f"atlas '{manifest['name']}' is of {spec.id}, a vision model: it has no captions to steer.")
    return spec


def check_target(folder: Path) -> Path:
    """The absolute path of a folder to write an atlas to; raises if anything but an older atlas would be lost."""
    target = folder.expanduser().absolute()
    restore(target)
    if target.is_symlink():
        raise StorageError(f"'{folder}' is a link; give the folder itself, or a new one.")
    if not target.exists():
        return target
    if not target.is_dir():
        raise StorageError(f"'{folder}' is a file; give a new folder for the atlas.")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise StorageError(f"'{folder}' is the current folder or above it; give a new folder for the atlas.")
    other = next(target.iterdir(), None)
    if other is None:
        return target
    if (target / MANIFEST).is_file():  # an atlas may be replaced, but not other files in its folder
        ours = {MANIFEST, *read_manifest(target)["files"]}
        inside = (path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir())
        other = next((target / name for name in inside if name not in ours), None)
    if other is not None:
        raise StorageError(f"'{folder}' holds other files ('{other.name}'), which would be lost; give a new folder.")
    if not os.access(target, os.W_OK):
        raise StorageError(f"'{folder}' is an atlas without write permission; give a new folder.")
    return target


def check_not_shipped(name: str, folder: Path | None, cure: str = "copy it, or pass the settings") -> Path:
    """Return the folder of an atlas that may be changed; raise with the cure if it comes with the package."""
    if folder is None or Path(__file__).resolve().parents[1] in folder.resolve().parents:
        raise StorageError(f"atlas '{name}' is shipped with the package and is read-only; {cure}.")
    return folder


def check_name(name: str) -> str:
    """Return the name if it can be that of a folder under `ELUDE_STEER_HOME/atlases`; raise if not."""
    if not re.fullmatch(r"[\w][\w .+-]*", name) or name.endswith((" ", ".")):
        raise SpecError(f"'{name}' cannot be the name of an atlas; use letters, digits, '-', '_', '.' and spaces.")
    return name


def _damaged(folder: Path, name: str) -> str:
    if _has_other_line_ends(folder / name):
        return (
            f"atlas '{folder}' is damaged: '{name}' has other line ends (CRLF) than when it was written. Git does "
            "so on some machines: put a line `* -text` into the file .gitattributes of the repository, and check it "
            "out again."
        )
    return f"atlas '{folder}' is damaged: '{name}' has changed since it was written; copy or build it again."


def _has_other_line_ends(path: Path) -> bool:
    """Whether a file of ours, in which lines end in LF, has CRLF."""
    if path.suffix not in (".json", ".txt", ".md") or path.stat().st_size > MAX_JSON:
        return False
    return b"\r\n" in path.read_bytes()


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(_text(body).encode()).hexdigest()


def _text(value: Mapping[str, Any]) -> str:
    return "".join(_write_json(value)) + "\n"


def _write_json(value: Any) -> Iterator[str]:
    return json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value)


def _is_text_of(value: Any, raw: bytes) -> bool:
    """Whether bytes are what `_text` gives; compared piece by piece, because what is nested takes many times more."""
    end = 0
    for text in _write_json(value):
        piece = text.encode()
        if not raw.startswith(piece, end):
            return False
        end += len(piece)
    return raw[end:] == b"\n"


def find_commit(folder: Path) -> str | None:
    """The commit that a folder of the Hub's cache holds; None for other folders."""
    return folder.resolve().name if is_snapshot(folder) else None


def download_atlas(repo_id: str, revision: str | None) -> Path:
    """Download an atlas from the Hub; returns its folder. A revision that is a commit must be the one that came."""
    folder = _download(repo_id, revision)
    commit = find_commit(folder)
    if is_commit(revision) and commit != revision:
        raise AtlasError(
            f"atlas '{repo_id}' came as commit {commit or 'unknown'}, not as {revision}; delete '{folder}', and load "
            "it again."
        )
    return folder


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        offline = bool(why_unreachable())
        return Path(
            snapshot_download(repo_id, revision=revision, local_files_only=offline, allow_patterns=[*ATLAS_FILES])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).strip().splitlines()
        raise AtlasError(
            f"atlas '{repo_id}' is neither installed nor on the Hub ({cause[0] if cause else type(error).__name__}); "
            "`elude-steer atlases list` shows the installed ones."
        ) from error


def upload_atlas(folder: Path, repo_id: str, *, private: bool, token: str | None) -> str:
    """Upload an atlas to the Hub; returns the address of the commit."""
    from huggingface_hub import HfApi

    if problem := why_unreachable():
        raise AtlasError(f"atlas '{folder}' was not uploaded: {problem}; connect to the Hub and push again.")
    try:
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload atlas")
    except Exception as error:  # the Hub's library and the two below it raise errors of many kinds
        cause = str(error).strip().splitlines()
        raise AtlasError(
            f"atlas '{folder}' was not uploaded to '{repo_id}' ({cause[0] if cause else type(error).__name__}); "
            "check the id (user/name), and log in with `hf auth login` or pass token=…."
        ) from error
    return str(info.commit_url)
