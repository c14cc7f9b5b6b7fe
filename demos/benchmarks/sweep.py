"""Seconds of a sweep of 81 settings on one image of toyland, relative to 81 plain captions.

    python demos/benchmarks/sweep.py [--rounds 5] [--json OUT]

The two alternate. For comparison, the naive way makes 81 steered captions, each from the image on; every caption of the
sweep is compared with the naive one.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from elude_steer import Steerer
from elude_steer.evaluation.edits.sweep import grid_points, try_settings
from elude_steer.models.images import open_image

GRID = {"gamma": (-10, -15, -50), "kappa": (16, 24, 40), "nu": (6, 10, 14), "beta": (10, 20, 30)}
IMAGE = Path(__file__).parents[1] / "images" / "toyland-dog.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steerer, image, points = Steerer.load("toyland"), open_image(IMAGE), grid_points(GRID)
    plain, sweep = [], []
    for _ in range(options.rounds + 1):
        start = time.perf_counter()
        for _point in points:
            steerer.vlm.caption([image])
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        _, tried = try_settings(steerer, image, "dog", "biker", GRID)
        sweep.append(time.perf_counter() - start)
    start, equal = time.perf_counter(), 0
    for trial in tried:
        plan, _ = steerer.prepare_plan(["dog"], ["biker"], settings=trial.settings)
        with steerer.applied(plan):
            equal += steerer.vlm.caption([image])[0] == trial.outcome.caption
    naive = time.perf_counter() - start
    found = {
        "settings": len(points),
        "plain captions, s": statistics.median(plain[1:]),  # the first round warms up
        "sweep, s": statistics.median(sweep[1:]),
        "sweep / plain captions": statistics.median(s / p for s, p in zip(sweep[1:], plain[1:], strict=True)),
        "naive steering, s": naive,
        "captions equal to the naive ones": f"{equal} of {len(tried)}",
    }
    for name, value in found.items():
        print(f"{name:<36}{value:.3f}" if isinstance(value, float) else f"{name:<36}{value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
