"""A grid of settings on many pictures at the price of a few captions: the tower runs once a picture for all of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from elude_steer.concepts import check_word
from elude_steer.edits import (
    Case,
    Kind,
    Outcome,
    Reading,
    Score,
    Task,
    World,
    baselines,
    judge,
    make_tasks,
    summary,
)
from elude_steer.errors import SpecError, closest
from elude_steer.plans import Plan, Settings, make_plan
from elude_steer.stages import key_of, versions
from elude_steer.steering import Steerer
from elude_steer.storage import home, write_file
from elude_steer.vlm import PROMPT
from elude_steer.vocabulary import FUNCTION_WORDS

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
            raise SpecError(f"there is no setting '{name}'.{closest(name, known)}")
        if isinstance(values, str) or not len(values):
            raise SpecError(f"{name} needs a list of values to try, not {values!r}.")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for point in points:
        Settings.of(point)
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
    said = baselines(steerer, world, prompt)
    tasks = make_tasks(world, said, kind, seed)  # with the baselines, so that another model is another sweep
    causes = (steerer.atlas.about, steerer.vlm.fingerprint(), steerer.matcher.key, versions(), world.name)
    key = key_of("sweep", *causes, [asdict(task) for task in tasks], points, prompt)
    folder = (work or home() / "work") / f"sweep-{key}"
    captions: list[list[str]] = []
    for start in range(0, len(tasks), _PICTURES):
        part, path = tasks[start : start + _PICTURES], folder / f"part-{start:06d}.json"
        if not path.exists():
            plans = [[_plan(steerer, task, point) for point in points] for task in part]
            got = steerer.captions([world.cases[task.case].image for task in part], plans, prompt)
            text = json.dumps(got)
            write_file(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        captions += json.loads(path.read_text(encoding="utf-8"))
        if step:
            step(len(part))
    found = []
    for number, point in enumerate(points):
        outcomes = [judge(world, task, own[number]) for task, own in zip(tasks, captions, strict=True)]
        found.append(Point(point, summary(kind, outcomes, seed)))
    return found


@dataclass(frozen=True)
class Tried:
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
    prompt: str = PROMPT,
) -> tuple[str, list[Tried]]:
    """The baseline of one picture and its caption at every point of a grid, the best first.

    Nobody knows the truth about a user's picture, so what the baseline says counts as true: a caption is good if the
    old word is gone, the new one there, and the other words are as they were.
    """
    points = grid_points(grid)
    baseline = steerer.captions([image], [[None]], prompt)[0][0]
    task = Task(0, baseline, check_word(minus).lower(), check_word(plus).lower() if plus else None)
    world = words_world(image, baseline, [task.minus, *([task.plus] if task.plus else [])])
    said = steerer.captions([image], [[_plan(steerer, task, point) for point in points]], prompt)[0]
    tried = [Tried(point, judge(world, task, caption)) for point, caption in zip(points, said, strict=True)]
    return baseline, sorted(tried, key=lambda t: (-t.outcome.success, -t.outcome.kept, len(t.outcome.invented)))


def words_world(image: Any, baseline: str, phrases: Sequence[str]) -> World:
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


def best(points: Sequence[Point], by: str = "harmonic", *, least_kept: float = 0.9) -> Point:
    """The point with the most of `by` among those that keep enough; without any, the one that keeps most."""
    enough = [point for point in points if point.score.kept >= least_kept]
    return (
        max(enough, key=lambda point: getattr(point.score, by)) if enough else max(points, key=lambda p: p.score.kept)
    )


def _plan(steerer: Steerer, task: Task, settings: Mapping[str, Any]) -> Plan:
    plus = [task.plus] if task.plus else []
    given: dict[str, Any] = {"minus": [task.minus], "plus": plus, "settings": settings, "defaults": steerer.defaults}
    try:
        return make_plan(steerer.atlas, steerer.matcher, **given)[0]
    except SpecError:  # no place for the plus word: this point of the grid does nothing
        return Plan()
