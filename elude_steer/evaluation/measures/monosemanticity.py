"""MS-Score: do the pictures that a sub-unit fires for look alike to the model itself?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

KEPT = 100  # pictures a sub-unit, the paper's


def ms_score(embeddings: torch.Tensor, weights: torch.Tensor) -> float:
    """The weighted mean of the cosines of all pairs of different pictures, `(k, d)` unit rows and `(k,)` weights.

    With the pairs written out it is the sum over i != j of w_i w_j e_i.e_j over that of w_i w_j; this needs none of
    them. NaN where fewer than two pictures have a weight.
    """
    e, w = embeddings.double(), weights.double()
    pairs = w.sum() ** 2 - (w**2).sum()
    lengths = (w**2 * (e**2).sum(1)).sum()
    return float(((w @ e).square().sum() - lengths) / pairs) if (w > 0).sum() > 1 else torch.nan


class Peaks:
    """The pictures each sub-unit fires most for, gathered one picture at a time in memory that does not grow.

    Of a picture counts the token where the sub-unit fires most, and of that token what the unsplit layer gave there.
    """

    def __init__(self, sub_units: int, d_out: int, kept: int = KEPT) -> None:
        self.values = torch.full((sub_units, kept), -torch.inf)
        self.embeddings = torch.zeros(sub_units, kept, d_out)
        self.pictures = torch.full((sub_units, kept), -1, dtype=torch.long)
        self.lowest = torch.full((sub_units,), torch.inf)
        self.highest = torch.full((sub_units,), -torch.inf)
        self.seen = 0

    def add(self, activations: torch.Tensor, outputs: torch.Tensor) -> None:
        """One picture: `(tokens, sub_units)` activations and `(tokens, d_out)` outputs of the layer."""
        best, token = (found.cpu() for found in activations.float().max(0))
        if not torch.isfinite(best).all():
            raise ValueError("activations that are not finite have no order; is the model sound?")
        self.lowest, self.highest = self.lowest.minimum(best), self.highest.maximum(best)
        weakest = self.values.min(1).values
        place = self.pictures.masked_fill(self.values != weakest[:, None], -2).argmax(1)  # of equals the last goes
        enters = (best > weakest).nonzero()[:, 0]
        at = (enters, place[enters])
        unit = torch.nn.functional.normalize(outputs.float(), dim=-1).cpu()
        self.values[at], self.embeddings[at], self.pictures[at] = best[enters], unit[token[enters]], self.seen
        self.seen += 1

    def top(self, count: int) -> torch.Tensor:
        """`(latents, count)` the pictures each fires most for, strongest first; of those that fire for so many."""
        if count > self.values.shape[1]:
            raise ValueError(f"{count} pictures of each are wanted, {self.values.shape[1]} are kept.")
        values, order = self.values.sort(dim=1, descending=True, stable=True)
        fires = (self.highest > 0) & (values[:, count - 1] > -torch.inf)
        return self.pictures.gather(1, order)[fires, :count]

    @property
    def silent(self) -> torch.Tensor:
        """Which never fire, `(sub_units,)` bool."""
        return self.highest <= 0

    def scores(self) -> torch.Tensor:
        """The MS-Score of each sub-unit, `(sub_units,)` float64; NaN where it never fires, or always alike."""
        found = torch.full((len(self.values),), torch.nan, dtype=torch.float64)
        span = (self.highest - self.lowest).double()
        for number in ((self.highest > 0) & (span > 0)).nonzero()[:, 0].tolist():
            there = self.values[number] > -torch.inf
            weights = (self.values[number][there].double() - self.lowest[number]) / span[number]
            found[number] = ms_score(self.embeddings[number][there], weights)
        return found


@torch.inference_mode()
def gather_peaks(
    inputs: Iterable[torch.Tensor],
    activations: Callable[[torch.Tensor], torch.Tensor],
    layer: Callable[[torch.Tensor], torch.Tensor],
    kept: int = KEPT,
) -> Peaks:
    """Peaks over pictures.

    Args:
        inputs: the layer's inputs of one picture after the other, `(tokens, d_in)`.
        activations: from those to what is measured, `(tokens, sub_units)`.
        layer: the unsplit layer.
        kept: how many pictures of each sub-unit count.
    """
    peaks: Peaks | None = None
    for q in inputs:
        fired, outputs = activations(q), layer(q)
        if peaks is None:
            peaks = Peaks(fired.shape[1], outputs.shape[1], kept)
        peaks.add(fired, outputs)
    if peaks is None:
        raise ValueError("there are no pictures to measure on.")
    return peaks


def mean_percent(scores: torch.Tensor | Sequence[float]) -> float:
    """The mean of those that fire, in percent."""
    values = torch.as_tensor(scores, dtype=torch.float64)
    return float(values[~values.isnan()].mean() * 100)
