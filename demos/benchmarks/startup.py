"""From the start of a process to toyland's first caption, beside a process that only imports what is needed for it.

    python demos/benchmarks/startup.py [--rounds 5] [--json OUT]

The two kinds of processes take turns, so that both see the same machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elude_steer.toyland.scenes import scenes

BARE = "import torch, sentence_transformers; from transformers import LlavaOnevisionForConditionalGeneration"
FURTHER = """
import sys, time
from PIL import Image
from elude_steer import Vlm, toyland
vlm = Vlm.load(str(toyland.CAPTIONER))
images = [Image.open(path).convert("RGB") for path in sys.argv[1:]]
vlm.caption(images[:1])
for image in images[1:]:
    start = time.perf_counter()
    vlm.caption([image])
    print(time.perf_counter() - start)
"""


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        paths = []
        for number, scene in enumerate(scenes(5, 9)):
            paths.append(str(Path(name) / f"{number}.png"))
            scene.image.save(paths[-1])
        bare, caption = [], []
        for _ in range(options.rounds + 1):
            bare.append(seconds([sys.executable, "-c", BARE]))
            caption.append(seconds([sys.executable, "-m", "elude_steer", "caption", paths[0]]))
        done = subprocess.run([sys.executable, "-c", FURTHER, *paths], check=True, capture_output=True, text=True)
        further = [float(line) for line in done.stdout.split()]
    # the first round fills the disk's cache
    rows = {
        "bare imports": statistics.median(bare[1:]),
        "process to first caption": statistics.median(caption[1:]),
        "difference": statistics.median(c - b for b, c in zip(bare[1:], caption[1:], strict=True)),
        "a further caption": statistics.median(further),
    }
    print("| | seconds |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
