"""Accuracy of an image classifier on the backbone that an atlas splits, with the original and the explicit layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from elude_steer.utils.progress import track


def head_accuracy(
    model_id: str,
    atlas: Atlas,
    items: Sequence[Item],
    names: Sequence[str],
    *,
    device: str | None = None,
    size: int = 16,
    trust_remote_code: bool = False,
) -> tuple[float, float]:
    """The accuracy of a classifier with the explicit layer, and with the original one.

    Args:
        model_id: an image classifier of transformers on the atlas's backbone, such as DINOv2 with its linear head.
        atlas: the split of the layer.
        items: readable images; their folders are the classes.
        names: ids of all images of the source, from which all folders are known.
        device: where the model runs.
        size: batch size.
        trust_remote_code: whether code that comes with the classifier may run.
    """
    from transformers import AutoModelForImageClassification

    model = load_pretrained(
        AutoModelForImageClassification, model_id, device=device, trust_remote_code=trust_remote_code
    )
    processor = load_image_processor(model_id, trust_remote_code=trust_remote_code)
    name, layer = find_layer(model, str(atlas.about["layer"]))
    atlas.check(layer)
    classes = find_classes([item.id for item in items], names, model.config.id2label)

    def logits(batch: Sequence[Any]) -> torch.Tensor:
        pixels = processor(images=list(batch), return_tensors="pt")["pixel_values"]
        return torch.as_tensor(model(pixel_values=pixels.to(model.device)).logits)

    def batches() -> Iterator[tuple[list[Any], list[int]]]:
        for start in track(range(0, len(items), size), "classifying", "batches"):
            yield [item.read()[0] for item in items[start : start + size]], classes[start : start + size]

    explicit = split_layer(layer, atlas.members().to(model.device), atlas.units.to(model.device))
    with swap_module(model, name, explicit):
        explicit_accuracy = accuracy(logits, batches())
    return explicit_accuracy, accuracy(logits, batches())


def find_classes(names: Sequence[str], all_names: Sequence[str], classes: Mapping[int, str]) -> list[int]:
    """The class of each image, from its folder: a class's name, one of its names between commas, or its number.

    Folders with other names, such as ImageNet's, stand for the classes in alphabetical order, if there are as many.
    """
    folders = [PurePosixPath(name).parent.name for name in names]
    numbers = {part.strip().lower(): number for number, text in classes.items() for part in [*text.split(","), text]}
    numbers |= {str(number): number for number in classes}
    if all(folder.lower() in numbers for folder in folders):
        return [numbers[folder.lower()] for folder in folders]
    all_folders = sorted({PurePosixPath(name).parent.name for name in all_names})
    if len(all_folders) != len(classes):
        unknown = next(folder for folder in folders if folder.lower() not in numbers)
        raise SpecError(
            f"the classifier has no class '{unknown}'; put images into folders named after its {len(classes)} "
            f"classes ('{classes[min(classes)]}', …), or into as many folders in their order, not {len(all_folders)}."
        )
    order = {folder: number for number, folder in enumerate(all_folders)}
    return [order[folder] for folder in folders]
