"""An atlas of the size of LLaVA's: bytes on disk, time to load, time to compute the weights of 400 sub-units.

python demos/benchmarks/atlas_size.py [--json OUT]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.weights import weights_hash

UNITS, PARTS, D_IN = 1152, 8, 4304


def random_atlas(layer: nn.Linear) -> Atlas:
    """An atlas with random memberships."""
    rng = np.random.default_rng(0)
    n = UNITS * PARTS
    packed = rng.integers(0, 256, (n, D_IN // 8), dtype=np.uint8)
    packed[::PARTS] |= ~np.bitwise_or.reduce(packed.reshape(UNITS, PARTS, -1), axis=1)  # every dimension has an owner

    def references(count: int) -> References:
        numbers = [torch.zeros(count, 25, dtype=torch.int32) for _ in range(3)]
        return References(torch.rand(count), torch.rand(count, 25), *numbers)

    about = {"name": "large", "model": {"id": "random"}, "layer": "fc2", "weights": weights_hash(layer)}
    about |= {"d_in": D_IN, "d_out": UNITS, "units": UNITS, "sub_units": n}
    owners = torch.arange(UNITS).repeat_interleave(PARTS)
    sizes = torch.full((n,), 100, dtype=torch.int32)
    return Atlas(
        torch.from_numpy(packed), owners, torch.rand(UNITS), sizes, references(n), references(UNITS), ("x",), about
    )


def median_seconds(repeat: int, call: Callable[[], object]) -> float:
    """Median seconds of several calls."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    layer = nn.Linear(D_IN, UNITS)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    with tempfile.TemporaryDirectory() as folder:
        path = random_atlas(layer).save(Path(folder) / "atlas")
        size = (path / "memberships.safetensors").stat().st_size
        load = median_seconds(9, lambda: Atlas.load(path))
        atlas = Atlas.load(path)
        any_400 = torch.randperm(len(atlas), generator=torch.Generator().manual_seed(0))[:400]
        weights = median_seconds(21, lambda: atlas.parameters(any_400, weight, bias))
    rows = {
        "sub-units x inputs": f"{len(atlas)} x {D_IN}",
        "memberships on disk": f"{size / 1e6:.2f} MB (as float32 weights: {len(atlas) * D_IN * 4 / 1e6:.0f} MB)",
        "load, every file's hash checked": f"{load * 1000:.0f} ms",
        "weights of any 400 sub-units": f"{weights * 1000:.1f} ms",
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "load_s": load, "weights_s": weights}, indent=2))


if __name__ == "__main__":
    main()
