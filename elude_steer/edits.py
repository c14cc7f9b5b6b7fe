"""The benchmark of edits: take an object away, or put another in its place, and count what happened to the caption.

Pictures come with the truth of what is in them: toyland's scenes, or COCO's annotations. An edit is asked for by word
alone; what counts is what the caption says before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from elude_steer.errors import SpecError
from elude_steer.images import open_image
from elude_steer.plans import Plan
from elude_steer.steering import Steerer
from elude_steer.vlm import PROMPT

Kind = Literal["remove", "replace"]


@dataclass(frozen=True)
class Reading:
    """What a caption says: the objects and places it names, and whether it is a sentence of its language."""

    objects: frozenset[str]
    places: frozenset[str] = frozenset()
    well_formed: bool = True


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
        well_formed: the caption is a sentence of its language.
    """

    task: Task
    caption: str
    gone: bool
    named: bool
    kept: float
    invented: tuple[str, ...]
    well_formed: bool

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
        well_formed: still a sentence.
        harmonic: harmonic mean of success and kept.
        intervals: of each, by name.
    """

    kind: str
    edits: int
    success: float
    gone: float
    kept: float
    invented: float
    clean: float
    well_formed: float
    harmonic: float
    intervals: Mapping[str, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def toyland_world(seed: int, n: int, *, least: int = 2, visible: float = 0.6) -> World:
    """Toyland's scenes with at least so many objects, each well enough to be seen.

    Args:
        seed: of the scenes.
        n: how many.
        least: objects in each.
        visible: share of each object that must be seen.
    """
    from elude_steer.toyland import OBJECTS, PLACES, parse, scenes

    cases: list[Case] = []
    start = 0
    while len(cases) < n:
        for scene in scenes(seed, n, start=start):
            if len(scene.things) >= least and all(thing.visible >= visible for thing in scene.things):
                cases.append(Case(scene.image, frozenset(scene.objects)))
        start += n

    def read(caption: str) -> Reading:
        said = parse(caption)
        places = frozenset([said.place]) if said.place in PLACES else frozenset[str]()
        return Reading(frozenset(said.objects), places, said.well_formed)

    return World(f"toyland:{seed}:{least}:{visible:g}", cases[:n], tuple(OBJECTS), read)


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


def judge(world: World, task: Task, caption: str) -> Outcome:
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


def summary(kind: str, outcomes: Sequence[Outcome], seed: int = 0, rounds: int = 1000) -> Score:
    """The shares over all outcomes, with bootstrap intervals."""
    if not outcomes:
        raise SpecError("there are no edits to sum up: no baseline names an object that is in its picture.")
    columns = ("success", "gone", "kept", "invented", "clean", "well_formed")
    table = np.array(
        [[o.success, o.gone, o.kept, bool(o.invented), o.clean, o.well_formed] for o in outcomes], dtype=float
    )  # (edits, columns)
    drawn = np.random.default_rng(seed).integers(0, len(table), (rounds, len(table)))
    means = np.stack([table[rows].mean(0) for rows in drawn])  # (rounds, columns)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    intervals = {name: (float(low[i]), float(high[i])) for i, name in enumerate(columns)}
    together = _harmonic(means[:, 0], means[:, 2])
    intervals["harmonic"] = tuple(float(v) for v in np.quantile(together, [0.025, 0.975]))  # type: ignore[assignment]
    shares = dict(zip(columns, (float(v) for v in table.mean(0)), strict=True))
    harmonic = float(_harmonic(np.array(shares["success"]), np.array(shares["kept"])))
    return Score(kind, len(table), **shares, harmonic=harmonic, intervals=intervals)


def _harmonic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a + b > 0, 2 * a * b / np.maximum(a + b, 1e-12), 0.0)


def baselines(steerer: Steerer, world: World, prompt: str = PROMPT, size: int = 32) -> list[str]:
    """What the model says of every picture by itself."""
    said: list[str] = []
    for start in range(0, len(world.cases), size):
        batch = [case.image for case in world.cases[start : start + size]]
        said += [own[0] for own in steerer.captions(batch, [[None]] * len(batch), prompt)]
    return said


def run_edits(
    steerer: Steerer,
    world: World,
    tasks: Sequence[Task],
    plan_of: Callable[[Task], Plan],
    *,
    prompt: str = PROMPT,
    size: int = 32,
    step: Callable[[int], object] | None = None,
) -> list[Outcome]:
    """Does the edits; `plan_of` says how."""
    outcomes = []
    for start in range(0, len(tasks), size):
        part = tasks[start : start + size]
        images = [world.cases[task.case].image for task in part]
        said = steerer.captions(images, [[plan_of(task)] for task in part], prompt)
        outcomes += [judge(world, task, own[0]) for task, own in zip(part, said, strict=True)]
        if step:
            step(len(part))
    return outcomes
