"""Images in COCO's formats for a benchmark: what is annotated, what captions name, and which images are taken.

Nothing here loads torch, so that wrong files and words are refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elude_steer.errors import ImageError, SpecError, did_you_mean
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.edits.annotations import AnnotatedImage, existing_images, read_captions, read_instances
from elude_steer.evaluation.edits.caption_reader import CaptionReader

if TYPE_CHECKING:
    from elude_steer.evaluation.edits.benchmark import World


@dataclass(frozen=True, eq=False)
class AnnotatedSet:
    """Images with their annotated classes.

    Attributes:
        name: of the file of instances, without its ending.
        folder: of the images.
        images: those that are in the folder.
        reader: reads captions for the classes.
        named: file -> the classes that people's captions of it name; empty without a file of captions.
    """

    name: str
    folder: Path
    images: Sequence[AnnotatedImage]
    reader: CaptionReader
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes."""
        return self.reader.names

    def find_classes(self, words: Sequence[str], role: str) -> tuple[str, ...]:
        """The class of each word, which is a name or a synonym of it; raises for a word of no class."""
        found = []
        for word in words:
            name = self.reader.concepts.get(" ".join(word.lower().split()))
            if not name:
                hint = did_you_mean(word.lower(), self.classes) or f" It has {', '.join(self.classes[:6])}, …"
                raise SpecError(f"{role} is '{word}', which is no class of '{self.name}'.{hint}")
            found.append(name)
        return tuple(dict.fromkeys(found))

    def classes_among(self, words: Sequence[str]) -> frozenset[str]:
        """The classes of those words that have one."""
        concepts = self.reader.concepts
        return frozenset(name for word in words if (name := concepts.get(" ".join(word.lower().split()))))

    def may_show(self, image: AnnotatedImage) -> frozenset[str]:
        """The classes that are annotated in an image or that captions of it name."""
        return image.objects | self.named.get(image.file, frozenset())


def read_dataset(
    instances: str | Path, folder: str | Path, *, captions: Path | None = None, synonyms: Path | None = None
) -> AnnotatedSet:
    """Read COCO's files; images are opened only when they are used.

    Args:
        instances: a file such as `instances_val2017.json`.
        folder: of its images, such as `val2017`.
        captions: a file such as `captions_val2017.json`, whose classes count as possibly there.
        synonyms: a file of words for the classes, as for `CaptionReader.from_file`; by default our own for COCO's
            classes, and only the names for others.

    Example:
        >>> data = read_dataset("annotations/instances_val2017.json", "val2017")
    """
    source, images = Path(instances).expanduser(), Path(folder).expanduser()
    if not images.is_dir():
        raise ImageError(f"there is no folder '{images}' with the images of '{source.name}'; check the path.")
    annotated, reader = read_instances(source, CaptionReader.from_file(synonyms) if synonyms else None)
    if not annotated:
        raise SpecError(f"'{source}' has no images; give one such as instances_val2017.json.")
    found = existing_images(annotated, images, source)
    named: dict[str, frozenset[str]] = {}
    if captions is not None:
        texts = read_captions(captions)
        if not any(image.file in texts for image in found):
            raise SpecError(f"'{captions}' has captions for none of the images of '{source}'; give that of the split.")
        named = {file: frozenset().union(*map(reader.read, own)) for file, own in texts.items()}
    return AnnotatedSet(source.stem, images, found, reader, named)


def find_captions(instances: str | Path) -> Path | None:
    """The file of captions beside a file of instances: `captions_val2017.json` for `instances_val2017.json`."""
    source = Path(instances).expanduser()
    beside = source.with_name(source.name.replace("instances", "captions"))
    return beside if beside != source and beside.is_file() else None


def images_for(benchmark: str, data: AnnotatedSet, options: BenchmarkOptions) -> list[AnnotatedImage]:
    """The images of a benchmark; raises for a word that is no class, and if there are no images.

    POPE takes images that show enough classes beside those of the edit. What removes absent classes takes images that
    show none of them.

    Args:
        benchmark: `pope`, `chair`, `absent` or `side-effects`.
        data: all images.
        options: the edit and the number of images.
    """
    erased = frozenset(data.find_classes(options.minus, "minus"))
    drawn: dict[str, Any] = {"limit": options.limit, "seed": options.seed}
    if benchmark in ("absent", "side-effects"):
        return choose_images(data, erased, **drawn, shown=False if erased else None)
    needed = options.per_image if benchmark == "pope" else 0
    ignored = data.classes_among(options.plus)
    return choose_images(data, erased, **drawn, balance=options.balance, ignored=ignored, min_others=needed)


def choose_images(
    data: AnnotatedSet,
    erased: Set[str] = frozenset(),
    *,
    ignored: Set[str] = frozenset(),
    limit: int,
    seed: int = 0,
    balance: bool = True,
    min_others: int = 0,
    shown: bool | None = None,
) -> list[AnnotatedImage]:
    """Draw images; a smaller limit takes the first of a larger one's.

    Images of which it is unclear whether they show an erased class, because only captions name it, are left out.

    Args:
        data: all images.
        erased: the classes that an edit removes.
        ignored: classes that do not count as others.
        limit: largest number of images.
        seed: seed of the order.
        balance: whether every other image shows an erased class, as long as there are such images.
        min_others: number of other classes that an image must show, and of classes that it must not show.
        shown: True takes only images that show an erased class, False only those that show none.
    """
    known = frozenset().union(*(image.objects for image in data.images)) - erased - ignored
    with_erased: list[AnnotatedImage] = []
    without: list[AnnotatedImage] = []
    mixed: list[AnnotatedImage] = []
    for number in np.random.default_rng(seed).permutation(len(data.images)):
        image = data.images[number]
        others = len(image.objects & known)
        if others < min_others or len(known) - others < min_others:
            continue
        if image.objects & erased:
            with_erased.append(image)
        elif data.may_show(image) & erased:
            continue
        else:
            without.append(image)
        mixed.append(image)
    if shown is not None:
        chosen = with_erased if shown else without
    elif erased and balance:
        pairs = zip_longest(with_erased, without)
        chosen = [image for pair in pairs for image in pair if image is not None]
    else:
        chosen = mixed
    _check_chosen(data, erased, with_erased, without, shown, min_others)
    return chosen[:limit]


def _check_chosen(
    data: AnnotatedSet,
    erased: Set[str],
    with_erased: Sequence[AnnotatedImage],
    without: Sequence[AnnotatedImage],
    shown: bool | None,
    min_others: int,
) -> None:
    """Raise if there is no image to measure on."""
    beside = f" and {min_others} other class{'es' * (min_others > 1)}" if min_others else ""
    names = " or ".join(f"'{name}'" for name in sorted(erased))
    if erased and shown is not False and not with_erased:
        raise SpecError(f"no image of '{data.name}' shows {names}{beside}; erase a class that is there.")
    if shown is not True and not without and (erased or not with_erased):
        what = f"leaves out {names}" + (f" and shows {min_others} other classes" if min_others else "")
        what = what if erased else f"shows {min_others} classes"
        raise SpecError(f"no image of '{data.name}' {what}; give more images.")


def rank_classes(data: AnnotatedSet, images: Sequence[AnnotatedImage]) -> list[str]:
    """The classes that are in some images, most frequent first, equally frequent ones in the order of the set."""
    counts = Counter(name for image in images for name in image.objects)
    return sorted(counts, key=lambda name: (-counts[name], data.classes.index(name)))


def make_world(data: AnnotatedSet, images: Sequence[AnnotatedImage]) -> World:
    """The images as a world of the benchmark of edits; what only captions name is possibly there."""
    from elude_steer.evaluation.edits.benchmark import Case, Reading, World

    def read(caption: str) -> Reading:
        counts = data.reader.count(caption)
        return Reading(frozenset(counts), repeated=frozenset(name for name, count in counts.items() if count > 1))

    content = repr([(image.file, sorted(image.objects), sorted(data.may_show(image))) for image in images])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    cases = [Case(data.folder / image.file, image.objects, data.may_show(image)) for image in images]
    return World(f"coco:{data.name}:{digest}", cases, data.classes, read)
