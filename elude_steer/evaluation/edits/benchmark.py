"""The benchmark of edits: take an object away, or put another in its place, and count what happened to the caption.

Pictures come with the truth of what is in them: toyland's scenes, or COCO's annotations. An edit is asked for by word
alone; what counts is what the caption says before and after. Whether it is still a sentence is read off a grammar where
there is one; otherwise the model that was not steered says how likely the caption is, against its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from elude_steer.errors import SpecError
from elude_steer.evaluation.edits.fluency import likelihoods
from elude_steer.models.images import open_image
from elude_steer.models.prefix_cache import image_batches, run_prefix
from elude_steer.models.vlm import PROMPT
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer

Kind = Literal["remove", "replace"]
_MOST = 3  # objects in a scene of toyland


@dataclass(frozen=True)
class Reading:
    """What a caption says: the objects and places it names, and whether it is a sentence; None without a grammar."""

    objects: frozenset[str]
    places: frozenset[str] = frozenset()
    well_formed: bool | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """A picture and the objects that are really in it.

    Attributes:
        source: the picture, or the path of its file.
        objects: what is there.
    """

    source: Any
    objects: frozenset[str]

    @property
    def image(self) -> Any:
        """The picture; a file is read anew each time, so that thousands of cases take no room."""
        return open_image(self.source) if isinstance(self.source, str | Path) else self.source


@dataclass(frozen=True, eq=False)
class World:
    """Pictures with their truth, and how their captions are read.

    Attributes:
        name: for reports, and for work that is kept: worlds of other pictures have other names.
        cases: the pictures.
        words: all objects that there are.
        read: a caption to what it says.
    """

    name: str
    cases: Sequence[Case]
    words: tuple[str, ...]
    read: Callable[[str], Reading]


@dataclass(frozen=True)
class Task:
    """One edit that is asked for: `minus` is an object that the baseline names, `plus` what should be there instead."""

    case: int
    baseline: str
    minus: str
    plus: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What one edit did.

    Attributes:
        task: what was asked for.
        caption: what the model says now.
        gone: the old object is no longer named.
        named: the new one is; True where none was asked for.
        kept: the share of the other objects and places of the baseline that are still named.
        invented: objects named that are neither in the picture nor asked for.
        well_formed: the caption is a sentence of its language; None where no grammar says so.
        likelihood: how much more likely a token of the caption is than one of the baseline, to the model that is not
            steered: the difference of the mean log-probabilities. It falls where the sentence breaks, and somewhat
            where a good sentence says what is not so; compare it between edits. None where it was not asked for.
    """

    task: Task
    caption: str
    gone: bool
    named: bool
    kept: float
    invented: tuple[str, ...]
    well_formed: bool | None
    likelihood: float | None = None

    @property
    def success(self) -> bool:
        """It did what was asked for."""
        return self.gone and self.named

    @property
    def clean(self) -> bool:
        """It did what was asked for, and nothing else."""
        return self.success and self.kept == 1 and not self.invented


@dataclass(frozen=True)
class Score:
    """Shares over many edits, each with a 95 % interval.

    Attributes:
        kind: remove or replace.
        edits: how many.
        success: did what was asked for.
        gone: the old object is no longer named.
        kept: of what else the baseline named.
        invented: named something that is neither there nor asked for.
        clean: did what was asked for and nothing else.
        well_formed: still a sentence; None where no grammar says so.
        harmonic: harmonic mean of success and kept.
        intervals: of each that is known, by name.
        likelihood: mean of the outcomes' (no share: a difference of log-probabilities); None where none is known.
    """

    kind: str
    edits: int
    success: float
    gone: float
    kept: float
    invented: float
    clean: float
    well_formed: float | None
    harmonic: float
    intervals: Mapping[str, tuple[float, float]]
    likelihood: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def toyland_world(seed: int, count: int, *, min_objects: int = 2, min_visible: float = 0.6) -> World:
    """Toyland's scenes with at least so many objects, each well enough to be seen.

    Args:
        seed: of the scenes.
        count: how many.
        min_objects: objects in each, 0 to 3.
        min_visible: share of each object that must be seen.
    """
    if count < 1:
        raise SpecError(f"count is {count}; take at least 1 scene.")
    if not 0 <= min_objects <= _MOST:
        raise SpecError(f"min_objects is {min_objects}; a scene of toyland has 0 to {_MOST} objects.")
    if not 0 <= min_visible <= 1:
        raise SpecError(f"min_visible is {min_visible:g}; it is a share, 0 to 1.")
    from elude_steer.toyland import OBJECTS, PLACES, parse, scenes

    cases: list[Case] = []
    start = 0
    while len(cases) < count:
        for scene in scenes(seed, count, start=start):
            if len(scene.things) >= min_objects and all(thing.visible >= min_visible for thing in scene.things):
                cases.append(Case(scene.image, frozenset(scene.objects)))
        start += count

    def read(caption: str) -> Reading:
        said = parse(caption)
        places = frozenset([said.place]) if said.place in PLACES else frozenset[str]()
        return Reading(frozenset(said.objects), places, said.well_formed)

    return World(f"toyland:{seed}:{min_objects}:{min_visible:g}", cases[:count], tuple(OBJECTS), read)


def make_tasks(world: World, baselines: Sequence[str], kind: Kind, seed: int = 0) -> list[Task]:
    """One edit a picture, of an object that is there and that the baseline names; pictures without one are left out."""
    if kind not in ("remove", "replace"):
        raise SpecError(f"an edit is 'remove' or 'replace', not '{kind}'.")
    tasks = []
    for number, (case, caption) in enumerate(zip(world.cases, baselines, strict=True)):
        rng = np.random.default_rng([seed, number])
        said = world.read(caption).objects
        there = sorted(said & case.objects)
        others = [word for word in world.words if word not in case.objects | said]
        if there and (others or kind == "remove"):
            minus = there[rng.integers(len(there))]
            plus = others[rng.integers(len(others))] if kind == "replace" else None
            tasks.append(Task(number, caption, minus, plus))
    return tasks


def score_caption(world: World, task: Task, caption: str) -> Outcome:
    """What an edit did, from the captions before and after."""
    before, after, case = world.read(task.baseline), world.read(caption), world.cases[task.case]
    rest = [*(before.objects - {task.minus}), *before.places]
    still = [word for word in rest if word in after.objects | after.places]
    asked = {task.plus} if task.plus else set()
    return Outcome(
        task,
        caption,
        task.minus not in after.objects,
        task.plus is None or task.plus in after.objects,
        len(still) / len(rest) if rest else 1.0,
        tuple(sorted(after.objects - case.objects - asked)),
        after.well_formed,
    )


def summarize(kind: str, outcomes: Sequence[Outcome], seed: int = 0, rounds: int = 1000) -> Score:
    """The shares over all outcomes, with bootstrap intervals."""
    if not outcomes:
        raise SpecError("there are no edits to sum up: no baseline names an object that is in its picture.")
    shares = {
        "success": [o.success for o in outcomes],
        "gone": [o.gone for o in outcomes],
        "kept": [o.kept for o in outcomes],
        "invented": [bool(o.invented) for o in outcomes],
        "clean": [o.clean for o in outcomes],
        "well_formed": [o.well_formed for o in outcomes if o.well_formed is not None],
        "likelihood": [o.likelihood for o in outcomes if o.likelihood is not None],
    }
    table = {name: np.array(values, dtype=float) for name, values in shares.items() if values}
    drawn = {name: _resampled(column, seed, rounds) for name, column in table.items()}  # (rounds,) each
    means: dict[str, Any] = {"well_formed": None, "likelihood": None}
    means |= {name: float(column.mean()) for name, column in table.items()}
    means["harmonic"] = float(_harmonic(np.array(means["success"]), np.array(means["kept"])))
    drawn["harmonic"] = _harmonic(drawn["success"], drawn["kept"])
    return Score(kind, len(outcomes), **means, intervals={name: _interval(column) for name, column in drawn.items()})


def _resampled(values: np.ndarray, seed: int, rounds: int) -> np.ndarray:
    """Means of so many samples; columns of one length are drawn alike, so that means belong together."""
    return values[np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))].mean(1)


def _interval(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _harmonic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a + b > 0, 2 * a * b / np.maximum(a + b, 1e-12), 0.0)


def caption_baselines(steerer: Steerer, world: World, prompt: str = PROMPT, batch_size: int = 32) -> list[str]:
    """What the model says of every picture by itself."""
    said: list[str] = []
    for _, batch in image_batches(steerer.vlm, world.cases, lambda case: case.image, batch_size):
        said += [own[0] for own in steerer.captions(batch, [[None]] * len(batch), prompt)]
    return said


def run_edits(
    steerer: Steerer,
    world: World,
    tasks: Sequence[Task],
    make_plan: Callable[[Task], Plan],
    *,
    prompt: str = PROMPT,
    batch_size: int = 32,
    likelihood: bool | None = None,
    step: Callable[[int], object] | None = None,
) -> list[Outcome]:
    """Does the edits.

    Args:
        steerer: what is measured.
        world: pictures with their truth.
        tasks: what is asked for.
        make_plan: says how each is done.
        prompt: the question.
        batch_size: pictures that are looked at together.
        likelihood: whether the model that is not steered says how likely each caption is; by default where the world
            has no grammar.
        step: told how many edits were done.
    """
    weigh = world.read("").well_formed is None if likelihood is None else likelihood
    outcomes: list[Outcome] = []
    for part, images in image_batches(steerer.vlm, tasks, lambda task: world.cases[task.case].image, batch_size):
        plans = [[make_plan(task)] for task in part]
        if weigh:
            prefix = run_prefix(steerer.vlm, images, prompt)
            said = [own[0] for own in steerer.captions(images, plans, prompt, prefix=prefix)]
            texts = [[caption, task.baseline] for task, caption in zip(part, said, strict=True)]
            weights = likelihoods(steerer.vlm, images, texts, prompt, prefix=prefix)
            changes: list[float | None] = [after - before for after, before in weights]
        else:
            said = [own[0] for own in steerer.captions(images, plans, prompt)]
            changes = [None] * len(part)
        for task, caption, change in zip(part, said, changes, strict=True):
            outcomes.append(replace(score_caption(world, task, caption), likelihood=change))
        if step:
            step(len(part))
    return outcomes
