"""What `strength` does: edits that are done, what they keep, and captions that change although nothing should.

    python demos/benchmarks/strength_curve.py --atlas toyland --out demos/images/strength-toyland.png
    python demos/benchmarks/strength_curve.py --atlas photoland --photos WORK/photos/dev --out strength-photoland.png

All other settings are the atlas's own. WORK is the folder of `python -m demos.photoland.make`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from elude_steer.evaluation.edits.benchmark import caption_baselines, make_tasks, run_edits, summarize, toyland_world
from elude_steer.evaluation.edits.photos import photo_world
from elude_steer.evaluation.edits.sweep import plan_or_empty
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import write_image
from elude_steer.utils.plotting import curves

STRENGTHS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
SEED = 4711


def main() -> None:
    """Measure, print and draw the curve of one atlas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atlas", default="toyland")
    parser.add_argument("--photos", type=Path, help="folder with captions.json; by default scenes of toyland")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steerer = Steerer.load(options.atlas)
    world = photo_world(options.photos, limit=options.count) if options.photos else toyland_world(SEED, options.count)
    baselines = caption_baselines(steerer, world)
    series: dict[str, list[tuple[float, float]]] = {}
    for kind in ("remove", "replace", "absent"):
        tasks = make_tasks(world, baselines, kind)  # type: ignore[arg-type]
        for strength in STRENGTHS:
            settings = {"strength": strength}
            outcomes = run_edits(
                steerer,
                world,
                tasks,
                lambda task, settings=settings: plan_or_empty(steerer, task, settings),  # type: ignore[misc]
                likelihood=False,
            )
            score = summarize(kind, outcomes)
            values = {f"{kind}: done": score.success, f"{kind}: kept": score.kept}
            if kind == "absent":
                values = {"absent: changed": 1 - score.success}
            for name, value in values.items():
                series.setdefault(name, []).append((strength, value))
            print(strength, json.dumps({name: round(value, 3) for name, value in values.items()}), flush=True)
    write_image(options.out, curves(series, x=f"strength ({options.atlas})", y="share", shares=True))


if __name__ == "__main__":
    main()
