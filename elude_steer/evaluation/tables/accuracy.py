"""Accuracy of a classifier when a dictionary's reconstruction takes the layer's place: a head, or a linear probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.evaluate import read_batches
from elude_steer.evaluation.measures.classifier_head import find_classes
from elude_steer.evaluation.measures.faithfulness import accuracy, linear_head
from elude_steer.models.hooks import find_layer, swap_module
from elude_steer.models.images import Item
from elude_steer.models.loading import load_image_processor, load_pretrained
from elude_steer.models.vision import Tower, read_positions
from elude_steer.utils import optional
from elude_steer.utils.progress import track

MIN_CLASSES = 3  # fewer need no classifier of several classes
_BATCH = 16  # images


class Reconstruction(nn.Module):
    """A dictionary in place of the layer that it was made from."""

    def __init__(self, dictionary: Dictionary, layer: nn.Module) -> None:
        super().__init__()
        self.dictionary, self.conv = dictionary, layer if isinstance(layer, nn.Conv2d) else None

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """The reconstruction of the layer's output, in the precision of its input."""
        if self.conv is None:
            return self.dictionary.reconstruct(q.float()).to(q.dtype)
        rows = read_positions(self.conv, q).movedim(1, -1).float()
        return self.dictionary.reconstruct(rows).movedim(-1, 1).to(q.dtype)


@dataclass(frozen=True, eq=False)
class Head:
    """An image classifier on the backbone.

    Attributes:
        model: the classifier, which contains the backbone.
        layer_name: dotted name of the target layer in it.
        layer: the layer itself.
        logits: from images to logits, `(images, classes)`.
        names: the classes: number -> names, separated by commas.
    """

    model: nn.Module
    layer_name: str
    layer: nn.Module
    logits: Callable[[Sequence[Any]], torch.Tensor]
    names: Mapping[int, str]

    @torch.inference_mode()
    def accuracy(self, items: Sequence[Item], classes: Sequence[int], dictionary: Dictionary | None = None) -> float:
        """The share of readable images that the classifier gets right, with a dictionary in the layer's place."""
        numbers = {item.index: number for item, number in zip(items, classes, strict=True)}

        def batches() -> Iterator[tuple[list[Any], list[int]]]:
            for batch in track(read_batches(items, _BATCH), "classifying", "batches", -(-len(items) // _BATCH)):
                yield [image for _, image in batch], [numbers[item.index] for item, _ in batch]

        changed = None if dictionary is None else Reconstruction(dictionary, self.layer)
        with nullcontext() if changed is None else swap_module(self.model, self.layer_name, changed):
            return accuracy(self.logits, batches())

    @torch.inference_mode()
    def predict(self, items: Sequence[Item]) -> dict[int, int]:
        """The class that the classifier sees in each readable image, by the index of the image."""
        found: dict[int, int] = {}
        for batch in track(read_batches(items, _BATCH), "classifying", "batches", -(-len(items) // _BATCH)):
            predicted = self.logits([image for _, image in batch]).argmax(-1).tolist()
            found |= {item.index: number for (item, _), number in zip(batch, predicted, strict=True)}
        return found

    def numbers(self, names: Sequence[str], all_names: Sequence[str]) -> list[int]:
        """The classes of images, from names such as `class/image`."""
        return find_classes(names, all_names, self.names)


def load_head(tower: Tower, head: str | None, device: str | None, *, trust_remote_code: bool = False) -> Head | None:
    """The classifier of a table: one of transformers by its id, or the head that a model of timm brings; or None.

    Args:
        tower: the backbone.
        head: an image classifier of transformers on the same backbone.
        device: where it runs.
        trust_remote_code: whether code that comes with it may run.
    """
    if head is None:
        return _own_head(tower)
    from transformers import AutoModelForImageClassification

    model = load_pretrained(AutoModelForImageClassification, head, device=device, trust_remote_code=trust_remote_code)
    processor = load_image_processor(head, trust_remote_code=trust_remote_code)
    name, layer = find_layer(model, tower.layer_name)
    own, other = (next(iter(module.parameters())).detach().float().cpu() for module in (tower.layer, layer))
    if own.shape != other.shape or not torch.allclose(own, other, atol=1e-3):
        raise SpecError(f"head '{head}' is on another backbone: its layer '{name}' has other weights.")

    def logits(images: Sequence[Any]) -> torch.Tensor:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
        return torch.as_tensor(model(pixel_values=pixels.to(model.device)).logits)

    return Head(model, name, layer, logits, model.config.id2label)


def _own_head(tower: Tower) -> Head | None:
    """The head of a model of timm; None for other models and for those without one."""
    model: Any = tower.model
    count = getattr(model, "num_classes", 0)
    if not hasattr(model, "pretrained_cfg") or not count:
        return None
    data = optional.require("timm", "the head of the model").data
    subset = data.infer_imagenet_subset(model)
    names = {number: str(number) for number in range(count)}
    if subset is not None:
        info = data.ImageNetInfo(subset)
        names = {n: f"{info.index_to_label_name(n)}, {info.index_to_description(n)}" for n in range(count)}

    def logits(images: Sequence[Any]) -> torch.Tensor:
        inputs = tower.prepare(images)
        if not isinstance(inputs, torch.Tensor):
            raise SpecError("a head of timm takes tensors.")
        return torch.as_tensor(model(inputs.to(tower.device)))

    return Head(model, tower.layer_name, tower.layer, logits, names)


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear classifier of the mean stream behind the layer's block, for backbones without a head.

    Where the layer is the last of its tower, that is the tower's output before its norm. Then nothing but the layer has
    to run again: a dictionary changes the stream by the change of the layer's output.

    Attributes:
        logits: from mean streams `(images, d_out)` to logits.
        scale: by what the layer's output is multiplied before it enters the stream; None for 1.
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    scale: torch.Tensor | None

    @classmethod
    def fit(cls, tower: Tower, means: torch.Tensor, classes: torch.Tensor) -> Probe:
        """Fit it to mean streams of images, `(images, d_out)`, and their classes."""
        return cls(linear_head(means, classes), tower.stream_scale)

    def mean_stream(self, stream: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """The mean stream `(d_out,)` of an image whose layer's output changes by `(tokens, d_out)`."""
        scaled = change if self.scale is None else change * self.scale.to(change)
        return (stream + scaled).mean(0).cpu()

    def accuracy(self, means: torch.Tensor, classes: Sequence[int]) -> float:
        """The share of images that it gets right."""
        return accuracy(self.logits, [(means, classes)])
