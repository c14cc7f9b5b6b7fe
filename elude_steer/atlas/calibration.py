"""What an atlas knows of each word as a whole: how its sub-units tell whether and where it is, and what it adds.

`method/concept_fit.py` says how detectors and directions are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.manifest_rules import CALIBRATION
from elude_steer.method.concept_fit import PEAKS, Presence, strongest_mean
from elude_steer.utils.files import write_tensors

FILE = CALIBRATION


@dataclass(frozen=True, eq=False)
class LinearReading:
    """A detector as a linear function of a layer's input: weight `(d_in,)` and bias `()`."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Readings `(…)` of inputs `(…, d_in)`."""
        return q.float() @ self.weight + self.bias


@dataclass(frozen=True, eq=False)
class WordReadings:
    """The detectors of all words as one linear function of a layer's input, and what the layer was at that time.

    Attributes:
        weight: `(W, d_in)` float32.
        bias: `(W,)`.
        layer_weight: a copy of the layer's weight: it may be written to in ways that leave no other trace.
        layer_bias: a copy of its bias; None without one.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    layer_weight: torch.Tensor
    layer_bias: torch.Tensor | None

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """Readings `(…, W)` of inputs `(…, d_in)`."""
        return F.linear(q.float(), self.weight, self.bias)

    def fits(self, layer: nn.Module) -> bool:
        """Whether a layer has these weights, in this data type and on this device."""
        return _is_same(self.layer_weight, layer.weight) and _is_same(self.layer_bias, layer.bias)


def copy_parameters(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies of a layer's weight and bias as they are, for `WordReadings`."""
    weight, bias = cast("torch.Tensor", layer.weight), cast("torch.Tensor | None", layer.bias)
    return weight.detach().clone(), None if bias is None else bias.detach().clone()


def _is_same(kept: torch.Tensor | None, now: object) -> bool:
    if kept is None or not isinstance(now, torch.Tensor):
        return kept is now
    return kept.dtype == now.dtype and kept.device == now.device and torch.equal(kept, now)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The detectors and directions of W words.

    A detector reads 0 on images without its word and 1 where the word is strongest in images with it.

    Attributes:
        words: `(W,)` int32, the numbers of the words in the vocabulary.
        weights: `(W, S)` float16, the weights of the sub-units, as shares of the largest.
        scale: `(W,)` the largest weight.
        bias: `(W,)`.
        levels: `(W, 2)` the readings of images without and with the word: means over their strongest patches, or
            over all if `fit` is 0.
        directions: `(W, d_out)` what a word adds to the residual stream; float16, or float32 where that would overflow.
        fit: `()` the share of the highest reading that the patches of a region have; see `find_region`.
        peaks: `()` int32, the number of patches that are the strongest ones. None: a twentieth, and at least three, as
            in older atlases.
    """

    words: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    levels: torch.Tensor
    directions: torch.Tensor
    fit: torch.Tensor
    peaks: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.words)

    def row(self, word: int) -> int | None:
        """The row of a word of the vocabulary; None if it was not calibrated."""
        found = (self.words == word).nonzero()
        return int(found[0]) if len(found) else None

    def detector(self, row: int) -> tuple[torch.Tensor, float]:
        """The weights of all sub-units, `(S,)`, and the bias."""
        return self.weights[row].float() * self.scale[row], float(self.bias[row])

    def read_all(self, activations: torch.Tensor) -> torch.Tensor:
        """Readings `(…, W)` of all words, for activations `(…, S)` of the sub-units."""
        weights, scale, bias = (values.to(activations) for values in (self.weights, self.scale, self.bias))
        return activations @ weights.T * scale + bias

    def direction(self, row: int) -> torch.Tensor:
        """What the word adds to the stream, `(d_out,)`."""
        return self.directions[row].float()

    def presence(self, row: int, readings: torch.Tensor) -> float:
        """How much of what images with the word reach an image reaches: about 0 without it, about 1 with it.

        Args:
            row: of the word.
            readings: of its detector on all patches of the image.
        """
        flat = readings.flatten().float()
        count = max(3, len(flat) // 20) if self.peaks is None else int(self.peaks)
        pooled = strongest_mean(flat, count) if float(self.fit) else flat.mean()
        low, high = self.levels[row].tolist()
        return (float(pooled) - low) / max(high - low, 1e-9)

    def save(self, folder: Path) -> None:
        """Write the file of an atlas."""
        write_tensors(folder / FILE, {name: tensor.contiguous() for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it knows, by name; without what older atlases lack."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def finish_calibration(
    words: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    directions: torch.Tensor,
    pooled: tuple[torch.Tensor, torch.Tensor],
    presence: Presence,
    fit: float,
) -> Calibration:
    """Put detectors and directions on an absolute scale.

    Args:
        words: `(W,)` their numbers in the vocabulary.
        weights: `(W, S)` of the detectors.
        bias: `(W,)` of the detectors.
        directions: `(W, d_out)`.
        pooled: `(N, W)` each, the mean over the strongest patches of an image, and over all.
        presence: of the words in these images.
        fit: the share of the highest reading that the patches of a region have.
    """
    strongest, mean = (values.double() for values in pooled)
    peak = _medians(strongest, presence.shows).clamp_min(1e-9)
    readings = (strongest if fit else mean) / peak
    levels = torch.stack([_medians(readings, presence.lacks), _medians(readings, presence.shows)], 1)
    weights = weights.double() / peak[:, None]
    scale = weights.abs().amax(1).clamp_min(1e-30)
    return Calibration(
        words.int(),
        (weights / scale[:, None]).half(),
        scale.float(),
        (bias.double() / peak).float(),
        levels.float(),
        directions.half() if directions.abs().max() <= torch.finfo(torch.float16).max else directions.float(),
        torch.tensor(float(fit)),
        torch.tensor(PEAKS, dtype=torch.int32),
    )


def _medians(values: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    return torch.stack([column[mask].median() for column, mask in zip(values.T, masks.T, strict=True)])
