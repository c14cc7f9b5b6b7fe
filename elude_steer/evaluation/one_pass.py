"""What an atlas is measured on: pictures that are read when their turn comes, and one pass of the tower for all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.pipeline import load_tower
from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.measures.faithfulness import R2
from elude_steer.evaluation.measures.monosemanticity import Peaks
from elude_steer.method.layers import layer_parameters, split_layer
from elude_steer.models.images import ImageSet, Item, image_set
from elude_steer.models.vision import Tower
from elude_steer.specs import ModelSpec


def tower_of(atlas: Atlas, model: str | None = None, device: str | None = None) -> Tower:
    """The model that an atlas was built for, or another copy of it."""
    known = atlas.about["spec"]["model"]
    tower = load_tower(ModelSpec(**{**known, **({"id": model, "revision": None} if model else {})}), device)
    atlas.check(tower.layer)
    return tower


def source_of(atlas: Atlas, images: Any, limit: int) -> ImageSet:
    """Where pictures are taken from: of files all, so that they can be spread over all folders; of others the first."""
    known = atlas.about["spec"]["images"]
    source = known["source"] if images is None else images
    if source is None:
        raise SpecError("the atlas does not say which pictures it was made from; give some: --images FOLDER.")
    files = isinstance(source, str | Path) and Path(source).exists()
    return image_set(source, split=known["split"], column=known["column"], limit=None if files else limit)


def items_of(source: ImageSet, limit: int) -> list[Item]:
    """So many pictures of a source, spread over it, none of them read yet."""
    length = source.length
    chosen = None if length is None or length <= limit else {number * length // limit for number in range(limit)}
    items = list(islice((item for item in source.items() if chosen is None or item.index in chosen), limit))
    if not items:
        raise ImageError(f"{source.name} gives no pictures to measure on.")
    return items


def read_items(items: Sequence[Item], size: int) -> Iterator[list[tuple[Item, Any]]]:
    """Pictures in batches of at most `size`; those that cannot be read are left out and named in a warning."""
    skipped: dict[str, str] = {}
    for start in range(0, len(items), size):
        batch = items[start : start + size]
        read = [(item, got[0]) for item in batch if (got := read_item(item, skipped)) is not None]
        if read:
            yield read
    if skipped:
        named = "; ".join(f"{name} ({why})" for name, why in list(skipped.items())[:5])
        more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        if len(skipped) == len(items):
            raise ImageError(f"none of the {len(items)} pictures can be read: {named}{more}.")
        text = f"{len(skipped)} pictures cannot be read and were left out: {named}{more}"
        warnings.warn(text, EludeSteerWarning, stacklevel=2)


@dataclass(eq=False)
class Viewing:
    """What one pass over the pictures gave the measures.

    Attributes:
        items: those that could be read.
        r2: the explicit layer beside the layer, both in the precision of the model.
        peaks: the pictures that `sub-units`, and `units` before the split, fire most for; empty where not asked for.
    """

    items: list[Item] = field(default_factory=list)
    r2: R2 = field(default_factory=R2)
    peaks: dict[str, Peaks] = field(default_factory=dict)


@torch.inference_mode()
def view(atlas: Atlas, tower: Tower, items: Sequence[Item], *, sums: bool = True, peaks: bool = True) -> Viewing:
    """One pass of the tower; as many pictures go through it together as when the atlas was built."""
    weight, bias = (tensor.float() for tensor in layer_parameters(tower.layer))
    found = Viewing()
    if sums:
        layer = _for_tokens(tower.layer)
        explicit = split_layer(layer, atlas.members().to(tower.device), atlas.units.to(tower.device))
    if peaks:
        every = atlas.sub_units(range(len(atlas)), tower.layer)
        found.peaks = {"sub-units": Peaks(len(atlas), len(weight)), "units": Peaks(len(weight), len(weight))}
    for batch in read_items(items, int(atlas.about["spec"]["tokens"]["batch_size"])):
        found.items += [item for item, _ in batch]
        for tiles in tower.encode([picture for _, picture in batch]):  # (tiles, tokens, d_in)
            q = tiles[:, tower.token_indices(tiles.shape[1]).to(tiles.device)].flatten(0, 1)
            if sums:
                given = q.to(layer.weight.dtype)
                found.r2.add(layer(given).float(), explicit(given).float())
            if peaks:
                out = q.float() @ weight.T + bias  # (tokens, d_out)
                found.peaks["sub-units"].add(every.activations(q), out)
                found.peaks["units"].add(out, out)
    return found


def _for_tokens(layer: nn.Module) -> nn.Linear:
    """The layer itself, or what a 1x1 convolution is to each place of a map."""
    if isinstance(layer, nn.Linear):
        return layer
    weight, bias = layer_parameters(layer)
    made = nn.Linear(weight.shape[1], len(weight), device=weight.device, dtype=next(layer.parameters()).dtype)
    made.weight.copy_(weight)
    made.bias.copy_(bias)
    return made
