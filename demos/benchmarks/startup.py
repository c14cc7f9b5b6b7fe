"""Seconds from the start of a process to toyland's first caption, and of a process that only imports what it needs.

    python demos/benchmarks/startup.py [--rounds 5] [--json OUT]

The two kinds of processes alternate, so that both run under the same conditions.
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

IMPORTS = "import torch, sentence_transformers; from transformers import LlavaOnevisionForConditionalGeneration"
CAPTIONS = """
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


def time_command(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            bare.append(time_command([sys.executable, "-c", IMPORTS]))
            caption.append(time_command([sys.executable, "-m", "elude_steer", "caption", paths[0]]))
        done = subprocess.run([sys.executable, "-c", CAPTIONS, *paths], check=True, capture_output=True, text=True)
        further = [float(line) for line in done.stdout.split()]
    # Without the first round, which fills the disk cache.
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
