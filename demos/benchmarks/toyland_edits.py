"""How well `place` edits fresh scenes of toyland, and which part of it does what.

    python -m demos.benchmarks.toyland_edits --scenes 300 --seed 90210 --work FOLDER --json demos/results/edits.json

Every row of a kind edits the same scenes. Rows: the atlas as shipped; the paper's mode (`scale`); without the gate that
leaves out words that are not seen; with parts of `place` exchanged, one at a time: its detectors by those of raw units
or of a random split, its regions by those of another word, or by the true ones, its directions by supervised
differences of means, or by those of another word. The bound of removal is no edit: the scene is drawn again without the
object. Adding a thing has controls of its own: a block of the same size, but a random one, the one that is claimed
most, or one that is empty in truth. Columns: edits that did what was asked, what else of the caption was kept, captions
that name something that is neither there nor asked for, and clean edits: done, all else kept, nothing invented, a
sentence, nothing named twice. Side effects: how far the next-token distributions move where what is removed is not
there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demos.benchmarks.detectors import FIT_SEED, dictionaries
from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.evaluation.baselines.dictionary import Levels, NamedDictionary
from elude_steer.evaluation.compare.labelling import Vocabulary, calibrate_dictionary
from elude_steer.evaluation.compare.scene_activations import SceneActivations
from elude_steer.evaluation.compare.supervised import true_directions
from elude_steer.evaluation.edits.benchmark import (
    Case,
    Score,
    Task,
    World,
    caption_baselines,
    make_tasks,
    run_edits,
    score_caption,
    summarize,
    toyland_world,
)
from elude_steer.evaluation.edits.fluency import divergences
from elude_steer.evaluation.edits.sweep import plan_or_empty
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.steering.caption_batches import caption_unsteered
from elude_steer.steering.plan import Plan
from elude_steer.steering.regions import FREE_SIDE, find_free_blocks, measure_claims
from elude_steer.steering.steerer import Steerer

KINDS = ("remove", "replace", "two", "place", "absent", "add")
COLUMNS = ("success", "kept", "invented", "clean")
PAPER: dict[str, Any] = {"mode": "scale", "gamma": -50, "alpha": 50}  # the best strengths of a sweep
SHIFT = 7  # how many words further another word's region or direction is taken from


@dataclass(frozen=True, eq=False)
class Trial:
    """Scenes, their captions, and steerers whose parts are exchanged.

    Attributes:
        seed: of the scenes.
        count: of the scenes.
        work: folder for the activations of the scenes that detectors are fitted to.
    """

    seed: int
    count: int
    work: Path

    @cached_property
    def steerer(self) -> Steerer[Atlas]:
        """As shipped."""
        return Steerer.load("toyland")

    @cached_property
    def scenes(self) -> list[tuple[int, toyland.Scene]]:
        """The scenes of the world, with their numbers in the series."""
        found, start = [], 0
        while len(found) < self.count:
            for number, scene in enumerate(toyland.scenes(self.seed, self.count, start=start), start):
                if len(scene.things) >= 2 and all(thing.visible >= 0.6 for thing in scene.things):
                    found.append((number, scene))
            start += self.count
        return found[: self.count]

    @cached_property
    def world(self) -> World:
        """The scenes as a world of the benchmark."""
        cases = [
            Case(scene.image, frozenset(scene.objects), places=frozenset([scene.background]))
            for _, scene in self.scenes
        ]
        return replace(toyland_world(self.seed, 1), cases=cases)

    @cached_property
    def baselines(self) -> list[str]:
        """The captions without edits."""
        return caption_baselines(self.steerer, self.world)

    @cached_property
    def fitted(self) -> tuple[SceneActivations, Vocabulary]:
        """Scenes to fit detectors to, and the words."""
        vocabulary = Vocabulary.load(self.steerer.atlas.about["spec"])
        self.work.mkdir(parents=True, exist_ok=True)
        return SceneActivations.prepare(self.steerer.vlm, vocabulary.encoder, FIT_SEED, 3000, self.work), vocabulary

    def with_detectors_of(self, name: str) -> Steerer[Any]:
        """A steerer whose detectors read other latents."""
        atlas, dictionary = self.steerer.atlas, dictionaries(self.steerer.vlm, self.steerer.atlas)[name]
        calibration = calibrate_dictionary(dictionary, *self.fitted, float(atlas.require_calibration().fit))
        levels = Levels(torch.ones(len(dictionary)))
        labels = replace(atlas.require_labels(), words=np.zeros((len(dictionary), 1), np.int32))
        return Steerer(
            self.steerer.vlm,
            NamedDictionary(dictionary, labels, levels, calibration, atlas.about),
            self.steerer.matcher,
        )

    def with_calibration(self, **changes: torch.Tensor) -> Steerer[Atlas]:
        """A steerer with another calibration."""
        calibration = replace(self.steerer.atlas.require_calibration(), **changes)  # type: ignore[arg-type]
        return replace(self.steerer, atlas=replace(self.steerer.atlas, calibration=calibration))

    def another_words(self, *names: str) -> Steerer[Atlas]:
        """A steerer in which some parts of each object or place are those of another one."""
        calibration = self.steerer.atlas.require_calibration()
        vocabulary = self.steerer.atlas.require_labels().vocabulary
        order = torch.arange(len(calibration))
        for group in (toyland.OBJECTS, toyland.PLACES):
            rows = torch.tensor([i for i, word in enumerate(calibration.words.tolist()) if vocabulary[word] in group])
            order[rows] = rows.roll(-SHIFT)
        return self.with_calibration(**{name: getattr(calibration, name)[order] for name in names})

    def with_true_directions(self) -> Steerer[Atlas]:
        """A steerer with supervised directions: the mean stream of a word's true patches minus that of all others."""
        calibration = self.steerer.atlas.require_calibration()
        vocabulary = self.steerer.atlas.require_labels().vocabulary
        words = [vocabulary[word] for word in calibration.words.tolist()]
        return self.with_calibration(directions=true_directions(self.fitted[0], words))

    def true_regions(self, task: Task) -> Plan:
        """The plan of an edit with the true regions of what is removed."""
        scene = self.scenes[task.case][1]

        def mask(word: str) -> np.ndarray:
            number = 0 if word == scene.background else 1 + scene.objects.index(word)
            return scene.truth == number

        minus = {word: {"where": mask(word)} for word in task.removed}
        return self.steerer.prepare_plan(minus, list(task.added))[0]

    def add_to_least(self, measure: Callable[[int], np.ndarray]) -> Callable[[str], Score]:
        """Scores additions in the block that has least of a measure of each patch, `(rows, columns)`, of a case."""

        def make_plan(task: Task) -> Plan:
            values = measure(task.case)
            (block,) = find_free_blocks(values, np.ones(values.shape, bool), [np.inf])
            return self.steerer.prepare_plan((), list(task.added), block)[0]

        return lambda kind: self.score_plans(kind, self.steerer, make_plan)

    def score_outnumbering(self) -> Score:
        """The score of replacing a thing and adding another in a free place, in scenes with room for that."""
        replaced = {task.case: task for task in make_tasks(self.world, self.baselines, "replace", self.seed)}
        added = make_tasks(self.world, self.baselines, "add", self.seed + 1)
        tasks = [
            replace(replaced[task.case], second=("", task.added[0]))
            for task in added
            if task.case in replaced and task.plus != replaced[task.case].plus
        ]
        outcomes = run_edits(self.steerer, self.world, tasks, lambda task: plan_or_empty(self.steerer, task, {}))
        return summarize("add", outcomes)

    def claims(self, case: int) -> np.ndarray:
        """How much the words claim each patch of the tile that shows the whole image."""
        vlm, atlas = self.steerer.vlm, self.steerer.atlas
        q = run_prefix(vlm, [self.world.cases[case].image]).q[0][0]
        return measure_claims(atlas.read_all_words(q, vlm.layer)).detach().numpy().reshape(self.shape)

    def covered(self, case: int) -> np.ndarray:
        """The share of each patch that a thing or clutter covers in truth."""
        truth, (rows, columns) = self.scenes[case][1].truth > 0, self.shape
        high, wide = truth.shape
        return truth.reshape(rows, high // rows, columns, wide // columns).mean((1, 3))

    def random_block(self, case: int) -> np.ndarray:
        """Zero on a random block of the size of a free place, else one."""
        rng, values = np.random.default_rng([self.seed, case]), np.ones(self.shape)
        high, wide = (round(FREE_SIDE * side) for side in self.shape)
        top, left = rng.integers(self.shape[0] - high + 1), rng.integers(self.shape[1] - wide + 1)
        values[top : top + high, left : left + wide] = 0
        return values

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of patches in a tile."""
        return self.steerer.vlm.patch_shape or (1, 1)

    def score(self, kind: str, steerer: Steerer[Any], settings: Mapping[str, Any]) -> Score:
        """The score of a steerer with some settings."""
        return self.score_plans(kind, steerer, lambda task: plan_or_empty(steerer, task, settings))

    def score_plans(self, kind: str, steerer: Steerer[Any], make_plan: Callable[[Task], Plan]) -> Score:
        """The score of a steerer with some plans."""
        tasks = make_tasks(self.world, self.baselines, kind, self.seed)  # type: ignore[arg-type]
        return summarize(kind, run_edits(steerer, self.world, tasks, make_plan))

    def side_effects(self, settings: Mapping[str, Any]) -> float:
        """Mean divergence of next-token distributions where what is removed is not there, in nats a token."""
        tasks = make_tasks(self.world, self.baselines, "absent", self.seed)
        found: list[float] = []
        for start in range(0, len(tasks), 32):
            part = tasks[start : start + 32]
            plans = [plan_or_empty(self.steerer, task, settings) for task in part]
            images = [self.world.cases[task.case].image for task in part]
            found += divergences(self.steerer, images, plans, [task.baseline for task in part])
        return float(np.mean(found))

    def score_redrawn(self) -> Score:
        """What the model says of the scenes drawn without the object."""
        tasks = make_tasks(self.world, self.baselines, "remove", self.seed)
        images = [
            toyland.draw_scene(np.random.default_rng([self.seed, self.scenes[t.case][0]]), hidden=[t.minus]).image
            for t in tasks
        ]
        captions: list[str] = []
        for start in range(0, len(images), 32):
            captions += caption_unsteered(self.steerer.vlm, images[start : start + 32])
        return summarize("remove", [score_caption(self.world, t, c) for t, c in zip(tasks, captions, strict=True)])


def rows(trial: Trial) -> Mapping[str, Callable[[str], Score | None]]:
    """The rows: each gives the score of a kind of edit, or None where it makes no sense."""
    shipped = trial.steerer

    def exchanged(make: Callable[[], Steerer[Any]], **settings: Any) -> Callable[[str], Score | None]:
        steerer = cache(make)
        return lambda kind: trial.score(kind, steerer(), settings)

    return {
        "as shipped": exchanged(lambda: shipped),
        "scale (the paper's mode)": exchanged(lambda: shipped, **PAPER),
        "no gate": exchanged(lambda: shipped, force=True),
        "detectors of raw units": exchanged(lambda: trial.with_detectors_of("raw units")),
        "detectors of a random split": exchanged(lambda: trial.with_detectors_of("random split")),
        "regions of another word": exchanged(
            lambda: trial.another_words("weights", "scale", "bias", "levels"), force=True
        ),
        "directions of another word": exchanged(lambda: trial.another_words("directions")),
        "supervised directions": exchanged(trial.with_true_directions),
        "true regions": lambda kind: None if kind == "absent" else trial.score_plans(kind, shipped, trial.true_regions),
        "drawn without it": lambda kind: trial.score_redrawn() if kind == "remove" else None,
    }


def rows_of_add(trial: Trial) -> Mapping[str, Callable[[str], Score | None]]:
    """The rows of additions."""

    def most_claimed(case: int) -> np.ndarray:
        claims = trial.claims(case)
        return claims.max() - claims

    return {
        "as shipped": lambda kind: trial.score(kind, trial.steerer, {}),
        "scale (the paper's mode)": lambda kind: trial.score(kind, trial.steerer, PAPER),
        "directions of another word": lambda kind: trial.score(kind, trial.another_words("directions"), {}),
        "random block": trial.add_to_least(trial.random_block),
        "most claimed block": trial.add_to_least(most_claimed),
        "truly empty block": trial.add_to_least(trial.covered),
        "beside a replacement": lambda _kind: trial.score_outnumbering(),
        "whole image": lambda kind: trial.score(kind, trial.steerer, {"fit": 0}),
    }


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=90210)
    parser.add_argument("--work", type=Path, required=True, help="folder for the activations of scenes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of edits; all by default")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows to make; all by default")
    options = parser.parse_args()
    trial, found = Trial(options.seed, options.scenes, options.work), []
    print(f"{'':40}{'edits':>6}{''.join(f'{name:>10}' for name in COLUMNS)}")
    others = [kind for kind in options.kinds if kind != "add"]
    tables = [(rows, others)] if others else []
    tables += [(rows_of_add, ["add"])] if "add" in options.kinds else []
    for make_rows, kinds in tables:
        for name, score_row in make_rows(trial).items():
            for kind in kinds if not options.rows or name in options.rows else ():
                score = score_row(kind)
                if score is not None:
                    found.append({"row": name, **score.to_dict()})
                    cells = "".join(f"{getattr(score, column):10.3f}" for column in COLUMNS)
                    print(f"{name + ', ' + kind:40}{score.edits:6}{cells}", flush=True)
    gates: dict[str, dict[str, Any]] = {"as shipped": {}, "no gate": {"force": True}, "scale": PAPER}
    for name, settings in gates.items() if "absent" in options.kinds and not options.rows else ():
        found.append({"row": name, "side effects": trial.side_effects(settings)})
        print(f"{name + ', side effects in nats a token':46}{found[-1]['side effects']:10.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
