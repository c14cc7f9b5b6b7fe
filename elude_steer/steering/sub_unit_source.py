"""What steering needs of an atlas, so that another dictionary of a layer can stand in its place.

`Atlas` fits, and so do the dictionaries that the evaluation compares it with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from elude_steer.atlas.calibration import Calibration
from elude_steer.atlas.labels import Labels


class EditableSubUnits(Protocol):
    """Some sub-units of a layer as arithmetic: what they read from its input, and what they write to its output."""

    def activations(self, q: torch.Tensor, /) -> torch.Tensor:
        """`(…, m)` of inputs `(…, d_in)`."""

    def add_change(self, total: torch.Tensor, change: torch.Tensor, /) -> None:
        """Add to `total`, `(…, d_out)`, what a change of their activations, `(…, m)`, writes."""


class ReferenceActivations(Protocol):
    """What "fully on" is for each sub-unit."""

    @property
    def activation(self) -> torch.Tensor:
        """`(S,)` activation of each sub-unit where it fires most."""


class SubUnitSource(Protocol):
    """The sub-units of one layer, with labels, numbered from 0."""

    def __len__(self) -> int: ...

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def d_out(self) -> int:
        """Number of units of the layer."""

    @property
    def units(self) -> torch.Tensor:
        """`(S,)` the unit that each sub-unit belongs to."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known about how it was made, as in an atlas's manifest."""

    @property
    def fingerprint(self) -> str:
        """A hash; plans of one source do not fit another."""

    @property
    def references(self) -> ReferenceActivations:
        """Reference activations of all sub-units."""

    def require_labels(self) -> Labels:
        """The labels; raises where there are none."""

    def check(self, layer: nn.Module, read_stored: Any, /) -> None:
        """Raise unless the sub-units are those of `layer`; `read_stored` reads its weights from the checkpoint."""

    def sub_units(self, numbers: torch.Tensor | Sequence[int], layer: nn.Module, /) -> EditableSubUnits:
        """Some sub-units as arithmetic, on the layer's device."""

    def require_calibration(self) -> Calibration:
        """The detectors and directions of words; raises where there are none."""

    def detector(self, row: int, layer: nn.Module, /) -> Callable[[torch.Tensor], torch.Tensor]:
        """The detector of a calibrated word: from inputs `(…, d_in)` of the layer to readings `(…)`."""

    def read_all_words(self, q: torch.Tensor, layer: nn.Module, /) -> torch.Tensor:
        """Readings `(…, W)` of the detectors of all calibrated words, for inputs `(…, d_in)` of the layer."""
