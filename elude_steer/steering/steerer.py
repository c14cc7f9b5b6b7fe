"""Say it in words, get another caption: a model with its atlas, captioning images while the target layer is changed."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Self, Unpack

import torch
from torch import nn

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import EMBEDDED_ATLAS, MANIFEST, find_atlas
from elude_steer.errors import AtlasError, EludeSteerWarning, LayerError, ModelError, SpecError
from elude_steer.models.hooks import replace_forward, watch_inputs
from elude_steer.models.images import open_image
from elude_steer.models.loading import check_device
from elude_steer.models.matcher import Matcher
from elude_steer.models.prefix_cache import Prefix, resume_from, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm
from elude_steer.specs import ModelSpec, SettingArguments
from elude_steer.steering.intervention import (
    AllSubUnits,
    PreparedPlan,
    make_edited_forward,
    make_resumed_forward,
)
from elude_steer.steering.plan import Plan, make_plan
from elude_steer.steering.regions import ImagePatches
from elude_steer.steering.result import SteeredCaption, result_notes
from elude_steer.steering.sub_unit_source import EditableSubUnits

MAX_BATCH_TILES = 192  # tiles that go through the model together


@dataclass(frozen=True, eq=False, repr=False)
class Steerer:
    """Everything steering needs: a model, the atlas of one of its layers and a matcher.

    Example:
        >>> steerer = Steerer.load("toyland")
        >>> steerer.steer("dog.png", minus=["dog"], plus=["biker"]).caption
    """

    vlm: Vlm
    atlas: Atlas
    matcher: Matcher

    @classmethod
    def load(
        cls,
        atlas: str = EMBEDDED_ATLAS,
        *,
        model: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        device_map: Any = None,
        trust_remote_code: bool | None = None,
    ) -> Self:
        """The steerer of an atlas, with the model it was built for.

        Args:
            atlas: a folder, a name of `elude-steer atlases list`, or a Hub id.
            model: another copy of the model; by default the id in the atlas.
            device: where the model goes.
            dtype: what it computes in; by default as the atlas was built.
            device_map: as in transformers.
            trust_remote_code: whether code that comes with the model or the matcher may run.
        """
        check_device(device)
        loaded = Atlas.load(atlas)
        spec = ModelSpec(**loaded.about["spec"]["model"])
        if spec.kind != "vlm":
            raise AtlasError(f"atlas '{loaded.name}' is of {spec.id}, a vision model: it has no captions to steer.")
        vlm = Vlm.load(
            model or spec.id,
            layer=loaded.about["layer"],
            device=device,
            dtype=dtype or spec.dtype,
            device_map=device_map,
            revision=spec.revision if model is None else None,
            attn_implementation=spec.attn_implementation,
            trust_remote_code=loaded.allows_remote_code(spec.trust_remote_code, trust_remote_code),
        )
        return cls.from_parts(vlm, loaded, loaded.matcher(trust_remote_code=trust_remote_code))

    @classmethod
    def from_parts(cls, vlm: Vlm, atlas: Atlas, matcher: Matcher) -> Self:
        """The same from parts that are already loaded; raises where they do not belong together."""
        atlas.check(vlm.layer)
        atlas.require_labels()
        if not isinstance(vlm.layer, nn.Linear):
            raise LayerError(
                f"layer '{vlm.layer_name}' is a {type(vlm.layer).__name__}; only nn.Linear can be steered."
            )
        return cls(vlm, atlas, matcher)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.vlm.model).__name__}, {self.atlas!r}>"

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The atlas's own settings, which count where the caller says nothing."""
        return self.atlas.about.get("spec", {}).get("steering", {})

    def prepare_plan(
        self, minus: Any = (), plus: Any = (), where: Any = None, settings: Mapping[str, Any] | None = None
    ) -> tuple[Plan, list[str]]:
        """The plan of some words where the atlas's own settings count, and notes about it; see `make_plan`."""
        words = {"minus": minus, "plus": plus, "where": where}
        return make_plan(self.atlas, self.matcher, **words, settings=settings, defaults=self.defaults)

    def gather_weights(
        self, plan: Plan | None, rows: dict[tuple[int, ...], EditableSubUnits] | None = None
    ) -> PreparedPlan | None:
        """A plan with its weights at hand; raises where it was made for another atlas. `rows` are shared by plans."""
        if plan is None:
            return None
        if plan.weights and plan.weights != self.atlas.fingerprint:
            raise AtlasError(f"the plan was made with another atlas ('{plan.atlas}'), whose sub-units are others.")
        return PreparedPlan.from_plan(
            plan, self.atlas, self.vlm.layer, self.vlm.patch_shape, lambda: self._surroundings, rows
        )

    @cached_property
    def _surroundings(self) -> AllSubUnits:
        # Kept for good, so it must not be made in the inference mode of whoever needs it first.
        with torch.inference_mode(False), torch.no_grad():
            return AllSubUnits.from_source(self.atlas, self.vlm.layer)

    @contextmanager
    def applied(self, plan: Plan | Sequence[Plan | None] | None) -> Iterator[None]:
        """Inside, the model sees pictures under the plan; outside, and in other threads, it is as it was.

        Args:
            plan: for every picture, or a list with one for each picture of a batch.

        Example:
            >>> with steerer.applied(plan):
            ...     steerer.vlm.caption([image, image])
        """
        plans = list(plan) if isinstance(plan, Sequence) else [plan]
        inputs: dict[str, Any] = {}  # of the call that is under way

        def see(given: Mapping[str, Any]) -> None:
            if given.get("pixel_values") is not None:
                inputs.clear()
                inputs.update(given)

        def generate(original: Any, *args: Any, **kwargs: Any) -> Any:
            see(kwargs)  # pictures are encoded before the model itself is called
            return original(*args, **kwargs)

        def split(x: torch.Tensor) -> Sequence[torch.Tensor]:
            return self.vlm.split_by_image(x, inputs, len(inputs["input_ids"]))

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            return self.vlm.join_images(parts, inputs)

        def compute(original: Any, x: torch.Tensor) -> torch.Tensor:
            count = len(inputs.get("input_ids", ()))
            if not count:
                raise ModelError("inside `applied` call the model itself, input_ids and pixel_values by keyword.")
            told = [inputs[name] for name in ("image_sizes", "image_grid_thw") if inputs.get(name) is not None]
            if any(len(one) != count for one in told):
                raise ModelError("a prompt with several pictures cannot be steered; give each picture a prompt.")
            if len(plans) not in (1, count):
                raise SpecError(f"{len(plans)} plans for {count} pictures; give one for all, or one each.")
            shapes = self.vlm.layout.shapes(inputs, count)
            covers = [ImagePatches(self.vlm, lambda i=i: _size(inputs, i), shapes[i]) for i in range(count)]  # type: ignore[misc]
            return make_edited_forward(self.vlm.layer, prepared, split, covers, join)(original, x)

        prepared = [self.gather_weights(one) for one in plans]
        model = self.vlm.model
        with (
            watch_inputs(model, see),
            replace_forward(model, generate, "generate"),
            replace_forward(self.vlm.layer, compute),
        ):
            yield

    def image_patches(self, seen: Prefix, picture: int) -> ImagePatches:
        """Which patches of a picture that was looked at a region covers."""
        return ImagePatches(self.vlm, lambda: seen.sizes[picture], seen.shapes[picture])

    def captions(
        self,
        images: Sequence[Any],
        plans: Sequence[Sequence[Plan | None]],
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        *,
        prefix: Prefix | None = None,
    ) -> list[list[str]]:
        """Captions of each picture under each of its plans; the tower runs once a picture, whatever their number.

        Args:
            images: PIL pictures.
            plans: for each picture its plans; None is the model as it is.
            prompt: the question.
            max_new_tokens: the longest answer.
            prefix: what `prefix_cache.run_prefix` gave for these pictures and this prompt, where it is known already.
        """
        if len(plans) != len(images) or any(isinstance(own, Plan) or own is None for own in plans):
            raise SpecError("captions wants a list of plans for each picture: captions([image], [[plan, None]]).")
        if not len(images):
            return []
        seen = run_prefix(self.vlm, images, prompt) if prefix is None else prefix
        wanted = [(picture, plan) for picture, own in enumerate(plans) for plan in own]
        said: list[str] = []
        weights: dict[tuple[int, ...], EditableSubUnits] = {}
        for part in _parts(wanted, seen.tiles):
            prepared = {plan: self.gather_weights(plan, weights) for plan in dict.fromkeys(plan for _, plan in part)}
            pictures = [picture for picture, _ in part]
            rows = [(picture, prepared[plan], self.image_patches(seen, picture)) for picture, plan in part]
            inputs = seen.select(pictures)
            once = make_resumed_forward(seen.q, rows, partial(self.vlm.join_images, inputs=inputs))
            with resume_from(self.vlm, seen, pictures), replace_forward(self.vlm.layer, once):
                said += self.vlm.answer(inputs, max_new_tokens)
        found, at = [], 0
        for own in plans:
            found.append(said[at : at + len(own)])
            at += len(own)
        return found

    def plan(
        self,
        *,
        minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        where: Any = None,
        **settings: Unpack[SettingArguments],
    ) -> Plan:
        """Which sub-units would be changed, and how; see `Settings` for what the settings mean.

        Example:
            >>> print(steerer.plan(minus=["dog"], gamma=-10, kappa=100, nu="all"))
        """
        plan, notes = self.prepare_plan(minus, plus, where, settings)
        for note in notes:
            warnings.warn(note, EludeSteerWarning, stacklevel=_callers_level())
        return plan

    def steer(
        self,
        image: Any,
        *,
        minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        where: Any = None,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        **settings: Unpack[SettingArguments],
    ) -> SteeredCaption:
        """The caption of a picture with some concepts taken away or put there; see `plan` for the settings.

        Args:
            image: a path, the bytes of a file, or a PIL picture.
            minus: words that should go.
            plus: words that should come.
            where: for `place`, a box in pixels or a mask; by default where the minus words fire.
            prompt: the question.
            max_new_tokens: the longest answer.
            **settings: mode, alpha, gamma, …: see `Settings`; what is left out is the atlas's own.
        """
        picture = open_image(image)
        plan, notes = self.prepare_plan(minus, plus, where, settings)
        result = self.explain(picture, plan, prompt=prompt, max_new_tokens=max_new_tokens, notes=notes)
        for note in result.notes:
            warnings.warn(note, EludeSteerWarning, stacklevel=_callers_level())
        return result

    def explain(
        self,
        image: Any,
        plan: Plan,
        *,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        notes: Sequence[str] = (),
    ) -> SteeredCaption:
        """Baseline and caption under a ready plan, with everything there is to tell."""
        (result,) = self.explain_all(image, [plan], prompt=prompt, max_new_tokens=max_new_tokens, notes=notes)
        return result

    def explain_all(
        self,
        image: Any,
        plans: Sequence[Plan],
        *,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        notes: Sequence[str] = (),
    ) -> list[SteeredCaption]:
        """The same for several plans of one picture; the tower runs once, and the baseline is shared."""
        start = time.perf_counter()
        picture = open_image(image)
        size = (picture.width, picture.height)
        prefix = run_prefix(self.vlm, [picture], prompt)
        ((baseline, *captions),) = self.captions([picture], [[None, *plans]], prompt, max_new_tokens, prefix=prefix)
        about = {
            "model": self.vlm.id,
            "revision": self.vlm.revision,
            "layer": self.vlm.layer_name,
            "atlas": self.atlas.name,
            "weights": self.atlas.about["weights"],
            "matcher": self.matcher.id,
            "prompt": prompt,
            "elude_steer": __version__,
        }
        found = []
        for plan, caption in zip(plans, captions, strict=True):
            prepared = self.gather_weights(plan)
            maps = prepared.maps(prefix.q[0], self.image_patches(prefix, 0)) if prepared else {}
            settings = {concept.word: asdict(concept.settings) for concept in plan.concepts}
            told = (*notes, *result_notes(baseline, caption, plan, maps))
            seconds = time.perf_counter() - start
            grid, provenance = self.vlm.grid(size), {**about, "settings": settings}
            found.append(SteeredCaption(baseline, caption, plan, maps, grid, picture, told, provenance, seconds))
        return found


def steer(
    image: Any,
    *,
    minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    where: Any = None,
    atlas: str = EMBEDDED_ATLAS,
    device: str | None = None,
    prompt: str = PROMPT,
    **settings: Unpack[SettingArguments],
) -> SteeredCaption:
    """The caption of a picture with some concepts taken away or put there.

    Args:
        image: a path, the bytes of a file, or a PIL picture.
        minus: words that should go.
        plus: words that should come.
        where: for `place`, a box in pixels or a mask.
        atlas: a folder, a name, or a Hub id; by default the one that comes with the package.
        device: where the model computes.
        prompt: the question.
        **settings: mode, alpha, gamma, …: see `Settings`; what is left out is what measured best for the atlas.

    Example:
        >>> steer("dog.png", minus=["dog"], plus=["biker"]).caption
    """
    steerer = _steerer(*_known(str(atlas)), device)
    return steerer.steer(image, minus=minus, plus=plus, where=where, prompt=prompt, **settings)


def _callers_level() -> int:
    """The `stacklevel` of whoever called into this file, be it a steerer's method or the function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    return level


def _known(atlas: str) -> tuple[str, int]:
    """An atlas's folder, and when it was written: one that was built again, or means another one now, is another."""
    folder = find_atlas(atlas)
    if folder is None or not (manifest := folder.resolve() / MANIFEST).is_file():
        return atlas, 0  # of the Hub, or nowhere
    return str(manifest.parent), manifest.stat().st_mtime_ns


@lru_cache(maxsize=2)
def _steerer(atlas: str, _written: int, device: str | None) -> Steerer:
    return Steerer.load(atlas, device=device)


def _parts(rows: Sequence[tuple[int, Plan | None]], tiles: Sequence[int]) -> Iterator[list[tuple[int, Plan | None]]]:
    """Rows that are captioned together: at most `MAX_BATCH_TILES` tiles, at least one row."""
    part: list[tuple[int, Plan | None]] = []
    for row in rows:
        if part and sum(tiles[picture] for picture, _ in part) + tiles[row[0]] > MAX_BATCH_TILES:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _size(inputs: Mapping[str, Any], index: int) -> tuple[int, int]:
    if "image_sizes" not in inputs:
        raise AtlasError("this model does not say how large its pictures are; use `Steerer.captions` for regions.")
    height, width = inputs["image_sizes"][index].tolist()
    return int(width), int(height)
