"""How much memory the MS-Score takes at the size of the paper's layer, beside embeddings held in memory.

    python demos/benchmarks/ms_score_memory.py [--sub-units 1000 9216] [--images 150] [--json OUT]

A layer of 1,152 units with up to 9,216 sub-units, 100 strongest images of each, images of 729 tokens with random
activations. Each number of sub-units runs in a new process, with the embeddings in a temporary file, as the library has
them, and as a control in memory; the scores must be the same bits. The peak counts everything that the process holds.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from elude_steer.evaluation.measures import monosemanticity
from elude_steer.evaluation.measures.monosemanticity import Peaks, mean_percent
from elude_steer.utils.memory import peak_megabytes

UNITS, TOKENS = 1152, 729


class RowsInMemory:
    """What `RowFile` does, in memory."""

    def __init__(self, rows: int, width: int, _content: str) -> None:
        self.table = torch.zeros(rows, width)

    def write(self, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows."""
        self.table[numbers] = values

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read rows."""
        return self.table[start:stop]


def measure(sub_units: int, images: int, in_memory: bool) -> dict[str, Any]:
    if in_memory:
        monosemanticity.RowFile = RowsInMemory  # type: ignore[assignment,misc]
    torch.set_num_threads(1)
    clock, cpu = time.perf_counter(), time.process_time()
    peaks = Peaks(sub_units, UNITS)
    for number in range(images):
        generator = torch.Generator().manual_seed(number)
        kind = torch.randn(UNITS, generator=generator)
        peaks.add(
            torch.randn(TOKENS, sub_units, generator=generator),
            kind + torch.randn(TOKENS, UNITS, generator=generator),
        )
    scores = peaks.scores()
    return {
        "sub-units": sub_units,
        "embeddings": "in memory" if in_memory else "in a file",
        "embeddings GB": sub_units * monosemanticity.TOP_IMAGES * UNITS * 4 / 1e9,
        "peak GB of the process": (peak_megabytes(torch.device("cpu")) or float("nan")) / 1e3,
        "seconds": time.perf_counter() - clock,
        "CPU seconds": time.process_time() - cpu,
        "mean score, %": mean_percent(scores),
        "scores": hashlib.blake2b(scores.numpy().tobytes(), digest_size=8).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sub-units", type=int, nargs="+", default=[1000, 9216])
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=["memory", "file"], help=argparse.SUPPRESS)  # in the new process
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.sub_units[0], options.images, options.measure == "memory")))
        return
    rows = []
    for sub_units in options.sub_units:
        for kind in ("file", "memory"):
            numbers = ["--sub-units", str(sub_units), "--images", str(options.images)]
            command = [sys.executable, __file__, "--measure", kind, *numbers]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout))
            print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
        if rows[-1]["scores"] != rows[-2]["scores"]:
            raise SystemExit("the scores differ")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
