"""The rows of a benchmark: the unsteered model, the edit, and controls that change as much but something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.benchmarks.measured import UNSTEERED
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.steering.plan import Plan
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer

EDIT, UNGATED = "edit", "without the gate"
Words = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Row:
    """One way to answer: a steerer, and the plan that it makes of what is to be removed.

    Attributes:
        name: of the row.
        steerer: the model; all rows have the same one.
        make_plan: from the words to remove to a plan; None is the model without edits.
    """

    name: str
    steerer: Steerer[Any]
    make_plan: Callable[[Words], Plan | None]
    _plans: dict[Words, Plan | None] = field(default_factory=dict)

    def plan(self, minus: Words) -> Plan | None:
        """The plan that removes these words; made once."""
        if minus not in self._plans:
            self._plans[minus] = self.make_plan(minus)
        return self._plans[minus]


def erasing_rows(
    steerer: Steerer[Atlas], classes: Sequence[str], taken: Set[str], options: BenchmarkOptions
) -> list[Row]:
    """The rows that erase what is in images: unsteered, the edit, a random change of the same size, another word.

    Args:
        steerer: the model and its atlas.
        classes: those of the images, most frequent first: the other word is one that there is something of.
        taken: the classes of the edit.
        options: the edit, the seed, and whether there are controls.
    """
    plus, settings = options.plus, options.settings
    rows = [Row(UNSTEERED, steerer, lambda _: None), _edit_row(EDIT, steerer, plus, settings)]
    if options.controls:
        rows.append(_random_row(steerer, plus, settings, options.seed))
        for other in known_words(steerer, [name for name in classes if name not in taken], settings, limit=1):
            rows.append(
                Row(f"another word ({other})", steerer, partial(_replace_words, steerer, other, plus, settings))
            )
    return rows


def sparing_rows(steerer: Steerer[Atlas], options: BenchmarkOptions) -> list[Row]:
    """The rows that remove what is not in images: unsteered, the edit, and how much its gate spares.

    In mode place, a row edits without the gate that leaves out what is not seen, and so does the random control.

    Args:
        steerer: the model and its atlas.
        options: the edit, the seed, and whether there are controls.
    """
    settings = options.settings
    rows = [Row(UNSTEERED, steerer, lambda _: None), _edit_row(EDIT, steerer, (), settings)]
    if not options.controls:
        return rows
    if find_mode(steerer, settings) != "place":
        return [*rows, _random_row(steerer, (), settings, options.seed)]
    forced = {**settings, "force": True}
    random = _random_row(steerer, (), forced, options.seed)
    ungated = _edit_row(f"{EDIT}, {UNGATED}", steerer, (), forced)
    return [*rows, ungated, replace(random, name=f"{random.name}, {UNGATED}")]


def find_mode(steerer: Steerer[Any], settings: Mapping[str, Any]) -> str:
    """The mode of an edit with these settings."""
    return merge_settings(settings, steerer.defaults).mode


def known_words(
    steerer: Steerer[Any], words: Sequence[str], settings: Mapping[str, Any], limit: int | None = None
) -> list[str]:
    """The words that the atlas knows something like, so that they can be removed; at most the first `limit`."""
    known: list[str] = []
    for word in words:
        if len(known) == limit:
            break
        try:
            _make_plan(steerer, (word,), (), settings)
        except SpecError:  # it is unlike all that the atlas knows
            continue
        known.append(word)
    return known


def _make_plan(steerer: Steerer[Any], minus: Words, plus: Sequence[str], settings: Mapping[str, Any]) -> Plan:
    return steerer.prepare_plan(list(minus), list(plus), settings=settings)[0]


def _replace_words(
    steerer: Steerer[Any], other: str, plus: Sequence[str], settings: Mapping[str, Any], _minus: Words
) -> Plan:
    """The plan that removes another word, whatever is to be removed."""
    return _make_plan(steerer, (other,), plus, settings)


def _edit_row(name: str, steerer: Steerer[Any], plus: Sequence[str], settings: Mapping[str, Any]) -> Row:
    return Row(name, steerer, lambda minus: _make_plan(steerer, minus, plus, settings))


def _random_row(steerer: Steerer[Atlas], plus: Sequence[str], settings: Mapping[str, Any], seed: int) -> Row:
    """A change of the same size at the same places, in random directions; in scale, of as many random sub-units."""
    if find_mode(steerer, settings) == "place":
        other = with_random_directions(steerer, seed)
        return _edit_row("random direction", other, plus, settings)
    return Row(
        "random sub-units",
        steerer,
        lambda minus: with_random_sub_units(steerer, _make_plan(steerer, minus, plus, settings), seed),
    )


def with_random_directions(steerer: Steerer[Atlas], seed: int) -> Steerer[Atlas]:
    """A steerer whose concepts have random directions, each as long as its own."""
    calibration = steerer.atlas.require_calibration()
    directions = calibration.directions.float()
    noise = torch.randn(directions.shape, generator=torch.Generator().manual_seed(seed))
    noise *= directions.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
    return replace(steerer, atlas=replace(steerer.atlas, calibration=replace(calibration, directions=noise)))


def with_random_sub_units(steerer: Steerer[Atlas], plan: Plan, seed: int) -> Plan:
    """The plan with other sub-units, drawn among those that fire, and the same factors."""
    atlas, rng = steerer.atlas, np.random.default_rng(seed)
    own = {edit.sub_unit for edit in plan.edits}
    free = [n for n in (atlas.references.activation > 0).nonzero().flatten().tolist() if n not in own]
    drawn = iter(rng.permutation(free).tolist())
    concepts = []
    for concept in plan.concepts:
        pairs = zip(concept.edits, drawn, strict=False)  # an atlas of few sub-units may run out of them
        edits = tuple(replace(edit, sub_unit=n, unit=int(atlas.units[n]), via="random") for edit, n in pairs)
        concepts.append(replace(concept, edits=edits))
    return replace(plan, concepts=tuple(concepts))
