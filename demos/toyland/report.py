"""Reports on toyland's models: how well they caption and label held-out scenes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elude_steer.toyland.scenes import Scene, draw_scene, scenes
from elude_steer.toyland.world import CONCEPTS, OBJECTS, parse


@dataclass(frozen=True)
class CaptionReport:
    """How many scenes were captioned, and the fractions of them with some property of the caption.

    Attributes:
        scenes: number of scenes.
        objects: the caption mentions exactly the objects of the scene.
        background: the place is correct.
        exact: the caption is correct.
        well_formed: the caption follows the grammar.
        clutter_named: it mentions an object that is absent, among the scenes with clutter.
        named_what_is_not_there: it mentions an object that is absent, among all scenes.
        named_twice: it mentions an object twice.
    """

    scenes: int
    objects: float
    background: float
    exact: float
    well_formed: float
    clutter_named: float
    named_what_is_not_there: float
    named_twice: float


def held_out_scenes(seed: int, n: int, min_visible: float = 0.6) -> list[Scene]:
    """The first n scenes of a series in which at least `min_visible` of every object is visible."""
    found: list[Scene] = []
    start = 0
    while len(found) < n:
        found += [s for s in scenes(seed, n, start=start) if all(t.visible >= min_visible for t in s.things)]
        start += n
    return found[:n]


def report_captions(captions: Sequence[str], truth: Sequence[Scene]) -> CaptionReport:
    """Compare captions with the scenes."""
    parsed = [parse(text) for text in captions]
    invented = [bool(set(p.objects) - set(scene.objects)) for p, scene in zip(parsed, truth, strict=True)]
    invented_in_clutter = [value for value, scene in zip(invented, truth, strict=True) if scene.clutter]
    pairs = list(zip(captions, parsed, truth, strict=True))
    return CaptionReport(
        len(truth),
        _fraction(set(p.objects) == set(scene.objects) for _, p, scene in pairs),
        _fraction(p.place == scene.background for _, p, scene in pairs),
        _fraction(text == scene.caption for text, _, scene in pairs),
        _fraction(p.well_formed for p in parsed),
        _fraction(invented_in_clutter),
        _fraction(invented),
        _fraction(len(set(p.objects)) < len(p.objects) for p in parsed),
    )


def caption_scenes(vlm: Any, truth: Sequence[Scene], size: int = 32) -> list[str]:
    """Caption all scenes, in batches of images of one shape."""
    captions = [""] * len(truth)
    for shape in sorted({scene.image.size for scene in truth}):
        numbers = [i for i, scene in enumerate(truth) if scene.image.size == shape]
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            for i, text in zip(batch, vlm.caption([truth[i].image for i in batch], max_new_tokens=32), strict=True):
                captions[i] = text
    return captions


def report_labels(score: Callable[[Sequence[Any], Sequence[str]], torch.Tensor], seed: int, each: int = 10) -> float:
    """Fraction of single-object scenes whose object scores highest among all concepts but the place.

    Args:
        score: computes the similarities `(images, texts)` of images and texts.
        seed: seed of the scenes.
        each: scenes per object.
    """
    correct = []
    for number, name in enumerate(OBJECTS):
        rng = np.random.default_rng([seed, number])
        single = [draw_scene(rng, wide=0, clutter=0, things=[name], jumping=False) for _ in range(each)]
        scores = score([scene.image for scene in single], CONCEPTS).clone()
        for scene, row in zip(single, scores, strict=True):
            row[CONCEPTS.index(scene.background)] = -torch.inf  # the place is correct as well
            correct.append(CONCEPTS[int(row.argmax())] == name)
    return _fraction(correct)


def _fraction(values: Iterable[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
