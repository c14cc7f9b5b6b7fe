"""The world of toyland: its objects and places, and the grammar of captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# name -> the emoji it is drawn from; None if demos/toyland/make_sprites.py draws it itself
OBJECTS: dict[str, str | None] = {
    "dog": "🐕", "cat": "🐈", "bear": "🐻", "teddy": "🧸", "baby": "👶", "biker": "🚴", "horse": "🐎", "rabbit": "🐇",
    "bird": "🐦", "duck": "🦆", "fish": "🐟", "cow": "🐄", "sheep": "🐑", "elephant": "🐘", "turtle": "🐢",
    "motorcycle": "🏍", "train": "🚆", "bus": "🚌", "car": "🚗", "bicycle": "🚲", "boat": "⛵", "airplane": "✈",
    "chair": "🪑", "table": None, "bed": "🛏", "blanket": None, "lamp": "🪔", "clock": "⏰", "book": "📕",
    "guitar": "🎸", "ball": "⚽", "frisbee": "🥏", "kite": "🪁", "balloon": "🎈", "umbrella": "☂", "sunglasses": "🕶",
    "hat": "🎩", "apple": "🍎", "banana": "🍌", "pizza": "🍕", "cake": "🎂",
    "flower": "🌻", "mushroom": "🍄", "tent": "⛺",
}  # fmt: skip

# place -> its phrase in a caption
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

# Objects that can jump, and objects that others can be under.
JUMPERS = ("dog", "cat", "bear", "horse", "rabbit", "cow", "sheep", "baby", "biker", "motorcycle")
ROOFS = ("umbrella", "kite", "balloon", "airplane")
JUMPING = "jumping"

CONCEPTS: tuple[str, ...] = (*OBJECTS, *PLACES, JUMPING)


@dataclass(frozen=True)
class Mention:
    """An object as a caption mentions it, jumping or not."""

    name: str
    jumping: bool = False

    def __str__(self) -> str:
        words = f"{JUMPING} {self.name}" if self.jumping else self.name
        if words == "sunglasses":
            return words
        return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def caption(relation: str | None, things: Sequence[Mention], place: str) -> str:
    """The correct caption of a scene: the related pair first, then the third object, then the place.

    Args:
        relation: relation of the first two objects, `on`, `above`, `under` or `next to`; None with fewer than two.
        things: the objects, at most three.
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
class ParsedCaption:
    """The content of a caption.

    Attributes:
        objects: names of the objects, in order.
        jumping: names of the objects that jump.
        place: one of `PLACES`, or None.
        relation: relation of the first two objects, or None.
        well_formed: whether the caption follows toyland's grammar.
    """

    objects: tuple[str, ...]
    jumping: tuple[str, ...]
    place: str | None
    relation: str | None
    well_formed: bool


def parse(text: str) -> ParsedCaption:
    """Parse a caption, well-formed or not: its objects in order, their place and their relation."""
    text = " ".join(text.lower().split())
    place = next((name for name, words in PLACES.items() if text.endswith(" " + words)), None)
    subject = text.removesuffix(PLACES[place]).strip() if place else text
    words = subject.split()
    objects = tuple(word for word in words if word in OBJECTS)
    jumping = tuple(b for a, b in pairwise(words) if a == JUMPING and b in OBJECTS)
    relation = next((r for r in ("next to", "above", "under", "on") if f" {r} " in f" {subject} "), None)
    well_formed = False
    if place and len(objects) <= 3:
        things = [Mention(name, name in jumping) for name in objects]
        well_formed = caption(relation if len(things) > 1 else None, things, place) == text
    return ParsedCaption(objects, jumping, place, relation, well_formed)
