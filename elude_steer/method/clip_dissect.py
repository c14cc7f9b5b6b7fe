"""From what images drive sub-units, and what words fit images, to the words that fit sub-units (CLIP-Dissect).

Scores of one sub-unit never depend on which others are computed with it, except through the prior, which runs over all
sub-units of the layer; so neither the size of blocks nor the number of processes changes a label.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch

from elude_steer.errors import EludeSteerWarning, SpecError

# Products of cos-cubed are always of this many sub-units: another shape may round differently.
GROUP = 32


@dataclass(frozen=True)
class Dissection:
    """How words are found for sub-units.

    Attributes:
        method: `soft_wpmi`, `wpmi` or `cos_cubed`.
        top_k: how many of a sub-unit's strongest images count.
        a: sharpness of an image's distribution over the words.
        lam: weight of how well a word fits all sub-units.
        min_prob: keeps logarithms finite.
        p_start: how surely the strongest image belongs to the sub-unit.
        p_end: how surely the weakest of the `top_k` does.
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
        """The method with its own defaults; settings that are None keep them.

        Example:
            >>> Dissection.for_method("wpmi", a=5.0).top_k
            28
        """
        if method not in _OWN:
            raise SpecError(f"the method is '{method}'; it is one of {', '.join(map(repr, _OWN))}.")
        given = {name: value for name, value in settings.items() if value is not None}
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise SpecError(f"a dissection has no setting {', '.join(map(repr, sorted(unknown)))}.")
        return cls(method, **{**_OWN[method], **given})  # type: ignore[arg-type]

    def clamp_top_k(self, images: int, *, warn: bool = True) -> Dissection:
        """The same with no more images than there are; says so where that changes it."""
        if self.top_k <= images or self.method == "cos_cubed":
            return self
        message = f"labels.top_k is {self.top_k}, but there are only {images} images: all of them are used."
        if warn:
            warnings.warn(message, EludeSteerWarning, stacklevel=2)
        return Dissection(**{**self.__dict__, "top_k": images})


_OWN: dict[str, dict[str, float]] = {"soft_wpmi": {}, "wpmi": {"top_k": 28, "a": 2.0, "lam": 0.6}, "cos_cubed": {}}


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
    """Finds words for every sub-unit.

    Args:
        activations: `(N, S)` of each image's strongest patch for each sub-unit.
        similarities: `(N, M)` cosines of images and words; its device does the work.
        settings: method and its numbers.
        keep: how many words are kept for each sub-unit.
        block: how many sub-units are looked at together; never changes a bit of the result.

    Example:
        >>> named = dissect(activations, similarities)
        >>> [vocabulary[i] for i in named.words[:, 0]]
    """
    settings = (settings or Dissection()).clamp_top_k(len(similarities))
    fit = Dissector.from_similarities(similarities, settings)
    block = -(-block // GROUP) * GROUP if settings.method == "cos_cubed" else block
    starts = range(0, activations.shape[1], block)
    rows = [fit.evidence(activations[:, start : start + block].to(similarities.device)).cpu() for start in starts]
    if not rows:
        raise SpecError("there are no sub-units to name.")
    return fit.best_concepts(torch.cat(rows), log_prior(lambda: rows), keep)


@dataclass(frozen=True, eq=False)
class Dissector:
    """What is the same for all sub-units.

    Attributes:
        settings: method and its numbers.
        prepared: `(N, M)` float32: P(word | image), or the cubed and normalised cosines.
    """

    settings: Dissection
    prepared: torch.Tensor

    @classmethod
    def from_similarities(cls, similarities: torch.Tensor, settings: Dissection) -> Dissector:
        """From the cosines of images and words, `(N, M)`."""
        if settings.method == "cos_cubed":
            return cls(settings, _cubed(similarities.float()))
        return cls(settings, torch.softmax(similarities.float() * settings.a, dim=1))

    def evidence(self, activations: torch.Tensor) -> torch.Tensor:
        """How well every word fits some sub-units before the prior, `(B, M)` float32.

        Args:
            activations: `(N, B)`; for `cos_cubed` starting at a multiple of `GROUP`.
        """
        if self.settings.method == "cos_cubed":
            return _cosines(activations, self.prepared)
        # A stable sort: of equal images the first counts.
        order = activations.sort(dim=0, descending=True, stable=True).indices[: self.settings.top_k]  # (k, B)
        return self.evidence_from_images(order.T.contiguous())

    def evidence_from_images(self, images: torch.Tensor) -> torch.Tensor:
        """The same from the numbers of each sub-unit's strongest images, `(B, top_k)`, strongest first."""
        # Digits as the original's: every step in float32, in its order. One sub-unit at a time, because a logarithm
        # may round differently beside others.
        certain = _certainties(self.settings).to(self.prepared)[:, None]  # (k, 1)
        out = torch.empty(len(images), self.prepared.shape[1], device=self.prepared.device)
        for row, numbers in enumerate(images):
            terms = self.prepared[numbers]  # (k, M)
            if self.settings.method == "soft_wpmi":
                terms.sub_(1).mul_(certain).add_(1)
            torch.sum(terms.add_(self.settings.min_prob).log_(), 0, out=out[row])
        return out

    def best_concepts(self, rows: torch.Tensor, log_prior: torch.Tensor, keep: int = 32) -> ConceptScores:
        """The best words of some sub-units from their evidence `(B, M)`; of equal ones the first in the vocabulary."""
        if self.settings.method != "cos_cubed":
            rows = rows - self.settings.lam * log_prior.float()
        values, words = rows.topk(min(keep, rows.shape[1]), dim=1)
        order = words.argsort(dim=1, stable=True)  # by word, then by value: equal values keep the order of words
        values, words = values.gather(1, order), words.gather(1, order)
        values, order = values.sort(dim=1, descending=True, stable=True)
        return ConceptScores(words.gather(1, order), values)


def log_prior(rows: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor:
    """Log of the mean over all sub-units of how well each word fits, `(M,)` float64, added up in their order.

    Args:
        rows: makes an iterable over the evidence of all sub-units, `(B, M)` pieces in order; walked twice.
    """
    highest = torch.stack([piece.max(0).values for piece in rows()]).max(0).values.double()
    total, count = torch.zeros_like(highest), 0
    for piece in rows():
        count += len(piece)
        for row in piece:
            total += (row.double() - highest).exp()
    return total.log() + highest - math.log(count)


def _certainties(settings: Dissection) -> torch.Tensor:
    """How surely each of the strongest images belongs to a sub-unit, `(top_k,)`."""
    return settings.p_start - torch.arange(settings.top_k) / settings.top_k * (settings.p_start - settings.p_end)


def _cubed(values: torch.Tensor) -> torch.Tensor:
    values = (values - values.mean(0)) ** 3
    return values / values.norm(dim=0).clamp_min(1e-3)


def _cosines(activations: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    out = []
    for start in range(0, activations.shape[1], GROUP):
        part = activations[:, start : start + GROUP].float()
        count = part.shape[1]
        # Centred and cubed one by one: the mean of a column may round differently beside other columns.
        whole = torch.zeros(GROUP, len(part), device=part.device)
        for row in range(count):
            whole[row] = _cubed(part[:, row].contiguous()[:, None])[:, 0]
        out.append((whole @ prepared)[:count])
    return torch.cat(out)
