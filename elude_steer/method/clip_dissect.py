"""CLIP-Dissect: find the words that fit sub-units, from the images that drive them and the words that fit the images.

The scores of one sub-unit do not depend on the sub-units computed with it, except through the prior, which is a mean
over all sub-units of the layer. So neither block sizes nor the number of processes change a label.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import torch

from elude_steer.errors import EludeSteerWarning, SpecError

# Sub-units in one product of cos_cubed. Fixed, because products of another shape may round differently.
GROUP = 32


@dataclass(frozen=True)
class Dissection:
    """Settings of CLIP-Dissect.

    Attributes:
        method: `soft_wpmi`, `wpmi` or `cos_cubed`.
        top_k: number of a sub-unit's most active images that count.
        a: sharpness of an image's distribution over the words.
        lam: weight of the prior, which is how well a word fits all sub-units.
        min_prob: added to probabilities to keep logarithms finite.
        p_start: probability that the most active image belongs to the sub-unit.
        p_end: probability that the last of the `top_k` images does.
    """

    method: str = "soft_wpmi"
    top_k: int = 100
    a: float = 10.0
    lam: float = 1.0
    min_prob: float = 1e-7
    p_start: float = 0.998
    p_end: float = 0.97

    @classmethod
    def for_method(cls, method: str, **settings: float | None) -> Dissection:
        """Settings of a method; those that are None keep the method's defaults.

        Example:
            >>> Dissection.for_method("wpmi", a=5.0).top_k
            28
        """
        if method not in _METHOD_DEFAULTS:
            raise SpecError(f"the method is '{method}'; it is one of {', '.join(map(repr, _METHOD_DEFAULTS))}.")
        changes = {name: value for name, value in settings.items() if value is not None}
        unknown = set(changes) - {field.name for field in fields(cls)}
        if unknown:
            raise SpecError(f"a dissection has no setting {', '.join(map(repr, sorted(unknown)))}.")
        return cls(method, **{**_METHOD_DEFAULTS[method], **changes})  # type: ignore[arg-type]

    def clamp_top_k(self, images: int, *, warn: bool = True) -> Dissection:
        """Reduce `top_k` to the number of images, with a warning if that changes it."""
        if self.top_k <= images or self.method == "cos_cubed":
            return self
        message = f"labels.top_k is {self.top_k}, but there are only {images} images: all of them are used."
        if warn:
            warnings.warn(message, EludeSteerWarning, stacklevel=2)
        return replace(self, top_k=images)


_METHOD_DEFAULTS: dict[str, dict[str, float]] = {
    "soft_wpmi": {},
    "wpmi": {"top_k": 28, "a": 2.0, "lam": 0.6},
    "cos_cubed": {},
}


@dataclass(frozen=True, eq=False)
class ConceptScores:
    """The best words of each sub-unit, best first.

    Attributes:
        words: `(S, keep)` int64 index into the vocabulary.
        scores: `(S, keep)` float32.
    """

    words: torch.Tensor
    scores: torch.Tensor


def dissect(
    activations: torch.Tensor,
    similarities: torch.Tensor,
    settings: Dissection | None = None,
    *,
    keep: int = 32,
    block: int = 64,
) -> ConceptScores:
    """Find the best words for every sub-unit.

    Args:
        activations: `(N, S)` activation of each image's most active patch for each sub-unit.
        similarities: `(N, M)` cosines of images and words; the computation runs on its device.
        settings: method and its settings.
        keep: number of words to return for each sub-unit.
        block: number of sub-units computed together; never changes a bit of the result.

    Example:
        >>> best = dissect(activations, similarities)
        >>> [vocabulary[i] for i in best.words[:, 0]]
    """
    settings = (settings or Dissection()).clamp_top_k(len(similarities))
    dissector = Dissector.from_similarities(similarities, settings)
    block = -(-block // GROUP) * GROUP if settings.method == "cos_cubed" else block
    starts = range(0, activations.shape[1], block)
    rows = [dissector.evidence(activations[:, start : start + block].to(similarities.device)).cpu() for start in starts]
    if not rows:
        raise SpecError("there are no sub-units to label.")
    return dissector.best_concepts(torch.cat(rows), log_prior(lambda: rows), keep)


@dataclass(frozen=True, eq=False)
class Dissector:
    """The part of the computation that all sub-units share.

    Attributes:
        settings: method and its settings.
        prepared: `(N, M)` float32: P(word | image), or for `cos_cubed` the cubed and normalised cosines.
    """

    settings: Dissection
    prepared: torch.Tensor

    @classmethod
    def from_similarities(cls, similarities: torch.Tensor, settings: Dissection) -> Dissector:
        """Prepare the cosines of images and words, `(N, M)`."""
        if settings.method == "cos_cubed":
            return cls(settings, _cube_columns(similarities.float()))
        return cls(settings, torch.softmax(similarities.float() * settings.a, dim=1))

    def evidence(self, activations: torch.Tensor) -> torch.Tensor:
        """How well every word fits some sub-units before the prior, `(B, M)` float32.

        Args:
            activations: `(N, B)`; for `cos_cubed` the first sub-unit must be at a multiple of `GROUP`.
        """
        if self.settings.method == "cos_cubed":
            return _cosines(activations, self.prepared)
        # A stable sort: the first of equal images counts.
        order = activations.sort(dim=0, descending=True, stable=True).indices[: self.settings.top_k]  # (k, B)
        return self.evidence_from_images(order.T.contiguous())

    def evidence_from_images(self, images: torch.Tensor) -> torch.Tensor:
        """The same from the indices of each sub-unit's most active images, `(B, top_k)`, most active first."""
        # The digits equal those of the original implementation: every step in float32 and in its order, one sub-unit
        # at a time, because a logarithm may round differently beside others.
        certainty = _certainties(self.settings).to(self.prepared)[:, None]  # (k, 1)
        out = torch.empty(len(images), self.prepared.shape[1], device=self.prepared.device)
        for row, indices in enumerate(images):
            terms = self.prepared[indices]  # (k, M)
            if self.settings.method == "soft_wpmi":
                terms.sub_(1).mul_(certainty).add_(1)
            torch.sum(terms.add_(self.settings.min_prob).log_(), 0, out=out[row])
        return out

    def best_concepts(self, evidence: torch.Tensor, log_prior: torch.Tensor, keep: int = 32) -> ConceptScores:
        """The best words of some sub-units from their evidence `(B, M)`; ties go to the first in the vocabulary."""
        if self.settings.method != "cos_cubed":
            evidence = evidence - self.settings.lam * log_prior.float()
        values, words = evidence.topk(min(keep, evidence.shape[1]), dim=1)
        order = words.argsort(dim=1, stable=True)  # by word, then by value: equal values keep the order of words
        values, words = values.gather(1, order), words.gather(1, order)
        values, order = values.sort(dim=1, descending=True, stable=True)
        return ConceptScores(words.gather(1, order), values)


def log_prior(evidence: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor:
    """Log of the mean over all sub-units of how well each word fits, `(M,)` float64, added up in their order.

    Args:
        evidence: returns an iterator over the evidence of all sub-units, in order and in pieces `(B, M)`; called twice.
    """
    highest = torch.stack([piece.max(0).values for piece in evidence()]).max(0).values.double()
    total, count = torch.zeros_like(highest), 0
    for piece in evidence():
        count += len(piece)
        for row in piece:
            total += (row.double() - highest).exp()
    return total.log() + highest - math.log(count)


def _certainties(settings: Dissection) -> torch.Tensor:
    """Probability that each of the most active images belongs to a sub-unit, `(top_k,)`."""
    return settings.p_start - torch.arange(settings.top_k) / settings.top_k * (settings.p_start - settings.p_end)


def _cube_columns(values: torch.Tensor) -> torch.Tensor:
    """Centre the columns, cube them and scale them to length one."""
    values = (values - values.mean(0)) ** 3
    return values / values.norm(dim=0).clamp_min(1e-3)


def _cosines(activations: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    out = []
    for start in range(0, activations.shape[1], GROUP):
        part = activations[:, start : start + GROUP].float()
        count = part.shape[1]
        # One column at a time: the mean of a column may round differently beside other columns.
        cubed = torch.zeros(GROUP, len(part), device=part.device)
        for row in range(count):
            cubed[row] = _cube_columns(part[:, row].contiguous()[:, None])[:, 0]
        out.append((cubed @ prepared)[:count])
    return torch.cat(out)
