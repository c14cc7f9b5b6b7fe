"""What a benchmark is asked to do; the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elude_steer.errors import SpecError

QUESTION = "Is there a {} in the image?"
DETAILED = "Please describe this image in detail."


@dataclass(frozen=True)
class BenchmarkOptions:
    """The edit, the images and the question of a benchmark.

    Attributes:
        minus: words to remove, each a class of the images or a synonym.
        plus: words to add.
        settings: those of the edit; what is left out is the atlas's.
        limit: largest number of images.
        seed: seed of the images, questions and controls.
        balance: whether every other image shows a removed class; without, images are drawn as they come.
        controls: whether to measure the controls too.
        prompt: the question; for POPE with `{}` for the name of a class.
        max_new_tokens: the longest answer.
        per_image: for POPE, the number of questions whose answer is yes for each image.
        work: folder for finished parts; by default below `ELUDE_STEER_HOME`.
    """

    minus: tuple[str, ...] = ()
    plus: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 500
    seed: int = 0
    balance: bool = True
    controls: bool = True
    prompt: str = ""
    max_new_tokens: int = 64
    per_image: int = 3
    work: Path | None = None


def format_question(template: str, name: str) -> str:
    """The question about a class: `Is there an apple in the image?`."""
    before, after = template.split("{}")
    if name[:1] in "aeiou" and before.endswith((" a ", "a ")):
        before = before.removesuffix("a ") + "an "
    return before + name + after


def check_template(template: str) -> str:
    """Return a question that has one place for the name of a class; raises for another."""
    if template.count("{}") != 1:
        raise SpecError(f"--prompt is '{template}'; POPE needs one {{}} for the class: '{QUESTION}'.")
    return template
