"""Say it in words, get another caption: the steerer, and what it tells about what happened."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Unpack

from elude_steer import __version__
from elude_steer.applying import Applier
from elude_steer.errors import EludeSteerWarning
from elude_steer.images import open_image
from elude_steer.manifest import EMBEDDED, find_atlas
from elude_steer.manifest import NAME as MANIFEST
from elude_steer.plans import Plan
from elude_steer.results import SteeredCaption, remarks
from elude_steer.resuming import look
from elude_steer.settings import Given
from elude_steer.tuning import tune
from elude_steer.vlm import PROMPT


class Steerer(Applier):
    """Everything steering needs: a model, the atlas of one of its layers and a matcher.

    Example:
        >>> steerer = Steerer.load("toyland")
        >>> steerer.steer("dog.png", minus=["dog"], plus=["biker"]).caption
    """

    def plan(
        self,
        *,
        minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
        where: Any = None,
        **settings: Unpack[Given],
    ) -> Plan:
        """Which sub-units would be changed, and how; see `Settings` for what the settings mean.

        Example:
            >>> print(steerer.plan(minus=["dog"], gamma=-10, kappa=100, nu="all"))
        """
        plan, notes = self.planned(minus, plus, where, settings)
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
        **settings: Unpack[Given],
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
        plan, notes = self.planned(minus, plus, where, settings)
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
            maps = prepared.maps(looked.q[0], self.covers(looked, 0)) if prepared else {}
            settings = {concept.word: asdict(concept.settings) for concept in plan.concepts}
            told = (*notes, *remarks(baseline, caption, plan, maps))
            seconds = time.perf_counter() - start
            grid, provenance = self.vlm.grid(size), {**about, "settings": settings}
            found.append(SteeredCaption(baseline, caption, plan, maps, grid, picture, told, provenance, seconds))
        return found

    tune = tune  # its first argument is the steerer


def steer(
    image: Any,
    *,
    minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    where: Any = None,
    atlas: str = EMBEDDED,
    device: str | None = None,
    prompt: str = PROMPT,
    **settings: Unpack[Given],
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
