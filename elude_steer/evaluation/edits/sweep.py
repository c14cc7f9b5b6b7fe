"""A grid of settings on many pictures at the price of a few captions: the tower runs once a picture for all of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from elude_steer.atlas.matching import normalize_word
from elude_steer.atlas.vocabulary import FUNCTION_WORDS
from elude_steer.errors import SpecError, did_you_mean
from elude_steer.evaluation.edits.benchmark import (
    Case,
    Kind,
    Outcome,
    Reading,
    Score,
    Task,
    World,
    caption_baselines,
    make_tasks,
    score_caption,
    summarize,
)
from elude_steer.models.prefix_cache import image_batches
from elude_steer.models.vlm import PROMPT
from elude_steer.specs import Settings
from elude_steer.steering.plan import Plan
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import home, write_file
from elude_steer.utils.fingerprint import make_key, versions

By = Literal["harmonic", "clean", "success", "kept"]  # what the best has most of
_PICTURES = 16  # that are captioned together, and kept in one file


@dataclass(frozen=True)
class Point:
    """Some settings and what they reach."""

    settings: Mapping[str, Any]
    score: Score

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"settings": dict(self.settings), **self.score.to_dict()}


def grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of some settings' values, checked; the last setting changes fastest.

    Example:
        >>> len(grid_points({"gamma": [-15, -50], "nu": [10, "all"]}))
        4
    """
    known = [field.name for field in fields(Settings)]
    for name, values in grid.items():
        if name not in known:
            raise SpecError(f"there is no setting '{name}'.{did_you_mean(name, known)}")
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
    grid: Mapping[str, Sequence[Any]],
    *,
    seed: int = 0,
    prompt: str = PROMPT,
    work: Path | None = None,
    step: Callable[[int], object] | None = None,
) -> list[Point]:
    """What every point of a grid reaches on the same edits, in the order of the grid; goes on where it was.

    Args:
        steerer: what is tuned.
        world: pictures with their truth.
        kind: `remove` or `replace`.
        grid: setting -> values to try.
        seed: of the edits that are asked for.
        prompt: the question.
        work: the folder of unfinished work; by default below `ELUDE_STEER_HOME`.
        step: told of every picture that is done.
    """
    points = grid_points(grid)
    said = caption_baselines(steerer, world, prompt)
    tasks = make_tasks(world, said, kind, seed)  # with the baselines, so that another model is another sweep
    model = (steerer.vlm.id, steerer.vlm.revision, steerer.vlm.fingerprint())
    causes = (steerer.atlas.about, model, steerer.matcher.key, versions(), world.name)
    key = make_key("sweep", *causes, [asdict(task) for task in tasks], points, prompt)
    folder = (work or home() / "work") / f"sweep-{key}"
    captions: list[list[str]] = []
    for start in range(0, len(tasks), _PICTURES):
        part, path = tasks[start : start + _PICTURES], folder / f"part-{start:06d}.json"
        if not path.exists():
            plans = [[plan_or_empty(steerer, task, point) for point in points] for task in part]
            got: list[list[str]] = []
            for some, images in image_batches(steerer.vlm, part, lambda task: world.cases[task.case].image, len(part)):
                got += steerer.captions(images, plans[len(got) : len(got) + len(some)], prompt)
            text = json.dumps(got)
            write_file(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        captions += json.loads(path.read_text(encoding="utf-8"))
        if step:
            step(len(part))
    found = []
    for number, point in enumerate(points):
        outcomes = [score_caption(world, task, own[number]) for task, own in zip(tasks, captions, strict=True)]
        found.append(Point(point, summarize(kind, outcomes, seed)))
    return found


@dataclass(frozen=True)
class SettingsTrial:
    """Some settings, and what they make of one picture."""

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
    """The baseline of one picture and its caption at every point of a grid, the best first.

    Nobody knows the truth about a user's picture, so what the baseline says counts as true: a caption is good if the
    old word is gone, the new one there, and the other words are as they were.

    Args:
        steerer: what is tuned.
        image: a PIL picture.
        minus: the word that should go.
        plus: the word that should come in its place, if any.
        grid: setting -> values to try.
        by: what counts first; then success, what is kept, and how little is invented.
        prompt: the question.
    """
    check_criterion(by)
    points = grid_points(grid)
    old, new = normalize_word(minus).lower(), normalize_word(plus).lower() if plus is not None else None
    asked = Task(0, "", old, new)
    plans = [plan_or_empty(steerer, asked, point) for point in points]
    if not any(plan.concepts for plan in plans):
        _strict_plan(steerer, asked, points[0])  # none can be made: the first says why
    ((baseline, *said),) = steerer.captions([image], [[None, *plans]], prompt)
    task = replace(asked, baseline=baseline)
    world = single_image_world(image, baseline, [old, *([new] if new else [])])
    tried = [
        SettingsTrial(point, score_caption(world, task, caption)) for point, caption in zip(points, said, strict=True)
    ]
    return baseline, sorted(tried, key=lambda t: _rank(t.outcome, by))


def _rank(outcome: Outcome, by: By) -> tuple[float, ...]:
    """Smaller is better. The harmonic mean needs no number of its own: for one edit it orders by success, then kept."""
    first = 0.0 if by == "harmonic" else float(getattr(outcome, by))
    return (-first, -outcome.success, -outcome.kept, len(outcome.invented))


def single_image_world(image: Any, baseline: str, phrases: Sequence[str]) -> World:
    """A world of one picture that is read by its words; phrases of several words count as one."""

    def read(caption: str) -> Reading:
        text = " ".join(word.strip(".,!?;:\"'").lower() for word in caption.split())
        found = []
        for phrase in sorted(phrases, key=len, reverse=True):
            text, count = re.subn(rf"\b{re.escape(phrase)}(e?s)?\b", " ", text)
            found += [phrase] * bool(count)
        return Reading(frozenset([*found, *(word for word in text.split() if word not in FUNCTION_WORDS)]))

    said = read(baseline).objects
    return World("one picture", [Case(image, said)], tuple(sorted(said)), read)


def best_point(points: Sequence[Point], by: By = "harmonic", *, min_kept: float = 0.9) -> Point:
    """The point with the most of `by` among those that keep enough; without any, the one that keeps most."""
    check_criterion(by)
    enough = [point for point in points if point.score.kept >= min_kept]
    return (
        max(enough, key=lambda point: getattr(point.score, by)) if enough else max(points, key=lambda p: p.score.kept)
    )


def check_criterion(by: str) -> None:
    """Raises where settings cannot be ranked by this."""
    known = get_args(By)
    if by not in known:
        raise SpecError(f"by is {by!r}; settings are ranked by {', '.join(known[:-1])} or {known[-1]}.")


def plan_or_empty(steerer: Steerer, task: Task, settings: Mapping[str, Any]) -> Plan:
    """How an edit is done; not at all where settings leave the plus word no place."""
    try:
        return _strict_plan(steerer, task, settings)
    except SpecError:  # both words may have the same sub-units
        return Plan()


def _strict_plan(steerer: Steerer, task: Task, settings: Mapping[str, Any]) -> Plan:
    return steerer.prepare_plan([task.minus], [task.plus] if task.plus else [], settings=settings)[0]
