"""How fast the backend `fast` clusters, how close it is to `exact`, how it scales, and how long a layer takes.

    python demos/benchmarks/fast_clustering.py [--parts unit growth layer toyland] [--work FOLDER] [--json OUT]

Contributions of the size of LLaVA-OneVision's fc2 (4,304 inputs): eight concepts of unequal size with overlapping
supports, sparse background of a tenth, a third or all of the signal's energy (clear, medium, hard), 30 % noise that has
all marginals of the data and none of its joint structure, min_cluster_size 100. The backends
alternate on the same vectors. The part `layer` reads a store of tokens as a build does: 32 of 1,152 units, two
processes with one thread each. The part `toyland` builds its atlas with both backends and measures them on 500
held-out scenes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score
from toyland_purity import encode_held_out, row_purity, summarize

import elude_steer as es
from elude_steer.evaluation.measures.monosemanticity import gather_peaks, mean_percent
from elude_steer.method.clustering import cluster
from elude_steer.method.contributions import contributions
from elude_steer.method.layers import layer_parameters

D_IN, UNITS, SIZE = 4304, 1152, 100
LEVELS = {"clear": 0.1, "medium": 10**-0.5, "hard": 1.0}


def planted_inputs(
    points: int, concepts: int, level: str, seed: int, noise: float = 0.3, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of a layer, `(points, D_IN)` float32, or as `out` stores them, and the concept of each, -1 for noise."""
    rng = np.random.default_rng((seed, concepts, list(LEVELS).index(level)))
    support = D_IN // (2 * concepts) if concepts > 8 else D_IN // 16
    places = np.arange(D_IN) - np.arange(concepts)[:, None] * (support - support // 3)
    supports = ((places >= 0) & (places < support))[:, rng.permutation(D_IN)]
    strengths = (supports * rng.uniform(0.5, 1.5, supports.shape)).astype(np.float32)
    sizes = np.geomspace(1, 5, concepts)
    truth = rng.choice(concepts, round(points * (1 - noise)), p=sizes / sizes.sum())
    q = np.empty((points, D_IN), np.float32) if out is None else out
    for start in range(0, len(truth), 4096):  # in pieces, to limit memory
        signal = strengths[truth[start : start + 4096]]
        signal *= rng.lognormal(-0.125, 0.5, signal.shape).astype(np.float32)
        background = np.maximum(rng.standard_normal(signal.shape, np.float32), 0) * (rng.random(signal.shape) < 0.3)
        scale = np.sqrt(LEVELS[level] * (signal**2).sum(1).mean() / (background**2).sum(1).mean())
        q[start : start + len(signal)] = signal + scale * background
    for start in range(len(truth), points, 4096):
        count = min(4096, points - start)
        q[start : start + count] = np.take_along_axis(q, rng.integers(len(truth), size=(count, D_IN)), 0)
    return q, np.concatenate([truth, np.full(points - len(truth), -1)])


def planted_unit(points: int, level: str, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Contributions to one unit, strongest instance first, and the concept of each."""
    q, truth = planted_inputs(points, 8, level, seed)
    rng = np.random.default_rng(seed)
    weight = (rng.lognormal(0, 0.5, D_IN) * np.where(rng.random(D_IN) < 0.3, -1, 1)).astype(np.float32)
    order = np.argsort(-(q @ weight), kind="stable")
    return contributions(torch.from_numpy(q[order]), torch.from_numpy(weight)), truth[order]


def time_clustering(vectors: torch.Tensor, backend: str, size: int = SIZE) -> tuple[np.ndarray, float]:
    """The labels, and the seconds to find them."""
    start = time.perf_counter()
    found = cluster(vectors, backend=backend, min_cluster_size=size)
    return found.labels, time.perf_counter() - start


def measure_unit(rounds: int) -> dict[str, Any]:
    """Compare exact and fast on 10,000 instances, and the library on 3,000, scaled by the square."""
    rows = []
    for level in LEVELS:
        for seed in range(3):
            vectors, truth = planted_unit(10_000, level, seed)
            seconds: dict[str, list[float]] = {"exact": [], "fast": []}
            labels = {}
            for _ in range(rounds if seed == 0 else 1):
                for name in seconds:
                    labels[name], elapsed = time_clustering(vectors, name)
                    seconds[name].append(elapsed)
            rows.append(
                {
                    "level": level,
                    "seed": seed,
                    "exact s": statistics.median(seconds["exact"]),
                    "fast s": statistics.median(seconds["fast"]),
                    "fast / exact": statistics.median(
                        f / e for f, e in zip(seconds["fast"], seconds["exact"], strict=True)
                    ),
                    "ARI to exact": adjusted_rand_score(labels["exact"], labels["fast"]),
                    "ARI of exact to truth": adjusted_rand_score(truth, labels["exact"]),
                    "ARI of fast to truth": adjusted_rand_score(truth, labels["fast"]),
                    "clusters": int(labels["fast"].max()) + 1,
                }
            )
    small, _ = planted_unit(3_000, "medium", 0)
    _, library = time_clustering(small, "hdbscan", 30)
    fast = statistics.median(row["fast s"] for row in rows)
    library_seconds = {"library at 3,000, s": library, "at 10,000 by the square, s": library * (10 / 3) ** 2}
    return {"rows": rows, **library_seconds, "fast / library": fast / (library * (10 / 3) ** 2)}


GROWTH_SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import fast_clustering as f
from sklearn.metrics import adjusted_rand_score as ari
vectors, truth = f.planted_unit({points}, "medium", 0)
held = vectors.numel() * 4 / 2**30
Path("/proc/self/clear_refs").write_text("5")  # do not count the memory of making the data
labels, seconds = f.time_clustering(vectors, "fast", {size})
peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
row = dict(instances={points}, seconds=seconds, peak_gb=peak / 2**20, vectors_gb=held, clusters=int(labels.max()) + 1,
           ari_truth=ari(truth, labels))
if {exact}:
    other, took = f.time_clustering(vectors, "exact", {size})
    row |= dict(exact_seconds=took, ari_exact=ari(other, labels), exact_ari_truth=ari(truth, other))
print(json.dumps(row))
"""


def measure_growth() -> dict[str, Any]:
    """Cluster 10,000 to 100,000 instances, each number in its own process; min_cluster_size grows in proportion."""
    rows = []
    for points in (10_000, 20_000, 50_000, 100_000):
        script = GROWTH_SCRIPT.format(
            folder=str(Path(__file__).parent), points=points, size=points // 100, exact=points <= 20_000
        )
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
        rows[-1]["exponent"] = (
            float(np.log(rows[-1]["seconds"] / rows[-2]["seconds"]) / np.log(points / rows[-2]["instances"]))
            if len(rows) > 1
            else None
        )
    slope = (rows[-1]["seconds"] - rows[-2]["seconds"]) / 50_000
    return {"rows": rows, "400,000 at the last slope, s": rows[-1]["seconds"] + 300_000 * slope}


def cluster_units(store: Path, units: list[int], done: Path) -> None:
    """The work of one process of a build: for each unit its strongest instances, contributions and clusters."""
    torch.set_num_threads(1)
    q = np.load(store, mmap_mode="r")
    weights = torch.from_numpy(np.load(store.with_suffix(".weights.npy")))
    top = np.load(store.with_suffix(".top.npy"))
    found = []
    for number in units:
        rows = torch.from_numpy(q[np.sort(top[number])]).float()
        vectors = contributions(rows, weights[number])
        found.append(cluster(vectors, backend="fast", min_cluster_size=SIZE).count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    done.write_text(json.dumps({"clusters": found, "peak_gb": peak}))


def measure_layer(units: int = 32, processes: int = 2) -> dict[str, Any]:
    """Cluster some units of a layer in several processes; the seconds include start-up."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "tokens.npy"
        q, _ = planted_inputs(40_000, 40, "medium", 7)
        rng = np.random.default_rng(7)
        weights = (rng.lognormal(0, 0.5, (units, D_IN)) * np.where(rng.random((units, D_IN)) < 0.5, -1, 1)).astype("f4")
        np.save(store.with_suffix(".top.npy"), np.argpartition(-(q @ weights.T), 10_000, axis=0)[:10_000].T)
        np.save(store.with_suffix(".weights.npy"), weights)
        np.save(store, q.astype(np.float16))
        del q
        start, running = time.perf_counter(), []
        for rank in range(processes):
            share, done = list(range(rank, units, processes)), Path(folder) / f"done-{rank}.json"
            script = (
                f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path; "
                f"from fast_clustering import cluster_units; "
                f"cluster_units(Path({str(store)!r}), {share}, Path({str(done)!r}))"
            )
            running.append((subprocess.Popen([sys.executable, "-c", script]), done))
        for process, _ in running:
            if process.wait():
                raise RuntimeError("a process of the layer failed")
        seconds = time.perf_counter() - start
        results = [json.loads(done.read_text()) for _, done in running]
    counts = [count for result in results for count in result["clusters"]]
    return {
        "units": units,
        "processes": processes,
        "seconds": seconds,
        "layer of 1,152, minutes": seconds / units * UNITS / 60,
        "peak of all processes, GB": sum(result["peak_gb"] for result in results),
        "clusters a unit": statistics.mean(counts),
        "the paper, 400,000 instances, A100 hours": "26 to 30",
    }


def measure_toyland(folder: Path) -> dict[str, Any]:
    """Build toyland's atlas with both backends, and compare them on the same held-out scenes."""
    vlm = es.Vlm.load("toyland/captioner")
    inputs, shown = encode_held_out(vlm, 500)
    tokens = len(inputs) // 500
    weight, bias = layer_parameters(vlm.layer)
    found: dict[str, Any] = {}
    atlases = {}
    for backend in ("exact", "fast"):
        settings = [f"clusters.backend={backend}"]
        atlas = es.build("toyland", out=folder / backend, work=folder / "work", settings=settings, quiet=True)
        alive = (~atlas.dead).nonzero()[:, 0]
        weights, biases = atlas.parameters(alive, weight, bias)
        purity = summarize(row_purity(weights, biases, inputs, shown))
        scores = gather_peaks(inputs.split(tokens), lambda q: q @ weights.T + biases, vlm.layer).scores()  # noqa: B023
        found[backend] = {"sub-units": len(atlas), "MS-Score": mean_percent(scores), "clean share": purity["clean"]}
        atlases[backend] = atlas
    exact, fast = atlases["exact"], atlases["fast"]
    overlaps, equal = [], 0
    for number in range(exact.d_out):
        one, other = (a.members(a.sub_units_of(number)).float() for a in (exact, fast))
        equal += len(one) == len(other)
        if len(one) and len(other):
            both = one @ other.T
            union = one.sum(1)[:, None] + other.sum(1) - both
            overlaps += (both / union).max(1).values.tolist()
    found["units with as many sub-units"] = equal / exact.d_out
    found["best overlap of an exact sub-unit's memberships (IoU), mean"] = statistics.mean(overlaps)
    found["MS-Score, fast - exact"] = found["fast"]["MS-Score"] - found["exact"]["MS-Score"]
    found["clean share, fast - exact, points"] = 100 * (found["fast"]["clean share"] - found["exact"]["clean share"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["unit", "growth", "layer", "toyland"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--work", type=Path, help="folder that keeps toyland's atlases and stages [default: a new one]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    parts = {
        "unit": lambda: measure_unit(options.rounds),
        "growth": measure_growth,
        "layer": measure_layer,
        "toyland": lambda: measure_toyland(work),
    }
    found = {}
    for name in options.parts:
        found[name] = parts[name]()
        print(f"{name}:")
        for key, value in found[name].items():
            for row in value if key == "rows" else [{key: value}]:
                print("  " + ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
