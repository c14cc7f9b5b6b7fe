"""Photographs as a world of edits: what is in them is taken from what several people wrote about them.

A concept is in a photo if at least two of its captions name it, and absent if none does. In between it is unknown: it
is then neither removed nor counted as invented. The captions come in the format of COCO's `captions_val2017.json`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.annotations import read_captions
from elude_steer.evaluation.edits.benchmark import Case, Reading, World
from elude_steer.evaluation.edits.caption_reader import CaptionReader

CAPTIONS = "captions.json"
NAMED_BY = 2  # captions that must name a concept

# Concepts that people name in photos of everyday life, each with its synonyms.
_CONCEPTS = """
dog: puppy, pup, hound, terrier, greyhound, poodle, labrador, retriever, collie, dalmatian, canine
man: guy, gentleman, male
woman: lady, female
boy: little boy
girl: little girl
child: kid, toddler
baby: infant
people: person, crowd, adult
player: athlete, teammate
biker: cyclist, bicyclist, motorcyclist, bike rider, bicycle rider
skateboarder: skater
surfer: body surfer
snowboarder: skier
climber: rock climber, mountain climber, hiker
water: puddle, splash
ocean: sea
lake: pond
river: stream, creek
pool: swimming pool
wave: surf
beach: shore, seashore, shoreline
sand: sandy
snow: snowy
mountain: mountainside, mountain top, peak
hill: hillside, slope
rock: boulder, rocky, rock face
cliff: ledge
grass: grassy, lawn
field: meadow, pasture
forest: wood, wooded, wooded area
tree: tree trunk, tree branch, log
flower: blossom
street: road, sidewalk, pavement
building: skyscraper, storefront
wall: brick wall
fence: gate, railing
bench: park bench
car: automobile, race car, taxi, van
bicycle: bike, mountain bike, bmx
motorcycle: motorbike, dirt bike, motor bike
boat: canoe, kayak, raft, sailboat, ship
horse: pony
bird: duck, seagull, goose, pigeon
ball: tennis ball, soccer ball, football, basketball, baseball, beach ball, volleyball
frisbee: flying disc
stick: branch, twig
skateboard: skate board
surfboard: surf board
swing: tire swing
helmet: hard hat
hat: cap, baseball cap, cowboy hat
shirt: t-shirt, tee shirt, tank top
jacket: coat, sweatshirt
dress: gown
sunglasses: goggles, glasses
"""
_OTHER_MEANINGS = (
    "dog toy, dog house, bike path, bike race, water gun, water bottle, water fountain, pool table, ball game, "
    "football field, football player, baseball player, basketball player, soccer field, football game, baseball game, "
    "basketball court, football team, basketball game, soccer game, hot dog, snow board, street light"
)
# What it means to name one of these: the others are then not absent either.
_ALSO = {
    "people": "man, woman, boy, girl, child, baby, player, biker, skateboarder, surfer, snowboarder, climber",
    "child": "boy, girl, baby",
    "water": "ocean, lake, river, pool, wave",
    "grass": "field",
    "rock": "cliff",
    "mountain": "hill, cliff",
    "biker": "bicycle, motorcycle",
    "skateboarder": "skateboard",
    "surfer": "surfboard",
    "beach": "sand, ocean",
    "sand": "beach",
}


def photo_world(source: str | Path, *, limit: int | None = None, min_concepts: int = 1, seed: int = 0) -> World:
    """Photos with what their captions say of them. Photos are opened only when they are used.

    Args:
        source: a folder with photos and their captions in `captions.json`, or such a file next to its photos.
        limit: largest number of photos; a smaller limit takes a prefix of a larger one's photos.
        min_concepts: number of concepts that the captions of each photo must agree on.
        seed: seed of the order of the photos.

    Example:
        >>> world = photo_world("photos/", limit=300)
    """
    path = Path(source).expanduser()
    path = path / CAPTIONS if path.is_dir() else path
    if limit is not None and limit < 1:
        raise SpecError(f"limit is {limit}; take at least 1 photo, or None for all.")
    found = [(name, _case(path.parent / name, texts)) for name, texts in sorted(read_captions(path).items())]
    suitable = [(name, case) for name, case in found if len(case.objects) >= min_concepts]
    if not suitable:
        raise SpecError(
            f"the captions of '{path}' agree on no concept in any photo; each photo needs several captions."
        )
    order = np.random.default_rng(seed).permutation(len(suitable))
    there = [suitable[number] for number in order if Path(suitable[number][1].source).is_file()]
    if not there:
        raise ImageError(
            f"none of the photos of '{path}', such as '{suitable[0][0]}', is in folder '{path.parent}'; put them there."
        )
    if len(there) < len(suitable):
        warnings.warn(
            f"{len(suitable) - len(there)} photos of '{path}' are not in its folder and were left out.",
            EludeSteerWarning,
            stacklevel=2,
        )
    chosen = there[:limit]
    content = repr([(name, sorted(case.objects), sorted(case.possible)) for name, case in chosen])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    return World(f"photos:{digest}", [case for _, case in chosen], _reader().names, read_caption)


def read_caption(caption: str) -> Reading:
    """The concepts that a caption names."""
    counts = _reader().count(caption)
    return Reading(frozenset(counts), repeated=frozenset(name for name, count in counts.items() if count > 1))


def _case(source: Path, captions: Sequence[str]) -> Case:
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(_reader().read(caption))
    possible = set(counts)
    for concept, others in _ALSO.items():
        if possible & set(others.split(", ")):
            possible.add(concept)
    return Case(source, frozenset(word for word, n in counts.items() if n >= NAMED_BY), frozenset(possible))


@cache
def _reader() -> CaptionReader:
    return CaptionReader(_CONCEPTS, other_meanings=_OTHER_MEANINGS)


def concept_names() -> tuple[str, ...]:
    """The concepts that captions are read for."""
    return _reader().names
