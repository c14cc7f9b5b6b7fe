"""Try a grid of settings on many images. The vision tower runs only once per image for all points of the grid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from elude_steer.atlas.matching import normalize_word
from elude_steer.atlas.vocabulary import FUNCTION_WORDS
from elude_steer.errors import SpecError
from elude_steer.evaluation.edits.benchmark import (
    Case,
    Kind,
    Outcome,
    Reading,
    Score,
    Task,
    World,
    caption_baselines,
    list_causes,
    make_tasks,
    score_caption,
    summarize,
)
from elude_steer.evaluation.result_files import compute_in_parts
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import PROMPT
from elude_steer.steering.plan import Plan
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import home
from elude_steer.utils.fingerprint import make_key

By = Literal["harmonic", "clean", "success", "kept"]  # what the best settings maximize


@dataclass(frozen=True)
class Point:
    """Settings with their score over many edits."""

    settings: Mapping[str, Any]
    score: Score

    def to_dict(self) -> dict[str, Any]:
        """The settings and the score as plain values, for JSON."""
        return {"settings": dict(self.settings), **self.score.to_dict()}


def grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values in a grid, validated; the last setting changes fastest.

    Example:
        >>> len(grid_points({"gamma": [-15, -50], "nu": [10, "all"]}))
        4
    """
    merge_settings(dict.fromkeys(grid))  # refuses unknown names
    for name, values in grid.items():
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str) or not len(values):
            raise SpecError(f"{name} needs a list of values to try, not {values!r}.")
    plain = [[v.item() if isinstance(v, np.generic) else v for v in values] for values in grid.values()]
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]
    for point in points:
        merge_settings(point)
    return points


def sweep(
    steerer: Steerer,
    world: World,
    kind: Kind,
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    prompt: str = PROMPT,
    work: Path | None = None,
    baselines: Sequence[str] | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> list[Point]:
    """Score every point of a grid on the same edits, in the order of the grid. An interrupted sweep resumes.

    Args:
        steerer: the model and the atlas to tune.
        world: images with their true objects.
        kind: `remove` or `replace`.
        grid: setting -> values to try, or the points themselves.
        seed: seed of the edits.
        prompt: the question.
        work: folder for cached captions; by default below `ELUDE_STEER_HOME`.
        baselines: the unsteered captions, where they are known.
        on_progress: called with the number of images done since the last call.
    """
    points = grid_points(grid) if isinstance(grid, Mapping) else [dict(point) for point in grid]
    baselines = caption_baselines(steerer, world, prompt) if baselines is None else baselines
    tasks = make_tasks(world, baselines, kind, seed)
    # The tasks contain the baselines, so that another model has another key.
    key = make_key("sweep", *list_causes(steerer, world), [asdict(task) for task in tasks], points, prompt)
    folder = (work or home() / "work") / f"sweep-{key}"

    def read_image(task: Task) -> Any:
        return world.cases[task.case].image

    def caption_part(part: Sequence[Task]) -> list[list[str]]:
        plans = [[plan_or_empty(steerer, task, point) for point in points] for task in part]
        new: list[list[str]] = []
        for batch, images in image_batches(steerer.vlm, part, read_image, len(part)):
            new += steerer.captions(images, plans[len(new) : len(new) + len(batch)], prompt)
        return new

    captions = compute_in_parts(folder, tasks, caption_part, "sweeping", on_progress)
    scored = []
    for number, point in enumerate(points):
        outcomes = [score_caption(world, task, row[number]) for task, row in zip(tasks, captions, strict=True)]
        scored.append(Point(point, summarize(kind, outcomes, seed)))
    return scored


@dataclass(frozen=True)
class SettingsTrial:
    """Settings with the outcome of one edit."""

    settings: Mapping[str, Any]
    outcome: Outcome


def try_settings(
    steerer: Steerer,
    image: Any,
    minus: str,
    plus: str | None,
    grid: Mapping[str, Sequence[Any]],
    *,
    by: By = "harmonic",
    prompt: str = PROMPT,
) -> tuple[str, list[SettingsTrial]]:
    """Caption one image at every point of a grid; return the baseline and the trials, best first.

    The true objects of a user's image are unknown, so the baseline counts as true: a caption is good if the old word is
    gone, the new word is there, and the other words are unchanged.

    Args:
        steerer: the model and the atlas to tune.
        image: a PIL image.
        minus: the concept to remove.
        plus: the concept to put in its place, if any.
        grid: setting -> values to try.
        by: the first criterion; ties are broken by success, then by what is kept, then by how little is invented.
        prompt: the question.
    """
    check_criterion(by)
    points = grid_points(grid)
    old, new = normalize_word(minus).lower(), normalize_word(plus).lower() if plus is not None else None
    task = Task(0, "", old, new)
    plans = [plan_or_empty(steerer, task, point) for point in points]
    if not any(plan.concepts for plan in plans):
        _make_plan(steerer, task, points[0])  # no plan is possible: raise the error that says why
    ((baseline, *captions),) = steerer.captions([image], [[None, *plans]], prompt)
    task = replace(task, baseline=baseline)
    world = single_image_world(image, baseline, [old, *([new] if new else [])])
    outcomes = [score_caption(world, task, caption) for caption in captions]
    trials = [SettingsTrial(point, outcome) for point, outcome in zip(points, outcomes, strict=True)]
    return baseline, sorted(trials, key=lambda trial: _rank_key(trial.outcome, by))


def _rank_key(outcome: Outcome, by: By) -> tuple[float, ...]:
    """Sort key; smaller is better. For a single edit, the harmonic mean orders by success, then kept, as ties do."""
    first = 0.0 if by == "harmonic" else float(getattr(outcome, by))
    return (-first, -outcome.success, -outcome.kept, len(outcome.invented))


def single_image_world(image: Any, baseline: str, phrases: Sequence[str]) -> World:
    """A world of one image whose captions are read word by word; each phrase counts as one word."""

    def read(caption: str) -> Reading:
        text = " ".join(word.strip(".,!?;:\"'").lower() for word in caption.split())
        found = []
        for phrase in sorted(phrases, key=len, reverse=True):
            text, count = re.subn(rf"\b{re.escape(phrase)}(e?s)?\b", " ", text)
            found += [phrase] * bool(count)
        return Reading(frozenset([*found, *(word for word in text.split() if word not in FUNCTION_WORDS)]))

    words = read(baseline).objects
    return World("one image", [Case(image, words)], tuple(sorted(words)), read)


def best_point(points: Sequence[Point], by: By = "harmonic", *, min_kept: float = 0.9) -> Point:
    """The point with the highest `by` among those that keep `min_kept`; if none does, the one that keeps most."""
    check_criterion(by)
    enough = [point for point in points if point.score.kept >= min_kept]
    if not enough:
        return max(points, key=lambda point: point.score.kept)
    return max(enough, key=lambda point: getattr(point.score, by))


def check_criterion(by: str) -> None:
    """Raise if settings cannot be ranked by this value."""
    *others, last = get_args(By)
    if by not in (*others, last):
        raise SpecError(f"by is {by!r}; settings are ranked by {', '.join(others)} or {last}.")


def plan_or_empty(steerer: Steerer, task: Task, settings: Mapping[str, Any]) -> Plan:
    """The plan of an edit; an empty plan if none can be made."""
    try:
        return _make_plan(steerer, task, settings)
    except SpecError:  # a word may be unlike everything that the atlas knows
        return Plan()


def _make_plan(steerer: Steerer, task: Task, settings: Mapping[str, Any]) -> Plan:
    return steerer.prepare_plan(task.removed, task.added, settings=settings)[0]
