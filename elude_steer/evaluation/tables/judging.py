"""LLM rank of all methods of a table: judges compare grids of latents, pooled over the draws of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from elude_steer.errors import SpecError
from elude_steer.evaluation.judge_atlases import draw_pairs
from elude_steer.evaluation.measures.llm_judges import (
    SIDE,
    Judge,
    Pair,
    Ranking,
    ask_judges,
    check_judges,
    rank_methods,
)
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.measure import strongest_images
from elude_steer.evaluation.tables.setup import TableSetup


def judge_methods(
    setup: TableSetup,
    judges: Sequence[Judge],
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    count: int = 50,
    work: Path | None = None,
    confirm: Callable[[int], object] = lambda count: None,
) -> Ranking:
    """Win rates of methods against each other: a pair of latents goes to the method that most answers name.

    Args:
        setup: the backbone, the images and the budget; the images to measure on are shown.
        judges: the judges to ask; the paper has three.
        methods: names of the methods, by default those of the preset.
        seeds: draws of tokens that are pooled, by default all of the preset.
        count: pairs of latents for every two methods and draw.
        work: where replies are stored; by default in the setup's folder.
        confirm: called once with the number of questions left to ask, before the first; raise from it to stop.
    """
    check_judges(judges)
    pairs = draw_method_pairs(setup, methods, seeds, count=count)
    answers = ask_judges(judges, pairs, work or setup.folder / "judge", confirm=confirm, log=setup.log)
    if all(answer.winner is None for answer in answers):
        raise SpecError("there is nothing to rank: no answer is A or B; check the judges' URLs and models.")
    return rank_methods(judges, pairs, answers)


def draw_method_pairs(
    setup: TableSetup, methods: Sequence[str] | None = None, seeds: Sequence[int] | None = None, *, count: int = 50
) -> list[Pair]:
    """Random pairs of latents of every two methods and every draw of tokens, as grids of their strongest images."""
    bench, pairs, size = Bench(setup), list[Pair](), SIDE * SIDE
    chosen = setup.find_methods(methods)
    if len(chosen) < 2:
        raise SpecError("judges compare methods; name two at least.")
    items = {item.index: item for item in bench.held_out.items}
    for seed in setup.find_seeds(seeds):
        tops: dict[str, torch.Tensor] = {}
        for method in chosen:
            found = strongest_images(bench, method, seed)[:, :size]
            tops[method.name] = found[(found >= 0).all(1)]
            if not len(tops[method.name]):
                raise SpecError(f"nothing in '{method.name}' fires for {size} of the images; give more of them.")
        drawn = draw_pairs(tops, lambda index: items[index].read()[0], count=count, seed=seed)
        pairs += [replace(pair, about=f"seed {seed}, {pair.about}") for pair in drawn]
    return pairs
