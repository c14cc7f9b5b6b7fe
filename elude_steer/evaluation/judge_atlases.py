"""Which of several atlases, or the units before them, judges find more coherent: pairs of grids, and the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.measures.llm_judges import SIDE, Judge, Pair, Ranking, ask, check_judges, picture_grid, rank
from elude_steer.evaluation.one_pass import items_of, source_of, tower_of, view
from elude_steer.utils.files import check_folder, home

UNITS = "units before the split"


def read_judge(text: str) -> Judge:
    """A judge from `MODEL@URL`, or `MODEL@URL#VARIABLE` where the environment holds its key."""
    found = re.fullmatch(r"(.+?)@(https?://[^#\s]+)(?:#(\w+))?", text.strip())
    if found is None:
        raise SpecError(
            f"'{text}' is no judge; write MODEL@URL or MODEL@URL#VARIABLE: qwen3-vl@http://localhost:8000/v1"
        )
    try:
        there = urlsplit(found[2])
        if not there.hostname or there.port == 0:
            raise ValueError("no host")
    except ValueError as error:
        raise SpecError(f"'{found[2]}' is no address ({error}); write one such as http://localhost:8000/v1") from error
    return Judge(found[1], found[2], found[3] or "")


def draw_pairs(
    methods: Mapping[str, torch.Tensor], picture: Callable[[int], Any], *, count: int = 50, seed: int = 42
) -> list[Pair]:
    """So many pairs of latents of every two methods, drawn by lot, as grids.

    Args:
        methods: name -> `(latents, 9)` numbers of the pictures each fires most for.
        picture: a number to its picture.
        count: pairs of two methods.
        seed: of the lot.
    """
    pairs = []
    for number, (one, other) in enumerate(combinations(methods, 2)):
        rng = np.random.default_rng([seed, number])
        for at in range(count):
            rows = [int(rng.integers(len(methods[name]))) for name in (one, other)]
            grids = [
                picture_grid([picture(int(i)) for i in methods[name][row]])
                for name, row in zip((one, other), rows, strict=True)
            ]
            pairs.append(Pair(one, other, (grids[0], grids[1]), f"{at}: {rows[0]} and {rows[1]}"))
    return pairs


def judge_atlases(
    atlases: Sequence[str],
    judges: Sequence[Judge],
    *,
    images: Any = None,
    limit: int = 500,
    count: int = 50,
    seed: int = 42,
    work: Path | None = None,
    device: str | None = None,
    confirm: Callable[[int], object] = lambda count: None,
    log: Callable[[str], object] = lambda line: None,
) -> Ranking:
    """Win rates of atlases of one model against each other and against the units before the first one's split.

    Args:
        atlases: folders, names or Hub ids.
        judges: who is asked; the paper has three.
        images: pictures, as for a build; by default those of the first atlas's recipe.
        limit: how many of them.
        count: pairs of latents of every two methods.
        seed: of their lot.
        work: where answers are kept; by default below `ELUDE_STEER_HOME`.
        device: where the model runs.
        confirm: called once with the number of questions left to ask, before the first; raise from it to stop.
        log: called with a line for each step.
    """
    check_judges(judges)
    folder = check_folder(work or home() / "work" / "judge")
    if not atlases or len(set(atlases)) < len(atlases):
        raise SpecError(f"judges compare atlases, each named once, not {', '.join(atlases) or 'none'}.")
    loaded = [Atlas.load(name) for name in atlases]
    layers = {(str(atlas.about["layer"]), atlas.about["weights"]) for atlas in loaded}
    if len(layers) > 1:
        named = ", ".join(sorted(layer for layer, _ in layers))
        raise SpecError(f"judges compare atlases of one layer with the same weights, not of {named}.")
    names = [atlas.name for atlas in loaded]
    if len(set(names)) < len(names):
        names = [str(name) for name in atlases]
    items = items_of(source_of(loaded[0], images, limit), limit)
    methods: dict[str, torch.Tensor] = {}
    for name, atlas in zip(names, loaded, strict=True):
        log(f"looking for what '{name}' fires for")
        seen = view(atlas, tower_of(atlas, device=device), items, sums=False)
        items = seen.items  # those that can be read
        methods[name] = seen.peaks["sub-units"].top(SIDE * SIDE)
        methods.setdefault(UNITS, seen.peaks["units"].top(SIDE * SIDE))
    for name, rows in methods.items():
        if not len(rows):
            raise SpecError(f"nothing of '{name}' fires for {SIDE * SIDE} of the pictures; give more of them.")
    pairs = draw_pairs(methods, lambda number: items[number].read()[0], count=count, seed=seed)
    answers = ask(judges, pairs, folder, confirm=confirm, log=log)
    if all(answer.winner is None for answer in answers):
        heard = f"{len(answers)} answers, neither A nor B, kept in '{folder}'" if answers else "no answer at all"
        raise SpecError(f"there is nothing to rank: {heard}; check the judges' URLs and models, then ask again.")
    return rank(judges, pairs, answers)
