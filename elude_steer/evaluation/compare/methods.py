"""Who takes part in the comparison, with which settings, and how large it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.sae import KINDS
from elude_steer.evaluation.edits.benchmark import Kind


def method_of(kind: str) -> str:
    """What an autoencoder of a kind is called."""
    return f"{kind.replace('_', ' ')}{'' if kind == 'transcoder' else ' SAE'}"


RULES = ("gap", "unique")
SPLITS = {"random split": "random", "k-means on contributions": "pure", "clusters of activations": "activations"}
METHODS = (
    *(f"ELUDe ({rule})" for rule in RULES),
    "raw units",
    *SPLITS,
    *(method_of(kind) for kind in KINDS),
    "difference of means (supervised)",
)
SUPERVISED = METHODS[-1:]
# One size for everybody: 12 points a mode and kind of edit. Latents that stand for a word may be few or many.
_WHERE = {"kappa": (6, 24), "nu": (6, 10)}
GRIDS: Mapping[tuple[str, Kind], Mapping[str, Sequence[Any]]] = {
    ("scale", "remove"): {"mode": ("scale",), "gamma": (-5, -15, -50), **_WHERE},
    ("scale", "replace"): {"mode": ("scale",), "gamma": (-15,), "alpha": (5, 20, 80), **_WHERE},
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
SETTINGS = {"level": ("stream",), "smooth": (True,), "by": ("score",)}  # as the atlas has them


@dataclass(frozen=True)
class Size:
    """How large a comparison is.

    Attributes:
        seeds: of the token draw.
        pictures: that are probed and name latents; None as the recipe has it.
        scenes: that are reported.
        many: held-out scenes for a second MS-Score.
        tuning: scenes that settings are chosen on.
        epochs: of an autoencoder; pursuit, which takes ten times as long a step, has a third of them.
        trials: points of an autoencoder's grid, on the first seed, with a sixth of its tokens and half of the epochs.
        grid: values of a steering setting that are tried; None for all.
        runs: of ELUDe on the tokens of the first seed, for the stability; others have two.
    """

    seeds: tuple[int, ...] = (42, 123, 999)
    pictures: int | None = None
    scenes: int = 500
    many: int = 3000
    tuning: int = 48
    epochs: int = 6
    trials: int = 9
    grid: int | None = None
    runs: int = 3


SMALL = Size(seeds=(42, 123), pictures=120, scenes=8, many=24, tuning=4, epochs=2, trials=1, grid=1, runs=2)


def check_methods(methods: Sequence[str]) -> Sequence[str]:
    """The same, or an error that names those there are."""
    for method in methods:
        if method not in METHODS:
            raise SpecError(f"there is no method '{method}'; there are {', '.join(METHODS)}.")
    return methods


def grids(size: Size) -> dict[tuple[str, Kind], dict[str, Sequence[Any]]]:
    """What every method tries, by mode and kind of edit."""
    whole = {at: {**grid, **SETTINGS} for at, grid in GRIDS.items()}
    return {at: {name: values[: size.grid] for name, values in grid.items()} for at, grid in whole.items()}
