"""How much faster `exact` clusters than the hdbscan library, and whether the labels are equal.

    python demos/benchmarks/exact_clustering.py clustering.json --points 1000 3000

The data are sparse planted contributions of the size of LLaVA-OneVision's fc2 (4,304 inputs): six concepts of unequal
size, each with its own upstream support, background on a few other dimensions, and a fifth of the instances without any
concept. Both backends run in this process on the same vectors, so that their ratio depends less on the machine than
their times do. hdbscan runs once; exact runs three times and its median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.method.clustering import Clusters, cluster
from elude_steer.method.contributions import contributions

CONCEPTS, SUPPORT, SPARSITY, NOISE = 6, 300, 0.05, 0.2


def planted_contributions(points: int, d_in: int, seed: int) -> torch.Tensor:
    """Contribution vectors with concepts of sizes 1 to 5, `(points, d_in)`; most entries are zero."""
    rng = np.random.default_rng(seed)
    sizes = np.linspace(1, 5, CONCEPTS)
    concept = rng.choice(CONCEPTS, points, p=sizes / sizes.sum())
    supports = np.stack([rng.permutation(d_in) < SUPPORT for _ in range(CONCEPTS)])  # (concepts, d_in)
    active = np.where(rng.random((points, 1)) < NOISE, rng.random((points, d_in)) < SUPPORT / d_in, supports[concept])
    q = active * rng.lognormal(-0.125, 0.5, (points, d_in))
    q += (rng.random((points, d_in)) < SPARSITY) * rng.exponential(0.5, (points, d_in))
    return contributions(torch.from_numpy(q).float(), torch.from_numpy(rng.normal(size=d_in)).float())


def time_clustering(vectors: torch.Tensor, backend: str, size: int, repeats: int) -> tuple[Clusters, float]:
    """The clusters, and the median seconds to find them."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = cluster(vectors, backend=backend, selection="leaf", min_cluster_size=size)
        seconds.append(time.perf_counter() - start)
    return found, statistics.median(seconds)


def compare_backends(points: int, d_in: int, seed: int) -> dict[str, Any]:
    """One row of the table."""
    vectors, size = planted_contributions(points, d_in, seed), points // 30
    exact, fast = time_clustering(vectors, "exact", size, 3)
    library, slow = time_clustering(vectors, "hdbscan", size, 1)
    return {
        "points": points,
        "dimensions": d_in,
        "min_cluster_size": size,
        "clusters": library.count,
        "noise": int((library.labels < 0).sum()),
        "labels_equal": bool(np.array_equal(exact.labels, library.labels)),
        "labels_that_differ": int((exact.labels != library.labels).sum()),
        "largest_difference_of_probabilities": float(np.abs(exact.probabilities - library.probabilities).max()),
        "hdbscan_seconds": slow,
        "exact_seconds": fast,
        "ratio": slow / fast,
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| points | dimensions | clusters | labels equal | largest difference of probabilities "
        "| hdbscan (s) | exact (s) | times faster |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = "yes" if row["labels_equal"] else f"no, {row['labels_that_differ']} differ"
        lines.append(
            f"| {row['points']:,} | {row['dimensions']:,} | {row['clusters']} | {equal} "
            f"| {row['largest_difference_of_probabilities']:.1e} "
            f"| {row['hdbscan_seconds']:.1f} | {row['exact_seconds']:.2f} | {row['ratio']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="file for the numbers")
    parser.add_argument("--points", type=int, nargs="+", default=[3000], help="numbers of instances, one row each")
    parser.add_argument("--dimensions", type=int, default=4304)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Warm up: imports and the first product do not count.
    time_clustering(planted_contributions(100, 64, 0), "exact", 10, 1)
    rows = [compare_backends(points, args.dimensions, args.seed) for points in args.points]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("hdbscan", "numpy", "torch")},
    }
    args.json.write_text(json.dumps({"rows": rows, "seed": args.seed, **machine}, indent=2) + "\n")
    print(f"{machine['cores']} cores, torch on {machine['torch_threads']} of them\n\n{format_table(rows)}")


if __name__ == "__main__":
    main()
