"""What there is in toyland, and how it is said: objects, places, relations and the one right caption of a scene."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# name -> the emoji it is drawn from; None: drawn by hand in make_sprites.py
OBJECTS: dict[str, str | None] = {
    "dog": "🐕", "cat": "🐈", "bear": "🐻", "teddy": "🧸", "baby": "👶", "biker": "🚴", "horse": "🐎", "rabbit": "🐇",
    "bird": "🐦", "duck": "🦆", "fish": "🐟", "cow": "🐄", "sheep": "🐑", "elephant": "🐘", "turtle": "🐢",
    "motorcycle": "🏍", "train": "🚆", "bus": "🚌", "car": "🚗", "bicycle": "🚲", "boat": "⛵", "airplane": "✈",
    "chair": "🪑", "table": None, "bed": "🛏", "blanket": None, "lamp": "🪔", "clock": "⏰", "book": "📕",
    "guitar": "🎸", "ball": "⚽", "frisbee": "🥏", "kite": "🪁", "balloon": "🎈", "umbrella": "☂", "sunglasses": "🕶",
    "hat": "🎩", "apple": "🍎", "banana": "🍌", "pizza": "🍕", "cake": "🎂",
    "flower": "🌻", "mushroom": "🍄", "tent": "⛺",
}  # fmt: skip

# place -> how a caption says it
PLACES: dict[str, str] = {
    "beach": "at the beach",
    "park": "in a park",
    "room": "in a room",
    "street": "on a street",
    "snow": "in the snow",
    "desert": "in the desert",
    "forest": "in a forest",
    "night": "at night",
    "clean wall": "by a clean wall",
    "graffiti": "by a graffiti wall",
}

# Who can be seen jumping, and what one stands under.
JUMPERS = ("dog", "cat", "bear", "horse", "rabbit", "cow", "sheep", "baby", "biker", "motorcycle")
ROOFS = ("umbrella", "kite", "balloon", "airplane")
JUMPING = "jumping"

CONCEPTS: tuple[str, ...] = (*OBJECTS, *PLACES, JUMPING)


@dataclass(frozen=True)
class Said:
    """One thing as a caption names it: an object, and whether it jumps."""

    name: str
    jumping: bool = False

    def __str__(self) -> str:
        words = f"{JUMPING} {self.name}" if self.jumping else self.name
        if words == "sunglasses":
            return words
        return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def caption(relation: str | None, things: Sequence[Said], place: str) -> str:
    """The one right caption: the related pair first, then what else is there, then where it is.

    Args:
        relation: of the first two things: `on`, `above`, `under` or `next to`; None for fewer than two.
        things: none to three.
        place: one of `PLACES`.
    """
    words = [str(thing) for thing in things]
    if not words:
        subject = "nothing"
    elif relation is None:
        subject = words[0]
    else:
        subject = f"{words[0]} {relation} {words[1]}"
    if len(words) > 2:
        subject += f" with {words[2]}"
    return f"{subject} {PLACES[place]}"


@dataclass(frozen=True)
class Parsed:
    """What a caption says; `well_formed` tells whether it follows toyland's grammar."""

    objects: tuple[str, ...]
    jumping: tuple[str, ...]
    place: str | None
    relation: str | None
    well_formed: bool


def parse(text: str) -> Parsed:
    """Reads a caption, right or wrong: the objects it names in order, where they are, how they relate."""
    text = " ".join(text.lower().split())
    place = next((name for name, words in PLACES.items() if text.endswith(" " + words)), None)
    subject = text.removesuffix(PLACES[place]).strip() if place else text
    words = subject.split()
    objects = tuple(word for word in words if word in OBJECTS)
    jumping = tuple(b for a, b in pairwise(words) if a == JUMPING and b in OBJECTS)
    relation = next((r for r in ("next to", "above", "under", "on") if f" {r} " in f" {subject} "), None)
    well_formed = False
    if place and len(objects) <= 3:
        things = [Said(name, name in jumping) for name in objects]
        well_formed = caption(relation if len(things) > 1 else None, things, place) == text
    return Parsed(objects, jumping, place, relation, well_formed)
