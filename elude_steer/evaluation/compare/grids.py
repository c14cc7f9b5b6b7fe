"""The steering settings that every method of the comparison tries, for each mode and kind of edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elude_steer.evaluation.edits import Kind

Grid = Mapping[str, Sequence[Any]]

# One grid for all methods. What does best should lie inside of it; tables mark the points that lie on its border.
# `seen` is that of toyland's atlas.
_PLACE: Grid = {"mode": ("place",), "seen": (0.4,), "strength": (0.5, 1, 1.5, 2.5), "fit": (0.08, 0.15, 0.3, 0.45, 0.6)}
_SCALE: Grid = {"mode": ("scale",), "by": ("score",), "kappa": (2, 6, 24, 96)}
GRIDS: Mapping[tuple[str, Kind], Grid] = {
    ("scale", "remove"): {**_SCALE, "nu": (4, 10, 25, 60), "gamma": (-5, -15, -50)},
    ("scale", "replace"): {**_SCALE, "nu": (2, 4, 10, 25), "gamma": (-50,), "alpha": (15, 50, 150, 500)},
    ("place", "remove"): _PLACE,
    ("place", "replace"): _PLACE,
}
SUPERVISED = ", supervised directions"  # in the names of edits, where these replace a method's own


def take_values(grid: Grid, count: int | None) -> dict[str, Sequence[Any]]:
    """The grid with the first few values of each setting; None takes all."""
    return {name: values[:count] for name, values in grid.items()}


def find_border(grid: Grid, settings: Mapping[str, Any]) -> list[str]:
    """The settings of a point that have the first or the last of several values: better ones may lie outside.

    Example:
        >>> find_border({"strength": (0.5, 1, 2), "fit": (0.3,)}, {"strength": 2, "fit": 0.3})
        ['strength']
    """
    return [name for name, values in grid.items() if len(values) > 1 and settings[name] in (values[0], values[-1])]
