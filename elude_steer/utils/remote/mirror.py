"""A folder of this machine, and behind it, if there is a URL, a store that other machines reach.

An object store has no rename, and a large object arrives in parts. So what belongs together is written first, and then
a marker that lists the files with their sizes and hashes. Nobody reads a file that no marker names, and what was
fetched is compared with the marker before it appears in the folder. A marker names files of its own folder alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from elude_steer.errors import StorageError
from elude_steer.utils.files import explain_write_errors, unfinished_path
from elude_steer.utils.remote.filesystems import explain_remote_errors, join_url, make_folder, open_filesystem

_MARKERS = "done"
_AT_A_TIME = 8  # files that are fetched at once
_BLOCK = 1 << 22
_brought: dict[str, set[str]] = {}  # by URL: the markers whose files this process has in its folder
_looked: set[str] = set()  # URLs of which this process has fetched all there was; of a finished stage, all there is
_GUARD = threading.Lock()


@dataclass(frozen=True)
class Mirror:
    """A local folder and the URL behind it; without a URL all methods do nothing but look at the folder.

    Attributes:
        path: the folder of this machine.
        url: the store; None if the folder is all there is.
    """

    path: Path
    url: str | None = None

    def share(self, files: Sequence[Path]) -> None:
        """Write files of the folder to the store, then their marker, which has the name of the last of them."""
        if self.url is None:
            return
        found = [file for file in files if file.exists()]
        filesystem, root = open_filesystem(self.url)
        described = {}
        with explain_remote_errors(self.url):
            make_folder(filesystem, f"{root}/{_MARKERS}")
            for file in found:
                described[file.name] = [file.stat().st_size, _hash(file)]
                filesystem.put_file(str(file), f"{root}/{file.name}")
            filesystem.pipe_file(self._marker(root, files[-1].name), json.dumps(described).encode())
        self._remember([files[-1].name])

    def has(self, file: Path) -> bool:
        """Whether the work that leaves this file last is done, here or, if there is a store, there."""
        if self.url is None:
            return file.exists()
        filesystem, root = open_filesystem(self.url)
        with explain_remote_errors(self.url):
            filesystem.invalidate_cache(f"{root}/{_MARKERS}")
            return bool(filesystem.exists(self._marker(root, file.name)))

    def finished(self) -> set[str] | None:
        """The names for which `has` is true, by one look at the store; None without one."""
        return None if self.url is None else set(self._list_markers())

    def bring(self, *, once: bool = False) -> None:
        """Fetch the files of the store that are not in the folder yet.

        Args:
            once: do nothing if this process has looked before; for folders of finished stages.
        """
        if self.url is None or (once and self.url in _looked):
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        # Processes of one machine fetch a file once.
        with explain_write_errors(self.path), FileLock(f"{self.path}.fetch.lock"):
            missing = [name for name in self._list_markers() if name not in _brought.get(self.url, ())]
            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                list(pool.map(self._fetch, missing))
        self._remember(missing)
        _looked.add(self.url)

    def forget(self, files: Iterable[Path]) -> None:
        """Delete files and their markers from the store, markers first; the folder keeps what it has."""
        if self.url is None:
            return
        filesystem, root = open_filesystem(self.url)
        for file in files:
            for path in (self._marker(root, file.name), f"{root}/{file.name}"):
                with suppress(FileNotFoundError), explain_remote_errors(self.url):
                    if filesystem.exists(path):
                        filesystem.rm_file(path)

    def _fetch(self, marker: str) -> None:
        filesystem, root = open_filesystem(str(self.url))
        with explain_remote_errors(join_url(str(self.url), _MARKERS, marker)):
            described = self._read_marker(filesystem.cat_file(self._marker(root, marker)), marker)
        for name, (size, digest) in described.items():
            target = self.path / name
            if target.exists() and target.stat().st_size == size and _hash(target) == digest:
                continue
            temporary = unfinished_path(target)
            try:
                with explain_write_errors(target), explain_remote_errors(join_url(str(self.url), name)):
                    filesystem.get_file(f"{root}/{name}", str(temporary))
                if temporary.stat().st_size != size or _hash(temporary) != digest:
                    raise StorageError(f"'{join_url(str(self.url), name)}' is damaged; delete it and run again.")
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    def _read_marker(self, data: bytes, name: str) -> Mapping[str, tuple[int, str]]:
        try:
            described: dict[str, Any] = json.loads(data)
            plain = all(Path(file).name == file and file not in ("", ".", "..") for file in described)
            if plain and all(isinstance(size, int) and isinstance(digest, str) for size, digest in described.values()):
                return {file: (size, digest) for file, (size, digest) in described.items()}
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass
        raise StorageError(f"'{join_url(str(self.url), _MARKERS, name)}' is damaged; delete it and run again.")

    def _list_markers(self) -> list[str]:
        filesystem, root = open_filesystem(str(self.url))
        folder = f"{root}/{_MARKERS}"
        with explain_remote_errors(str(self.url)):
            filesystem.invalidate_cache()
            found = filesystem.find(folder) if filesystem.exists(folder) else []
        return sorted(path.rsplit("/", 1)[1].removesuffix(".json") for path in found)

    @staticmethod
    def _marker(root: str, name: str) -> str:
        return f"{root}/{_MARKERS}/{name}.json"

    def _remember(self, names: Iterable[str]) -> None:
        with _GUARD:
            _brought.setdefault(str(self.url), set()).update(names)


def publish(folder: Path, url: str, last: str) -> None:
    """Copy the files of a folder to a URL, the one called `last` at the end: without it nobody takes the rest.

    What was published there before, as the `files` of its own `last` say, is deleted.
    """
    filesystem, root = open_filesystem(url)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with explain_remote_errors(url):
        if filesystem.exists(f"{root}/{last}"):
            before = _list_published(filesystem.cat_file(f"{root}/{last}"))
            filesystem.rm_file(f"{root}/{last}")
            for name in sorted(before.difference(names)):
                if filesystem.exists(f"{root}/{name}"):
                    filesystem.rm_file(f"{root}/{name}")
        for name in [*(name for name in names if name != last), last]:
            make_folder(filesystem, f"{root}/{name}".rsplit("/", 1)[0])
            filesystem.put_file(str(folder / name), f"{root}/{name}")


def _list_published(data: bytes) -> set[str]:
    """The files that a manifest names below its own folder; none if it cannot be read."""
    try:
        names = {str(name) for name in json.loads(data)["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {name for name in names if "\\" not in name and not {"", ".", ".."} & {*name.split("/")}}


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
