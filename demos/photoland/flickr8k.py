"""Flickr8k: photos with five captions each, and the lists of its training, development and test photos.

The folder is the data set as its authors distribute it: `Flicker8k_Dataset/` with the photos, `Flicker8k_text/` with
the captions and lists. The photos belong to their owners and may be used for research and education; none of them, and
no thumbnail of one, is part of this project.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elude_steer.errors import ImageError

SPLITS = {"train": "Flickr_8k.trainImages.txt", "dev": "Flickr_8k.devImages.txt", "test": "Flickr_8k.testImages.txt"}
LONGEST = 20  # words of a caption that are learnt; 3 % are longer


@dataclass(frozen=True)
class Photo:
    """A photo and what five people wrote about it, in lower case and without punctuation."""

    path: Path
    captions: tuple[str, ...]


def read_photos(folder: Path, split: str) -> list[Photo]:
    """Read the photos of `train`, `dev` or `test`, in the order of its list."""
    texts, images = folder / "Flicker8k_text", folder / "Flicker8k_Dataset"
    if not (texts / "Flickr8k.token.txt").exists():
        raise ImageError(f"'{folder}' is not Flickr8k: it has no Flicker8k_text/Flickr8k.token.txt.")
    captions: dict[str, list[str]] = {}
    for line in (texts / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
        name, caption = line.split("\t")
        captions.setdefault(name.split("#")[0], []).append(clean(caption))
    names = (texts / SPLITS[split]).read_text(encoding="utf-8").split()
    return [Photo(images / name, tuple(captions[name])) for name in names]


def clean(caption: str) -> str:
    """A caption in lower case, words only: `A man 's T-shirt .` becomes `a man's t-shirt`."""
    words = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*|'s", caption.lower())
    return " ".join(words).replace(" 's", "'s")


def frequent_words(photos: Sequence[Photo], least: int = 4) -> list[str]:
    """The words that occur at least so often in the captions, sorted."""
    counts = Counter(word for photo in photos for caption in photo.captions for word in caption.split())
    return sorted(word for word, count in counts.items() if count >= least)


def write_captions(photos: Sequence[Photo], folder: Path) -> None:
    """Write a folder for `elude-steer sweep --scenes photos:FOLDER`: links to the photos, and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number, photo in enumerate(photos):
        link = folder / photo.path.name
        if not link.exists():
            link.symlink_to(photo.path.resolve())
        images.append({"id": number, "file_name": photo.path.name})
        annotations += [{"image_id": number, "caption": caption} for caption in photo.captions]
    text = json.dumps({"images": images, "annotations": annotations})
    (folder / "captions.json").write_text(text, encoding="utf-8")
