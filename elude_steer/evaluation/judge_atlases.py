"""Let judges compare atlases with each other and with the raw units: draws pairs of grids, asks, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.errors import SpecError
from elude_steer.evaluation.evaluate import choose_items, load_atlas_tower, open_images, run_tower
from elude_steer.evaluation.measures.llm_judges import (
    SIDE,
    Judge,
    Pair,
    Ranking,
    ask_judges,
    check_judges,
    make_grid,
    rank_methods,
)
from elude_steer.utils.files import check_folder, home
from elude_steer.utils.progress import track
from elude_steer.utils.threads import check_threads

UNITS = "units before the split"


def draw_pairs(
    methods: Mapping[str, torch.Tensor], read_image: Callable[[int], Any], *, count: int = 50, seed: int = 42
) -> list[Pair]:
    """Draw random pairs of latents for every two methods, as grids of their strongest images.

    Args:
        methods: name -> `(latents, 9)` numbers of the images that activate each latent most.
        read_image: reads the image with this number.
        count: number of pairs for every two methods.
        seed: for the random draw.
    """
    pairs = []
    for number, (one, other) in enumerate(combinations(methods, 2)):
        rng = np.random.default_rng([seed, number])
        for index in track(range(count), "drawing", "pairs"):
            rows = [int(rng.integers(len(methods[name]))) for name in (one, other)]
            grids = [
                make_grid([read_image(int(i)) for i in methods[name][row]])
                for name, row in zip((one, other), rows, strict=True)
            ]
            pairs.append(Pair(one, other, (grids[0], grids[1]), f"{index}: {rows[0]} and {rows[1]}"))
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
    threads: int | None = None,
    trust_remote_code: bool = False,
    confirm: Callable[[int], object] = lambda count: None,
    log: Callable[[str], object] = lambda line: None,
) -> Ranking:
    """Win rates of atlases of one model against each other and against the units before the first one's split.

    Args:
        atlases: folders, names or Hub ids.
        judges: the judges to ask; the paper has three.
        images: images, as for a build; by default those of the first atlas's recipe.
        limit: maximum number of images.
        count: number of pairs of latents for every two methods.
        seed: for the random draw of pairs.
        work: where replies are stored; by default below `ELUDE_STEER_HOME`.
        device: where the model runs.
        threads: threads on a CPU; by default the model's size and the free cores decide.
        trust_remote_code: whether code that comes with the model may run.
        confirm: called once with the number of questions left to ask, before the first; raise from it to stop.
        log: called with a line for each step.
    """
    check_judges(judges)
    check_threads(threads)
    folder = check_folder(work) if work else home() / "work" / "judge"
    if not atlases or len(set(atlases)) < len(atlases):
        raise SpecError(f"name the atlases to judge, each once, not {', '.join(atlases) or 'none'}.")
    loaded = [Atlas.load(name) for name in atlases]
    layers = {(str(atlas.about["layer"]), atlas.about["weights"]) for atlas in loaded}
    if len(layers) > 1:
        different = ", ".join(sorted(layer for layer, _ in layers))
        raise SpecError(f"judges compare atlases of one layer with the same weights, not of {different}.")
    names = [atlas.name for atlas in loaded]
    if len(set(names)) < len(names):
        names = [str(name) for name in atlases]
    items = choose_items(open_images(loaded[0], images, limit), limit)
    methods: dict[str, torch.Tensor] = {}
    for name, atlas in zip(names, loaded, strict=True):
        log(f"finding the images that '{name}' fires for")
        tower = load_atlas_tower(atlas, None, device, threads, trust_remote_code=trust_remote_code)
        with tower.use_threads():
            items, _, peaks = run_tower(atlas, tower, items, with_r2=False)
        methods[name] = peaks["sub-units"].top(SIDE * SIDE)
        methods.setdefault(UNITS, peaks["units"].top(SIDE * SIDE))
    for name, rows in methods.items():
        if not len(rows):
            raise SpecError(f"nothing in '{name}' fires for {SIDE * SIDE} of the images; give more of them.")
    pairs = draw_pairs(methods, lambda number: items[number].read()[0], count=count, seed=seed)
    answers = ask_judges(judges, pairs, folder, confirm=confirm, log=log)
    if all(answer.winner is None for answer in answers):
        replies = f"{len(answers)} answers, neither A nor B, stored in '{folder}'" if answers else "no answer at all"
        raise SpecError(f"there is nothing to rank: {replies}; check the judges' URLs and models, then ask again.")
    return rank_methods(judges, pairs, answers)
