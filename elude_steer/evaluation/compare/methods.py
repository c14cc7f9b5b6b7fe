"""The methods that `compare` runs, and the sizes of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines import SAE_KINDS

Part = Literal["measures", "edits"]
PARTS: tuple[Part, ...] = ("measures", "edits")


@dataclass(frozen=True)
class Size:
    """The size of a comparison.

    Attributes:
        seeds: seeds of the token draw.
        images: images to probe and to label latents with; None for the recipe's number.
        scenes: held-out scenes to report on.
        ms_scenes: held-out scenes for a second MS-Score.
        tuning_scenes: scenes to choose steering settings on.
        edited_scenes: scenes to steer with them.
        epochs: training epochs of an SAE; matching pursuit, whose steps take ten times as long, has a third of them.
        trials: points of an SAE's grid, tried on the first seed with a sixth of its tokens and half of the epochs.
        grid_values: values to try of each steering setting; None for all.
        runs: runs of ELUDe on the tokens of the first seed, for the stability; the others have two.
    """

    seeds: tuple[int, ...] = (42, 123, 999)
    images: int | None = None
    scenes: int = 500
    ms_scenes: int = 3000
    tuning_scenes: int = 48
    edited_scenes: int = 300
    epochs: int = 6
    trials: int = 9
    grid_values: int | None = None
    runs: int = 3

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys of size.json, which never change: existing work folders must be recognised.

        Files of edits have the number of edited scenes in their names, so it is not among them.
        """
        keys = {"images": "pictures", "ms_scenes": "many", "tuning_scenes": "tuning", "grid_values": "grid"}
        values = {keys.get(name, name): value for name, value in asdict(self).items()}
        del values["edited_scenes"]
        return values


SMALL = Size(
    seeds=(42, 123),
    images=120,
    scenes=8,
    ms_scenes=24,
    tuning_scenes=4,
    edited_scenes=8,
    epochs=2,
    trials=1,
    grid_values=1,
    runs=2,
)


@dataclass(frozen=True)
class Method:
    """A method that `compare` runs.

    Attributes:
        name: shown in tables, given to `--method`, and written to results.
        kind: how its dictionary is made: from an atlas, from the raw units, by another split of the units, by an SAE,
            from differences of means, or by a split that is told the classes of instances.
        variant: the atlas's winner rule, the split, or the kind of SAE.
        supervised: whether it is given what tokens show.
    """

    name: str
    kind: Literal["atlas", "units", "split", "sae", "means", "classes"]
    variant: str = ""
    supervised: bool = False

    @property
    def number(self) -> int:
        """Its position among all methods, which file names contain."""
        return list(METHODS).index(self.name)

    @property
    def splits_units(self) -> bool:
        """Whether each of its latents is a part of a unit, or a whole one."""
        return self.kind in ("atlas", "split", "classes", "units")


# In the order of the table. Files are numbered by it: add new methods at the end.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ELUDe (gap)", "atlas", "gap"),
        Method("ELUDe (unique)", "atlas", "unique"),
        Method("raw units", "units"),
        Method("random split", "split", "random"),
        Method("k-means on contributions", "split", "pure"),
        Method("clusters of activations", "split", "activations"),
        *(
            Method(f"{kind.replace('_', ' ')}{'' if kind == 'transcoder' else ' SAE'}", "sae", kind)
            for kind in SAE_KINDS
        ),
        Method("difference of means (supervised)", "means", supervised=True),
        Method("DPCiCNN (supervised)", "classes", supervised=True),
    )
}
ELUDE = METHODS["ELUDe (gap)"]  # sets the number of parts and latents of all other methods


def find_methods(names: Iterable[str]) -> list[Method]:
    """The methods with these names; raises for a name that no method has."""
    for name in (names := list(names)):
        if name not in METHODS:
            raise SpecError(f"there is no method '{name}'; there are {', '.join(METHODS)}.")
    return [METHODS[name] for name in names]


def check_seeds(size: Size, seeds: Iterable[int] | None) -> list[int]:
    """The seeds, by default all of the size; raises for a seed that it does not have."""
    chosen = list(seeds or size.seeds)
    for seed in chosen:
        if seed not in size.seeds:
            raise SpecError(f"there is no seed {seed} in the comparison; there are {', '.join(map(str, size.seeds))}.")
    return chosen
