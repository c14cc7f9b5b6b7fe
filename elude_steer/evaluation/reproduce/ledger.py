"""What each piece of a run takes: predicted before, measured while it runs, also over interruptions.

Runs of other images, budgets or models may share a folder and so the file: a piece is entered under its name and the
key of what it depends on, and a run reports only its own pieces.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
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
        find_key: a piece's name -> the key of everything that the piece depends on.
    """

    path: Path
    on_gpu: bool = False
    find_key: Callable[[str], str] = field(default=lambda name: "")
    _entries: dict[str, dict[str, float]] = field(default_factory=dict)
    _own: dict[str, str] = field(default_factory=dict)  # pieces of this run -> their entries

    def __post_init__(self) -> None:
        if self.path.exists():
            self._entries = read_json(self.path, dict)
            if not all(map(_is_entry, self._entries.values())):
                raise StorageError(f"'{self.path}' is damaged; delete it and run the same command again.")

    def _find(self, name: str) -> dict[str, float]:
        """The entry of a piece of this run."""
        if name not in self._own:
            self._own[name] = f"{name} [{self.find_key(name)}]"
        return self._entries.setdefault(self._own[name], {})

    def _find_own(self) -> dict[str, dict[str, float]]:
        """The entries of this run, in the order in which any run began them."""
        names = {entry: name for name, entry in self._own.items()}
        return {names[entry]: content for entry, content in self._entries.items() if entry in names}

    def predict(self, pieces: Mapping[str, float]) -> None:
        """Write down predicted seconds; a piece that was begun keeps the prediction that it was begun with."""
        for name, seconds in pieces.items():
            entry = self._find(name)
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
            entry = self._find(name)
            if "done" not in entry:
                for key, seconds in spent.items():
                    entry[key] = entry.get(key, 0.0) + seconds
                self._save()

    def finish(self) -> None:
        """Mark all pieces of this run as done: a further run only reads them."""
        for entry in self._find_own().values():
            if "cpu" in entry:
                entry["done"] = 1.0
        self._save()

    def measured(self, name: str) -> float | None:
        """The seconds of a piece, by the clock on a GPU and of the processor elsewhere; None if it was never begun."""
        return self._find_own().get(name, {}).get("clock" if self.on_gpu else "cpu")

    def to_dict(self) -> dict[str, Any]:
        """Hours of all pieces of this run that were made, now or before, predicted and measured, and their sums."""
        pieces = {
            name: {"predicted": entry.get("predicted", 0.0) / 3600, "measured": (self.measured(name) or 0.0) / 3600}
            for name, entry in self._find_own().items()
            if "cpu" in entry
        }
        total = {key: sum(piece[key] for piece in pieces.values()) for key in ("predicted", "measured")}
        clock = sum(entry.get("clock", 0.0) for entry in self._find_own().values()) / 3600
        return {"unit": "hours" if self.on_gpu else "CPU hours", "pieces": pieces, **total, "clock": clock}

    def _save(self) -> None:
        text = json.dumps(self._entries, indent=1)
        write_file(self.path, lambda file: file.write(text.encode()))
