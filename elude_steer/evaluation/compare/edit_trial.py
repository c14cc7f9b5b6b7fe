"""How well a method's dictionary steers: settings are chosen on some scenes and scored on others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from elude_steer.evaluation.baselines.dictionary import Dictionary, NamedDictionary
from elude_steer.evaluation.compare.grids import Grid, find_border
from elude_steer.evaluation.edits import Kind
from elude_steer.evaluation.edits.benchmark import World, make_tasks, run_edits, summarize
from elude_steer.evaluation.edits.sweep import plan_or_empty, sweep
from elude_steer.evaluation.measures.faithfulness import caption_agreement
from elude_steer.models.matcher import Matcher
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import Vlm
from elude_steer.steering.caption_batches import caption_unsteered
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.progress import track


@dataclass(frozen=True, eq=False)
class EditTrial:
    """The scenes that every method edits.

    Attributes:
        vlm: the model.
        matcher: finds the latents of a concept.
        tuning: scenes to choose settings on.
        reported: scenes to score them on.
        work: where sweeps store their captions.
    """

    vlm: Vlm
    matcher: Matcher
    tuning: World
    reported: World
    work: Path

    @cached_property
    def baselines(self) -> list[str]:
        """Captions of the reported scenes without any edit."""
        captions: list[str] = []
        cases = track(self.reported.cases, "captioning", "scenes")
        for _, images in image_batches(self.vlm, cases, lambda case: case.image, 32):
            captions += caption_unsteered(self.vlm, images)
        return captions

    def caption_agreement(self, dictionary: Dictionary) -> float:
        """Share of captions that stay the same when the dictionary's reconstruction replaces the layer's output."""
        images = (case.image for case in track(self.reported.cases, "captioning", "scenes"))
        return caption_agreement(self.vlm, _Reconstruction(dictionary), images, size=32, baselines=self.baselines)

    def steer(self, latents: NamedDictionary, kind: Kind, grid: Grid) -> dict[str, Any]:
        """Choose the point of a grid with most clean edits on the tuning scenes, and score it on the reported ones.

        The result has the names of the settings that lie on the grid's `border`. That of `remove` has the score of
        removing what is not there, with the same settings, as `absent`.
        """
        steerer = Steerer(self.vlm, latents, self.matcher)
        points = sweep(steerer, self.tuning, kind, grid, work=self.work)
        best = max(points, key=lambda point: (point.score.clean, point.score.harmonic))

        def score(edits: Kind) -> dict[str, Any]:
            tasks = make_tasks(self.reported, self.baselines, edits)
            outcomes = run_edits(
                steerer, self.reported, tasks, lambda task: plan_or_empty(steerer, task, best.settings)
            )
            return summarize(edits, outcomes).to_dict()

        about = {"tried": len(points), "settings": dict(best.settings), "border": find_border(grid, best.settings)}
        return {**about, **score(kind), **({"absent": score("absent")} if kind == "remove" else {})}


class _Reconstruction(torch.nn.Module):
    """A dictionary in place of the layer that it was made from."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.dictionary.reconstruct(q)
