"""How well words steer toyland: objects removed and replaced on held-out scenes, with what else it changes.

    python demos/benchmarks/toyland_edits.py --scenes 300 --seed 81001

Rows: the atlas's own settings; the paper's way (`scale`); ours without its parts, one by one; the same settings with
names from the truth in the place of the dissection's. A row is read as: of all edits, in how many the old object is
gone (and the new one named), which share of the rest of the caption is kept, in how many something is named that is
neither there nor asked for, and in how many nothing but the wish came true.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from elude_steer import toyland
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.labels import Labels
from elude_steer.evaluation.edits.benchmark import (
    Score,
    Task,
    caption_baselines,
    make_tasks,
    run_edits,
    summarize,
    toyland_world,
)
from elude_steer.steering.plan import Plan
from elude_steer.steering.steerer import Steerer

ROWS: dict[str, dict[str, object]] = {
    "as shipped": {},
    "scale (the paper's mode)": {"mode": "scale", "gamma": -50, "alpha": 50},
    "level reference": {"level": "reference"},
    "region not smoothed": {"smooth": False},
    "region of 10 patches": {"fit": 0, "nu": 10},
    "no reach": {"reach": 0},
    "no fill": {"fill": 0},
}


def true_names(steerer: Steerer, seed: int = 31) -> Atlas:
    """The atlas with each sub-unit named by what its reference patches show; the words' order is their share."""
    atlas = steerer.atlas
    wanted = {name: int(name.rsplit(":", 1)[1]) for name in atlas.image_ids}  # toyland:SEED:NUMBER
    cache: dict[int, list[list[str]]] = {}
    vocabulary = (*toyland.OBJECTS, *toyland.PLACES, "clutter")
    index = {word: number for number, word in enumerate(vocabulary)}
    keep = atlas.require_labels().words.shape[1]
    words = np.full((len(atlas), keep), -1, np.int32)
    scores = np.full((len(atlas), keep), -np.inf, np.float32)
    refs = atlas.references
    for sub_unit in range(len(atlas)):
        seen: Counter[str] = Counter()
        for image, tile, token in zip(refs.images[sub_unit], refs.tiles[sub_unit], refs.tokens[sub_unit], strict=True):
            number = wanted[atlas.image_ids[int(image)]]
            if number not in cache:
                (scene,) = toyland.scenes(seed, 1, start=number)
                boxes = steerer.vlm.grid(scene.image.size).boxes
                cache[number] = [scene.names_at(one) for one in boxes]
            seen[cache[number][int(tile)][int(token)]] += 1
        for place, (word, count) in enumerate(seen.most_common(keep)):
            words[sub_unit, place], scores[sub_unit, place] = index[word], count / sum(seen.values())
    labels = Labels(vocabulary, words, scores, atlas.require_labels().groups, {"scorer": "the truth"})
    return replace(atlas, labels=labels)


def measure(steerer: Steerer, seed: int, count: int, kind: str, settings: dict[str, object]) -> Score:
    """The score of one row."""
    world = toyland_world(seed, count)
    said = caption_baselines(steerer, world)
    tasks = make_tasks(world, said, kind, seed)  # type: ignore[arg-type]

    def plan(task: Task) -> Plan:
        return steerer.prepare_plan([task.minus], [task.plus] if task.plus else [], settings=settings)[0]

    return summarize(kind, run_edits(steerer, world, tasks, plan), seed)


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atlas", default="toyland")
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=81001)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    steerer = Steerer.load(chosen.atlas)
    truth = replace(steerer, atlas=true_names(steerer))
    found = []
    head = ("success", "gone", "kept", "invented", "clean", "well_formed", "harmonic")
    print(f"{'':34}{''.join(f'{name:>13}' for name in head)}")
    for kind in ("remove", "replace"):
        for name, settings in [*ROWS.items(), ("names from the truth", {})]:
            if kind == "replace" and name == "no fill":
                continue
            own = truth if name == "names from the truth" else steerer
            score = measure(own, chosen.seed, chosen.scenes, kind, settings)
            found.append({"row": name, **score.to_dict()})
            cells = "".join(f"{getattr(score, column):13.3f}" for column in head)
            print(f"{kind + ', ' + name:34}{cells}", flush=True)
    shipped = [row for row in found if row["row"] == "as shipped"]
    for row in shipped:
        spans = ", ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in row["intervals"].items())
        print(f"{row['kind']}, {row['edits']} edits, as shipped, 95 %: {spans}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
