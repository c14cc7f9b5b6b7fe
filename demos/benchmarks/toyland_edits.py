"""How well steering removes and replaces objects on held-out scenes of toyland, and what else it changes.

    python demos/benchmarks/toyland_edits.py --scenes 300 --seed 81001

Rows: the atlas's own settings; the paper's mode (`scale`); our mode without its parts, one at a time; the atlas's
settings with labels from the truth instead of CLIP-Dissect. Columns: the fraction of edits in which the old object is
gone (and the new one is mentioned), the fraction of the rest of the caption that is kept, the fraction of edits that
mention something neither present nor requested, and the fraction of edits that change only what was requested.
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


def label_by_truth(steerer: Steerer, seed: int = 31) -> Atlas:
    """The atlas with each sub-unit labelled by what its reference patches show, most frequent first."""
    atlas = steerer.atlas
    scene_numbers = {name: int(name.rsplit(":", 1)[1]) for name in atlas.image_ids}  # toyland:SEED:NUMBER
    cache: dict[int, list[list[str]]] = {}
    vocabulary = (*toyland.OBJECTS, *toyland.PLACES, "clutter")
    index = {word: number for number, word in enumerate(vocabulary)}
    keep = atlas.require_labels().words.shape[1]
    words = np.full((len(atlas), keep), -1, np.int32)
    scores = np.full((len(atlas), keep), -np.inf, np.float32)
    refs = atlas.references
    for sub_unit in range(len(atlas)):
        counts: Counter[str] = Counter()
        for image, tile, token in zip(refs.images[sub_unit], refs.tiles[sub_unit], refs.tokens[sub_unit], strict=True):
            number = scene_numbers[atlas.image_ids[int(image)]]
            if number not in cache:
                (scene,) = toyland.scenes(seed, 1, start=number)
                boxes = steerer.vlm.grid(scene.image.size).boxes
                cache[number] = [scene.names_at(tile_boxes) for tile_boxes in boxes]
            counts[cache[number][int(tile)][int(token)]] += 1
        for rank, (word, count) in enumerate(counts.most_common(keep)):
            words[sub_unit, rank], scores[sub_unit, rank] = index[word], count / sum(counts.values())
    labels = Labels(vocabulary, words, scores, atlas.require_labels().groups, {"scorer": "the truth"})
    return replace(atlas, labels=labels)


def measure(steerer: Steerer, seed: int, count: int, kind: str, settings: dict[str, object]) -> Score:
    """The score of one row."""
    world = toyland_world(seed, count)
    captions = caption_baselines(steerer, world)
    tasks = make_tasks(world, captions, kind, seed)  # type: ignore[arg-type]

    def make_plan(task: Task) -> Plan:
        return steerer.prepare_plan([task.minus], [task.plus] if task.plus else [], settings=settings)[0]

    return summarize(kind, run_edits(steerer, world, tasks, make_plan), seed)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atlas", default="toyland")
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=81001)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steerer = Steerer.load(options.atlas)
    truth = replace(steerer, atlas=label_by_truth(steerer))
    found = []
    columns = ("success", "gone", "kept", "invented", "clean", "well_formed", "harmonic")
    print(f"{'':34}{''.join(f'{name:>13}' for name in columns)}")
    for kind in ("remove", "replace"):
        for name, settings in [*ROWS.items(), ("names from the truth", {})]:
            if kind == "replace" and name == "no fill":
                continue
            row_steerer = truth if name == "names from the truth" else steerer
            score = measure(row_steerer, options.seed, options.scenes, kind, settings)
            found.append({"row": name, **score.to_dict()})
            cells = "".join(f"{getattr(score, column):13.3f}" for column in columns)
            print(f"{kind + ', ' + name:34}{cells}", flush=True)
    shipped = [row for row in found if row["row"] == "as shipped"]
    for row in shipped:
        spans = ", ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in row["intervals"].items())
        print(f"{row['kind']}, {row['edits']} edits, as shipped, 95 %: {spans}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
