"""The benchmark of edits: remove an object, replace it, add one, or remove one that is not there; score the caption.

The objects in each image are known: from toyland's scenes, COCO's annotations, or several captions of a photo. An edit
names only words; its score compares the captions before and after. Toyland's grammar tells whether the caption is still
a sentence. Without a grammar, the unsteered model compares the likelihood of the caption to that of the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from elude_steer.errors import SpecError
from elude_steer.evaluation.edits import KINDS, Kind
from elude_steer.evaluation.edits.fluency import likelihoods
from elude_steer.models.images import open_image
from elude_steer.models.prefix_cache import image_batches, run_prefix
from elude_steer.models.vlm import PROMPT
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.fingerprint import versions
from elude_steer.utils.progress import track

_MAX_OBJECTS = 3  # in a scene of toyland


@dataclass(frozen=True)
class Reading:
    """What a caption names, and whether it is a sentence.

    Attributes:
        objects: the objects that it names.
        places: the places that it names.
        well_formed: whether it is a sentence; None without a grammar.
        repeated: the objects that it names more than once.
    """

    objects: frozenset[str]
    places: frozenset[str] = frozenset()
    well_formed: bool | None = None
    repeated: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Case:
    """An image with its true objects.

    Attributes:
        source: the image, or the path of its file.
        objects: the objects in the image.
        possible: further objects of which nobody can say that they are absent; they do not count as invented.
        places: the place that the image shows, if it is known.
    """

    source: Any
    objects: frozenset[str]
    possible: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()

    @property
    def image(self) -> Any:
        """The image. A file is read on every access, so that thousands of cases need no memory."""
        return open_image(self.source) if isinstance(self.source, str | Path) else self.source


@dataclass(frozen=True, eq=False)
class World:
    """Images with their true objects, and a function that reads captions.

    Attributes:
        name: identifies the images, in reports and in the keys of cached work.
        cases: the images.
        vocabulary: the names of all objects.
        read: returns what a caption names.
        places: the names of all places, where they are known.
        max_objects: the largest number of objects that a caption can name; None if there is no limit.
    """

    name: str
    cases: Sequence[Case]
    vocabulary: tuple[str, ...]
    read: Callable[[str], Reading]
    places: tuple[str, ...] = ()
    max_objects: int | None = None


@dataclass(frozen=True)
class Task:
    """One edit to try.

    Attributes:
        case: index of the image in `World.cases`.
        baseline: the unsteered caption.
        minus: the object to remove, which the baseline names; empty to only add.
        plus: the object to put in its place, or anywhere; None to only remove.
        present: whether `minus` is in the image; otherwise the caption should stay as it is.
        second: another object to replace at the same time, and the object to put in its place; the first may be empty.
    """

    case: int
    baseline: str
    minus: str
    plus: str | None = None
    present: bool = True
    second: tuple[str, str] | None = None

    @property
    def removed(self) -> tuple[str, ...]:
        """All that is to go."""
        return tuple(word for word in (self.minus, self.second[0] if self.second else "") if word)

    @property
    def added(self) -> tuple[str, ...]:
        """All that is to come."""
        return (*([self.plus] if self.plus else []), *([self.second[1]] if self.second else []))


@dataclass(frozen=True)
class Outcome:
    """What one edit did.

    Attributes:
        task: the edit.
        caption: the steered caption.
        gone: whether the removed object is no longer named.
        plus_named: whether the new object is named; True if the task has none.
        kept: the share of the baseline's other objects and places that are still named.
        invented: named objects that are neither in the image nor requested.
        well_formed: whether the caption is a sentence; None without a grammar.
        repeated: objects that the caption names more than once and the baseline does not.
        likelihood: mean log-probability of the caption's tokens minus that of the baseline's, under the unsteered
            model. It drops if the sentence breaks, and a little if a good sentence says something false, so compare it
            between edits. None if it was not computed.
    """

    task: Task
    caption: str
    gone: bool
    plus_named: bool
    kept: float
    invented: tuple[str, ...]
    well_formed: bool | None
    repeated: tuple[str, ...] = ()
    likelihood: float | None = None

    @property
    def success(self) -> bool:
        """Whether the edit did what was requested: for an object that is not there, nothing."""
        return self.gone and self.plus_named if self.task.present else not self.changed

    @property
    def changed(self) -> bool:
        """Whether the caption is another one than the baseline."""
        return self.caption != self.task.baseline

    @property
    def clean(self) -> bool:
        """Whether the edit did what was requested and nothing else, in a sentence that names nothing twice."""
        whole = self.well_formed is not False and not self.repeated
        return self.success and self.kept == 1 and not self.invented and whole


@dataclass(frozen=True)
class Score:
    """Shares over many edits, with 95 % intervals.

    Attributes:
        kind: as in `make_tasks`.
        edits: number of edits.
        success: share of edits that did what was requested; for `absent`, of captions that stayed as they were.
        gone: share in which the removed object is no longer named.
        kept: mean share of the baseline's other objects and places that are still named.
        invented: share that name an object which is neither in the image nor requested.
        clean: share that did what was requested and nothing else, in a sentence that names nothing twice.
        well_formed: share of captions that are sentences; None without a grammar.
        harmonic: harmonic mean of success and kept.
        intervals: 95 % interval of each of these values that is known.
        likelihood: mean of the outcomes' likelihood, which is a difference of log-probabilities; None if unknown.
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
        """The score as plain values, for JSON."""
        return asdict(self)


def toyland_world(seed: int, count: int, *, min_objects: int = 2, min_visible: float = 0.6) -> World:
    """Toyland's scenes with enough visible objects.

    Args:
        seed: seed of the scenes.
        count: number of scenes.
        min_objects: smallest number of objects in each scene, 0 to 3.
        min_visible: smallest visible share of each object.
    """
    if count < 1:
        raise SpecError(f"count is {count}; take at least 1 scene.")
    if not 0 <= min_objects <= _MAX_OBJECTS:
        raise SpecError(f"min_objects is {min_objects}; a scene of toyland has 0 to {_MAX_OBJECTS} objects.")
    if not 0 <= min_visible <= 1:
        raise SpecError(f"min_visible is {min_visible:g}; it is a share, 0 to 1.")
    from elude_steer.toyland import OBJECTS, PLACES, parse, scenes

    cases: list[Case] = []
    start = 0
    while len(cases) < count:
        for scene in track(scenes(seed, count, start=start), "drawing", "scenes", count):
            if len(scene.things) >= min_objects and all(thing.visible >= min_visible for thing in scene.things):
                cases.append(Case(scene.image, frozenset(scene.objects), places=frozenset([scene.background])))
        start += count

    def read(caption: str) -> Reading:
        parsed = parse(caption)
        places = frozenset([parsed.place]) if parsed.place in PLACES else frozenset[str]()
        repeated = frozenset(word for word in parsed.objects if parsed.objects.count(word) > 1)
        return Reading(frozenset(parsed.objects), places, parsed.well_formed, repeated)

    name = f"toyland:{seed}:{min_objects}:{min_visible:g}"
    return World(name, cases[:count], tuple(OBJECTS), read, tuple(PLACES), _MAX_OBJECTS)


def make_tasks(world: World, baselines: Sequence[str], kind: Kind, seed: int = 0) -> list[Task]:
    """One edit per image, of an object that is there and that the baseline names; skip images without one.

    For `absent` it is an object that is not there and that the baseline does not name; for `place` it is the place; for
    `two` there are two objects. For `add` it is an object that is not there; images with as many objects as a caption
    can name are left out.
    """
    if kind not in get_args(Kind):
        raise SpecError(f"an edit is {KINDS}, not '{kind}'.")
    tasks = []
    for number, (case, caption) in enumerate(zip(world.cases, baselines, strict=True)):
        rng = np.random.default_rng([seed, number])
        read = world.read(caption)
        named, known, all_words = read.objects, case.objects, world.vocabulary
        if kind == "place":
            named, known, all_words = read.places, case.places, world.places
        removable = sorted(named & known)
        absent = [word for word in all_words if word not in known | case.possible | named]
        if kind == "absent":
            tasks += [Task(number, caption, absent[rng.integers(len(absent))], present=False)] if absent else []
        elif kind == "add":
            if absent and (world.max_objects is None or len(known | named) < world.max_objects):
                tasks.append(Task(number, caption, "", absent[rng.integers(len(absent))]))
        elif kind == "two":
            if len(removable) > 1 and len(absent) > 1:
                (first, second), (new, other) = (rng.permutation(words)[:2].tolist() for words in (removable, absent))
                tasks.append(Task(number, caption, first, new, second=(second, other)))
        elif removable and (absent or kind == "remove"):
            minus = removable[rng.integers(len(removable))]
            plus = absent[rng.integers(len(absent))] if kind != "remove" else None
            tasks.append(Task(number, caption, minus, plus))
    return tasks


def score_caption(world: World, task: Task, caption: str) -> Outcome:
    """Score a steered caption against the baseline and the image's true objects."""
    before, after, case = world.read(task.baseline), world.read(caption), world.cases[task.case]
    named = after.objects | after.places
    others = [word for word in (*before.objects, *before.places) if word not in task.removed]
    kept = [word for word in others if word in named]
    return Outcome(
        task,
        caption,
        gone=not named & set(task.removed),
        plus_named=named >= set(task.added),
        kept=len(kept) / len(others) if others else 1.0,
        invented=tuple(sorted(after.objects - case.objects - case.possible - set(task.added))),
        well_formed=after.well_formed,
        repeated=tuple(sorted(after.repeated - before.repeated)),
    )


def summarize(kind: str, outcomes: Sequence[Outcome], seed: int = 0, rounds: int = 1000) -> Score:
    """Average over outcomes, with bootstrap intervals."""
    if not outcomes:
        raise SpecError("there are no edits to summarize: no baseline names an object that is in its image.")
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
    samples = {name: bootstrap_means(column, seed, rounds) for name, column in table.items()}  # (rounds,) each
    means: dict[str, Any] = {"well_formed": None, "likelihood": None}
    means |= {name: float(column.mean()) for name, column in table.items()}
    means["harmonic"] = float(_harmonic(np.array(means["success"]), np.array(means["kept"])))
    samples["harmonic"] = _harmonic(samples["success"], samples["kept"])
    return Score(
        kind, len(outcomes), **means, intervals={name: find_interval(column) for name, column in samples.items()}
    )


def bootstrap_means(values: np.ndarray, seed: int, rounds: int) -> np.ndarray:
    """Means of `rounds` resamples. Columns of equal length draw the same rows, so their means can be combined."""
    return values[np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))].mean(1)


def find_interval(means: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of resampled values."""
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _harmonic(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(a + b > 0, 2 * a * b / np.maximum(a + b, 1e-12), 0.0)


def list_causes(steerer: Steerer, world: World) -> tuple[Any, ...]:
    """What captions depend on, for the key of cached work: the atlas, the model, the matcher, the images."""
    model = (steerer.vlm.id, steerer.vlm.revision, steerer.vlm.fingerprint())
    return (steerer.atlas.about, model, steerer.matcher.key, versions(), world.name)


def caption_baselines(steerer: Steerer, world: World, prompt: str = PROMPT, batch_size: int = 32) -> list[str]:
    """The unsteered captions of all images."""
    captions: list[str] = []
    cases = track(world.cases, "captioning", "images")
    for _, batch in image_batches(steerer.vlm, cases, lambda case: case.image, batch_size):
        captions += [caption for (caption,) in steerer.captions(batch, [[None]] * len(batch), prompt)]
    return captions


def run_edits(
    steerer: Steerer,
    world: World,
    tasks: Sequence[Task],
    make_plan: Callable[[Task], Plan],
    *,
    prompt: str = PROMPT,
    batch_size: int = 32,
    likelihood: bool | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> list[Outcome]:
    """Run edits and score their captions.

    Args:
        steerer: the model and the atlas to measure.
        world: images with their true objects.
        tasks: the edits.
        make_plan: returns the plan of an edit.
        prompt: the question.
        batch_size: largest number of images in a batch.
        likelihood: whether to compute `Outcome.likelihood`; by default only if the world has no grammar.
        on_progress: called with the number of edits done since the last call.
    """
    with_likelihood = world.read("").well_formed is None if likelihood is None else likelihood
    outcomes: list[Outcome] = []
    tracked = track(tasks, "editing", "images")
    for part, images in image_batches(steerer.vlm, tracked, lambda task: world.cases[task.case].image, batch_size):
        plans = [[make_plan(task)] for task in part]
        if with_likelihood:
            prefix = run_prefix(steerer.vlm, images, prompt)
            captions = [caption for (caption,) in steerer.captions(images, plans, prompt, prefix=prefix)]
            texts = [[caption, task.baseline] for task, caption in zip(part, captions, strict=True)]
            pairs = likelihoods(steerer.vlm, images, texts, prompt, prefix=prefix)
            changes: list[float | None] = [after - before for after, before in pairs]
        else:
            captions = [caption for (caption,) in steerer.captions(images, plans, prompt)]
            changes = [None] * len(part)
        for task, caption, change in zip(part, captions, changes, strict=True):
            outcomes.append(replace(score_caption(world, task, caption), likelihood=change))
        if on_progress:
            on_progress(len(part))
    return outcomes
