"""What the tower makes of every photo, computed once and kept on disk: training reads it from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from demos.photoland.flickr8k import Photo
from demos.photoland.tower import SIDE

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as DINOv2 was trained
PIECE = 500  # photos in a file


def pixels(photo: Photo, *, mirrored: bool = False) -> torch.Tensor:
    """The pixels that the image processor makes of a photo: all of it, squeezed to a square, `(3, side, side)`."""
    with Image.open(photo.path) as image:
        image = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@torch.inference_mode()
def keep_features(tower: Any, photos: Sequence[Photo], folder: Path, *, mirrored: bool = False) -> np.ndarray:
    """Run photos through the tower, or read what an earlier run kept.

    Returns:
        `(photos, 1 + patches, width)` in half precision: the stream behind the last block, CLS first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for start in tqdm(range(0, len(photos), PIECE), desc=folder.name):
        path = folder / f"{start:05d}.npy"
        if not path.exists():
            piece = []
            for first in range(start, min(start + PIECE, len(photos)), 25):
                batch = photos[first : min(first + 25, start + PIECE)]
                inputs = torch.stack([pixels(photo, mirrored=mirrored) for photo in batch])
                states = tower(pixel_values=inputs, output_hidden_states=True).hidden_states
                piece.append(states[-1].half().numpy())
            unfinished = path.with_suffix(".part.npy")
            np.save(unfinished, np.concatenate(piece))
            unfinished.rename(path)
        pieces.append(np.load(path, mmap_mode="r"))
    return np.concatenate(pieces)
