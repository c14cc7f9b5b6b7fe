"""What visitors of the demo bring and take away: pictures, marks, recipes; and how often they may press."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from PIL import Image

from elude_steer.atlas.manifest import EMBEDDED_ATLAS
from elude_steer.demo import html_parts
from elude_steer.errors import ImageError, SpecError
from elude_steer.models.images import MAX_PIXELS, open_image
from elude_steer.models.vlm import PROMPT
from elude_steer.recipe_files import list_recipes, load_recipe, parse_recipe
from elude_steer.specs import Recipe, Settings, SteeringSpec, StepSpec
from elude_steer.utils.yaml_schema import dump_document

SHOWN = 480  # pixels of the longer side of pictures in the page
SIGNS = {"minus": "\N{MINUS SIGN} ", "plus": "+ "}
_LONGEST_MARK = 2_000_000  # characters; a mark of the page is a small part of that
_LONGEST_WORD, _LONGEST_QUESTION, _LONGEST_RECIPE = 100, 1000, 100_000  # characters; YAML is slow to read


@dataclass(frozen=True)
class Picture:
    """A picture of a visitor, as it came: a file's bytes, and what the file is called."""

    name: str
    data: bytes

    @classmethod
    def of(cls, path: str | Path, *, most: int = MAX_PIXELS) -> Picture:
        """The picture of a file; raises where it is none, or has more than `most` pixels."""
        try:
            picture = cls(Path(path).name, Path(path).read_bytes())
        except OSError as error:
            raise ImageError(f"'{Path(path).name}' cannot be read: {error.strerror or error}.") from error
        picture.opened(most)
        return picture

    def opened(self, most: int = MAX_PIXELS) -> Any:
        """Its pixels."""
        try:
            return open_image(self.data, max_pixels=most)
        except ImageError as error:
            raise ImageError(str(error).replace("the given bytes", f"'{Path(self.name).name}'")) from error


@dataclass(frozen=True)
class EditRequest:
    """What stands in the page when somebody presses: everything that makes a caption."""

    picture: Picture | None
    mark: str | None
    minus: tuple[str, ...]
    plus: tuple[str, ...]
    prompt: str
    settings: Mapping[str, Any]

    def checked(self) -> EditRequest:
        """The same; raises where nothing is said, or too much."""
        if not self.minus and not self.plus:
            raise SpecError("say what should go or come: pick a word, or type one.")
        for word in (*self.minus, *self.plus):
            check_length(word)
        if len(self.prompt) > _LONGEST_QUESTION:
            raise SpecError(f"a question has at most {_LONGEST_QUESTION:,} letters here.")
        return self


@dataclass(frozen=True)
class ImageState:
    """What the page shows of a visitor's picture, and the picture itself.

    Attributes:
        picture: as it came.
        view: what stands on the easel.
        edits: what an example's recipe does, as buttons.
        reasons: the sub-units of the last answer.
        taken: the last answer as a recipe and a Python call.
        given: the question and the settings that an edit brought; they leave with the picture.
    """

    picture: Picture | None = None
    view: Mapping[str, Any] = field(default_factory=dict)
    edits: str = ""
    reasons: str = html_parts.table("The sub-units that were changed", (), [])
    taken: str = html_parts.table("The present state to take home", (), [])
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Example:
    """A picture that comes with a recipe, and the recipe's edits."""

    path: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        """What its file is called, without the part that all have."""
        return self.path.stem.removeprefix(f"{self.recipe.atlas}-")


class RateLimit:
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


def check_length(word: str) -> None:
    """Raises where a word is too long to be one."""
    if len(word) > _LONGEST_WORD:
        raise SpecError(f"'{word[:20]}…' has {len(word):,} letters; a word or a few have at most {_LONGEST_WORD} here.")


def region(mark: str | None) -> np.ndarray | None:
    """What was marked with the brush, as a mask over the picture; None where nothing was."""
    if not mark:
        return None
    try:
        if not isinstance(mark, str) or len(mark) > _LONGEST_MARK:
            raise ValueError("too long")
        data = base64.b64decode(mark.partition(",")[2], validate=True)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if max(image.size) > 4 * SHOWN:
                raise ValueError("too large")
            mask = np.asarray(image.convert("L")) > 127
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError("what was marked did not arrive whole; mark it again.") from error
    return mask if mask.any() else None


def placed(wanted: EditRequest) -> tuple[np.ndarray | None, dict[str, Any]]:
    """The region that was marked, and the settings: who marks something wants it placed."""
    where = region(wanted.mark)
    return where, {**wanted.settings, **({} if where is None else {"mode": "place"})}


def python_call(image: str, wanted: EditRequest, atlas: str, *, mask: str | None = None) -> str:
    """The call that does the same."""
    parts = [repr(image)]
    parts += [f"minus={list(wanted.minus)!r}"] if wanted.minus else []
    parts += [f"plus={list(wanted.plus)!r}"] if wanted.plus else []
    parts += [f"where={mask!r}"] if mask else []
    parts += [f"{name}={value!r}" for name, value in wanted.settings.items()]
    parts += [f"prompt={wanted.prompt!r}"] if wanted.prompt not in ("", PROMPT) else []
    parts += [f"atlas={atlas!r}"] if atlas != EMBEDDED_ATLAS else []
    return f"import elude_steer as es\n\nes.steer({', '.join(parts)}).caption"


def recipe_text(image: str, wanted: EditRequest, atlas: str, *, mask: str | None = None) -> str:
    """The present state as a recipe; the picture is left to the command line, which stands in its first lines."""
    step = StepSpec(wanted.minus, wanted.plus, mask=mask, settings=SteeringSpec(**wanted.settings))
    document = Recipe("from-the-demo", atlas, (step,), prompt=wanted.prompt or PROMPT)
    lines = [f"# {edit_name(step)}, from the demo.", "#", f"#   elude-steer run steering.yaml --image {quote(image)}"]
    # A line break in a word or a name would end the comment.
    plain = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]
    return "\n".join([*plain, "", dump_document(document, brief=True)])


def edit_name(step: StepSpec) -> str:
    """What an edit does, in signs and words."""
    words = [("minus", word) for word in step.minus] + [("plus", word) for word in step.plus]
    return " ".join(SIGNS[role] + word for role, word in words) or "nothing"


def read_recipe(path: str | Path) -> Recipe:
    """A recipe that somebody gives to the page; its pictures are theirs, not files of this machine."""
    try:
        if Path(path).stat().st_size > _LONGEST_RECIPE:
            raise SpecError(f"the recipe has more than {_LONGEST_RECIPE:,} characters; give one with fewer edits.")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("the recipe cannot be read as UTF-8 text; give a YAML file.") from error
    recipe = parse_recipe(text, "the recipe")
    steps = tuple(replace(step, mask=step.mask and Path(step.mask).name) for step in recipe.steps)
    return replace(recipe, image=None, steps=steps)


def left_out(recipe: Recipe, fields: Collection[str], own: Settings, atlas: str) -> list[str]:
    """What a recipe's first edit says otherwise than the atlas and the page has no field for, in sentences."""
    given = {name: value for name, value in vars(recipe.steps[0].settings).items() if value is not None}
    said = {name for name, value in given.items() if value != getattr(own, name)} - set(fields)
    said |= {"max_new_tokens"} if recipe.max_new_tokens != Recipe.max_new_tokens else set()
    notes = [f"This page has no field for {', '.join(sorted(said))}: left out."] if said else []
    mine = recipe.atlas == atlas or Path(recipe.atlas).name == atlas
    return notes + ([] if mine else [f"It was written for atlas '{Path(recipe.atlas).name}', this page has '{atlas}'."])


def shipped_examples(atlas: str) -> list[Example]:
    """The shipped recipes for an atlas whose pictures are at hand."""
    recipes = [load_recipe(one.name) for one in list_recipes() if one.kind == "steering"]
    mine = [one for one in recipes if one.atlas == atlas and one.image and Path(one.image).is_file()]
    return [Example(Path(str(one.image)), one) for one in mine]
