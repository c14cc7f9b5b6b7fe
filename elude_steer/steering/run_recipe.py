"""Run steering recipes: make every edit of a recipe on its image, and check what the recipe expects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elude_steer.models.images import open_image
from elude_steer.recipe_files import require_image
from elude_steer.specs import Recipe, StepSpec
from elude_steer.steering.settings import format_setting
from elude_steer.steering.steerer import SteeredCaption, Steerer


@dataclass(frozen=True, eq=False)
class StepResult:
    """One edit of a recipe: its step, the result, and the expectations that were not met."""

    step: StepSpec
    result: SteeredCaption
    missing: tuple[str, ...]

    @property
    def title(self) -> str:
        """The edit as the paper writes it, with its settings: `-dog +biker (kappa 6)`."""
        return step_title(self.step)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"step": asdict(self.step), "missing": self.missing, **self.result.to_dict()}


def step_title(step: StepSpec) -> str:
    """The edit of a step as the paper writes it, with the settings that it names: `-dog +biker (kappa 6)`."""
    words = " ".join([*(f"-{word}" for word in step.minus), *(f"+{word}" for word in step.plus)]) or "no edit"
    settings = ", ".join(format_setting(name, value) for name, value in step_settings(step).items())
    return f"{words} ({settings})" if settings else words


def step_settings(step: StepSpec) -> Mapping[str, Any]:
    """The settings that a step names."""
    return {name: value for name, value in asdict(step.settings).items() if value is not None}


def run_recipe(recipe: Recipe, steerer: Steerer, image: Any = None) -> list[StepResult]:
    """Make every edit of a recipe on its image, each from the baseline.

    Args:
        recipe: see `load_recipe`.
        steerer: loaded with the recipe's atlas.
        image: used instead of the recipe's image.
    """
    if image is None:
        require_image(recipe)
    opened = open_image(recipe.image if image is None else image)
    plans = [
        steerer.plan(minus=step.minus, plus=step.plus, where=step.region, **step_settings(step))
        for step in recipe.steps
    ]
    results = steerer.explain_all(opened, plans, prompt=recipe.prompt, max_new_tokens=recipe.max_new_tokens)
    return [
        StepResult(step, result, unmet_expectations(step, result.caption))
        for step, result in zip(recipe.steps, results, strict=True)
    ]


def unmet_expectations(step: StepSpec, caption: str) -> tuple[str, ...]:
    """Short sentences on what the step expects and the caption does not show."""
    problems = [f"'{word}' is still there" for word in step.expect.gone if says(caption, word)]
    if step.expect.new and not any(says(caption, word) for word in step.expect.new):
        new = ", ".join(map(repr, step.expect.new))
        problems.append(f"{new} did not come" if len(step.expect.new) == 1 else f"none of {new} came")
    return tuple(problems)


def says(caption: str, words: str) -> bool:
    """Whether a caption has some words, each whole, in whatever case."""
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", caption, re.IGNORECASE) is not None


def format_table(results: Sequence[StepResult]) -> str:
    """A text table of edits and captions, as in the paper's figures."""
    baseline = results[0].result.baseline if results else ""
    rows = [] if baseline is None else [("baseline", baseline)]
    rows += [(one.title, one.result.caption) for one in results]
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{width}}  {caption}" for title, caption in rows)
