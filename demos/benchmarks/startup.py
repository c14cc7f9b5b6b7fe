"""CPU seconds from the start of `elude-steer steer` to its caption, and of a process that only imports what it needs.

    python demos/benchmarks/startup.py [--rounds 5] [--json OUT]

The two kinds of processes alternate, so that both run under the same conditions; the first round, which fills the disk
cache, does not count. A third kind reports the CPU seconds of each step, to show what is left beside the imports. Other
programs change CPU seconds much less than seconds on the clock; still, measure on a quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

# Times the bare imports, for the best round and for the median.
LIMITS = {"elude-steer steer": 1.25, "elude-steer steer, a photograph": 2.0}
IMAGE = Path(__file__).parents[1] / "images" / "toyland-teddy.png"
PHOTO = IMAGE.with_name("photoland-astronaut.jpg")
IMPORTS = "import torch; from transformers import LlavaOnevisionForConditionalGeneration"
STEER = ["-m", "elude_steer", "steer", str(IMAGE), "--minus", "teddy"]
STEER_PHOTO = ["-m", "elude_steer", "steer", str(PHOTO), "--minus", "woman", "--atlas", "photoland"]
STEPS = f"""
import json, time
steps, before = {{}}, 0.0
def finish(step):
    global before
    now = time.process_time()
    steps[step], before = now - before, now
finish("Python")
{IMPORTS}
finish("bare imports")
from elude_steer.atlas.atlas import Atlas
from elude_steer.models.images import open_image
from elude_steer.models.loading import load_pretrained, load_processor
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from elude_steer import toyland
from transformers import AutoModelForImageTextToText
image = open_image({str(IMAGE)!r})
finish("import elude_steer")
atlas = Atlas.load("toyland")
finish("read the atlas, check its files' hashes")
model = load_pretrained(AutoModelForImageTextToText, str(toyland.CAPTIONER))
finish("load the model")
processor = load_processor(str(toyland.CAPTIONER), model.config.model_type)
finish("load the processor")
vlm = Vlm.from_model(model, processor, layer=atlas.about["layer"])
finish("find the layer and its patches")
matcher = atlas.matcher()
finish("load the matcher")
steerer = Steerer.from_parts(vlm, atlas, matcher)
finish("check the hash of the layer's weights")
plan = steerer.plan(minus=["teddy"])
finish("plan")
steerer.explain(image, plan)
finish("two captions, first time")
steerer.explain(image, plan)
finish("two captions, again")
print(json.dumps(steps))
"""


def run(arguments: list[str]) -> tuple[float, str]:
    """Run Python; returns the CPU seconds, of the process and the system for it, and what it printed."""
    before = os.times()
    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return spent, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"bare imports": [], **{name: [] for name in LIMITS}}
    all_steps = []
    for number in range(options.rounds + 1):
        results = [run(arguments) for arguments in (["-c", IMPORTS], STEER, STEER_PHOTO, ["-c", STEPS])]
        if number:
            for row, (spent, _) in zip(seconds.values(), results, strict=False):
                row.append(spent)
            all_steps.append(json.loads(results[-1][1]))
    best, median = ([statistic(row) for row in seconds.values()] for statistic in (min, statistics.median))
    print(f"| CPU seconds of {options.rounds} rounds | best | median |\n|---|---|---|")
    for name, low, middle in zip(seconds, best, median, strict=True):
        print(f"| {name} | {low:.2f} | {middle:.2f} |")
    ratios = {
        name: {"best": low / best[0], "median": middle / median[0]}
        for name, low, middle in list(zip(seconds, best, median, strict=True))[1:]
    }
    for name, ratio in ratios.items():
        print(f"| {name}: ratio | {ratio['best']:.2f} | {ratio['median']:.2f} |")
    print("\n| where they go | median |\n|---|---|")
    steps = {name: statistics.median(one[name] for one in all_steps) for name in all_steps[0]}
    for name, value in steps.items():
        print(f"| {name} | {value:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios, "steps": steps}, indent=2))
    for name, ratio in ratios.items():
        if max(ratio.values()) > LIMITS[name]:
            sys.exit(f"{name} takes more than {LIMITS[name]} times the bare imports")


if __name__ == "__main__":
    main()
