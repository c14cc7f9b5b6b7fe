"""Faithfulness: whether a model behaves the same after its layer is replaced, in outputs, a classifier and captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elude_steer.models.hooks import swap_module
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import PROMPT, Vlm


class R2:
    """Share of the variance of the true outputs that approximate ones explain, accumulated batch by batch.

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

    def add(self, true: torch.Tensor, approximate: torch.Tensor) -> None:
        """Add a batch of tokens, `(tokens, d_out)` each."""
        if true.shape != approximate.shape:
            raise ValueError(f"outputs of shape {tuple(true.shape)} are compared with {tuple(approximate.shape)}.")
        true, approximate = true.double().flatten(0, -2), approximate.double().flatten(0, -2)
        if not len(true):
            return
        self.residual += float((true - approximate).square().sum())
        # Combine the means and spreads of two parts into those of both; no sum grows so large that digits are lost.
        count, mean = len(true), true.mean(0)
        between = mean - self.mean
        total = self.count + count
        self.spread += float((true - mean).square().sum() + (between.square() * self.count * count / total).sum())
        self.mean = self.mean + between * count / total
        self.count = total

    @property
    def value(self) -> float:
        """1 where everything is explained, 0 where the mean would do as well."""
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
    baselines: Sequence[str] | None = None,
) -> float:
    """Share of images whose caption stays the same, word for word, when `layer` replaces the target layer.

    Args:
        vlm: the model.
        layer: replaces the target layer.
        images: the images.
        prompt: the prompt.
        size: batch size.
        baselines: captions of the unchanged model, where they are known.
    """
    same, count = 0, 0
    for _, batch in image_batches(vlm, images, lambda image: image, size):
        before = vlm.caption(batch, prompt=prompt) if baselines is None else baselines[count : count + len(batch)]
        with swap_module(vlm.model, vlm.layer_name, layer):
            after = vlm.caption(batch, prompt=prompt)
        same += sum(a == b for a, b in zip(before, after, strict=True))
        count += len(batch)
    if not count:
        raise ValueError("there are no images to caption.")
    return same / count


def linear_head(features: torch.Tensor, classes: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit a logistic regression on features `(n, d)` and classes `(n,)`; returns a function from features to logits."""
    from sklearn.linear_model import LogisticRegression

    mean, spread = features.double().mean(0), features.double().std(0).clamp_min(1e-12)
    model = LogisticRegression(max_iter=200).fit(((features.double() - mean) / spread).numpy(), classes.numpy())
    if len(model.classes_) < 3:
        raise ValueError(f"a head needs at least three classes, not {len(model.classes_)}.")
    weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)

    def logits(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((*x.shape[:-1], int(model.classes_.max()) + 1), -torch.inf, dtype=torch.float64)
        out[..., torch.from_numpy(model.classes_)] = ((x.double() - mean) / spread) @ weight.T + bias
        return out

    return logits


@torch.inference_mode()
def accuracy(
    logits: Callable[[Any], torch.Tensor], batches: Iterable[tuple[Any, Sequence[int] | torch.Tensor]]
) -> float:
    """Share of inputs that a classifier gets right.

    Args:
        logits: from a batch to logits, `(batch, classes)`.
        batches: pairs of a batch and its classes.
    """
    correct, count = 0, 0
    for inputs, classes in batches:
        predicted = logits(inputs).argmax(-1).cpu()
        correct += int((predicted == torch.as_tensor(classes)).sum())
        count += len(predicted)
    if not count:
        raise ValueError("there are no images to classify.")
    return correct / count
