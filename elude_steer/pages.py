"""What the demo answers: captions, maps, reasons, recipes, the Python call. Nothing here knows Gradio."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from elude_steer import fragments
from elude_steer.documents import dump_document, parse_document
from elude_steer.errors import EludeSteerError, ImageError, SpecError
from elude_steer.figures import data_uri, fitted
from elude_steer.images import open_image
from elude_steer.plans import Settings
from elude_steer.recipe import Recipe, SteeringSpec, StepSpec, list_recipes, load_recipe
from elude_steer.results import SteeredCaption
from elude_steer.specimens import Specimens
from elude_steer.steering import Steerer
from elude_steer.tuning import Found, known_as, tune
from elude_steer.vlm import PROMPT, telling

SHOWN = 480  # pixels of the longer side of pictures in the page
TUNABLE = ("mode", "kappa", "nu", "gamma", "alpha", "beta", "fill")
# One line each, for people who have not read the paper.
HINTS: Mapping[str, str] = {
    "mode": "place works on a region and can put things there; scale, the paper's, multiplies what already fires",
    "kappa": "how many sub-units a word stands for",
    "nu": "how many patches of each tile are changed, or all; larger for large things and for places",
    "gamma": "what the sub-units of removed words are multiplied by",
    "alpha": "what those of added words are multiplied by (scale)",
    "beta": "how strongly added words are set (place)",
    "fill": "how many sub-units of the surroundings take a removed word's place (place); 0 leaves a hole",
}
SIGNS = {"minus": "\N{MINUS SIGN} ", "plus": "+ "}
_LONGEST_MARK = 2_000_000  # characters; a mark of the page is a small part of that


class StoppedError(EludeSteerError):
    """Somebody pressed stop, or went away."""


@dataclass(frozen=True)
class Picture:
    """A picture of a visitor, as it came: a file's bytes, and what the file is called."""

    name: str
    data: bytes

    @classmethod
    def of(cls, path: str | Path, name: str | None = None) -> Picture:
        """The picture of a file; raises where it is none."""
        try:
            picture = cls(name or Path(path).name, Path(path).read_bytes())
        except OSError as error:
            raise ImageError(f"'{Path(path).name}' cannot be read: {error.strerror or error}.") from error
        picture.opened()
        return picture

    def opened(self) -> Any:
        """Its pixels."""
        try:
            return open_image(self.data)
        except ImageError as error:
            raise ImageError(str(error).replace("the given bytes", f"'{Path(self.name).name}'")) from error


@dataclass(frozen=True)
class Wanted:
    """What stands in the page when somebody presses: everything that makes a caption."""

    picture: Picture | None
    mark: str | None
    minus: tuple[str, ...]
    plus: tuple[str, ...]
    prompt: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """A picture that comes with a recipe, and the recipe's edits."""

    path: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        """What its file is called, without the part that all have."""
        return self.path.stem.removeprefix(f"{self.recipe.atlas}-")


class Page:
    """The page's answers to what visitors do; it keeps nothing of them but what is being worked on."""

    def __init__(self, steerer: Steerer, examples: Sequence[Example] = ()) -> None:
        self.steerer, self.examples = steerer, tuple(examples)
        self.specimens = Specimens(steerer.atlas, steerer.vlm)
        self.own = Settings.of(steerer.defaults)
        self.words = list(steerer.atlas.named().counts)
        self._running: dict[str, threading.Event] = {}

    def warm_up(self) -> None:
        """Does everything once, so that the first visitor does not wait for what only the first call does."""
        blank = Image.new("RGB", (64, 64))
        plan, _ = self.steerer.planned(self.words[:1])
        self.views(self.steerer.explain(blank, plan, max_new_tokens=2))

    @contextmanager
    def working(self, visitor: str, told: Callable[[int], object] = lambda tokens: None) -> Iterator[None]:
        """Inside, what the model does can be stopped, and `told` hears of every token; a visitor's old work ends."""
        self.stop(visitor)
        stop = self._running[visitor] = threading.Event()

        def step(tokens: int) -> None:
            if stop.is_set():
                raise StoppedError("stopped.")
            told(tokens)

        try:
            with telling(step):
                yield
        finally:
            if self._running.get(visitor) is stop:
                del self._running[visitor]

    def stop(self, visitor: str) -> None:
        """Ends what is being done for a visitor, if anything is."""
        running = self._running.get(visitor)
        if running is not None:
            running.set()

    def settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """What stands in the folded settings, as far as it differs from the atlas's own."""
        given = dict(zip(TUNABLE, values, strict=True))
        text = str(given["nu"]).strip()
        given["nu"] = int(text) if text.lstrip("-").isdecimal() else text
        for name in ("kappa", "fill"):
            if isinstance(given[name], float) and given[name].is_integer():
                given[name] = int(given[name])
        known = {field.name for field in fields(Settings)}
        return {
            name: value
            for name, value in given.items()
            if name in known and value not in (None, "") and value != getattr(self.own, name)
        }

    def fields(self, settings: Mapping[str, Any] | None = None) -> list[Any]:
        """The folded settings as the page shows them: the atlas's own, and what differs from them."""
        now = vars(self.own) | {name: value for name, value in (settings or {}).items() if value is not None}
        return [str(now[name]) if name == "nu" else now[name] for name in TUNABLE]

    def steer(self, wanted: Wanted) -> SteeredCaption:
        """Both captions of a picture."""
        image = _pixels(wanted.picture)
        if not wanted.minus and not wanted.plus:
            raise SpecError("say what should go or come: pick a word, or type one.")
        where, settings = region(wanted.mark), dict(wanted.settings)
        if where is not None and wanted.plus:
            settings["mode"] = "place"
        plan, notes = self.steerer.planned(wanted.minus, wanted.plus, where, settings)
        return self.steerer.explain(image, plan, prompt=wanted.prompt or PROMPT, notes=notes)

    def find(self, wanted: Wanted) -> Found:
        """Captions under a dozen settings around the atlas's own, best first."""
        image = _pixels(wanted.picture)
        if len(wanted.minus) != 1 or len(wanted.plus) > 1:
            raise SpecError("settings are tried for one word that goes, and at most one that comes in its place.")
        own, grid = self.own, {name: [value] for name, value in wanted.settings.items()}
        grid["kappa"] = _around(own.kappa, (2 / 3, 1, 5 / 3))
        grid["nu"] = ["all", 10, 50] if isinstance(own.nu, str) else _around(own.nu, (0.6, 1, 1.5, 3))
        plus = wanted.plus[0] if wanted.plus else None
        prompt = wanted.prompt or PROMPT
        return tune(self.steerer, image, minus=wanted.minus[0], plus=plus, grid=grid, prompt=prompt)

    def view(self, picture: Picture) -> dict[str, Any]:
        """The picture alone, as the page shows it."""
        return {"views": [_view("picture", fitted(picture.opened(), SHOWN))], "chosen": 0, "fresh": True}

    def views(self, result: SteeredCaption) -> dict[str, Any]:
        """The picture, and the picture with a heat map for each word; the first word's is in sight."""
        signs = {c.word: SIGNS[c.role] + c.word for c in result.plan.concepts}
        maps = [_view(signs[word], result.heatmap(word, side=SHOWN)) for word in result.maps]
        return {"views": [_view("picture", fitted(result.image, SHOWN)), *maps], "chosen": min(1, len(maps))}

    def reasons(self, result: SteeredCaption) -> str:
        """The sub-units that were changed, as a table to choose from."""
        rows = []
        for concept in result.plan.concepts:
            word = SIGNS[concept.role] + concept.word
            for e in concept.edits:
                cells = (f"{word}: {e.label}", round(e.similarity, 2), round(e.score, 1), e.unit, e.sub_unit)
                rows.append(({"sub_unit": e.sub_unit}, cells))
        return fragments.table(
            "The sub-units that were changed; choose one to see what it fires for",
            ("word: label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def tried(self, found: Found) -> str:
        """What was tried as a table to choose from."""
        rows = []
        for row in found.rows:
            told = {name: row[name] for name in TUNABLE if name in row}
            rows.append((told, (row["caption"], row["nu"], row["kappa"], f"{row['kept']:.0%}")))
        return fragments.table("Tried, best first; choose one to use it", ("caption", "nu", "kappa", "kept"), rows)

    def concepts(self) -> str:
        """Every label of the atlas, the most frequent first."""
        counts = self.steerer.atlas.named().counts
        rows = [({"word": word}, (word, count)) for word, count in counts.items()]
        return fragments.table("All concepts", ("concept", "sub-units"), rows)

    def search(self, word: str) -> str:
        """The sub-units that match a word."""
        atlas = self.steerer.atlas
        matches = atlas.named().search(self.steerer.matcher, word, atlas.units.numpy(), limit=24, by="label")
        rows = [
            ({"sub_unit": m.sub_unit}, (m.label, round(m.similarity, 2), round(m.score, 1), m.unit, m.sub_unit))
            for m in matches
        ]
        return fragments.table(
            f"Sub-units for '{word}'; choose one to see what it fires for",
            ("label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def specimen(self, sub_unit: Any) -> str:
        """What a sub-unit fires for, beside its parent unit, and what else the unit was split into."""
        atlas = self.steerer.atlas
        if not isinstance(sub_unit, int) or not 0 <= sub_unit < len(atlas):
            raise SpecError(f"there is no sub-unit {sub_unit}; atlas '{atlas.name}' has 0 to {len(atlas) - 1}.")
        labels, unit = atlas.named(), int(atlas.units[sub_unit])
        parts = [
            fragments.choice(f"{labels[one] or 'without a name'} ({one})", {"sub_unit": one})
            for one in atlas.sub_units_of(unit)
            if one != sub_unit
        ]
        name = labels[sub_unit] or "without a name"
        return (
            '<div class="specimens">'
            + fragments.strip(f"Sub-unit {sub_unit}: {name}", self.specimens.of_sub_unit(sub_unit))
            + fragments.strip(f"Unit {unit}, before the split", self.specimens.of_unit(unit))
            + (f"<h3>What else the unit was split into</h3>{fragments.choices('parts', parts)}" if parts else "")
            + "</div>"
        )

    def take_home(self, wanted: Wanted) -> str:
        """The present state as a recipe and as a Python call."""
        name = wanted.picture.name if wanted.picture else "photo.png"
        marked = region(wanted.mark) is not None and bool(wanted.plus)
        atlas = known_as(self.steerer)
        recipe = recipe_text(name, wanted, atlas, mask="mark.png" if marked else None)
        call = python_call(name, wanted, atlas, mask="mark.png" if marked else None)
        return fragments.code("Recipe", recipe, save_as="steering.yaml") + fragments.code("The same in Python", call)

    def examples_strip(self) -> str:
        """The examples' pictures as buttons."""
        buttons = []
        for number, example in enumerate(self.examples):
            picture = fitted(open_image(example.path), 96)
            buttons.append(fragments.choice(example.name, {"example": number}, picture=picture, chosen=not number))
        return fragments.choices("Examples", buttons)

    def edits(self, number: int) -> str:
        """What an example's recipe does, as buttons."""
        steps = self.examples[number].recipe.steps
        buttons = [
            fragments.choice(edit_name(step), {"example": number, "step": index}) for index, step in enumerate(steps)
        ]
        return fragments.choices("Edits to try", buttons)


class Pace:
    """How often a page may be pressed within a minute, by one visitor and by all."""

    def __init__(self, each: int, together: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.each, self.together, self.clock = each, together, clock
        self._pressed: dict[str, deque[float]] = defaultdict(deque)
        self._lock = threading.Lock()

    def check(self, visitor: str) -> None:
        """Counts one press; raises where there were too many."""
        now = self.clock()
        with self._lock:
            for who in list(self._pressed):
                pressed = self._pressed[who]
                while pressed and now - pressed[0] > 60:
                    pressed.popleft()
                if not pressed:
                    del self._pressed[who]
            if len(self._pressed.get(visitor, ())) >= self.each:
                raise SpecError(f"this page takes {self.each} presses a minute from one visitor; wait a little.")
            if sum(map(len, self._pressed.values())) >= self.together:
                raise SpecError("many people are on this page just now; try again in a minute.")
            self._pressed[visitor].append(now)


def region(mark: str | None) -> np.ndarray | None:
    """What was marked with the brush, as a mask over the picture; None where nothing was."""
    if not mark:
        return None
    try:
        if not isinstance(mark, str) or len(mark) > _LONGEST_MARK:
            raise ValueError("too long")
        data = base64.b64decode(mark.partition(",")[2], validate=True)
        with Image.open(io.BytesIO(data)) as image:
            if max(image.size) > 4 * SHOWN:
                raise ValueError("too large")
            mask = np.asarray(image.convert("L")) > 127
    except (OSError, ValueError) as error:
        raise ImageError("what was marked did not arrive whole; mark it again.") from error
    return mask if mask.any() else None


def python_call(image: str, wanted: Wanted, atlas: str, *, mask: str | None = None) -> str:
    """The call that does the same."""
    parts = [repr(image)]
    parts += [f"minus={list(wanted.minus)!r}"] if wanted.minus else []
    parts += [f"plus={list(wanted.plus)!r}"] if wanted.plus else []
    parts += [f"where={mask!r}"] if mask else []
    parts += [f"{name}={value!r}" for name, value in wanted.settings.items()]
    parts += [f"prompt={wanted.prompt!r}"] if wanted.prompt not in ("", PROMPT) else []
    parts += [f"atlas={atlas!r}"] if atlas != "toyland" else []
    return f"import elude_steer as es\n\nes.steer({', '.join(parts)}).caption"


def recipe_text(image: str, wanted: Wanted, atlas: str, *, mask: str | None = None) -> str:
    """The present state as a recipe; the picture is left to the command line, which stands in its first lines."""
    step = StepSpec(wanted.minus, wanted.plus, mask=mask, settings=SteeringSpec(**wanted.settings))
    document = Recipe("from-the-demo", atlas, (step,), prompt=wanted.prompt or PROMPT)
    picture = f"'{image}'" if " " in image else image
    lines = [f"# {edit_name(step)}, from the demo.", "#", f"#   elude-steer run steering.yaml --image {picture}"]
    return "\n".join([*(line.replace("\r", " ") for line in lines), "", dump_document(document, brief=True)])


def edit_name(step: StepSpec) -> str:
    """What an edit does, in signs and words."""
    words = [("minus", word) for word in step.minus] + [("plus", word) for word in step.plus]
    return " ".join(SIGNS[role] + word for role, word in words) or "nothing"


def read_recipe(path: str | Path) -> Recipe:
    """A recipe that somebody gives to the page; its pictures are theirs, not files of this machine."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("the recipe cannot be read as UTF-8 text; give a YAML file.") from error
    recipe = parse_document(Recipe, text, "the recipe")
    if not recipe.steps:
        raise SpecError("the recipe has no steps; it needs at least one, with minus or plus words.")
    return replace(recipe, image=None, steps=tuple(replace(step, mask=None) for step in recipe.steps))


def examples_of(atlas: str) -> list[Example]:
    """The shipped recipes for an atlas whose pictures are at hand."""
    recipes = [load_recipe(one.name) for one in list_recipes() if one.kind == "steering"]
    mine = [one for one in recipes if one.atlas == atlas and one.image and Path(one.image).is_file()]
    return [Example(Path(str(one.image)), one) for one in mine]


def _pixels(picture: Picture | None) -> Any:
    if picture is None:
        raise ImageError("there is no picture yet; choose an example, or bring one of yours.")
    return picture.opened()


def _view(name: str, image: Image.Image) -> dict[str, str]:
    return {"name": name, "source": data_uri(image, quick=True)}


def _around(value: int, shares: Sequence[float]) -> list[int]:
    return list(dict.fromkeys(max(1, round(value * share)) for share in shares))
