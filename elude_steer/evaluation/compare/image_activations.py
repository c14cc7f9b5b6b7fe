"""Images with the activations of the layer, on disk, so that every method of a comparison reads the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.build.activation_cache import ActivationCache
from elude_steer.models.dual_encoder import DualEncoder, EmbeddingCache
from elude_steer.models.images import Item, image_set
from elude_steer.models.vlm import Vlm
from elude_steer.utils.files import read_array, write_array
from elude_steer.utils.progress import track


@dataclass(frozen=True, eq=False)
class ImageActivations:
    """Some images.

    Attributes:
        cache: the layer's inputs and the residual stream, in float16.
        items: the images, as items of an image set.
        vectors: `(images, d)` embeddings of the images by the dual encoder.
    """

    cache: ActivationCache
    items: Sequence[Item]
    vectors: np.ndarray

    @classmethod
    def of_folder(
        cls, vlm: Vlm, encoder: DualEncoder, images: Path, folder: Path, limit: int | None = None
    ) -> ImageActivations:
        """Run the tower and the dual encoder on the images of a folder, unless `folder` holds their activations."""
        folder.mkdir(parents=True, exist_ok=True)
        cache = ActivationCache(vlm, folder, dtype=torch.float16)
        items = list(image_set(images, limit=limit).items())
        path = folder / f"vectors-{len(items)}.npy"
        if not path.exists():
            rows, vectors = [], EmbeddingCache(encoder)
            for item in track(items, "encoding", "images"):
                list(cache.activations([item]))  # stores them
                rows.append(vectors.embed([item.read()]).numpy())
            write_array(path, np.concatenate(rows))
        return cls(cache, items, read_array(path))

    def __len__(self) -> int:
        return len(self.items)

    def layer_inputs(self) -> Iterator[torch.Tensor]:
        """The layer's inputs of one image after the other, `(tokens, d_in)` float32."""
        for item in track(self.items, "reading", "images"):  # one by one: a batch of several rounds differently
            for _, inputs in self.cache.layer_inputs([item]):
                yield inputs.flatten(0, 1).float()

    def activations(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs `(tokens, d_in)` and stream `(tokens, d_out)` of one image after the other, float32."""
        for item in track(self.items, "reading", "images"):
            for _, (inputs, stream) in self.cache.activations([item]):
                yield inputs.flatten(0, 1).float(), stream.flatten(0, 1).float()
