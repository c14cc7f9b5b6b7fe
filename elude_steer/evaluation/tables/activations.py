"""What all methods of a table read: tokens of several draws from one pass of the tower, and activations of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.build.activation_cache import ActivationCache
from elude_steer.errors import ImageError
from elude_steer.models.images import Item
from elude_steer.models.vision import Tower
from elude_steer.utils.files import read_array, write_array
from elude_steer.utils.progress import track


class PoolingCache(ActivationCache):
    """Gives layer inputs to a build, and on the way stores the mean stream of some images.

    Args:
        tower: the model.
        folder: where the means are stored.
        step: every so many-th image has one; 0 for none.
    """

    def __init__(self, tower: Tower, folder: Path, step: int) -> None:
        super().__init__(tower, None)
        self.means, self.step = folder, step

    def encode(self, items: Sequence[Item], images: Sequence[Any]) -> list[torch.Tensor]:
        """Run the tower on images that have just been read; returns the layer inputs of each."""
        if not self.step or all(item.index % self.step for item in items):
            return self.tower.encode(images)
        pairs = self.tower.streams(images)
        for item, (_, stream) in zip(items, pairs, strict=True):
            if item.index % self.step == 0:
                write_array(_mean_path(self.means, item.index), mean_of_tokens(self.tower, stream).cpu().numpy())
        return [inputs for inputs, _ in pairs]


def mean_of_tokens(tower: Tower, values: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that count as instances, `(d,)` float32, of `(tiles, tokens, d)`."""
    return values[:, tower.token_indices(values.shape[1]).to(values.device)].flatten(0, 1).float().mean(0)


def read_means(folder: Path, items: Sequence[Item]) -> tuple[list[Item], torch.Tensor]:
    """The items whose mean stream is stored, and the means, `(items, d)`."""
    found = [item for item in items if _mean_path(folder, item.index).exists()]
    if not found:
        raise ImageError(f"'{folder}' holds no means of images; delete the folder above it and run again.")
    return found, torch.from_numpy(np.stack([read_array(_mean_path(folder, item.index)) for item in found]))


def _mean_path(folder: Path, index: int) -> Path:
    return folder / f"{index:08d}.npy"


class HeldOut:
    """Images to measure on, with the layer's inputs and the stream behind it.

    They are stored in half precision while there is room on the disk, so that the tower runs once for all methods. On a
    CPU it runs on one image at a time, so that the same numbers come out after an interruption.

    Args:
        tower: the model.
        items: the images; those that cannot be read are left out.
        folder: where activations are stored.
        batch: images in one pass on a GPU.
    """

    def __init__(self, tower: Tower, items: Sequence[Item], folder: Path, batch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tower, self.items = tower, list(items)
        self.cache = ActivationCache(tower, folder, dtype=torch.float16)
        self.batch = batch if tower.device.type != "cpu" else 1

    def __len__(self) -> int:
        return len(self.items)

    def activations(self) -> Iterator[tuple[Item, torch.Tensor, torch.Tensor]]:
        """Each readable image with its layer inputs `(tokens, d_in)` and stream `(tokens, d_out)`, float32."""
        for start in track(range(0, len(self.items), self.batch), "reading", "batches"):
            for item, (inputs, stream) in self.cache.activations(self.items[start : start + self.batch]):
                counted = self.tower.token_indices(inputs.shape[1]).to(inputs.device)
                yield item, inputs[:, counted].flatten(0, 1).float(), stream[:, counted].flatten(0, 1).float()

    def layer_inputs(self) -> Iterator[torch.Tensor]:
        """The layer's inputs of one readable image after the other."""
        return (inputs for _, inputs, _ in self.activations())
