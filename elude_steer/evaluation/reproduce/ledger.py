"""What each piece of a run takes: predicted before, measured while it runs, also over interruptions."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elude_steer.errors import StorageError
from elude_steer.utils.files import read_json, write_file


def _is_entry(entry: Any) -> bool:
    """Whether this is what is written about a piece: numbers by name."""
    values: list[Any] = list(entry.values()) if isinstance(entry, dict) else [None]
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


@dataclass(eq=False)
class Ledger:
    """The hours of a run, in one file.

    Attributes:
        path: the file.
        on_gpu: whether time by the clock counts; on a CPU, whose cores may have other work, CPU time does.
    """

    path: Path
    on_gpu: bool = False
    _entries: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self._entries = read_json(self.path, dict)
            if not all(map(_is_entry, self._entries.values())):
                raise StorageError(f"'{self.path}' is damaged; delete it and run the same command again.")

    def predict(self, pieces: Mapping[str, float]) -> None:
        """Write down predicted seconds; a piece that was begun keeps the prediction that it was begun with."""
        for name, seconds in pieces.items():
            entry = self._entries.setdefault(name, {"predicted": seconds})
            if "cpu" not in entry:
                entry["predicted"] = seconds
        self._save()

    @contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Add the seconds that pass inside to a piece; finding that all is there already adds nothing."""
        cpu, clock = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            spent = {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}
            entry = self._entries.setdefault(name, {})
            if "done" not in entry:
                for key, seconds in spent.items():
                    entry[key] = entry.get(key, 0.0) + seconds
                self._save()

    def finish(self) -> None:
        """Mark all pieces as done: a further run only reads them."""
        for entry in self._entries.values():
            if "cpu" in entry:
                entry["done"] = 1.0
        self._save()

    def measured(self, name: str) -> float | None:
        """The seconds of a piece, by the clock on a GPU and of the processor elsewhere; None if it was never begun."""
        return self._entries.get(name, {}).get("clock" if self.on_gpu else "cpu")

    def to_dict(self) -> dict[str, Any]:
        """Hours of all pieces that ran, predicted and measured, and their sums."""
        pieces = {
            name: {"predicted": entry.get("predicted", 0.0) / 3600, "measured": (self.measured(name) or 0.0) / 3600}
            for name, entry in self._entries.items()
            if "cpu" in entry
        }
        total = {key: sum(piece[key] for piece in pieces.values()) for key in ("predicted", "measured")}
        clock = sum(entry.get("clock", 0.0) for entry in self._entries.values()) / 3600
        return {"unit": "hours" if self.on_gpu else "CPU hours", "pieces": pieces, **total, "clock": clock}

    def _save(self) -> None:
        text = json.dumps(self._entries, indent=1)
        write_file(self.path, lambda file: file.write(text.encode()))
