"""Whether a model with another layer in it is still the same model: outputs, answers of a head, captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elude_steer.models.hooks import swap_module
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import PROMPT, Vlm


class R2:
    """The share of the variance of some outputs that others explain, gathered piece by piece.

    Example:
        >>> r2 = R2()
        >>> for q in inputs:
        ...     r2.add(layer(q), other(q))
        >>> r2.value
    """

    def __init__(self) -> None:
        self.count, self.residual = 0, 0.0
        self.mean: torch.Tensor | float = 0.0
        self.spread = 0.0

    def add(self, true: torch.Tensor, made: torch.Tensor) -> None:
        """Some tokens, `(tokens, d_out)` each."""
        if true.shape != made.shape:
            raise ValueError(f"outputs of shape {tuple(true.shape)} are compared with {tuple(made.shape)}.")
        true, made = true.double().flatten(0, -2), made.double().flatten(0, -2)
        if not len(true):
            return
        self.residual += float((true - made).square().sum())
        # Means and spreads of two parts become those of both; no sum grows so large that digits are lost.
        count, mean = len(true), true.mean(0)
        between = mean - self.mean
        whole = self.count + count
        self.spread += float((true - mean).square().sum() + (between.square() * self.count * count / whole).sum())
        self.mean = self.mean + between * count / whole
        self.count = whole

    @property
    def value(self) -> float:
        """1 where all is explained, 0 where the mean would do as well."""
        if not self.count:
            raise ValueError("there are no outputs to compare.")
        return 1 - self.residual / self.spread if self.spread else float(self.residual == 0)


def caption_agreement(
    vlm: Vlm,
    layer: nn.Module,
    images: Iterable[Any],
    *,
    prompt: str = PROMPT,
    size: int = 16,
    said: Sequence[str] | None = None,
) -> float:
    """The share of pictures whose caption is the same, word for word, with `layer` in the place of the target.

    Args:
        vlm: the model.
        layer: takes the target's place.
        images: the pictures.
        prompt: the question.
        size: pictures that are looked at together.
        said: the captions of the model as it is, where they are known.
    """
    same, count = 0, 0
    for _, batch in image_batches(vlm, images, lambda image: image, size):
        before = vlm.caption(batch, prompt=prompt) if said is None else said[count : count + len(batch)]
        with swap_module(vlm.model, vlm.layer_name, layer):
            after = vlm.caption(batch, prompt=prompt)
        same += sum(a == b for a, b in zip(before, after, strict=True))
        count += len(batch)
    if not count:
        raise ValueError("there are no pictures to caption.")
    return same / count


def linear_head(features: torch.Tensor, classes: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A logistic regression from features, `(n, d)`, to classes, `(n,)`: features to logits, `(…, classes)`."""
    from sklearn.linear_model import LogisticRegression

    mean, spread = features.double().mean(0), features.double().std(0).clamp_min(1e-12)
    found = LogisticRegression(max_iter=200).fit(((features.double() - mean) / spread).numpy(), classes.numpy())
    if len(found.classes_) < 3:
        raise ValueError(f"a head tells at least three classes apart, not {len(found.classes_)}.")
    weight, bias = torch.from_numpy(found.coef_), torch.from_numpy(found.intercept_)

    def logits(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((*x.shape[:-1], int(found.classes_.max()) + 1), -torch.inf, dtype=torch.float64)
        out[..., torch.from_numpy(found.classes_)] = ((x.double() - mean) / spread) @ weight.T + bias
        return out

    return logits


@torch.inference_mode()
def accuracy(
    logits: Callable[[Any], torch.Tensor], batches: Iterable[tuple[Any, Sequence[int] | torch.Tensor]]
) -> float:
    """How often a head is right.

    Args:
        logits: from a batch to the head's answers, `(batch, classes)`.
        batches: pairs of a batch and its classes.
    """
    right, count = 0, 0
    for inputs, classes in batches:
        found = logits(inputs).argmax(-1).cpu()
        right += int((found == torch.as_tensor(classes)).sum())
        count += len(found)
    if not count:
        raise ValueError("there are no pictures to classify.")
    return right / count
