"""The steerer: a vision-language model with the atlas of one of its layers, which captions images under plans."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Generic, TypeVar, Unpack, overload

import torch
from torch import nn

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import EMBEDDED_ATLAS, check_captions, default_settings, locate_atlas, read_defaults
from elude_steer.errors import AtlasError, EludeSteerWarning, LayerError, SpecError
from elude_steer.models.images import open_image, open_images
from elude_steer.models.loading import as_dtype, check_device
from elude_steer.models.matcher import Matcher, check_matcher
from elude_steer.models.prefix_cache import Prefix, image_batches, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm
from elude_steer.specs import SettingArguments
from elude_steer.steering.apply_plans import apply_to_calls, image_patches, resume_under_plans
from elude_steer.steering.caption_batches import MAX_BATCH_IMAGES, AtlasArguments, SteerArguments, caption_rows
from elude_steer.steering.intervention import ImageMemo, PreparedPlan
from elude_steer.steering.plan import Plan, Words, make_plan, read_concepts
from elude_steer.steering.result import SteeredCaption, image_notes, result_notes
from elude_steer.steering.sub_unit_source import EditableSubUnits, SubUnitSource
from elude_steer.trust import check_needs
from elude_steer.utils.files import resolve_id
from elude_steer.utils.progress import track
from elude_steer.utils.threads import check_threads, with_threads

Source = TypeVar("Source", bound=SubUnitSource)  # an atlas, or a dictionary in its place


@dataclass(frozen=True, eq=False, repr=False)
class Steerer(Generic[Source]):
    """A model, the atlas of one of its layers, and the matcher that finds sub-units by word.

    Example:
        >>> from elude_steer import Steerer
        >>> steerer = Steerer.load("toyland")
        >>> steerer.steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"]).caption
        'a biker on a motorcycle with sunglasses on a street'
    """

    vlm: Vlm
    atlas: Source
    matcher: Matcher

    @staticmethod
    def load(
        atlas: str = EMBEDDED_ATLAS,
        *,
        model: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        device_map: Any = None,
        quantize: str | None = None,
        trust_remote_code: bool = False,
        threads: int | None = None,
    ) -> Steerer[Atlas]:
        """Load an atlas and the model it was built for.

        Args:
            atlas: a folder, a name of `elude-steer atlases list`, or a Hub id.
            model: another copy of the model; by default the id in the atlas.
            device: where the model computes.
            dtype: the model's number type; by default the one the atlas was built with.
            device_map: as in transformers.
            quantize: how the language model is quantised; see `Vlm.load`.
            trust_remote_code: whether code that comes with the model or the matcher may run; the atlas has no say.
            threads: threads of torch while the model computes on a CPU; by default its size and the free cores decide.
        """
        check_threads(threads)
        check_device(device)
        as_dtype(dtype or "auto")
        read_defaults(atlas)  # refuses an atlas that cannot be steered before its files are read
        loaded = Atlas.load(atlas)
        spec = check_captions(loaded.about)
        check_needs(loaded.about["spec"], ("matcher",) if model else ("model", "matcher"), trust_remote_code)
        if matcher := loaded.about["spec"].get("matcher"):
            check_matcher(matcher["id"])  # before minutes of loading the model
        vlm = Vlm.load(
            model or spec.id,
            layer=loaded.about["layer"],
            device=device,
            dtype=dtype or spec.dtype,
            device_map=device_map,
            quantize=quantize,
            revision=spec.revision if model is None else None,
            attn_implementation=spec.attn_implementation,
            trust_remote_code=trust_remote_code,
            threads=threads,
        )
        return Steerer.from_parts(vlm, loaded, loaded.matcher(trust_remote_code=trust_remote_code))

    @classmethod
    def from_parts(cls, vlm: Vlm, atlas: Source, matcher: Matcher) -> Steerer[Source]:
        """Make a steerer of parts that are already loaded; raises if they do not belong together."""
        atlas.check(vlm.layer, vlm.read_stored)
        atlas.require_labels()
        if not isinstance(vlm.layer, nn.Linear):
            kind = type(vlm.layer).__name__
            raise LayerError(f"layer '{vlm.layer_name}' is a {kind}; only nn.Linear can be steered.")
        return cls(vlm, atlas, matcher)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.vlm.model).__name__}, {self.atlas!r}>"

    def use_threads(self) -> AbstractContextManager[None]:
        """Inside, torch computes with the threads of the model; see `Steerer.load`."""
        return self.vlm.use_threads()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The settings of the atlas, used for what the caller leaves out."""
        return default_settings(self.atlas.about)

    def plan(
        self, *, minus: Words = (), plus: Words = (), where: Any = None, **settings: Unpack[SettingArguments]
    ) -> Plan:
        """Plan which sub-units would change, and how; `Settings` explains the settings.

        Example:
            >>> from elude_steer import Steerer
            >>> print(Steerer.load("toyland").plan(minus=["dog"], mode="scale", gamma=-10, kappa=100, nu="all"))
            -dog: 100 sub-units times -10 on every patch
              100 by 'dog' (1.00)
        """
        plan, notes = self.prepare_plan(minus, plus, where, settings)
        _warn(notes)
        return plan

    def prepare_plan(
        self, minus: Any = (), plus: Any = (), where: Any = None, settings: Mapping[str, Any] | None = None
    ) -> tuple[Plan, list[str]]:
        """Make a plan from words and the atlas's default settings, with notes on it; see `make_plan`."""
        words = {"minus": minus, "plus": plus, "where": where}
        return make_plan(self.atlas, self.matcher, **words, settings=settings, defaults=self.defaults)

    @overload
    def steer(self, image: list[Any] | tuple[Any, ...], **options: Unpack[SteerArguments]) -> list[SteeredCaption]: ...

    @overload
    def steer(self, image: Any, **options: Unpack[SteerArguments]) -> SteeredCaption: ...

    def steer(
        self,
        image: Any,
        *,
        minus: Words = (),
        plus: Words = (),
        where: Any = None,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        baseline: bool = True,
        **settings: Unpack[SettingArguments],
    ) -> SteeredCaption | list[SteeredCaption]:
        """Caption an image, or each image of a list, with some concepts removed or added.

        Args:
            image: a path, the bytes of a file, a PIL image, or a NumPy array of uint8 (see `open_image`); or a list
                of these, which are captioned in batches and give a list of results.
            minus: words of concepts to remove.
            plus: words of concepts to add.
            where: in mode `place`, a box in pixels or a mask; by default where minus concepts fire, or a free place.
            prompt: the question.
            max_new_tokens: the longest answer.
            baseline: whether to make the caption without edits too.
            **settings: mode, alpha, gamma, …: see `Settings`; by default those of the atlas.
        """
        many = isinstance(image, list | tuple)
        opened = open_images(image) if many else [open_image(image)]
        plan, notes = self.prepare_plan(minus, plus, where, settings)
        results = self.explain_each(
            opened, plan, prompt=prompt, max_new_tokens=max_new_tokens, notes=notes, baseline=baseline
        )
        if not many:
            _warn(results[0].notes)
            return results[0]
        own = sum(len(result.notes) > len(notes) for result in results)
        more = [f"{own} of {len(results)} images have notes of their own: see `notes` of their results."] if own else []
        _warn([*notes, *more])
        return results

    def explain(
        self,
        image: Any,
        plan: Plan,
        *,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        notes: Sequence[str] = (),
    ) -> SteeredCaption:
        """Caption an image without and with a plan; the result has maps, notes and provenance."""
        return self.explain_all(image, [plan], prompt=prompt, max_new_tokens=max_new_tokens, notes=notes)[0]

    @with_threads
    def explain_all(
        self,
        image: Any,
        plans: Sequence[Plan],
        *,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        notes: Sequence[str] = (),
    ) -> list[SteeredCaption]:
        """Do what `explain` does for several plans of one image; the tower and the baseline run once."""
        return self._explain_batch([open_image(image)], plans, prompt, max_new_tokens, notes)[0]

    @with_threads
    def explain_each(
        self,
        images: Sequence[Any],
        plan: Plan,
        *,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        notes: Sequence[str] = (),
        baseline: bool = True,
    ) -> list[SteeredCaption]:
        """Do what `explain` does for one plan and several images, in batches; `baseline` as in `steer`."""
        opened, results = track(open_images(images), "captioning", "images"), []
        for _, batch in image_batches(self.vlm, opened, lambda image: image, MAX_BATCH_IMAGES):
            explained = self._explain_batch(batch, [plan], prompt, max_new_tokens, notes, baseline=baseline)
            results += [result for (result,) in explained]
        return results

    def _explain_batch(
        self,
        images: Sequence[Any],
        plans: Sequence[Plan],
        prompt: str,
        max_new_tokens: int,
        notes: Sequence[str],
        *,
        baseline: bool = True,
    ) -> list[list[SteeredCaption]]:
        """For each image, its result under each plan."""
        start = time.perf_counter()
        prefix = run_prefix(self.vlm, images, prompt)
        rows = [[*([None] if baseline else []), *plans]] * len(images)
        captions = self.captions(images, rows, prompt, max_new_tokens, prefix=prefix)
        prepared = [self.gather_weights(plan) for plan in plans]
        results = []
        for number, (image, own) in enumerate(zip(images, captions, strict=True)):
            first = own[0] if baseline else None
            grid, patches = self.vlm.grid((image.width, image.height)), image_patches(self.vlm, prefix, number)
            own_notes = image_notes(self.atlas, prefix.q[number], self.vlm.token_indices(prefix.q[number].shape[1]))
            found = []
            for plan, edits, caption in zip(plans, prepared, own[baseline:], strict=True):
                view = prefix.q[number], patches, ImageMemo()
                maps, seen = (edits.maps(*view), edits.presences(*view)) if edits else ({}, {})
                all_notes = (*notes, *own_notes, *result_notes(first, caption, plan, maps, seen))
                seconds = (time.perf_counter() - start) / len(images)
                provenance = self._provenance(plan, prompt)
                one = SteeredCaption(first, caption, plan, maps, grid, image, all_notes, provenance, seconds, seen)
                found.append(one)
            results.append(found)
        return results

    @property
    def _model_name(self) -> str:
        """The model as the atlas names it, or as the caller named another copy."""
        named = str(self.atlas.about.get("model", {}).get("id", ""))
        return named if resolve_id(named) == self.vlm.id else self.vlm.id

    def _provenance(self, plan: Plan, prompt: str) -> dict[str, Any]:
        return {
            "model": self._model_name,
            "revision": self.vlm.revision,
            "layer": self.vlm.layer_name,
            "atlas": self.atlas.name,
            "weights": self.atlas.about["weights"],
            "matcher": self.matcher.id,
            "prompt": prompt,
            "elude_steer": __version__,
            "settings": {concept.word: asdict(concept.settings) for concept in plan.concepts},
        }

    @with_threads
    def captions(
        self,
        images: Sequence[Any],
        plans: Sequence[Sequence[Plan | None]],
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        *,
        prefix: Prefix | None = None,
    ) -> list[list[str]]:
        """Caption each image under each of its plans; the tower runs once for an image, however many plans it has.

        Args:
            images: PIL images.
            plans: for each image its plans; None is the model without edits.
            prompt: the question.
            max_new_tokens: the longest answer.
            prefix: the result of `run_prefix` for these images and this prompt, where it is known already.
        """
        if len(plans) != len(images) or any(isinstance(own, Plan) or own is None for own in plans):
            raise SpecError("captions needs a list of plans for each image: captions([image], [[plan, None]]).")
        weights: dict[tuple[int, ...], EditableSubUnits] = {}
        gather = partial(self.gather_weights, weights=weights)
        return caption_rows(self.vlm, images, plans, gather, prompt, max_new_tokens, prefix)

    def gather_weights(
        self, plan: Plan | None, weights: dict[tuple[int, ...], EditableSubUnits] | None = None
    ) -> PreparedPlan | None:
        """Gather the weights of a plan's sub-units; raises if the plan was made for another atlas.

        Args:
            plan: None gives None.
            weights: shared by plans with the same sub-units.
        """
        if plan is None:
            return None
        if plan.weights and plan.weights != self.atlas.fingerprint:
            raise AtlasError(
                f"the plan was made with another atlas ('{plan.atlas}'), which numbers other sub-units; make it again."
            )
        return PreparedPlan.from_plan(
            plan, self.atlas, self.vlm.layer, self.vlm.patch_shape, weights, self._detector, self.vlm.stream_scale
        )

    @cached_property
    def _detector(self) -> Callable[[int], Callable[[torch.Tensor], torch.Tensor]]:
        """Gives the detector of a row of the calibration; those of words that were used are kept."""
        # They stay for good, so they must not be made in the inference mode of the first caller.
        find = torch.inference_mode(False)(torch.no_grad()(self.atlas.detector))
        return lru_cache(maxsize=None)(lambda row: find(row, self.vlm.layer))

    @with_threads
    def embeds(self, image: Any, plan: Plan | None = None) -> torch.Tensor:
        """Return the embeddings of an image under a plan, `(tokens, width)`: the language model's input for the image.

        Serving engines take them in the place of the image, with the model as it is.

        Args:
            image: a path, the bytes of a file, or a PIL image.
            plan: None is the model without edits.

        Example:
            >>> from elude_steer import Steerer
            >>> steerer = Steerer.load("toyland")
            >>> steerer.embeds("demos/images/toyland-dog.png", steerer.plan(minus=["dog"])).shape
            torch.Size([136, 128])
        """
        prefix = run_prefix(self.vlm, [open_image(image)])
        with resume_under_plans(self.vlm, prefix, [(0, self.gather_weights(plan))]) as inputs:
            return self.vlm.embed_images(inputs)[0]

    @contextmanager
    def applied(self, plan: Plan | Sequence[Plan | None] | None) -> Iterator[None]:
        """Inside, the model sees images under the plan; outside, and in other threads and tasks, it is unchanged.

        This holds for calls of the model, for `generate` and for `get_image_features`. A generator that yields
        inside keeps the edit to itself: its consumer, be it a test that uses a fixture, calls the unchanged model.

        Args:
            plan: one for all images, or a list with one for each image of a batch.

        Example:
            >>> from elude_steer import Steerer
            >>> from elude_steer.models.images import open_image
            >>> steerer = Steerer.load("toyland")
            >>> with steerer.applied(steerer.plan(minus=["dog"], plus=["biker"])):
            ...     steerer.vlm.caption([open_image("demos/images/toyland-dog.png")])
            ['a biker on a motorcycle with sunglasses on a street']
        """
        prepared = [self.gather_weights(one) for one in (plan if isinstance(plan, Sequence) else [plan])]
        with apply_to_calls(self.vlm, prepared):
            yield


@overload
def steer(image: list[Any] | tuple[Any, ...], **options: Unpack[AtlasArguments]) -> list[SteeredCaption]: ...


@overload
def steer(image: Any, **options: Unpack[AtlasArguments]) -> SteeredCaption: ...


def steer(
    image: Any,
    *,
    minus: Words = (),
    plus: Words = (),
    where: Any = None,
    atlas: str = EMBEDDED_ATLAS,
    model: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    prompt: str = PROMPT,
    max_new_tokens: int = 64,
    baseline: bool = True,
    trust_remote_code: bool = False,
    **settings: Unpack[SettingArguments],
) -> SteeredCaption | list[SteeredCaption]:
    """Caption an image, or each image of a list, with some concepts removed or added.

    Args:
        image: a path, the bytes of a file, a PIL image, or a NumPy array of uint8 (see `open_image`); or a list of
            these, which are captioned in batches and give a list of results.
        minus: words of concepts to remove.
        plus: words of concepts to add.
        where: in mode `place`, a box in pixels or a mask; by default where minus concepts fire, or a free place.
        atlas: a folder, a name, or a Hub id; by default the one that comes with the package.
        model: another copy of the model; by default the id in the atlas.
        device: where the model computes.
        dtype: the model's number type; by default the one the atlas was built with.
        threads: threads of torch while the model computes on a CPU; by default its size and the free cores decide.
        prompt: the question.
        max_new_tokens: the longest answer.
        baseline: whether to make the caption without edits too.
        trust_remote_code: whether code that comes with the model or the matcher may run.
        **settings: mode, alpha, gamma, …: see `Settings`; by default those that measured best for the atlas.

    Example:
        >>> from elude_steer import steer
        >>> steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"]).caption
        'a biker on a motorcycle with sunglasses on a street'
    """
    opened = open_images(image) if isinstance(image, list | tuple) else open_image(image)
    read_concepts(minus, plus, where, settings, read_defaults(atlas))  # refuses mistakes before a model is loaded
    loading: dict[str, Any] = {"model": model, "device": device, "dtype": dtype, "threads": threads}
    steerer = _load_steerer(*locate_atlas(str(atlas)), trust_remote_code=trust_remote_code, **loading)
    words: SteerArguments = {"minus": minus, "plus": plus, "where": where, "prompt": prompt}
    options: SteerArguments = {**words, "max_new_tokens": max_new_tokens, "baseline": baseline, **settings}
    return steerer.steer(opened, **options)


def _warn(notes: Sequence[str]) -> None:
    """Warn with each note, at the line that called into this file."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    for note in notes:
        warnings.warn(note, EludeSteerWarning, stacklevel=level)


@lru_cache(maxsize=2)
def _load_steerer(atlas: str, _written: int, **options: Any) -> Steerer[Atlas]:
    return Steerer.load(atlas, **options)
