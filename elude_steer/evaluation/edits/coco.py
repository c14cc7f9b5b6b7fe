"""COCO's images as a world of edits: objects from the annotations, captions read by the names of the 80 classes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from elude_steer.errors import EludeSteerWarning, ImageError, SpecError
from elude_steer.evaluation.edits.benchmark import Case, Reading, World
from elude_steer.evaluation.edits.caption_reader import CaptionReader

LARGE = 0.01  # share of the image; captions seldom mention smaller objects
_EXPECTED = "give one such as instances_val2017.json"

# The classes in COCO's order, each with its synonyms in captions. Names of games (baseball, football) are left out,
# because captions mean the game more often than the ball; so are names of several classes (glass, pitcher, crane).
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

# Phrases that contain the name of a class but mean something else.
_OTHER_MEANINGS = (
    "bus stop, bus station, train station, train track, train set, car park, parking lot, flower bed, dog bed, "
    "dog house, bird house, bird feeder, bird cage, cat tree, table tennis, table cloth, chair lift, ski lift, "
    "ski slope, ski pole, ski resort, toilet paper, book case, book shelf, book store, phone booth, mouse pad, "
    "remote area, remote location, apple computer, tie dye, boat house, power plant, "
    "jet ski, ball game, ball park, ball field, record player, dvd player, cd player, man made, man hole"
)
_ANIMALS = "bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe"

# Orange is more often a colour than a fruit: it counts only after an article, and before neither a noun nor a colour.
_ORANGE = (
    r"(?:(?<=\ban )|(?<=\bone )|(?<=\bthe ))orange(?=\W*$|\s*[.,;:!?]|\s+(?:and|or|on|in|next|with|beside|near|is|from)"
    r"\b(?!\s+(?:black|white|yellow|red|blue|green|brown|gr[ae]y|pink|purple|orange)\b))"
)


class _AnnotatedImage(NamedTuple):
    """An image's file, its classes, and how many of them are large."""

    file: str
    objects: frozenset[str]
    large: int


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
    suitable = [image for image in _read_annotations(source) if image.large >= min_classes]
    if not suitable:
        raise SpecError(
            f"no image of '{source}' shows {min_classes} classes on 1 % of its area each; lower min_classes."
        )
    chosen: list[_AnnotatedImage] = []
    absent = 0
    for number in np.random.default_rng(seed).permutation(len(suitable)):
        if len(chosen) == limit:
            break
        if (folder / suitable[number].file).is_file():
            chosen.append(suitable[number])
        else:
            absent += 1
    if not chosen:
        raise ImageError(
            f"none of the {len(suitable)} images of '{source.name}', such as '{suitable[0].file}', is in folder "
            f"'{folder}'; give the folder of the same year and split."
        )
    if absent:
        warnings.warn(
            f"{absent} images of '{source.name}' are not in folder '{folder}' and were left out.",
            EludeSteerWarning,
            stacklevel=2,
        )
    # The name is part of the keys of cached work, so other images must give another name.
    content = repr([(image.file, sorted(image.objects)) for image in chosen])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    cases = [Case(folder / image.file, image.objects) for image in chosen]
    return World(f"coco:{source.stem}:{digest}", cases, _reader().names, read_caption)


def read_caption(caption: str) -> Reading:
    """The classes that a caption names. The longest name counts, so a hot dog is no dog.

    Example:
        >>> sorted(read_caption("Two men eat hot dogs at a traffic light.").objects)
        ['hot dog', 'person', 'traffic light']
    """
    counts = _reader().count(caption)
    return Reading(frozenset(counts), repeated=frozenset(name for name, count in counts.items() if count > 1))


def _read_annotations(path: Path) -> list[_AnnotatedImage]:
    content, classes = (
        read_json_lists(path, ("images", "annotations", "categories"), "instances_val2017.json"),
        _reader().concepts,
    )
    try:
        names = {row["id"]: str(row["name"]).lower() for row in content["categories"]}
        unknown = sorted(name for name in names.values() if not classes.get(name))
        if unknown:
            raise SpecError(f"'{path}' has a category '{unknown[0][:60]}', which is none of COCO's 80 classes.")
        areas: defaultdict[Any, Counter[str]] = defaultdict(Counter)
        for row in content["annotations"]:
            areas[row["image_id"]][classes[names[row["category_id"]]]] += row["area"]
        images = []
        for row in content["images"]:
            by_class, min_area = areas[row["id"]], LARGE * row["width"] * row["height"]
            large = sum(area >= min_area for area in by_class.values())
            images.append(_AnnotatedImage(plain_name(row["file_name"], path), frozenset(by_class), large))
    except (KeyError, TypeError, OverflowError) as error:
        raise SpecError(
            f"'{path}' is no COCO instances file: an entry is malformed ({repr(error)[:80]}); {_EXPECTED}."
        ) from error
    return sorted(images)


def plain_name(name: Any, path: Path) -> str:
    """The name of an image in a file of annotations; raise if it leaves the folder of the images, or is no name."""
    text = name if isinstance(name, str) else ""
    parts = PurePath(text).parts
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(name)[:60])
    if not parts or not text.isprintable() or any(len(part.encode()) > 255 for part in parts) or len(text) > 1000:
        raise SpecError(f"'{path}' has an image '{shown}', which is not the name of a file; give names that are.")
    if PurePath(text).is_absolute() or ".." in parts:
        raise SpecError(f"'{path}' names the image '{shown}', which lies outside its folder; give names inside it.")
    return text


def read_json_lists(path: Path, keys: Sequence[str], example: str) -> dict[str, Any]:
    """Read a JSON file of COCO's formats, which must have a list under each of these keys.

    Args:
        path: the file.
        keys: the lists that it must have.
        example: the name of such a file, for the error.
    """
    expected = f"give one such as {example}"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror or error}; {expected}.") from error
    except ValueError as error:  # not JSON, or not even text
        raise SpecError(f"'{path}' is not JSON; {expected}.") from error
    except RecursionError as error:
        raise SpecError(f"'{path}' is nested too deeply; {expected}.") from error
    for key in keys:
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise SpecError(f"'{path}' has no list '{key}'; {expected}.")
    return dict(content)


@cache
def _reader() -> CaptionReader:
    animals = {f"baby {name}": name for name in _ANIMALS.split(", ")}  # otherwise a baby is a person
    return CaptionReader(_CLASSES, other_meanings=_OTHER_MEANINGS, further=animals, patterns={"orange": _ORANGE})
