"""How strongly, where and on what words act: the settings of an edit, checked before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict

import numpy as np

from elude_steer.errors import SpecError, did_you_mean
from elude_steer.utils.yaml_schema import validate


@dataclass(frozen=True)
class Settings:
    """How the sub-units of a word are changed; the names are the paper's where it has one.

    Attributes:
        mode: `scale` multiplies each sub-unit where it fires (the paper's); `place` sets those of plus words on a
            region, by default where the minus words fire.
        alpha: What plus sub-units are multiplied by.
        gamma: What minus sub-units are multiplied by.
        beta: How many times their level sub-units are set to, in `place`.
        level: What a sub-unit is set to multiples of: its own `reference` activation, or what its unit carries behind
            the residual connection (`stream`) where the word's sub-units fire.
        reach: In `place`, how many times the stream those units are moved by that have none of a word's sub-units:
            towards a plus word, away from a removed one where nothing is placed; 0 leaves them as they are.
        fill: In `place`, how many sub-units of the surroundings are set where a removed word was; 0 leaves a gap.
        kappa: How many sub-units a word stands for.
        nu: On how many patches, where a sub-unit fires most; `all` is every patch.
        per: Whether nu counts in every tile or over the whole picture.
        fit: In `place`, the share of its peak in the picture that a word must fire with on a patch of its region, which
            so fits small and large things; nu is then the most patches that it may have, and nothing outside is
            changed. 0 takes nu patches always, for minus words those where each sub-unit fires most.
        smooth: In `place`, whether a word's region is sought in the mean of neighbouring patches.
        by: How sub-units are found: by the closeness of their `label`, or by the `score` of the closest words.
        min_similarity: Sub-units found by a word less close than this are left alone.
    """

    mode: Literal["scale", "place"] = "scale"
    alpha: float = 15.0
    gamma: float = -15.0
    beta: float = 20.0
    level: Literal["reference", "stream"] = "reference"
    reach: float = 0.0
    fill: int = 0
    kappa: int = 100
    nu: int | Literal["all"] = 50
    per: Literal["tile", "image"] = "tile"
    fit: float = 0.0
    smooth: bool = False
    by: Literal["label", "score"] = "label"
    min_similarity: float = -1.0

    @classmethod
    def of(cls, *layers: Mapping[str, Any]) -> Settings:
        """The settings that several layers give, the first that has one deciding; None counts as not given."""
        known = {field.name for field in fields(cls)}
        merged: dict[str, Any] = {}
        for layer in reversed(layers):
            for name in layer:
                if name not in known:
                    raise SpecError(f"there is no setting '{name}'.{did_you_mean(name, sorted(known))}")
            given = {name: value for name, value in layer.items() if value is not None}
            merged |= {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
        try:
            return _checked(**merged)
        except TypeError as error:  # a list cannot be a setting
            raise SpecError(f"a setting is a single value ({error}).") from error

    @property
    def fits(self) -> bool:
        """Whether a word is changed on a region of the thing's own size, and nowhere else."""
        return self.mode == "place" and self.fit > 0

    def validate(self) -> Settings:
        """The same; raises where a value cannot be meant."""
        if isinstance(self.nu, str) and self.nu != "all":
            raise SpecError(f"nu is '{self.nu}'; it is a number of patches, or 'all'.")
        if not isinstance(self.nu, str) and (isinstance(self.nu, bool) or not 1 <= self.nu < math.inf or self.nu % 1):
            raise SpecError(f"nu is {self.nu}; it is at least 1, or 'all'.")
        if isinstance(self.kappa, bool) or not isinstance(self.kappa, int) or self.kappa < 1:
            raise SpecError(f"kappa is {self.kappa!r}; a whole number of sub-units stands for a word, at least 1.")
        if isinstance(self.fill, bool) or not isinstance(self.fill, int) or self.fill < 0:
            raise SpecError(f"fill is {self.fill!r}; it is a number of sub-units, 0 for none.")
        for name in ("alpha", "gamma", "beta", "reach", "fit", "min_similarity"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise SpecError(f"{name} is {value!r}; it is a finite number.")
        if not 0 <= self.fit <= 1:
            raise SpecError(f"fit is {self.fit:g}; it is a share of a word's peak, 0 to 1.")
        try:
            same = validate(self)
        except SpecError as error:  # it speaks of the line of a document, and there is none
            raise SpecError(re.sub(r"^Settings:\d+: ", "", str(error))) from error
        numbers = {name: float(getattr(same, name)) for name in ("alpha", "gamma", "beta", "reach", "fit")}
        return replace(same, **numbers)  # type: ignore[arg-type]


class Given(TypedDict, total=False):
    """The settings that a caller may give by name; None leaves one to the atlas. `Settings` says what they mean."""

    mode: str | None
    alpha: float | None
    gamma: float | None
    beta: float | None
    level: str | None
    reach: float | None
    fill: int | None
    kappa: int | None
    nu: int | str | None
    per: str | None
    fit: float | None
    smooth: bool | None
    by: str | None
    min_similarity: float | None


@lru_cache(maxsize=4096, typed=True)  # by type, for True is not 1
def _checked(**values: Any) -> Settings:
    return Settings(**values).validate()
