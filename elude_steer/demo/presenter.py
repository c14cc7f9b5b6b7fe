"""Answers what visitors of the demo ask: captions, heat maps, tables, code. Nothing here depends on Gradio."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.atlas.vocabulary import FUNCTION_WORDS
from elude_steer.demo import html_parts
from elude_steer.demo.recipes import SIGNS, Example, edit_name, python_call, recipe_text
from elude_steer.demo.running import Decorator, StoppableRequests, run_on
from elude_steer.demo.session import DISPLAY_SIDE, EditRequest, ImageFile, ImageState, check_length
from elude_steer.errors import ImageError, SpecError
from elude_steer.evaluation.edits.tune import TuningResult, atlas_reference, tune
from elude_steer.models.images import MAX_PIXELS, open_image
from elude_steer.models.vlm import PROMPT
from elude_steer.specs import StepSpec, demo_hints
from elude_steer.steering.result import SteeredCaption, mark_difference
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.plotting import data_uri, fit_within

HINTS = demo_hints()  # a line for each setting that the page shows
TUNABLE = tuple(HINTS)
WORKERS = 2  # requests that run at a time
MAX_STRENGTH = 3.0  # of the slider
DOSES = (0, 0.5, 1, 1.5, 2, 3)  # strengths of a dose curve
_SWAPS = 10  # words that are offered in the place of another


class Presenter(StoppableRequests):
    """Answers the page's requests. It stores nothing about visitors except which request of theirs is running.

    Args:
        steerer: the model and the atlas.
        examples: images with recipes to choose from.
        public: whether strangers can reach the page. Their images may have at most 20 million pixels, and exported
            recipes do not reveal the folder of the atlas.
        gpu: decorates the functions that run the model, such as `spaces.GPU`, which runs them in another process.
        name: what the page calls the atlas; by default the atlas's own name.
        workers: the threads for heavy work, which several presenters may share; by default two of its own.
    """

    def __init__(
        self,
        steerer: Steerer[Atlas],
        examples: Sequence[Example] = (),
        *,
        public: bool = False,
        gpu: Decorator | None = None,
        name: str | None = None,
        workers: ThreadPoolExecutor | None = None,
    ) -> None:
        # Heavy work runs in the same few threads: each thread that runs a model keeps its own memory afterwards.
        super().__init__(workers or ThreadPoolExecutor(WORKERS))
        self.steerer, self.examples = steerer, tuple(examples)
        self.name = name or steerer.atlas.name
        self._steer = self._steer_here if gpu is None else run_on(gpu, self._steer_here)
        self._find_settings = self._find_settings_here if gpu is None else run_on(gpu, self._find_settings_here)
        self._try_doses = self._try_doses_here if gpu is None else run_on(gpu, self._try_doses_here)
        self._caption = self._caption_here if gpu is None else run_on(gpu, self._caption_here)
        self.max_pixels = 20_000_000 if public else MAX_PIXELS
        self.max_bytes = (5 if public else 50) * 2**20
        self.atlas = self.name if public else atlas_reference(steerer)
        self.reference_images = ReferenceImages(steerer.atlas, steerer.vlm)
        self.atlas_settings = merge_settings(steerer.defaults)
        self.concepts = list(steerer.atlas.require_labels().counts)
        self.known_words = {word.casefold(): word for word in self._list_known_words()}
        self._example_files = {ImageFile.from_path(example.path) for example in self.examples}
        self._example_captions: dict[ImageFile, str] = {}
        self._image_numbers = itertools.count(1)

    # Running requests

    def warm_up(self) -> None:
        """Run one edit and caption the examples, so that the first visitor waits for neither."""
        blank = Image.new("RGB", (64, 64))
        plan, _ = self.steerer.prepare_plan(self.concepts[:1])
        self.result_view(self.steerer.explain(blank, plan, max_new_tokens=2))
        for example in self.examples:
            self.caption(ImageFile.from_path(example.path))

    # The settings fields

    def read_settings(self, values: Sequence[Any]) -> dict[str, Any]:
        """The settings among the fields' values that differ from the atlas's."""
        settings = dict(zip(TUNABLE, values, strict=True))
        text = "" if settings["nu"] is None else str(settings["nu"]).strip()
        settings["nu"] = int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else text
        if isinstance(settings["kappa"], float) and settings["kappa"].is_integer():
            settings["kappa"] = int(settings["kappa"])
        return {
            name: value
            for name, value in settings.items()
            if value not in (None, "", getattr(self.atlas_settings, name))
        }

    def field_values(self, settings: Mapping[str, Any] | None = None) -> list[Any]:
        """The values of the settings fields: the given settings, and the atlas's for all others."""
        values = vars(self.atlas_settings) | {
            name: value for name, value in (settings or {}).items() if value is not None
        }
        values["strength"] = min(values["strength"], self.max_strength)  # Gradio refuses what a slider cannot show
        return [str(values[name]) if name == "nu" else values[name] for name in TUNABLE]

    @property
    def max_strength(self) -> float:
        """The right end of the slider; the atlas's own strength is always on it."""
        return max(MAX_STRENGTH, self.atlas_settings.strength)

    def fields_for_next_image(self, state: ImageState, fields: Sequence[Any]) -> list[Any]:
        """The question and the settings for the next image: reset if a recipe filled them in, kept if typed."""
        return [PROMPT, *self.field_values()] if tuple(fields) == state.loaded_fields else list(fields)

    # Images

    def open_example(self, number: int, step: int | None = None) -> ImageState:
        """The state after choosing an example; the region of one of its edits is marked, if it has one."""
        example = self.examples[number]
        image = ImageFile.from_path(example.path)
        box = () if step is None else example.recipe.steps[step].where
        return ImageState(image, self.image_view(image, box, number), self.edit_buttons(number))

    def open_upload(self, path: str | Path) -> ImageState:
        """The state after uploading an image."""
        image = ImageFile.from_path(path, max_pixels=self.max_pixels)
        return ImageState(image, self.image_view(image))

    def image_view(self, image: ImageFile, box: Sequence[float] = (), example: int | None = None) -> dict[str, Any]:
        """The viewer's value for a new image, with a box in pixels to mark on it."""
        opened = image.open(self.max_pixels)
        sides = (opened.width, opened.height) * 2
        shares = [value / side for value, side in zip(box, sides, strict=bool(box))]
        # A new number each time, so that choosing the same image again also clears the mark.
        new_image = {"fresh": next(self._image_numbers), "box": shares, "example": example}
        return {"views": [_view("image", fit_within(opened, DISPLAY_SIDE))], "chosen": 0, **new_image}

    def result_view(self, result: SteeredCaption) -> dict[str, Any]:
        """The viewer's value after an edit: the image, and one heat map per concept. The first map is shown."""
        names = {concept.word: SIGNS[concept.role] + concept.word for concept in result.plan.concepts}
        maps = [
            {**_view(names[word], result.heatmap(word, side=DISPLAY_SIDE)), "framed": bool(touched.any())}
            for word, (_, touched) in result.maps.items()
        ]
        return {
            "views": [_view("image", fit_within(result.image, DISPLAY_SIDE)), *maps],
            "chosen": min(1, len(maps)),
        }

    def _open_image(self, request: EditRequest) -> Any:
        if request.image is None:
            raise ImageError("there is no image yet; choose an example, or upload your own.")
        return request.image.open(self.max_pixels)

    # The caption without edits

    def is_captioned(self, image: ImageFile) -> bool:
        """Whether the caption of an image is known. Only those of examples are stored."""
        return image in self._example_captions

    def is_example(self, image: ImageFile) -> bool:
        """Whether an image is that of an example, which is captioned once for all visitors."""
        return image in self._example_files

    def caption(self, image: ImageFile) -> str:
        """The caption of an image without edits."""
        if self.is_captioned(image):
            return self._example_captions[image]
        caption = self._caption(image)
        if self.is_example(image):
            self._example_captions[image] = caption
        return caption

    def _caption_here(self, image: ImageFile) -> str:
        return self.steerer.captions([image.open(self.max_pixels)], [[None]])[0][0]

    def show_caption(self, image: ImageFile | None) -> str:
        """HTML of an image's caption if it is known already."""
        if image is None or not self.is_captioned(image):
            return html_parts.no_caption(coming=image is not None)
        return self.render_caption(self.caption(image))

    def render_caption(self, caption: str) -> str:
        """HTML of a caption; a click on a word that the atlas knows sends it."""
        return html_parts.clickable_caption(caption, self.find_known_word)

    def _list_known_words(self) -> list[str]:
        atlas = self.steerer.atlas
        if atlas.calibration is None:  # then only mode scale works, with any label
            return self.concepts
        vocabulary = atlas.require_labels().vocabulary
        return [vocabulary[int(number)] for number in atlas.calibration.words]

    def find_known_word(self, text: str) -> str | None:
        """The calibrated word that a text is, also in the plural; None if there is none."""
        plain = re.sub(r"^\W+|\W+$", "", text.casefold())
        if plain in FUNCTION_WORDS:
            return None
        forms = (plain, plain.removesuffix("s"), plain.removesuffix("es"))
        return next((self.known_words[form] for form in forms if form in self.known_words), None)

    def list_swaps(self, word: str) -> list[str]:
        """What could stand in the place of a word: calibrated words, those closest in meaning first."""
        check_length(word)
        labels = self.steerer.atlas.require_labels()
        cosines = dict(zip(labels.vocabulary, labels.similarities(self.steerer.matcher, word).tolist(), strict=True))
        own = self.find_known_word(word)
        others = [other for other in self.known_words.values() if other not in (own, word)]
        return sorted(others, key=lambda other: -cosines[other])[:_SWAPS]

    def swap_buttons(self, minus: Sequence[str]) -> str:
        """Words that could stand in the place of the first word to remove, as buttons; empty if there is none."""
        word = minus[0].strip() if minus else ""
        if not word:
            return ""
        buttons = [html_parts.button(other, {"instead": other}) for other in self.list_swaps(word)]
        return html_parts.folded_buttons(f"What could stand there instead of '{word}'", buttons)

    # Steering

    def answer(self, state: ImageState, request: EditRequest) -> tuple[ImageState, SteeredCaption]:
        """Steer, and return the result together with the state that shows it."""
        result = self.steer(request)
        result = replace(result, notes=(*result.notes, *self._notes(request)))
        view, sub_units, export = self.result_view(result), self.sub_unit_table(result), self.export_code(request)
        return replace(state, view=view, sub_units=sub_units, export=export), result

    def steer(self, request: EditRequest) -> SteeredCaption:
        """The baseline and the steered caption of an image."""
        request.validate()
        return self._steer(request)

    def _steer_here(self, request: EditRequest) -> SteeredCaption:
        image = self._open_image(request)
        region, settings = request.region_and_settings()
        plan, notes = self.steerer.prepare_plan(request.minus, request.plus, region, settings)
        return self.steerer.explain(image, plan, prompt=request.prompt or PROMPT, notes=notes)

    def _notes(self, request: EditRequest) -> list[str]:
        """What influenced the result but may be out of sight: folded settings and the mark."""
        has_region = request.region_and_settings()[0] is not None
        changed = ", ".join(f"{name} {value}" for name, value in request.settings.items())
        notes = [f"Settings that differ from the atlas's: {changed}."] if changed else []
        if has_region and request.settings.get("mode", self.atlas_settings.mode) == "scale":
            notes.append("Mode place was used, because a region is marked; mode scale has no regions.")
        if has_region and request.minus:
            both = "Concepts were added in the marked region and removed wherever they fire."
            notes.append(both if request.plus else "Removed only in the marked region.")
        return notes

    def find_settings(self, request: EditRequest) -> TuningResult:
        """Captions under about a dozen settings near the atlas's, best first."""
        request.validate()
        return self._find_settings(request)

    def _find_settings_here(self, request: EditRequest) -> TuningResult:
        image = self._open_image(request)
        if len(request.minus) != 1 or len(request.plus) > 1:
            raise SpecError("settings can be tried for one concept to remove and at most one to replace it.")
        if request.mark:
            raise SpecError("settings are tried where the concept fires, but a region is marked; clear the mark first.")
        grid = {name: [value] for name, value in request.settings.items()}
        grid |= self._nearby_settings(str(request.settings.get("mode", self.atlas_settings.mode)))
        plus = request.plus[0] if request.plus else None
        prompt = request.prompt or PROMPT
        return tune(self.steerer, image, minus=request.minus[0], plus=plus, grid=grid, prompt=prompt)

    def _nearby_settings(self, mode: str) -> dict[str, list[Any]]:
        own = self.atlas_settings
        if mode == "place":
            strengths = [round(own.strength * factor, 3) for factor in (0.5, 1, 1.5, 2)]
            fits = [round(min(1, own.fit * factor), 3) for factor in (0.5, 1, 1.5)] if own.fit else [0, 0.2, 0.4]
            return {"strength": list(dict.fromkeys(strengths)), "fit": list(dict.fromkeys(fits))}
        nu = ["all", 10, 50] if isinstance(own.nu, str) else _multiples(own.nu, (0.6, 1, 1.5, 3))
        return {"kappa": _multiples(own.kappa, (2 / 3, 1, 5 / 3)), "nu": list(nu)}

    def try_doses(self, request: EditRequest) -> list[tuple[float, str]]:
        """A dose curve: the captions of an edit under several strengths."""
        request.validate()
        return self._try_doses(request)

    def _try_doses_here(self, request: EditRequest) -> list[tuple[float, str]]:
        image = self._open_image(request)
        region, settings = request.region_and_settings()
        if settings.get("mode", self.atlas_settings.mode) != "place":
            raise SpecError("mode scale has no strength; choose mode place under Settings to see a dose curve.")
        plans = [
            self.steerer.prepare_plan(request.minus, request.plus, region, {**settings, "strength": dose})[0]
            for dose in DOSES
        ]
        captions = self.steerer.captions([image], [plans], request.prompt or PROMPT)[0]
        return list(zip(DOSES, captions, strict=True))

    # HTML

    def dose_table(self, request: EditRequest, doses: Sequence[tuple[float, str]]) -> str:
        """The captions of a dose curve; a click on a row sends its strength."""
        plain = doses[0][1] if doses else ""  # the caption at strength 0
        rows = [
            ({"strength": dose}, (f"{dose:g}", html_parts.Html(mark_difference(caption, plain))))
            for dose, caption in doses
        ]
        same = len({caption for _, caption in doses}) == 1
        name = edit_name(StepSpec(request.minus, request.plus))
        title = f"Dose curve of {name}: the caption at each strength; click a row to use it"
        note = "The caption is the same at every strength." if same else ""
        return html_parts.table(title, ("strength", "caption"), rows) + html_parts.note(note)

    def sub_unit_table(self, result: SteeredCaption) -> str:
        """The sub-units that an edit changed or read."""
        rows = []
        for concept in result.plan.concepts:
            word = SIGNS[concept.role] + concept.word
            for e in concept.edits:
                cells = (f"{word}: {e.label}", round(e.similarity, 2), round(e.score, 1), e.unit, e.sub_unit)
                rows.append(({"sub_unit": e.sub_unit}, cells))
        return html_parts.table(
            "Sub-units of these words; click one to see what it fires for",
            ("concept: label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def trials_table(self, result: TuningResult) -> str:
        """The settings that were tried, with their captions."""
        rows, first = [], result.rows[0] if result.rows else {}
        tried = ("nu", "kappa") if "kappa" in first and "nu" in first else ("strength", "fit")
        for row in result.rows:
            settings = {name: row[name] for name in TUNABLE if name in row}
            rows.append((settings, (row["caption"], *(row[name] for name in tried), f"{row['kept']:.0%}")))
        return html_parts.table("Tried settings, best first; click a row to use it", ("caption", *tried, "kept"), rows)

    def concept_table(self) -> str:
        """Every label of the atlas, most frequent first."""
        counts = self.steerer.atlas.require_labels().counts
        rows = [({"word": word}, (word, count)) for word, count in counts.items()]
        return html_parts.table("All concepts", ("concept", "sub-units"), rows)

    def list_concepts(self, like: str = "", limit: int = 50) -> list[str]:
        """Labels of the atlas: those closest in meaning to a word first, or the most frequent."""
        check_length(like)
        if type(limit) is not int or limit < 1:
            raise SpecError(f"limit is {limit}; it must be a whole number of at least 1.")
        if not like:
            return self.concepts[:limit]
        labels = self.steerer.atlas.require_labels()
        cosines = dict(zip(labels.vocabulary, labels.similarities(self.steerer.matcher, like).tolist(), strict=True))
        return sorted(self.concepts, key=lambda word: -cosines[word])[:limit]

    def search(self, word: str) -> str:
        """The sub-units whose labels are closest to a word."""
        check_length(word)
        atlas = self.steerer.atlas
        matches = atlas.require_labels().search(self.steerer.matcher, word, atlas.units.numpy(), limit=24, by="label")
        rows = [
            ({"sub_unit": m.sub_unit}, (m.label, round(m.similarity, 2), round(m.score, 1), m.unit, m.sub_unit))
            for m in matches
        ]
        return html_parts.table(
            f"Sub-units for '{word}'; click one to see what it fires for",
            ("label", "similarity", "score", "unit", "sub-unit"),
            rows,
        )

    def sub_unit_details(self, sub_unit: Any) -> str:
        """Reference images of a sub-unit and of its unit, and the unit's other sub-units."""
        atlas = self.steerer.atlas
        if type(sub_unit) is not int or not 0 <= sub_unit < len(atlas):
            raise SpecError(f"there is no sub-unit {sub_unit}; atlas '{atlas.name}' has 0 to {len(atlas) - 1}.")
        labels, unit = atlas.require_labels(), int(atlas.units[sub_unit])
        siblings = [
            html_parts.button(f"{labels[other] or 'no label'} ({other})", {"sub_unit": other})
            for other in atlas.sub_units_of(unit)
            if other != sub_unit
        ]
        title = f"Sub-unit {sub_unit}: {labels[sub_unit] or 'no label'}"
        buttons = html_parts.button_row("other sub-units", siblings)
        return (
            '<div class="specimens">'
            + html_parts.image_strip(title, self.reference_images.for_sub_unit(sub_unit))
            + html_parts.image_strip(f"Unit {unit}, before the split", self.reference_images.for_unit(unit))
            + (f"<h3>Other sub-units of this unit</h3>{buttons}" if siblings else "")
            + "</div>"
        )

    def export_code(self, request: EditRequest) -> str:
        """An edit as a recipe and as a Python call."""
        name = request.image.name if request.image else "photo.png"
        region, settings = request.region_and_settings()
        mask, edit = "mark.png" if region is not None else None, replace(request, settings=settings)
        recipe, call = recipe_text(name, edit, self.atlas, mask=mask), python_call(name, edit, self.atlas, mask=mask)
        files: dict[str, str | None] = {"steering.yaml": None}
        if region is not None:
            files["mark.png"] = data_uri(Image.fromarray(region))
        return html_parts.code_block("Recipe", recipe, files) + html_parts.code_block("The same in Python", call)

    def example_buttons(self) -> str:
        """The images of the examples as buttons."""
        buttons = []
        for number, example in enumerate(self.examples):
            image = fit_within(open_image(example.path), 96)
            buttons.append(html_parts.button(example.name, {"example": number}, image=image, pressed=not number))
        return html_parts.button_row("Examples", buttons)

    def edit_buttons(self, number: int) -> str:
        """The edits of an example's recipe as buttons."""
        steps = self.examples[number].recipe.steps
        buttons = [
            html_parts.button(edit_name(step), {"example": number, "step": index}) for index, step in enumerate(steps)
        ]
        return html_parts.named_buttons("Edits to try", buttons)


def _view(name: str, image: Image.Image) -> dict[str, Any]:
    return {"name": name, "source": data_uri(image, quick=True)}


def _multiples(value: int, factors: Sequence[float]) -> list[int]:
    """Rounded multiples of a count, at least 1, without duplicates."""
    return list(dict.fromkeys(max(1, round(value * factor)) for factor in factors))
