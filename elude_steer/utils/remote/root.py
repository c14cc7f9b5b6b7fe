"""Where this process has the folders of the build that it works for.

Work that travels to another machine names folders; each machine has them at a place of its own.
"""

from __future__ import annotations

from pathlib import Path

from elude_steer.errors import ProcessError
from elude_steer.utils.remote.filesystems import join_url

_current: list[tuple[Path, str | None]] = []


def enter_root(path: Path, url: str | None) -> None:
    """From now on, folders that arrive from elsewhere are below this one, with this URL behind it."""
    _current[:] = [(path, url)]


def find_folder(name: str) -> tuple[Path, str | None]:
    """The folder of this name, and the URL behind it."""
    if not _current:
        raise ProcessError("this process works for no build; folders of a build cannot be opened here.")
    path, url = _current[0]
    return path / name, None if url is None else join_url(url, name)
