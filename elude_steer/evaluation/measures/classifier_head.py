"""A classifier on the backbone that an atlas splits: is it as often right with the explicit layer?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import PurePosixPath
from typing import Any

import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.measures.faithfulness import accuracy
from elude_steer.method.layers import split_layer
from elude_steer.models.hooks import find_layer, swap_module
from elude_steer.models.images import Item
from elude_steer.models.loading import load_image_processor, load_pretrained


def head_accuracy(
    model_id: str,
    atlas: Atlas,
    items: Sequence[Item],
    names: Sequence[str],
    *,
    device: str | None = None,
    size: int = 16,
) -> tuple[float, float]:
    """How often a classifier is right with the explicit layer, and as it is.

    Args:
        model_id: an image classifier of transformers on the atlas's backbone, such as DINOv2 with its linear head.
        atlas: says what the layer is split into.
        items: pictures that can be read; their folders are the classes.
        names: of all pictures there are, which tell what folders there are.
        device: where it runs.
        size: pictures that are looked at together.
    """
    from transformers import AutoModelForImageClassification

    model = load_pretrained(AutoModelForImageClassification, model_id, device=device)
    processor = load_image_processor(model_id)
    name, layer = find_layer(model, str(atlas.about["layer"]))
    atlas.check(layer)
    classes = _classes([item.id for item in items], names, model.config.id2label)

    def logits(batch: Sequence[Any]) -> torch.Tensor:
        pixels = processor(images=list(batch), return_tensors="pt")["pixel_values"]
        return torch.as_tensor(model(pixel_values=pixels.to(model.device)).logits)

    def batches() -> Iterator[tuple[list[Any], list[int]]]:
        for start in range(0, len(items), size):
            yield [item.read()[0] for item in items[start : start + size]], classes[start : start + size]

    explicit = split_layer(layer, atlas.members().to(model.device), atlas.units.to(model.device))
    found = []
    for way in (swap_module(model, name, explicit), nullcontext()):
        with way:
            found.append(accuracy(logits, batches()))
    return found[0], found[1]


def _classes(names: Sequence[str], every: Sequence[str], known: Mapping[int, str]) -> list[int]:
    """A picture's class from its folder: the class's name, one of several between commas, or its number.

    Folders that are none of these, such as ImageNet's, stand for the classes in their order where they are as many.
    """
    folders = [PurePosixPath(name).parent.name for name in names]
    numbers = {part.strip().lower(): number for number, text in known.items() for part in [*text.split(","), text]}
    numbers |= {str(number): number for number in known}
    if all(folder.lower() in numbers for folder in folders):
        return [numbers[folder.lower()] for folder in folders]
    there = sorted({PurePosixPath(name).parent.name for name in every})
    if len(there) != len(known):
        unknown = next(folder for folder in folders if folder.lower() not in numbers)
        raise SpecError(
            f"the classifier knows no class '{unknown}'; put pictures into folders named after its {len(known)} "
            f"classes ('{known[min(known)]}', …), or into as many folders in their order, not {len(there)}."
        )
    order = {folder: number for number, folder in enumerate(there)}
    return [order[folder] for folder in folders]
