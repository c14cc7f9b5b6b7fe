"""One unit at the paper's scale: how long and in how much memory it is clustered, and whether the clusters are right.

    python demos/benchmarks/paper_scale_unit.py [--instances 400000] [--level medium] [--work FOLDER] [--json OUT]

The unit has 400,000 instances of 4,304 inputs with planted clusters, as `fast_clustering.py` plants them: eight
concepts of unequal size with overlapping supports, sparse background, and 30 % noise that has all marginals of the data
and none of its joint structure. They are written to a token store as a build writes it (float16, 3.4 GB of disk). A new
process then opens the store and finds the unit's clusters and their representatives, as a build does with
`clusters.backend: fast` and the paper's min_cluster_size of 1,000. Its peak memory counts everything that the process
holds: imports, and the pages of the store that are mapped at the time. CPU seconds count all threads; on a busy machine
they say more than the clock. With `--chunks`, the unit is clustered once more in pieces of another size, and the
results must be the same bits.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fast_clustering import D_IN, LEVELS, planted_inputs
from sklearn.metrics import adjusted_rand_score

from elude_steer.atlas.build.token_store import PLACE, TokenStore
from elude_steer.atlas.build.unit_clusters import StoredRows
from elude_steer.method.backends import ClusteringSize, memory_needed
from elude_steer.method.clustering import cluster
from elude_steer.method.contributions import ContributionRows, summarize_clusters
from elude_steer.utils.memory import peak_megabytes

SMALLEST = 1000 / 400_000  # the paper's min_cluster_size, as a share of the instances


def write_unit(folder: Path, instances: int, level: str, seed: int) -> None:
    """Write a token store, the weight of a unit, its instances from the strongest on, and the concept of each."""
    folder.mkdir(parents=True, exist_ok=True)
    q = np.memmap(folder / "tokens.bin", np.float16, mode="w+", shape=(instances, D_IN))
    _, truth = planted_inputs(instances, 8, level, seed, out=q)
    rng = np.random.default_rng(seed)
    weight = (rng.lognormal(0, 0.5, D_IN) * np.where(rng.random(D_IN) < 0.3, -1, 1)).astype(np.float32)
    activations = np.concatenate([q[start : start + 4096] @ weight for start in range(0, instances, 4096)])
    order = np.argsort(-activations, kind="stable")
    np.savez(folder / "unit.npz", weight=weight, rows=order, truth=truth[order])
    np.zeros(instances, PLACE).tofile(folder / "places.bin")
    (folder / "shape.json").write_text(json.dumps({"d_in": D_IN, "dtype": "float16"}))


def cluster_stored(folder: Path, block: int | None) -> dict[str, Any]:
    """Cluster the unit of a store as a build does, and measure this process."""
    unit = np.load(folder / "unit.npz")
    weight = torch.from_numpy(unit["weight"])
    q = StoredRows(TokenStore(folder), unit["rows"])
    smallest = round(SMALLEST * len(unit["rows"]))
    clock, cpu = time.perf_counter(), time.process_time()
    c = ContributionRows(q, weight) if block is None else ContributionRows(q, weight, block)
    clusters = cluster(c, backend="fast", min_cluster_size=smallest)
    found_at, found_cpu = time.perf_counter() - clock, time.process_time() - cpu
    summary = summarize_clusters(q, c, clusters)
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    peak = (peak_megabytes(torch.device("cpu")) or float("nan")) / 1e3  # before anything that only checks the result
    truth, labels = unit["truth"], clusters.labels
    both = (truth >= 0) & (labels >= 0)
    digest = hashlib.blake2b(labels.tobytes() + clusters.probabilities.tobytes(), digest_size=8)
    for tensor in summary.values():
        digest.update(tensor.numpy().tobytes())
    return {
        "instances": len(labels),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
        "of them to find the clusters, s": found_at,
        "of them to find the clusters, CPU s": found_cpu,
        "peak GB of the process": peak,
        "estimate GB": memory_needed("fast", ClusteringSize(*q.shape, smallest)) / 1e9,
        "planted clusters": int(truth.max()) + 1,
        "clusters": clusters.count,
        "ARI to the truth, noise as a group": adjusted_rand_score(truth, labels),
        "ARI to the truth, where both are in a cluster": adjusted_rand_score(truth[both], labels[both]),
        "share of the planted instances in a cluster": float((labels[truth >= 0] >= 0).mean()),
        "share of the planted noise in a cluster": float((labels[truth < 0] >= 0).mean()),
        "result": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=400_000)
    parser.add_argument("--level", choices=LEVELS, default="medium", help="energy of the background")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder that keeps the store, 3.4 GB [default: a temporary one]")
    parser.add_argument("--chunks", type=int, help="cluster once more in pieces of so many instances")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", metavar="BLOCK", help=argparse.SUPPRESS)  # what the new process is called with
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(cluster_stored(options.work, None if options.measure == "usual" else int(options.measure))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.work or Path(temporary)) / f"{options.instances}-{options.level}-{options.seed}"
        if not (folder / "shape.json").exists():
            write_unit(folder, options.instances, options.level, options.seed)
        found = []
        for block in ("usual", *([str(options.chunks)] if options.chunks else [])):
            command = [sys.executable, __file__, "--work", str(folder), "--measure", block]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout) | {"pieces": block})
            for key, value in found[-1].items():
                print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}", flush=True)
    if len({one["result"] for one in found}) > 1:
        raise SystemExit("the size of the pieces changed the result")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
