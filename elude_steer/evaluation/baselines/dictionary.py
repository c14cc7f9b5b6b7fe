"""A dictionary of latents: what each reads from a layer and writes to its output, and how a steerer uses it.

All baselines have the same number of latents and learn from the same tokens: splits use the same instances as ELUDe and
divide each unit into as many parts; autoencoders have as many latents as there are sub-units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.calibration import Calibration
from elude_steer.atlas.labels import Labels
from elude_steer.errors import AtlasError
from elude_steer.method.layers import layer_parameters


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Latents of one layer.

    Attributes:
        name: the method's name.
        read: from the layer's inputs `(…, d_in)` to activations `(…, S)`.
        write: `(S, d_out)` what one unit of activation adds to the layer's output.
        base: `(d_out,)` the output where no latent is active.
        atoms: `(S, d)` the vectors of the dictionary: incoming weights of sub-units, directions of latents.
        units: `(S,)` the unit that each latent is a part of; all 0 for methods without units.
        names: `(S,)` concepts of supervised latents; empty where dissection labels them.
    """

    name: str
    read: Callable[[torch.Tensor], torch.Tensor]
    write: torch.Tensor
    base: torch.Tensor
    atoms: torch.Tensor
    units: torch.Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.write)

    def reconstruct(self, q: torch.Tensor) -> torch.Tensor:
        """The dictionary's approximation of the layer's output, `(…, d_out)`."""
        return self.read(q) @ self.write + self.base

    def vectors(self) -> dict[str, torch.Tensor]:
        """What the stability compares: the atoms and their units, on the CPU."""
        return {"atoms": self.atoms.cpu().contiguous(), "units": self.units.cpu().contiguous()}


def group_by_unit(atoms: torch.Tensor, units: torch.Tensor) -> list[torch.Tensor]:
    """The vectors of each unit, without those of length zero."""
    alive = atoms.norm(dim=1) > 0
    return [atoms[(units == unit) & alive] for unit in units.unique()]


def linear_outputs(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that computes the layer's own output, even while another module stands in its place."""
    weight, bias = (tensor.float() for tensor in layer_parameters(layer))
    return lambda q: F.linear(q.float(), weight, bias)


@dataclass(frozen=True, eq=False)
class Latents:
    """Some latents with the interface that an edit needs; the counterpart of `SubUnits`."""

    dictionary: Dictionary
    rows: torch.Tensor

    def activations(self, q: torch.Tensor) -> torch.Tensor:
        """Activations `(…, m)` for inputs `(…, d_in)`."""
        return self.dictionary.read(q)[..., self.rows]

    def add_change(self, total: torch.Tensor, change: torch.Tensor) -> None:
        """Add to `total` what a change of the activations writes."""
        total += change @ self.dictionary.write[self.rows]


@dataclass(frozen=True)
class Levels:
    """The activation of each latent that counts as fully on, `(S,)`."""

    activation: torch.Tensor


@dataclass(frozen=True, eq=False)
class NamedDictionary:
    """A dictionary whose latents have labels; a steerer takes it in place of an atlas.

    Attributes:
        dictionary: the latents.
        labels: the concepts of each latent.
        references: the activations that count as fully on.
        calibration: the detectors and directions of words, for mode place.
        about: replaces the atlas's manifest.
    """

    dictionary: Dictionary
    labels: Labels
    references: Levels
    calibration: Calibration | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dictionary)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.dictionary.name

    @property
    def d_out(self) -> int:
        """Number of units of the layer."""
        return self.dictionary.write.shape[1]

    @property
    def units(self) -> torch.Tensor:
        """Each latent counts as a unit of its own."""
        return torch.arange(len(self))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the latents, their labels, their reference activations and their calibration."""
        digest = hashlib.sha256(self.labels.words.tobytes() + self.labels.scores.tobytes())
        calibration = [] if self.calibration is None else self.calibration.tensors().values()
        for tensor in (self.dictionary.atoms, self.references.activation, *calibration):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def require_labels(self) -> Labels:
        """The labels, which are never missing here."""
        return self.labels

    def check(self, layer: nn.Module, read_stored: Any = None) -> None:
        """Do nothing: a dictionary is always made from the layer at hand."""

    def sub_units(self, numbers: torch.Tensor | Sequence[int], layer: nn.Module) -> Latents:
        """Some latents, with the interface that an edit needs."""
        return Latents(self.dictionary, torch.as_tensor(numbers, dtype=torch.long).to(self.dictionary.write.device))

    def require_calibration(self) -> Calibration:
        """The calibration; raises if there is none."""
        if self.calibration is None:
            raise AtlasError(f"the dictionary '{self.name}' is not calibrated; use mode scale.")
        return self.calibration

    def detector(self, row: int, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """The detector of a calibrated word, from the layer's inputs to readings."""
        weights, bias = self.require_calibration().detector(row)
        weights = weights.to(self.dictionary.write.device)
        return lambda q: self.dictionary.read(q.float()) @ weights + bias

    def read_all_words(self, q: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Readings of the detectors of all calibrated words."""
        return self.require_calibration().read_all(self.dictionary.read(q.float()))
