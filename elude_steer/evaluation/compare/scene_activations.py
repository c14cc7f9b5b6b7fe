"""Toyland's scenes with the activations of the layer, on disk, and what each of their tokens shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer import toyland
from elude_steer.atlas.build.activation_cache import ActivationCache
from elude_steer.evaluation.compare.image_activations import ImageActivations
from elude_steer.models.images import image_set
from elude_steer.models.vlm import Vlm
from elude_steer.toyland.scenes import CLUTTER
from elude_steer.utils.files import read_array, write_array
from elude_steer.utils.progress import track


@dataclass(frozen=True, eq=False)
class SceneActivations(ImageActivations):
    """Some scenes of one seed; sets of one seed share the files of their cache.

    Attributes:
        shown: `(tokens,)` what each token shows, one scene after the other.
        counts: `(images,)` number of tokens of each scene.
    """

    shown: np.ndarray
    counts: np.ndarray

    @classmethod
    def prepare(cls, vlm: Vlm, encoder: Any, seed: int, count: int, folder: Path) -> SceneActivations:
        """Run the tower and the dual encoder on the first `count` scenes of a seed, unless the folder holds them."""
        stored = folder / f"scenes-{seed}"
        stored.mkdir(parents=True, exist_ok=True)
        cache = ActivationCache(vlm, stored, dtype=torch.float16)
        items = list(image_set(f"toyland:{seed}", limit=count).items())
        names = ("vectors", "shown", "counts")
        paths = {name: folder / f"scenes-{seed}-{count}-{name}.npy" for name in names}
        if not all(path.exists() for path in paths.values()):
            rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
            pairs = zip(items, toyland.scenes(seed, count), strict=True)
            for item, scene in track(pairs, "encoding", "scenes", count):
                list(cache.activations([item]))  # stores them
                boxes = vlm.grid(scene.image.size).boxes.reshape(-1, 4)
                rows["vectors"].append(encoder.embed_images([scene.image]).numpy())
                rows["shown"].append(np.array(scene.names_at(boxes)))
                rows["counts"].append(np.array([len(boxes)]))
            for name, path in paths.items():
                write_array(path, np.concatenate(rows[name]))
        return cls(cache, items, *map(read_array, paths.values()))

    def shown_by_image(self) -> Iterator[np.ndarray]:
        """What the tokens of one scene after the other show, `(tokens,)`."""
        ends = np.cumsum(self.counts).tolist()
        return (self.shown[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True))

    def sample(self, count: int) -> tuple[torch.Tensor, np.ndarray]:
        """Up to `count` tokens, evenly spread: the layer's inputs `(tokens, d_in)`, and what they show."""
        rows = np.linspace(0, len(self.shown) - 1, min(count, len(self.shown))).astype(int)
        starts = np.cumsum(self.counts) - self.counts
        parts = [
            inputs[rows[(rows >= start) & (rows < start + len(inputs))] - start]
            for inputs, start in zip(self.layer_inputs(), starts, strict=True)
        ]
        return torch.cat(parts), self.shown[rows]

    def instance_classes(self, places: np.ndarray) -> np.ndarray:
        """What each stored instance shows, as a number: `(instances,)`, -1 for clutter."""
        starts = np.cumsum(self.counts) - self.counts
        numbers = class_numbers(self.shown[starts[places["image"]] + places["token"]]).numpy()
        return np.where(numbers == 0, -1, numbers)


def class_numbers(shown: np.ndarray) -> torch.Tensor:
    """A number for what each token shows, the same in every set of scenes."""
    numbers = {name: number for number, name in enumerate((CLUTTER, *toyland.OBJECTS, *toyland.PLACES))}
    return torch.tensor([numbers[str(name)] for name in shown])
