"""COCO's images as a world of edits: objects from the annotations, captions read by the names of the 80 classes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from elude_steer.errors import ImageError, SpecError
from elude_steer.evaluation.edits.annotations import coco_reader, existing_images, read_instances
from elude_steer.evaluation.edits.benchmark import Case, Reading, World


def coco_world(
    annotations: str | Path, images: str | Path, *, limit: int | None = None, min_classes: int = 2, seed: int = 0
) -> World:
    """COCO's images with their annotated objects. Images are opened only when they are used.

    Every annotated object counts as present, however small. Captions are read for the 80 classes only.

    Args:
        annotations: an instances file, such as `instances_val2017.json`.
        images: the folder of its images, such as `val2017`.
        limit: largest number of images; a smaller limit takes a prefix of a larger one's images.
        min_classes: number of classes that each image must show on at least 1 % of its area.
        seed: seed of the order of the images.

    Example:
        >>> world = coco_world("annotations/instances_val2017.json", "val2017", limit=300)
    """
    source, folder = Path(annotations).expanduser(), Path(images).expanduser()
    if limit is not None and limit < 1:
        raise SpecError(f"limit is {limit}; take at least 1 image, or None for all.")
    if not folder.is_dir():
        raise ImageError(f"there is no folder '{folder}' with the images of '{source.name}'; check the path.")
    suitable = [image for image in read_instances(source, coco_reader())[0] if image.large >= min_classes]
    if not suitable:
        raise SpecError(
            f"no image of '{source}' shows {min_classes} classes on 1 % of its area each; lower min_classes."
        )
    shuffled = [suitable[number] for number in np.random.default_rng(seed).permutation(len(suitable))]
    chosen = existing_images(shuffled, folder, source)[:limit]
    # The name is part of the keys of cached work, so other images must give another name.
    content = repr([(image.file, sorted(image.objects)) for image in chosen])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    cases = [Case(folder / image.file, image.objects) for image in chosen]
    return World(f"coco:{source.stem}:{digest}", cases, coco_reader().names, read_caption)


def read_caption(caption: str) -> Reading:
    """The classes that a caption names. The longest name counts, so a hot dog is no dog.

    Example:
        >>> sorted(read_caption("Two men eat hot dogs at a traffic light.").objects)
        ['hot dog', 'person', 'traffic light']
    """
    counts = coco_reader().count(caption)
    return Reading(frozenset(counts), repeated=frozenset(name for name, count in counts.items() if count > 1))
