"""Captions of many images under many plans, in batches: the tower runs once for an image, however many plans it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elude_steer.models.prefix_cache import Prefix, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm
from elude_steer.specs import SettingArguments
from elude_steer.steering.apply_plans import resume_under_plans
from elude_steer.steering.intervention import PreparedPlan
from elude_steer.steering.plan import Plan, Words
from elude_steer.utils.progress import track

MAX_BATCH_TILES = 192  # tiles that go through the model together
MAX_BATCH_IMAGES = 32  # images whose captions are made together
Row = tuple[int, Plan | None]  # one caption to make: the number of its image, and its plan


class SteerArguments(SettingArguments, total=False):
    """The arguments of `steer` that are the same for one image and for several."""

    minus: Words
    plus: Words
    where: Any
    prompt: str
    max_new_tokens: int
    baseline: bool


class AtlasArguments(SteerArguments, total=False):
    """The arguments of the function `steer` for one image and for several."""

    atlas: str
    model: str | None
    device: str | None
    dtype: str | None
    threads: int | None
    trust_remote_code: bool


def caption_unsteered(vlm: Vlm, images: Sequence[Any], prompt: str = PROMPT, max_new_tokens: int = 64) -> list[str]:
    """Caption images without edits, in the same batches as `Steerer.captions` does."""
    captions = caption_rows(vlm, images, [[None]] * len(images), lambda _plan: None, prompt, max_new_tokens)
    return [caption for (caption,) in captions]


def caption_rows(
    vlm: Vlm,
    images: Sequence[Any],
    plans: Sequence[Sequence[Plan | None]],
    gather_weights: Callable[[Plan | None], PreparedPlan | None],
    prompt: str,
    max_new_tokens: int,
    prefix: Prefix | None = None,
) -> list[list[str]]:
    """Caption each image under each of its plans; see `Steerer.captions`."""
    if not len(images):
        return []
    prefix = run_prefix(vlm, images, prompt) if prefix is None else prefix
    rows = [(image, plan) for image, own in enumerate(plans) for plan in own]
    answers: list[str] = []
    for batch in track(list(_batches(rows, prefix.tiles)), "captioning", "batches"):
        prepared = {plan: gather_weights(plan) for plan in dict.fromkeys(plan for _, plan in batch)}
        with resume_under_plans(vlm, prefix, [(image, prepared[plan]) for image, plan in batch]) as inputs:
            answers += vlm.answer(inputs, max_new_tokens)
    remaining = iter(answers)
    return [[next(remaining) for _ in own] for own in plans]


def _batches(rows: Sequence[Row], tiles: Sequence[int]) -> Iterator[list[Row]]:
    """Rows that are captioned together: at most `MAX_BATCH_TILES` tiles, at least one row."""
    batch: list[Row] = []
    for row in rows:
        if batch and sum(tiles[image] for image, _ in batch) + tiles[row[0]] > MAX_BATCH_TILES:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
