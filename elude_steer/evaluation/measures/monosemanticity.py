"""MS-Score: whether the images that a sub-unit fires for look alike to the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from elude_steer.evaluation.measures.row_file import RowFile
from elude_steer.utils.progress import track

TOP_IMAGES = 100  # images of each sub-unit, as in the paper
_ROWS = 1024  # embeddings that are copied at a time


def ms_score(embeddings: torch.Tensor, weights: torch.Tensor) -> float:
    """The weighted mean cosine of all pairs of different images, from `(k, d)` unit rows and `(k,)` weights.

    It equals the sum over i != j of w_i w_j e_i.e_j, divided by the sum of w_i w_j, but does not build the pairs. NaN
    where fewer than two images have a weight.
    """
    e, w = embeddings.double(), weights.double()
    pairs = w.sum() ** 2 - (w**2).sum()
    lengths = (w**2 * (e**2).sum(1)).sum()
    return float(((w @ e).square().sum() - lengths) / pairs) if (w > 0).sum() > 1 else torch.nan


class Peaks:
    """The images that activate each sub-unit most, collected one image at a time in constant memory.

    Each image counts once: its most active token, with the unsplit layer's output for that token. Those outputs are in
    a temporary file: of 9,000 sub-units of a layer of 1,152 units they take 4.1 GB.
    """

    def __init__(self, sub_units: int, d_out: int, count: int = TOP_IMAGES) -> None:
        self.values = torch.full((sub_units, count), -torch.inf)
        self._embeddings = RowFile(sub_units * count, d_out, f"the strongest images of {sub_units:,} sub-units")
        self.images = torch.full((sub_units, count), -1, dtype=torch.long)
        self.lowest = torch.full((sub_units,), torch.inf)
        self.highest = torch.full((sub_units,), -torch.inf)
        self.image_count = 0

    def add(self, activations: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add an image: `(tokens, sub_units)` activations and `(tokens, d_out)` outputs of the layer."""
        best, token = (result.cpu() for result in activations.float().max(0))
        if not torch.isfinite(best).all():
            raise ValueError("activations that are not finite have no order; are the model's weights intact?")
        self.lowest, self.highest = self.lowest.minimum(best), self.highest.maximum(best)
        weakest = self.values.min(1).values
        place = self.images.masked_fill(self.values != weakest[:, None], -2).argmax(1)  # among equals, replace the last
        enters = (best > weakest).nonzero()[:, 0]
        slots = (enters, place[enters])
        unit = torch.nn.functional.normalize(outputs.float(), dim=-1).cpu()
        self.values[slots], self.images[slots] = best[enters], self.image_count
        rows = enters * self.values.shape[1] + place[enters]
        for part, tokens in zip(rows.split(_ROWS), token[enters].split(_ROWS), strict=True):
            self._embeddings.write(part, unit[tokens])
        self.image_count += 1

    def top(self, count: int) -> torch.Tensor:
        """Strongest images of each sub-unit that fires for so many, `(n, count)`, strongest first."""
        if count > self.values.shape[1]:
            raise ValueError(f"the {count} strongest images are asked for, but only {self.values.shape[1]} are stored.")
        values, order = self.values.sort(dim=1, descending=True, stable=True)
        fires = (self.highest > 0) & (values[:, count - 1] > -torch.inf)
        return self.images.gather(1, order)[fires, :count]

    @property
    def silent(self) -> torch.Tensor:
        """Which sub-units never fire, `(sub_units,)` bool."""
        return self.highest <= 0

    def scores(self) -> torch.Tensor:
        """The MS-Score of each sub-unit, `(sub_units,)` float64; NaN where it never fires or always fires equally."""
        scores, count = torch.full((len(self.values),), torch.nan, dtype=torch.float64), self.values.shape[1]
        span = (self.highest - self.lowest).double()
        for number in track(((self.highest > 0) & (span > 0)).nonzero()[:, 0].tolist(), "scoring", "sub-units"):
            filled = self.values[number] > -torch.inf
            weights = (self.values[number][filled].double() - self.lowest[number]) / span[number]
            embeddings = self._embeddings.read(number * count, (number + 1) * count)
            scores[number] = ms_score(embeddings[filled], weights)
        return scores


@torch.inference_mode()
def gather_peaks(
    inputs: Iterable[torch.Tensor],
    activations: Callable[[torch.Tensor], torch.Tensor],
    layer: Callable[[torch.Tensor], torch.Tensor],
    count: int = TOP_IMAGES,
) -> Peaks:
    """Collect the strongest images of each sub-unit.

    Args:
        inputs: the layer's inputs of one image after the other, `(tokens, d_in)`.
        activations: from those to the activations to measure, `(tokens, sub_units)`.
        layer: the unsplit layer.
        count: number of images of each sub-unit.
    """
    peaks: Peaks | None = None
    for q in inputs:
        values, outputs = activations(q), layer(q)
        if peaks is None:
            peaks = Peaks(values.shape[1], outputs.shape[1], count)
        peaks.add(values, outputs)
    if peaks is None:
        raise ValueError("there are no images to measure on.")
    return peaks


def mean_percent(scores: torch.Tensor | Sequence[float]) -> float:
    """The mean over sub-units that have a score, in percent."""
    values = torch.as_tensor(scores, dtype=torch.float64)
    return float(values[~values.isnan()].mean() * 100)
