"""How well a method's dictionary steers: settings are chosen on some scenes and scored on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from elude_steer.evaluation.baselines.dictionary import Dictionary, NamedDictionary
from elude_steer.evaluation.compare.grids import Grid, find_border
from elude_steer.evaluation.edits import Kind
from elude_steer.evaluation.edits.benchmark import Outcome, World, make_tasks, score_caption, summarize
from elude_steer.evaluation.edits.sweep import Point, plan_or_empty, sweep
from elude_steer.evaluation.measures.faithfulness import caption_agreement
from elude_steer.models.matcher import Matcher
from elude_steer.models.prefix_cache import Prefix, image_batches, run_prefix
from elude_steer.models.vlm import Vlm
from elude_steer.steering.caption_batches import caption_unsteered
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.progress import track

# Every point of a grid is tried on the first third of the tuning scenes, and the better quarter of them on all.
_FIRST, _BETTER = 3, 4


@dataclass(frozen=True, eq=False)
class EditTrial:
    """The scenes that every method edits.

    Attributes:
        vlm: the model.
        matcher: finds the latents of a concept.
        tuning: scenes to choose settings on.
        edited: scenes to score them on.
        reported: scenes whose captions a reconstruction should not change.
        work: where sweeps store their captions.
    """

    vlm: Vlm
    matcher: Matcher
    tuning: World
    edited: World
    reported: World
    work: Path

    @cached_property
    def baselines(self) -> list[str]:
        """Captions of the reported scenes without any edit."""
        return self._caption(self.reported)

    @cached_property
    def tuning_baselines(self) -> list[str]:
        """Captions of the tuning scenes without any edit."""
        return self._caption(self.tuning)

    @cached_property
    def prefixes(self) -> list[tuple[list[Any], Prefix]]:
        """The edited scenes in batches, with what the tower computes of them up to the layer: the same for all."""
        cases = track(self.edited.cases, "encoding", "scenes")
        batches = image_batches(self.vlm, cases, lambda case: case.image, 32)
        return [(images, run_prefix(self.vlm, images)) for _, images in batches]

    @cached_property
    def edited_baselines(self) -> list[str]:
        """Captions of the edited scenes without any edit."""
        return self._caption(self.edited)

    def _caption(self, world: World) -> list[str]:
        captions: list[str] = []
        cases = track(world.cases, "captioning", "scenes")
        for _, images in image_batches(self.vlm, cases, lambda case: case.image, 32):
            captions += caption_unsteered(self.vlm, images)
        return captions

    def caption_agreement(self, dictionary: Dictionary) -> float:
        """Share of captions that stay the same when the dictionary's reconstruction replaces the layer's output."""
        images = (case.image for case in track(self.reported.cases, "captioning", "scenes"))
        return caption_agreement(self.vlm, _Reconstruction(dictionary), images, size=32, baselines=self.baselines)

    def steer(self, latents: NamedDictionary, kind: Kind, grid: Grid) -> dict[str, Any]:
        """Choose the point of a grid with most clean edits on the tuning scenes, and score it on the edited ones.

        The result has the names of the settings that lie on the grid's `border`. That of `remove` has the score of
        removing what is not there, with the same settings, as `absent`.
        """
        steerer = Steerer(self.vlm, latents, self.matcher)
        tried, best = self._choose(steerer, kind, grid)
        kinds: list[Kind] = [kind, "absent"] if kind == "remove" else [kind]
        scores = {one: summarize(one, found).to_dict() for one, found in self._edit(steerer, kinds, best).items()}
        about = {"tried": tried, "settings": dict(best), "border": find_border(grid, best)}
        return {**about, **scores[kind], **({"absent": scores["absent"]} if kind == "remove" else {})}

    def _choose(self, steerer: Steerer[Any], kind: Kind, grid: Grid) -> tuple[int, Mapping[str, Any]]:
        """How many points there are, and the best."""
        count = -(-len(self.tuning.cases) // _FIRST)
        few = replace(self.tuning, name=f"{self.tuning.name}:{count}", cases=self.tuning.cases[:count])
        first = sweep(steerer, few, kind, grid, work=self.work, baselines=self.tuning_baselines[:count])
        better = [point.settings for point in sorted(first, key=_rank, reverse=True)[: -(-len(first) // _BETTER)]]
        last = sweep(steerer, self.tuning, kind, better, work=self.work, baselines=self.tuning_baselines)
        return len(first), max(last, key=_rank).settings

    def _edit(
        self, steerer: Steerer[Any], kinds: Sequence[Kind], settings: Mapping[str, Any]
    ) -> dict[Kind, list[Outcome]]:
        """The outcomes of some kinds of edits; all captions of a scene are made together."""
        tasks = {kind: make_tasks(self.edited, self.edited_baselines, kind) for kind in kinds}
        rows = [(kind, task) for kind, own in tasks.items() for task in own]
        outcomes: dict[Kind, list[Outcome]] = {kind: [] for kind in kinds}
        start = 0
        for images, prefix in track(self.prefixes, "editing", "batches"):
            own = [[row for row in rows if row[1].case == start + number] for number in range(len(images))]
            plans = [[plan_or_empty(steerer, task, settings) for _, task in part] for part in own]
            captions = steerer.captions(images, plans, prefix=prefix)
            for part, answers in zip(own, captions, strict=True):
                for (kind, task), caption in zip(part, answers, strict=True):
                    outcomes[kind].append(score_caption(self.edited, task, caption))
            start += len(images)
        return outcomes


def _rank(point: Point) -> tuple[float, float]:
    """Points with more clean edits come first, then those with the larger harmonic mean."""
    return point.score.clean, point.score.harmonic


class _Reconstruction(torch.nn.Module):
    """A dictionary in place of the layer that it was made from."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.dictionary.reconstruct(q)
