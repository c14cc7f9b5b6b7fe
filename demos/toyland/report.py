"""How well toyland's models know toyland: captions, labels and clutter on scenes they never saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from elude_steer.toyland.scenes import Scene, draw_scene, scenes
from elude_steer.toyland.world import CONCEPTS, OBJECTS, parse


@dataclass(frozen=True)
class CaptionReport:
    """Shares of scenes.

    Attributes:
        scenes: how many were captioned.
        objects: the exact set of objects is named.
        background: the place is right.
        exact: the whole caption is right.
        well_formed: the caption follows the grammar.
        clutter_named: of the scenes with clutter, something is named that is not there.
        named_what_is_not_there: the same over all scenes.
        named_twice: an object that is there once is named twice.
    """

    scenes: int
    objects: float
    background: float
    exact: float
    well_formed: float
    clutter_named: float
    named_what_is_not_there: float
    named_twice: float


def held_out(seed: int, n: int, least_visible: float = 0.6) -> list[Scene]:
    """The first n scenes of a seed whose objects can all be seen well enough."""
    found: list[Scene] = []
    start = 0
    while len(found) < n:
        found += [s for s in scenes(seed, n, start=start) if all(t.visible >= least_visible for t in s.things)]
        start += n
    return found[:n]


def examine_captions(captions: Sequence[str], truth: Sequence[Scene]) -> CaptionReport:
    """Compares captions with what is true."""
    read = [parse(text) for text in captions]
    extra = [bool(set(said.objects) - set(scene.objects)) for said, scene in zip(read, truth, strict=True)]
    littered = [more for more, scene in zip(extra, truth, strict=True) if scene.clutter]
    pairs = list(zip(captions, read, truth, strict=True))
    return CaptionReport(
        len(truth),
        _share(set(said.objects) == set(scene.objects) for _, said, scene in pairs),
        _share(said.place == scene.background for _, said, scene in pairs),
        _share(text == scene.caption for text, _, scene in pairs),
        _share(said.well_formed for said in read),
        _share(littered),
        _share(extra),
        _share(len(set(said.objects)) < len(said.objects) for said in read),
    )


def caption_all(vlm: Any, truth: Sequence[Scene], size: int = 32) -> list[str]:
    """Captions of all scenes, pictures of one shape at a time."""
    said = [""] * len(truth)
    for shape in sorted({scene.image.size for scene in truth}):
        numbers = [i for i, scene in enumerate(truth) if scene.image.size == shape]
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            for i, text in zip(batch, vlm.caption([truth[i].image for i in batch], max_new_tokens=32), strict=True):
                said[i] = text
    return said


def examine_labels(score: Callable[[Sequence[Any], Sequence[str]], torch.Tensor], seed: int, each: int = 10) -> float:
    """Share of single-object scenes in which the right object comes first among all concepts but the place.

    Args:
        score: pictures and texts to a `(pictures, texts)` similarity.
        seed: of the scenes.
        each: scenes an object.
    """
    right = []
    for number, name in enumerate(OBJECTS):
        rng = np.random.default_rng([seed, number])
        shown = [draw_scene(rng, wide=0, clutter=0, things=[name], jumping=False) for _ in range(each)]
        best = score([scene.image for scene in shown], CONCEPTS).clone()
        for scene, row in zip(shown, best, strict=True):
            row[CONCEPTS.index(scene.background)] = -torch.inf  # the place is true as well
            right.append(CONCEPTS[int(row.argmax())] == name)
    return _share(right)


def _share(values: Iterable[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def as_dict(report: CaptionReport) -> dict[str, float]:
    """A report as plain numbers."""
    return asdict(report)
