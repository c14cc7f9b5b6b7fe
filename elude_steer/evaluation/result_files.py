"""Results as JSON files, so that a run that was interrupted continues where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from elude_steer.errors import StorageError
from elude_steer.utils.files import read_json, remove_leftovers, write_file
from elude_steer.utils.progress import progress_bar

Item = TypeVar("Item")
ITEMS_PER_FILE = 16  # worked on together and kept in one file


def load_or_make(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The content of a JSON file; a missing one is made first, with the CPU seconds it took as `seconds`."""
    if not path.exists():
        remove_leftovers(path.parent, path.name)
        start = time.process_time()  # not the clock: a core may have other work, and a run may be paused
        found = make()
        text = json.dumps({**found, "seconds": time.process_time() - start}, indent=1)
        write_file(path, lambda file: file.write(text.encode()))
    content: dict[str, Any] = read_json(path, dict)
    return content


def compute_in_parts(
    folder: Path,
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], list[Any]],
    label: str,
    on_progress: Callable[[int], object] | None = None,
) -> list[Any]:
    """A value for each item, part by part; the parts that are in the folder already are read.

    Args:
        folder: of the finished parts; its name must hold everything that the values depend on.
        items: what to work on, such as images.
        compute: gives a value for each item of a part, of what JSON can hold.
        label: what is being done, for the progress bar.
        on_progress: called with the number of items done since the last call.
    """
    values: list[Any] = []
    remove_leftovers(folder)
    with progress_bar(label, "images", len(items)) as advance:
        for start in range(0, len(items), ITEMS_PER_FILE):
            part, path = items[start : start + ITEMS_PER_FILE], folder / f"part-{start:06d}.json"
            if not path.exists():
                text = json.dumps(compute(part))
                write_file(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
            found = read_json(path, list)
            if len(found) != len(part):
                raise StorageError(f"'{path}' is damaged; delete it and run the same command again.")
            values += found
            advance(len(part))
            if on_progress:
                on_progress(len(part))
    return values
