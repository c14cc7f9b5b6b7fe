"""Say it in words, get another caption: the steerer, and what it tells about what happened."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from elude_steer import __version__
from elude_steer.atlas import Atlas
from elude_steer.concepts import Matcher
from elude_steer.editing import Prepared, edited
from elude_steer.errors import AtlasError, EludeSteerWarning, LayerError, ModelError, SpecError
from elude_steer.hooks import replaced, watched
from elude_steer.images import open_image
from elude_steer.manifest import EMBEDDED
from elude_steer.plans import Plan, make_plan
from elude_steer.recipe import ModelSpec
from elude_steer.results import SteeredCaption, remarks
from elude_steer.resuming import Looked, look, resumed
from elude_steer.vlm import PROMPT, Vlm

BATCH = 160  # tiles that go through the model together


@dataclass(frozen=True, eq=False)
class Steerer:
    """A model, the atlas of one of its layers and a matcher: everything steering needs.

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
        atlas: str = EMBEDDED,
        *,
        model: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        device_map: Any = None,
        trust_remote_code: bool | None = None,
    ) -> Steerer:
        """The steerer of an atlas, with the model it was built for.

        Args:
            atlas: a folder, a name of `elude-steer atlases list`, or a Hub id.
            model: another copy of the model; by default the id in the atlas.
            device: where the model goes.
            dtype: what it computes in; by default as the atlas was built.
            device_map: as in transformers.
            trust_remote_code: whether code that comes with the model or the matcher may run.
        """
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
            trust_remote_code=loaded.trusts(spec.trust_remote_code, trust_remote_code),
        )
        return cls.of(vlm, loaded, loaded.matcher(trust_remote_code=trust_remote_code))

    @classmethod
    def of(cls, vlm: Vlm, atlas: Atlas, matcher: Matcher) -> Steerer:
        """The same from parts that are already loaded; raises where they do not belong together."""
        atlas.check(vlm.layer)
        atlas.named()
        if not isinstance(vlm.layer, nn.Linear):
            raise LayerError(
                f"layer '{vlm.layer_name}' is a {type(vlm.layer).__name__}; only nn.Linear can be steered."
            )
        return cls(vlm, atlas, matcher)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The atlas's own settings, which count where the caller says nothing."""
        return self.atlas.about["spec"].get("steering", {})

    def plan(
        self,
        *,
        minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        where: Any = None,
        mode: str | None = None,
        alpha: float | None = None,
        gamma: float | None = None,
        beta: float | None = None,
        kappa: int | None = None,
        nu: int | str | None = None,
        per: str | None = None,
        by: str | None = None,
        min_similarity: float | None = None,
    ) -> Plan:
        """Which sub-units would be changed, and how; see `Settings` for what the settings mean.

        Example:
            >>> print(steerer.plan(minus=["dog"], gamma=-10, kappa=100, nu="all"))
        """
        settings = {"mode": mode, "alpha": alpha, "gamma": gamma, "beta": beta, "kappa": kappa, "nu": nu}
        settings |= {"per": per, "by": by, "min_similarity": min_similarity}
        plan, notes = self._plan(minus, plus, where, settings)
        for note in notes:
            warnings.warn(note, EludeSteerWarning, stacklevel=2)
        return plan

    def _plan(self, minus: Any, plus: Any, where: Any, settings: Mapping[str, Any]) -> tuple[Plan, list[str]]:
        return make_plan(
            self.atlas,
            self.matcher,
            minus=minus,
            plus=plus,
            where=where,
            settings=settings,
            defaults=self.defaults,
        )

    def prepare(self, plan: Plan | None) -> Prepared | None:
        """A plan with its weights at hand; raises where it was made for another atlas."""
        if plan is None:
            return None
        if plan.weights and plan.weights != self.atlas.fingerprint:
            raise AtlasError(f"the plan was made with another atlas ('{plan.atlas}'), whose sub-units are others.")
        return Prepared.of(plan, self.atlas, self.vlm.layer)

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

        def regions(index: int) -> Any:
            return self._covered(plans[index if len(plans) > 1 else 0], lambda: _size(inputs, index))

        def split(x: torch.Tensor) -> Sequence[torch.Tensor]:
            return self.vlm.split_by_image(x, inputs, len(inputs["input_ids"]))

        def compute(original: Any, x: torch.Tensor) -> torch.Tensor:
            count = len(inputs.get("input_ids", ()))
            if not count:
                raise ModelError("inside `applied` call the model itself, with input_ids and pixel_values.")
            if len(plans) not in (1, count):
                raise SpecError(f"{len(plans)} plans for {count} pictures; give one for all, or one each.")
            covered = [regions(i) for i in range(count)]
            return edited(self.vlm.layer, prepared, split, covered)(original, x)

        prepared = [self.prepare(one) for one in plans]
        model = self.vlm.model
        with watched(model, see), replaced(model, generate, "generate"), replaced(self.vlm.layer, compute):
            yield

    def _covered(self, plan: Plan | None, size: Any) -> Any:
        if plan is None or plan.where is None:
            return None
        region = plan.where

        def covers() -> np.ndarray:
            width, height = size()
            return region.covers(self.vlm.grid((width, height)).boxes, (width, height))

        return covers

    def captions(
        self,
        images: Sequence[Any],
        plans: Sequence[Sequence[Plan | None]],
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
        *,
        looked: Looked | None = None,
    ) -> list[list[str]]:
        """Captions of each picture under each of its plans; the tower runs once a picture, whatever their number.

        Args:
            images: PIL pictures.
            plans: for each picture its plans; None is the model as it is.
            prompt: the question.
            max_new_tokens: the longest answer.
            looked: what `resuming.look` gave for these pictures and this prompt, where it is known already.
        """
        seen = look(self.vlm, images, prompt) if looked is None else looked
        rows = [(picture, plan) for picture, own in enumerate(plans) for plan in own]
        said: list[str] = []
        for part in _parts(rows, [len(q) for q in seen.q]):
            prepared = {plan: self.prepare(plan) for plan in dict.fromkeys(plan for _, plan in part)}
            pictures = [picture for picture, _ in part]
            inputs = seen.rows(pictures)

            def split(x: torch.Tensor, inputs: Any = inputs, count: int = len(part)) -> Sequence[torch.Tensor]:
                return self.vlm.split_by_image(x, inputs, count)

            covered = [self._covered(plan, lambda i=picture: seen.sizes[i]) for picture, plan in part]
            ready = [prepared[plan] for _, plan in part]
            compute = edited(self.vlm.layer, ready, split, covered, fold=False)
            with resumed(self.vlm, seen, pictures), replaced(self.vlm.layer, compute):
                said += self.vlm.answer(inputs, max_new_tokens)
        found, at = [], 0
        for own in plans:
            found.append(said[at : at + len(own)])
            at += len(own)
        return found

    def steer(
        self,
        image: Any,
        *,
        minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        where: Any = None,
        mode: str | None = None,
        alpha: float | None = None,
        gamma: float | None = None,
        beta: float | None = None,
        kappa: int | None = None,
        nu: int | str | None = None,
        per: str | None = None,
        by: str | None = None,
        min_similarity: float | None = None,
        prompt: str = PROMPT,
        max_new_tokens: int = 64,
    ) -> SteeredCaption:
        """The caption of a picture with some concepts taken away or put there; see `plan` for the settings.

        Args:
            image: a path, the bytes of a file, or a PIL picture.
            minus: words that should go.
            plus: words that should come.
            where: for `place`, a box in pixels or a mask; by default where the minus words fire.
            mode: see `Settings`, as for all up to `min_similarity`.
            alpha: of plus words.
            gamma: of minus words.
            beta: of plus words that are placed.
            kappa: sub-units a word.
            nu: patches, or `all`.
            per: `tile` or `image`.
            by: `label` or `score`.
            min_similarity: least cosine.
            prompt: the question.
            max_new_tokens: the longest answer.
        """
        picture = open_image(image)
        settings = {"mode": mode, "alpha": alpha, "gamma": gamma, "beta": beta, "kappa": kappa, "nu": nu}
        settings |= {"per": per, "by": by, "min_similarity": min_similarity}
        plan, notes = self._plan(minus, plus, where, settings)
        result = self.explain(picture, plan, prompt=prompt, max_new_tokens=max_new_tokens, notes=notes)
        for note in result.notes:
            warnings.warn(note, EludeSteerWarning, stacklevel=2)
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
        looked = look(self.vlm, [picture], prompt)
        ((baseline, *captions),) = self.captions([picture], [[None, *plans]], prompt, max_new_tokens, looked=looked)
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
            prepared = self.prepare(plan)
            maps = prepared.maps(looked.q[0], self._covered(plan, lambda: size)) if prepared else {}
            settings = {concept.word: asdict(concept.settings) for concept in plan.concepts}
            told = (*notes, *remarks(baseline, caption, plan, maps))
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
    mode: str | None = None,
    atlas: str = EMBEDDED,
    device: str | None = None,
    prompt: str = PROMPT,
) -> SteeredCaption:
    """The caption of a picture with some concepts taken away or put there; `Steerer.steer` has all settings.

    Args:
        image: a path, the bytes of a file, or a PIL picture.
        minus: words that should go.
        plus: words that should come.
        where: for `place`, a box in pixels or a mask.
        mode: `scale` or `place`; by default what measured best for the atlas.
        atlas: a folder, a name, or a Hub id; by default the one that comes with the package.
        device: where the model computes.
        prompt: the question.

    Example:
        >>> steer("dog.png", minus=["dog"], plus=["biker"]).caption
    """
    return _steerer(str(atlas), device).steer(image, minus=minus, plus=plus, where=where, mode=mode, prompt=prompt)


@lru_cache(maxsize=2)
def _steerer(atlas: str, device: str | None) -> Steerer:
    return Steerer.load(atlas, device=device)


def _parts(rows: Sequence[tuple[int, Plan | None]], tiles: Sequence[int]) -> Iterator[list[tuple[int, Plan | None]]]:
    """Rows that are captioned together: at most `BATCH` tiles, at least one row."""
    part: list[tuple[int, Plan | None]] = []
    for row in rows:
        if part and sum(tiles[picture] for picture, _ in part) + tiles[row[0]] > BATCH:
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
