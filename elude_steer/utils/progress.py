"""Progress bars on stderr for work that takes longer than a second; none where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
DELAY = 1.0  # seconds before a bar appears


def track(items: Iterable[Item], label: str, unit: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a bar of those that are done.

    Args:
        items: what is worked on.
        label: what is being done: `captioning`.
        unit: what the bar counts: `images`.
        total: the number of items, where they have no length.
    """
    yield from _bar(items, label, unit, total)


@contextmanager
def progress_bar(label: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number of items that were done since its last call."""
    with _bar(None, label, unit, total) as bar:
        yield bar.update


def _bar(items: Any, label: str, unit: str, total: int | None) -> Any:
    from tqdm import tqdm

    options: dict[str, Any] = {"delay": DELAY, "leave": False, "dynamic_ncols": True}
    return tqdm(items, desc=f"{label:<10}", unit=f" {unit}", total=total, disable=None, **options)
