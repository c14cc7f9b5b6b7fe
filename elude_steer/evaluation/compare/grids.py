"""The steering settings that every method of the comparison tries, for each mode and kind of edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elude_steer.evaluation.edits import Kind

Grids = Mapping[tuple[str, Kind], Mapping[str, Sequence[Any]]]

# Every grid has 12 points for each mode and kind of edit, so that all methods get the same number of trials. A concept
# may have few latents or many, so kappa and nu vary. The strengths and regions bracket what does best for any method.
_COUNTS = {"kappa": (6, 24), "nu": (6, 10)}
_PLACE = {"mode": ("place",), "strength": (0.5, 1, 2), "fit": (0.15, 0.3, 0.45, 0.6)}
GRIDS: Grids = {
    ("scale", "remove"): {"mode": ("scale",), "gamma": (-5, -15, -50), **_COUNTS},
    ("scale", "replace"): {"mode": ("scale",), "gamma": (-15,), "alpha": (5, 20, 80), **_COUNTS},
    ("place", "remove"): _PLACE,
    ("place", "replace"): _PLACE,
}
SETTINGS = {"by": ("score",)}  # as in the atlas
