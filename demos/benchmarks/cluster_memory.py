"""How much memory clustering one unit takes, beside the estimate by which builds choose and refuse.

    python demos/benchmarks/cluster_memory.py [--instances 50000] [--inputs 768 3072] [--backend fast]

The unit is clustered as a build does it: its inputs are read from a store on disk. Eight planted concepts and a quarter
of noise, min_cluster_size one 400th of the instances (the paper's 1,000 of 400,000). Memory is what the process
allocates; pages of the store, which the system can take back, are not counted.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.build.token_store import PLACE, TokenStore, strongest_instances
from elude_steer.atlas.build.unit_clusters import StoredRows, cluster_unit
from elude_steer.method.backends import ClusteringSize, memory_needed
from elude_steer.specs import ClustersSpec


def write_store(folder: Path, instances: int, inputs: int) -> TokenStore:
    """A store of planted instances, as a build writes it."""
    rng = np.random.default_rng(0)
    centres = (rng.random((8, inputs)) < 0.1) * rng.uniform(1, 2, (8, inputs))
    truth = rng.integers(-3, 8, instances)
    with (folder / "tokens.bin").open("wb") as file:
        for start in range(0, instances, 8192):
            part = truth[start : start + 8192, None]
            noise = 0.3 * np.abs(rng.standard_normal((len(part), inputs), np.float32))
            file.write((noise + np.where(part >= 0, centres[part[:, 0]], 0)).astype(np.float16).tobytes())
    np.zeros(instances, PLACE).tofile(folder / "places.bin")
    (folder / "shape.json").write_text(json.dumps({"d_in": inputs, "dtype": "float16"}))
    return TokenStore(folder)


def allocated() -> int:
    """Bytes that this process has allocated."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(instances: int, inputs: int, backend: str) -> str:
    smallest = max(5, instances // 400)
    spec = ClustersSpec(top_k=instances, min_cluster_size=smallest, backend=backend)
    weight = torch.from_numpy(np.random.default_rng(1).lognormal(0, 0.3, inputs).astype(np.float32))
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), instances, inputs)
        _, rows = strongest_instances(store, weight[None], torch.zeros(1), instances)
        before, peak, stop = allocated(), [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                peak[0] = max(peak[0], allocated())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        try:
            found = cluster_unit(StoredRows(store, rows[0].numpy()), weight, spec)
        finally:
            stop.set()
            watcher.join()
    used, needed = peak[0] - before, memory_needed(backend, ClusteringSize(instances, inputs, smallest))
    return (
        f"{backend}, {instances:,} instances of {inputs:,} inputs: {used / 1e9:.2f} GB (estimate {needed / 1e9:.2f}), "
        f"{time.perf_counter() - start:.0f} s, {len(found['sizes'])} clusters"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[50_000])
    parser.add_argument("--inputs", type=int, nargs="+", default=[768, 3072])
    parser.add_argument("--backend", default="fast", choices=["exact", "fast", "hdbscan", "cuml"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for instances in options.instances:
        for inputs in options.inputs:
            print(measure(instances, inputs, options.backend), flush=True)


if __name__ == "__main__":
    main()
