"""The steering settings that every method of the comparison tries, for each mode and kind of edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elude_steer.evaluation.edits import Kind

Grids = Mapping[tuple[str, Kind], Mapping[str, Sequence[Any]]]

# Every grid has 12 points for each mode and kind of edit, so that all methods get the same number of trials. A concept
# may have few latents or many, so kappa and nu vary.
_COUNTS = {"kappa": (6, 24), "nu": (6, 10)}
GRIDS: Grids = {
    ("scale", "remove"): {"mode": ("scale",), "gamma": (-5, -15, -50), **_COUNTS},
    ("scale", "replace"): {"mode": ("scale",), "gamma": (-15,), "alpha": (5, 20, 80), **_COUNTS},
    ("place", "remove"): {
        "mode": ("place",),
        "gamma": (-15,),
        "beta": (20,),
        "reach": (2,),
        "fill": (0, 80),
        "kappa": (6, 24),
        "nu": (10,),
        "fit": (0, 0.25, 0.35),
    },
    ("place", "replace"): {
        "mode": ("place",),
        "gamma": (-15,),
        "beta": (5, 20),
        "reach": (2,),
        "kappa": (6, 12, 24),
        "nu": (10,),
        "fit": (0, 0.35),
    },
}
SETTINGS = {"level": ("stream",), "smooth": (True,), "by": ("score",)}  # as in the atlas
