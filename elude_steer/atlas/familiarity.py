"""How much an image is like those that an atlas was built from.

The inputs of the layer, averaged over the patches of an image, are one vector. Those of the probing images fill a few
directions of their space; what lies outside these directions is small for images of the same kind, and large for
others. Deviations of single channels are not enough: photographs stay within them, but combine them in other ways.
`demos/benchmarks/familiarity.py` compares this distance with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from elude_steer.atlas.manifest_rules import FAMILIARITY
from elude_steer.utils.files import write_tensors

FILE = FAMILIARITY
MIN_IMAGES, MAX_IMAGES = 200, 4000  # fewer say too little about the rest; more say nothing new
_VARIANCE = 0.95  # share that the directions explain
_MAX_DIRECTIONS = 256
_QUANTILE, _MARGIN = 0.999, 1.05  # the limit is this multiple of the distance that this share of images is within
_FLOOR = 0.01  # of the mean deviation: a channel that is silent in all probing images must not decide alone


@dataclass(frozen=True, eq=False)
class Familiarity:
    """What the probing images have in common.

    Attributes:
        mean: `(d_in,)` mean of the images' vectors.
        deviation: `(d_in,)` their standard deviations.
        directions: `(k, d_in)` float16, the principal directions of the standardized vectors.
        limit: `()` the distance beyond which an image counts as unlike the probing images.
    """

    mean: torch.Tensor
    deviation: torch.Tensor
    directions: torch.Tensor
    limit: torch.Tensor

    def distances(self, vectors: torch.Tensor) -> torch.Tensor:
        """The length of what the directions do not explain of each image's vector, `(n,)` of `(n, d_in)`."""
        standardized = (vectors.double() - self.mean) / self.deviation
        directions = self.directions.double()
        return (standardized - standardized @ directions.T @ directions).norm(dim=1)

    def is_unlike(self, vector: torch.Tensor) -> bool:
        """Whether an image with this vector, `(d_in,)`, is unlike the probing images."""
        return bool(self.distances(vector[None]) > self.limit)

    def save(self, folder: Path) -> None:
        """Write the file of an atlas."""
        write_tensors(folder / FILE, {name: tensor.contiguous() for name, tensor in vars(self).items()})


def describe_image(q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The vector of one image: the mean of the layer's inputs over its patches, `(d_in,)` float32.

    Args:
        q: `(tiles, tokens, d_in)` layer inputs.
        positions: the tokens of a tile that count as patches.
    """
    positions = positions.to(q.device)
    means = torch.stack([tile[positions].mean(0, dtype=torch.float64) for tile in q])  # (tiles, d_in)
    return means.mean(0).float().cpu()


def measure_familiarity(vectors: torch.Tensor) -> Familiarity | None:
    """Find what images have in common: the directions from one half, the limit from the other.

    Args:
        vectors: `(n, d_in)`, one for each image.

    Returns:
        None for fewer than `MIN_IMAGES` images, or if all are the same.
    """
    vectors = vectors[vectors.isfinite().all(1)]  # a model in float16 may overflow
    if len(vectors) < MIN_IMAGES:
        return None
    fitted, held_out = vectors[::2].double(), vectors[1::2].double()
    mean, deviation = fitted.mean(0), fitted.std(0)
    if not deviation.any():
        return None
    mean, deviation = mean.float(), deviation.clamp_min(_FLOOR * float(deviation.mean())).float()
    _, lengths, directions = torch.linalg.svd((fitted - mean) / deviation, full_matrices=False)
    explained = lengths.square().cumsum(0) / lengths.square().sum()
    count = min(int((explained < _VARIANCE).sum()) + 1, _MAX_DIRECTIONS)
    found = Familiarity(mean, deviation, directions[:count].half(), torch.tensor(0.0))
    limit = _MARGIN * torch.quantile(found.distances(held_out), _QUANTILE, interpolation="higher")
    return Familiarity(mean, deviation, found.directions, limit.float())
