"""What the demo answers: captions, maps, reasons, recipes, the Python call. Nothing here knows Gradio."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.demo import html_parts
from elude_steer.demo.session import (
    SHOWN,
    SIGNS,
    EditRequest,
    Example,
    ImageState,
    Picture,
    check_length,
    edit_name,
    placed,
    python_call,
    recipe_text,
)
from elude_steer.errors import ImageError, SpecError, StoppedError
from elude_steer.evaluation.edits.tune import TuningResult, atlas_reference, tune
from elude_steer.models.images import MAX_PIXELS, open_image
from elude_steer.models.vlm import PROMPT, report_tokens
from elude_steer.specs import demo_hints
from elude_steer.steering.result import SteeredCaption
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.plotting import data_uri, fit_within

T = TypeVar("T")
HINTS = demo_hints()  # a line for each setting that the page shows
TUNABLE = tuple(HINTS)


class Presenter:
    """The page's answers to what visitors do; it keeps nothing of them but what is being worked on."""

    def __init__(self, steerer: Steerer, examples: Sequence[Example] = (), *, public: bool = False) -> None:
        self.steerer, self.examples = steerer, tuple(examples)
        # Strangers bring no huge pictures, and are not told where the atlas lies.
        self.most = 20_000_000 if public else MAX_PIXELS
        self.atlas = steerer.atlas.name if public else atlas_reference(steerer)
        self.specimens = ReferenceImages(steerer.atlas, steerer.vlm)
        self.own = merge_settings(steerer.defaults)
        self.words = list(steerer.atlas.require_labels().counts)
        self._running: dict[str, _Work] = {}
        self._fresh = itertools.count(1)
        # Two threads for all that is heavy, always the same: each keeps memory of its own for what it once computed.
        self._workers = ThreadPoolExecutor(2)

    def warm_up(self) -> None:
        """Does everything once, so that the first visitor does not wait for what only the first call does."""
        blank = Image.new("RGB", (64, 64))
        plan, _ = self.steerer.prepare_plan(self.words[:1])
        self.views(self.steerer.explain(blank, plan, max_new_tokens=2))

    def run(self, job: Callable[[], T]) -> T:
        """Does something heavy, when it is its turn."""
        return self._workers.submit(copy_context().run, job).result()

    @contextmanager
    def working(self, visitor: str, told: Callable[[int], object] = lambda tokens: None) -> Iterator[None]:
        """Inside, what the model does can be stopped, and `told` hears of every token; a visitor's old work ends."""
        self.stop(visitor, "")
        work = self._running[visitor] = _Work()

        def step(tokens: int) -> None:
            work.go_on()
            told(tokens)

        try:
            with report_tokens(step):
                yield
            work.go_on()  # an answer that nobody waits for any more is none
        finally:
            if self._running.get(visitor) is work:
                del self._running[visitor]

    def stop(self, visitor: str, because: str = "Stopped.") -> None:
        """Ends what is being done for a visitor, if anything is; no reason is given where something else takes over."""
        work = self._running.get(visitor)
        if work is not None:
            work.stopped = because

    def settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """What stands in the folded settings, as far as it differs from the atlas's own."""
        given = dict(zip(TUNABLE, values, strict=True))
        text = "" if given["nu"] is None else str(given["nu"]).strip()
        given["nu"] = int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else text
        for name in ("kappa", "fill"):
            if isinstance(given[name], float) and given[name].is_integer():
                given[name] = int(given[name])
        return {name: value for name, value in given.items() if value not in (None, "", getattr(self.own, name))}

    def field_values(self, settings: Mapping[str, Any] | None = None) -> list[Any]:
        """The folded settings as the page shows them: the atlas's own, and what differs from them."""
        now = vars(self.own) | {name: value for name, value in (settings or {}).items() if value is not None}
        return [str(now[name]) if name == "nu" else now[name] for name in TUNABLE]

    def steer(self, wanted: EditRequest) -> SteeredCaption:
        """Both captions of a picture."""
        image = self._pixels(wanted.checked().picture)
        where, settings = placed(wanted)
        if where is None and not wanted.minus and settings.get("mode", self.own.mode) == "place":
            raise SpecError(
                f"'{wanted.plus[0]}' needs a place: name what it replaces under Remove, or mark where on the picture."
            )
        plan, notes = self.steerer.prepare_plan(wanted.minus, wanted.plus, where, settings)
        return self.steerer.explain(image, plan, prompt=wanted.prompt or PROMPT, notes=notes)

    def _remarks(self, wanted: EditRequest) -> list[str]:
        """What stands folded away or on the picture and made a difference."""
        marked = placed(wanted)[0] is not None
        given = ", ".join(f"{name} {value}" for name, value in wanted.settings.items())
        notes = [f"Settings that are not the atlas's own: {given}."] if given else []
        if marked and wanted.settings.get("mode", self.own.mode) == "scale":
            notes.append("There is a mark, so place did it: scale has no region.")
        if marked and wanted.minus:
            added = "What is added went to the mark, what is removed goes where it fires."
            notes.append(added if wanted.plus else "Removed in the marked region alone.")
        return notes

    def _pixels(self, picture: Picture | None) -> Any:
        if picture is None:
            raise ImageError("there is no picture yet; choose an example, or bring one of yours.")
        return picture.opened(self.most)

    def answered(self, board: ImageState, wanted: EditRequest) -> tuple[ImageState, SteeredCaption]:
        """Both captions of a picture, and the board with all there is to tell about them."""
        result = self.steer(wanted)
        result = replace(result, notes=(*result.notes, *self._remarks(wanted)))
        view, reasons, taken = self.views(result), self.reasons(result), self.take_home(wanted)
        return replace(board, view=view, reasons=reasons, taken=taken), result

    def board(self, number: int, step: int | None = None) -> ImageState:
        """An example that was chosen, with the region of one of its edits marked where it has one."""
        example = self.examples[number]
        picture = Picture.of(example.path)
        box = () if step is None else example.recipe.steps[step].where
        return ImageState(picture, self.view(picture, box, number), self.edits(number))

    def brought(self, path: str | Path) -> ImageState:
        """A picture that somebody brought."""
        picture = Picture.of(path, most=self.most)
        return ImageState(picture, self.view(picture))

    def released(self, board: ImageState, given: Sequence[Any]) -> list[Any]:
        """The question and the settings for the next picture: what an edit had brought leaves with the last one."""
        return [PROMPT, *self.field_values()] if tuple(given) == board.given else list(given)

    def find(self, wanted: EditRequest) -> TuningResult:
        """Captions under a dozen settings around the atlas's own, best first."""
        image = self._pixels(wanted.checked().picture)
        if len(wanted.minus) != 1 or len(wanted.plus) > 1:
            raise SpecError("settings are tried for one word that goes, and at most one that comes in its place.")
        if wanted.mark:
            raise SpecError("settings are tried where the word fires, and there is a mark; clear it first.")
        own, grid = self.own, {name: [value] for name, value in wanted.settings.items()}
        grid["kappa"] = _around(own.kappa, (2 / 3, 1, 5 / 3))
        grid["nu"] = ["all", 10, 50] if isinstance(own.nu, str) else _around(own.nu, (0.6, 1, 1.5, 3))
        plus = wanted.plus[0] if wanted.plus else None
        prompt = wanted.prompt or PROMPT
        return tune(self.steerer, image, minus=wanted.minus[0], plus=plus, grid=grid, prompt=prompt)

    def view(self, picture: Picture, box: Sequence[float] = (), example: int | None = None) -> dict[str, Any]:
        """The picture alone, as the page shows it, with a box of pixels marked on it or none."""
        image = picture.opened(self.most)
        sides = (image.width, image.height) * 2
        shares = [value / side for value, side in zip(box, sides, strict=bool(box))]
        # Counted, so that the same picture chosen once more is told from the one that stands there.
        fresh = {"fresh": next(self._fresh), "box": shares, "example": example}
        return {"views": [_view("picture", fit_within(image, SHOWN))], "chosen": 0, **fresh}

    def views(self, result: SteeredCaption) -> dict[str, Any]:
        """The picture, and the picture with a heat map for each word; the first word's is in sight."""
        signs = {c.word: SIGNS[c.role] + c.word for c in result.plan.concepts}
        maps = [_view(signs[word], result.heatmap(word, side=SHOWN)) for word in result.maps]
        return {"views": [_view("picture", fit_within(result.image, SHOWN)), *maps], "chosen": min(1, len(maps))}

    def reasons(self, result: SteeredCaption) -> str:
        """The sub-units that were changed, as a table to choose from."""
        rows = []
        for concept in result.plan.concepts:
            word = SIGNS[concept.role] + concept.word
            for e in concept.edits:
                cells = (f"{word}: {e.label}", round(e.similarity, 2), round(e.score, 1), e.unit, e.sub_unit)
                rows.append(({"sub_unit": e.sub_unit}, cells))
        return html_parts.table(
            "The sub-units that were changed; choose one to see what it fires for",
            ("word: label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def tried(self, found: TuningResult) -> str:
        """What was tried as a table to choose from."""
        rows = []
        for row in found.rows:
            told = {name: row[name] for name in TUNABLE if name in row}
            rows.append((told, (row["caption"], row["nu"], row["kappa"], f"{row['kept']:.0%}")))
        return html_parts.table("Tried, best first; choose one to use it", ("caption", "nu", "kappa", "kept"), rows)

    def concepts(self) -> str:
        """Every label of the atlas, the most frequent first."""
        counts = self.steerer.atlas.require_labels().counts
        rows = [({"word": word}, (word, count)) for word, count in counts.items()]
        return html_parts.table("All concepts", ("concept", "sub-units"), rows)

    def search(self, word: str) -> str:
        """The sub-units that match a word."""
        check_length(word)
        atlas = self.steerer.atlas
        matches = atlas.require_labels().search(self.steerer.matcher, word, atlas.units.numpy(), limit=24, by="label")
        rows = [
            ({"sub_unit": m.sub_unit}, (m.label, round(m.similarity, 2), round(m.score, 1), m.unit, m.sub_unit))
            for m in matches
        ]
        return html_parts.table(
            f"Sub-units for '{word}'; choose one to see what it fires for",
            ("label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def specimen(self, sub_unit: Any) -> str:
        """What a sub-unit fires for, beside its parent unit, and what else the unit was split into."""
        atlas = self.steerer.atlas
        if type(sub_unit) is not int or not 0 <= sub_unit < len(atlas):
            raise SpecError(f"there is no sub-unit {sub_unit}; atlas '{atlas.name}' has 0 to {len(atlas) - 1}.")
        labels, unit = atlas.require_labels(), int(atlas.units[sub_unit])
        parts = [
            html_parts.choice(f"{labels[one] or 'without a name'} ({one})", {"sub_unit": one})
            for one in atlas.sub_units_of(unit)
            if one != sub_unit
        ]
        name = labels[sub_unit] or "without a name"
        return (
            '<div class="specimens">'
            + html_parts.strip(f"Sub-unit {sub_unit}: {name}", self.specimens.for_sub_unit(sub_unit))
            + html_parts.strip(f"Unit {unit}, before the split", self.specimens.for_unit(unit))
            + (f"<h3>What else the unit was split into</h3>{html_parts.choices('parts', parts)}" if parts else "")
            + "</div>"
        )

    def take_home(self, wanted: EditRequest) -> str:
        """The present state as a recipe and as a Python call."""
        name = wanted.picture.name if wanted.picture else "photo.png"
        where, settings = placed(wanted)
        mask, done = "mark.png" if where is not None else None, replace(wanted, settings=settings)
        recipe, call = recipe_text(name, done, self.atlas, mask=mask), python_call(name, done, self.atlas, mask=mask)
        files: dict[str, str | None] = {"steering.yaml": None}
        if where is not None:
            files["mark.png"] = data_uri(Image.fromarray(where))
        return html_parts.code("Recipe", recipe, files) + html_parts.code("The same in Python", call)

    def examples_strip(self) -> str:
        """The examples' pictures as buttons."""
        buttons = []
        for number, example in enumerate(self.examples):
            picture = fit_within(open_image(example.path), 96)
            buttons.append(html_parts.choice(example.name, {"example": number}, picture=picture, chosen=not number))
        return html_parts.choices("Examples", buttons)

    def edits(self, number: int) -> str:
        """What an example's recipe does, as buttons."""
        steps = self.examples[number].recipe.steps
        buttons = [
            html_parts.choice(edit_name(step), {"example": number, "step": index}) for index, step in enumerate(steps)
        ]
        return html_parts.choices("Edits to try", buttons)


@dataclass
class _Work:
    """What is being done for a visitor."""

    stopped: str | None = None  # why, once it is

    def go_on(self) -> None:
        if self.stopped is not None:
            raise StoppedError(self.stopped)


def _view(name: str, image: Image.Image) -> dict[str, str]:
    return {"name": name, "source": data_uri(image, quick=True)}


def _around(value: int, shares: Sequence[float]) -> list[int]:
    return list(dict.fromkeys(max(1, round(value * share)) for share in shares))
