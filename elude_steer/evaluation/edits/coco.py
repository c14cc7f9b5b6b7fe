"""COCO's pictures as a world of edits: what its annotations say is there, and its 80 classes found in captions."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.benchmark import Case, Reading, World

LARGE = 0.01  # of the picture: what is smaller is seldom worth a word
_WANTED = "give one such as instances_val2017.json"

# The classes in COCO's order, each with what captions call it. Names of games (baseball, football) are left out, since
# captions mean the game more often than its ball; so are names that mean several classes (glass, pitcher, crane).
_CLASSES = """
person: man, woman, boy, girl, child, kid, baby, toddler, infant, lady, gentleman, guy, adult, teenager, persons, crowd,
  player, ball player, rider, skier, surfer, snowboarder, skateboarder, skater, cyclist, bicyclist, biker, motorcyclist,
  swimmer, pedestrian, passenger, driver, worker, chef, soldier, policeman, fireman, officer, bride, groom
bicycle: bike, tricycle, mountain bike
car: automobile, sedan, taxi, cab, suv, jeep, minivan, police car
motorcycle: motorbike, motor bike, moped, scooter, motor scooter, dirt bike
airplane: plane, aeroplane, jet, airliner, jetliner, aircraft, biplane, seaplane
bus: minibus, double decker, double decker bus, school bus
train: locomotive, tram, trolley, streetcar, train car, train engine, freight train
truck: lorry, pickup, pick up truck, semi truck, fire truck, tow truck, firetruck, truck bed
boat: ship, canoe, kayak, sailboat, yacht, ferry, rowboat, speedboat
traffic light: traffic signal, stoplight, stop light, traffic lamp
fire hydrant: hydrant, fireplug
stop sign: stopsign
parking meter: parking metre
bench: park bench, pew
bird: duck, goose, seagull, gull, parrot, pigeon, owl, swan
cat: kitten, kitty, tabby, feline
dog: puppy, pup, doggy, hound, canine
horse: pony, foal, stallion, mare, colt
sheep: lamb, ewe, ram
cow: cattle, bull, calf, ox, heifer
elephant: elephant calf
bear: grizzly, polar bear, bear cub, panda, panda bear
zebra: zebra foal
giraffe: giraffe calf
backpack: back pack, rucksack, knapsack, book bag, bookbag
umbrella: parasol, brolly
handbag: hand bag, purse, shoulder bag, tote bag, pocketbook
tie: necktie, neck tie, bow tie, bowtie
suitcase: suit case, luggage, baggage, carry on bag
frisbee: frisby, flying disc, flying disk
skis: ski
snowboard: snow board
sports ball: ball, soccer ball, tennis ball, beach ball, golf ball
kite: box kite
baseball bat: bat
baseball glove: mitt, baseball mitt, catcher's mitt
skateboard: skate board, longboard
surfboard: surf board, boogie board, paddle board, bodyboard
tennis racket: racket, racquet, tennis racquet
bottle: wine bottle, beer bottle, water bottle
wine glass: wineglass, glass of wine, glasses of wine, goblet, champagne glass
cup: mug, teacup, coffee cup, tea cup, tumbler
fork: salad fork
knife: pocketknife, pocket knife, butter knife
spoon: teaspoon, tablespoon, soup spoon
bowl: soup bowl
banana: plantain
apple: green apple
sandwich: burger, hamburger, cheeseburger, panini, sub sandwich
orange: tangerine, clementine, mandarin
broccoli: broccoli floret
carrot: baby carrot
hot dog: hotdog, corn dog, chili dog, frankfurter
pizza: pizza pie
donut: doughnut
cake: cupcake, cup cake, cheesecake, birthday cake
chair: armchair, arm chair, rocking chair, recliner, high chair
couch: sofa, loveseat, love seat, settee
potted plant: house plant, houseplant, pot plant, plant pot, flower pot, flowerpot
bed: bunk bed, bunk, crib
dining table: table, dinner table, kitchen table, desk
toilet: toilet bowl, toilet seat, commode
tv: television, tv set, television set, telly, monitor, computer screen, flat screen
laptop: laptop computer, notebook computer, macbook
mouse: computer mouse
remote: remote control, remote controller, wii remote
keyboard: computer keyboard
cell phone: cellphone, phone, smartphone, smart phone, mobile phone, iphone, telephone
microwave: microwave oven
oven: stove, stovetop, stove top, cooker
toaster: toaster oven
sink: basin, washbasin, wash basin
refrigerator: fridge, freezer
book: novel, textbook, paperback
clock: alarm clock, clock tower
vase: flower vase, urn
scissors: shears
teddy bear: teddy, stuffed bear, stuffed animal, plush toy, toy bear
hair drier: hair dryer, hairdryer, hairdrier, blow dryer, blow drier
toothbrush: tooth brush
"""

# What has the name of a class in it and is none of it.
_NONE = (
    "bus stop, bus station, train station, train track, train set, car park, parking lot, flower bed, dog bed, "
    "dog house, bird house, bird feeder, bird cage, cat tree, table tennis, table cloth, chair lift, ski lift, "
    "ski slope, ski pole, ski resort, toilet paper, book case, book shelf, book store, phone booth, mouse pad, "
    "remote area, remote location, apple computer, tie dye, boat house, power plant, "
    "jet ski, ball game, ball park, ball field, record player, dvd player, cd player, man made, man hole"
)
_ANIMALS = "bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe"
_PLURALS = {
    "person": "people", "child": "children", "mouse": "mice", "knife": "knives", "pocketknife": "pocketknives",
    "calf": "calves", "goose": "geese", "ox": "oxen",
}  # fmt: skip

# More often a colour than a fruit: it counts with an article before it, and with neither a thing nor a colour after it.
_ORANGE = (
    r"(?:(?<=\ban )|(?<=\bone )|(?<=\bthe ))orange(?=\W*$|\s*[.,;:!?]|\s+(?:and|or|on|in|next|with|beside|near|is|from)"
    r"\b(?!\s+(?:black|white|yellow|red|blue|green|brown|gr[ae]y|pink|purple|orange)\b))"
)


class _Picture(NamedTuple):
    """A row of the annotations: the picture's file, the classes in it, and how many of them are large."""

    file: str
    objects: frozenset[str]
    large: int


def coco_world(
    annotations: str | Path, images: str | Path, *, limit: int | None = None, min_classes: int = 2, seed: int = 0
) -> World:
    """COCO's pictures with what its annotations say is in them; a picture is only opened when it is looked at.

    Everything annotated counts as there, however small; what a caption may name besides the 80 classes is not read.

    Args:
        annotations: an instances file, such as `instances_val2017.json`.
        images: the folder of its pictures, such as `val2017`.
        limit: how many pictures at most; a smaller limit takes the first of a larger one's.
        min_classes: how many different classes each must show on at least 1 % of its area.
        seed: of the order in which they are taken.

    Example:
        >>> world = coco_world("annotations/instances_val2017.json", "val2017", limit=300)
    """
    source, folder = Path(annotations).expanduser(), Path(images).expanduser()
    if limit is not None and limit < 1:
        raise SpecError(f"limit is {limit}; take at least 1 picture, or None for all.")
    if not folder.is_dir():
        raise ImageError(f"no folder '{folder}' with the pictures of '{source.name}'; check the path.")
    fit = [picture for picture in _pictures(source) if picture.large >= min_classes]
    if not fit:
        raise SpecError(
            f"no picture of '{source}' shows {min_classes} classes on 1 % of its area each; lower min_classes."
        )
    chosen: list[_Picture] = []
    absent = 0
    for number in np.random.default_rng(seed).permutation(len(fit)):
        if len(chosen) == limit:
            break
        if (folder / fit[number].file).is_file():
            chosen.append(fit[number])
        else:
            absent += 1
    if not chosen:
        raise ImageError(
            f"none of the {len(fit)} pictures of '{source.name}' is in folder '{folder}', such as '{fit[0].file}'; "
            "give the folder of the same year and split."
        )
    if absent:
        warnings.warn(
            f"{absent} pictures of '{source.name}' are not in folder '{folder}' and were left out.",
            EludeSteerWarning,
            stacklevel=2,
        )
    # Work that is kept by a world's name must not be taken for that of other pictures.
    digest = hashlib.blake2b(repr([(p.file, sorted(p.objects)) for p in chosen]).encode(), digest_size=6).hexdigest()
    cases = [Case(folder / picture.file, picture.objects) for picture in chosen]
    return World(f"coco:{source.stem}:{digest}", cases, tuple(_classes()), read_caption)


def read_caption(caption: str) -> Reading:
    """The classes that a caption names, each by its own name; the longest name counts, so a hot dog is no dog.

    Example:
        >>> sorted(read_caption("Two men eat hot dogs at a traffic light.").objects)
        ['hot dog', 'person', 'traffic light']
    """
    pattern, classes = _names()
    said = (re.sub(r"[\s-]+", " ", match.group()) for match in pattern.finditer(caption.lower()))
    return Reading(frozenset(classes[name] for name in said) - {""})


def _pictures(path: Path) -> list[_Picture]:
    content, known = _content(path), _names()[1]
    try:
        names = {row["id"]: str(row["name"]).lower() for row in content["categories"]}
        other = sorted(name for name in names.values() if not known.get(name))
        if other:
            raise SpecError(f"'{path}' has a category '{other[0]}', which is none of COCO's 80 classes.")
        areas: defaultdict[Any, Counter[str]] = defaultdict(Counter)
        for row in content["annotations"]:
            areas[row["image_id"]][known[names[row["category_id"]]]] += row["area"]
        found = []
        for row in content["images"]:
            own, least = areas[row["id"]], LARGE * row["width"] * row["height"]
            found.append(_Picture(str(row["file_name"]), frozenset(own), sum(area >= least for area in own.values())))
    except (KeyError, TypeError) as error:
        raise SpecError(
            f"'{path}' is no COCO instances file: an entry is not as it should be ({error!r}); {_WANTED}."
        ) from error
    return sorted(found)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror or error}; check the path.") from error
    except ValueError as error:  # no JSON, or no text at all
        raise SpecError(f"'{path}' is no COCO instances file: it is not JSON; {_WANTED}.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise SpecError(f"'{path}' is no COCO instances file: it has no list '{key}'; {_WANTED}.")
    return content


@cache
def _classes() -> dict[str, tuple[str, ...]]:
    """The 80 classes, and what else each is called."""
    lines = re.sub(r",\n\s+", ", ", _CLASSES.strip()).splitlines()
    pairs = (line.split(": ") for line in lines)
    return {name: tuple(others.split(", ")) for name, others in pairs}


@cache
def _names() -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern of all names, longest first, and the class of each; that of a name of nothing is empty."""
    of = dict.fromkeys(_NONE.split(", "), "")
    of |= {other: name for name, others in _classes().items() for other in (name, *others)}
    of |= {f"baby {name}": name for name in _ANIMALS.split(", ")}  # otherwise a baby is a person
    every = {form: name for one, name in of.items() for form in (one, _plural(one))}
    patterns = [
        _ORANGE if form == "orange" else re.escape(form).replace(r"\ ", r"[\s-]+")
        for form in sorted(every, key=len, reverse=True)
    ]
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b"), every


def _plural(name: str) -> str:
    *head, last = name.split(" ")
    if last in _PLURALS:
        last = _PLURALS[last]
    elif last.endswith("man"):
        last = last.removesuffix("man") + "men"
    elif re.search(r"[^aeiou]y$", last):
        last = last.removesuffix("y") + "ies"
    else:
        last += "es" if re.search(r"(?:s|x|z|ch|sh)$", last) else "s"
    return " ".join([*head, last])
