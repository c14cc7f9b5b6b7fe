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

from elude_steer.atlas.labels import Labels
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

    def mean_activations(self, q: torch.Tensor) -> torch.Tensor:
        """Mean activations over tokens, `(m,)`."""
        return self.activations(q).mean(0)

    def add_change(self, total: torch.Tensor, change: torch.Tensor) -> None:
        """Add to `total` what a change of the activations writes."""
        total += change @ self.dictionary.write[self.rows]

    def select(self, rows: torch.Tensor) -> Latents:
        """A subset of these latents."""
        return Latents(self.dictionary, self.rows[rows])


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
        streams: `(S, d_out)` mean residual stream after the layer where each latent fires, minus the mean over all.
        about: replaces the atlas's manifest.
    """

    dictionary: Dictionary
    labels: Labels
    references: Levels
    streams: torch.Tensor | None = None
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
        """Hash of the latents, their labels, their reference activations and their streams."""
        digest = hashlib.sha256(self.labels.words.tobytes() + self.labels.scores.tobytes())
        streams = [] if self.streams is None else [self.streams]
        for tensor in (self.dictionary.atoms, self.references.activation, *streams):
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

    def target_levels(self, numbers: torch.Tensor | Sequence[int], level: str) -> torch.Tensor:
        """The activations that count as on for the latents of one concept, `(n,)`.

        With `reference`, each latent has its own level. With `stream`, the latents together write what the stream
        carries where the concept is, as closely as they can; the smallest such activations are taken. For parts of
        units this equals what an atlas does.
        """
        rows = torch.as_tensor(numbers, dtype=torch.long)
        if level == "reference" or self.streams is None or not len(rows):
            return self.references.activation[rows]
        carried = self.streams[rows].double().mean(0)
        return (torch.linalg.pinv(self._writes(rows).double().T) @ carried).float()

    def stream_outside(self, numbers: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """The part of a concept's stream that its latents do not write, `(d_out,)`."""
        rows = torch.as_tensor(numbers, dtype=torch.long)
        if self.streams is None:
            return torch.zeros(self.d_out)
        return self.streams[rows].float().mean(0) - self.target_levels(rows, "stream") @ self._writes(rows)

    def _writes(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dictionary.write[rows.to(self.dictionary.write.device)].cpu()
