"""How time and memory grow with the work: collecting, ranking, clustering, naming, matching at 1, 2, 4 and 8 times.

    python demos/benchmarks/scaling.py [--times 1 2 4 8] [--plot OUT.png] [--json OUT]

Everything is done on toyland by the library's own functions, with one thread, each size in a process of its own. A
row's slope is that of a line through its times on doubly logarithmic axes, beside the slope of its arithmetic: 1 where
each piece of work is taken once, 2 where every instance meets every other. Memory is the peak of what a process that
builds an atlas itself holds, which pages of files mapped into it are not part of.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import elude_steer as es
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.atlas.matching import rank_sub_units
from elude_steer.cli.options import hide_loading_bars
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.method.clustering import cluster
from elude_steer.method.contributions import contributions
from elude_steer.utils.parallel import worker_group
from elude_steer.utils.plotting import curves

IMAGES, INSTANCES, SUB_UNITS, WORDS = 250, 1000, 4000, 4000  # of the smallest size; words are always as many
LABELS = 20_000  # among which a word is sought
_PICTURES, _ROWS, _PARTS = f"{IMAGES:,} images", f"{INSTANCES:,} instances", f"{SUB_UNITS:,} sub-units"
# What is done, how much of it, and how its arithmetic grows.
ROWS = {
    "collecting": (_PICTURES, 1), "pooling": (_PICTURES, 1), "scoring": (_PICTURES, 1), "ranking": (_PICTURES, 1),
    "clustering, exact": (_ROWS, 2), "clustering, fast": (_ROWS, 2), "naming": (_PARTS, 1),
    "matching": (f"{LABELS:,} sub-units", 1),
}  # fmt: skip


class Peak(threading.Thread):
    """Watches how much memory of its own the process has."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0.0, threading.Event()

    def run(self) -> None:
        """Looks a hundred times a second."""
        while not self.over.wait(0.01):
            text = Path("/proc/self/status").read_text()
            self.most = max(self.most, int(text.partition("RssAnon:")[2].split()[0]) / 1024)


@contextmanager
def watched() -> Iterator[Peak]:
    peak = Peak()
    peak.start()
    try:
        yield peak
    finally:
        peak.over.set()
        peak.join()


class Stages(logging.Handler):
    """What a build says of the seconds of its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes name and seconds of a stage."""
        if isinstance(record.args, tuple) and len(record.args) == 3:
            self.seconds[str(record.args[0])] = float(record.args[1])  # type: ignore[arg-type]


def built(images: int, folder: Path) -> tuple[dict[str, float], float, TokenStore]:
    """A build from so many pictures: seconds of its stages, and its peak in MB."""
    told, log = Stages(), logging.getLogger("elude_steer")
    log.setLevel(logging.INFO)
    log.handlers = [told]
    settings = [f"images.limit={images}", "clusters.top_k=1000", "clusters.units=8"]
    with watched() as peak:
        es.build("toyland", settings=settings, out=folder / "atlas", work=folder / "work", threads=1, quiet=True)
    (store,) = (folder / "work").glob("tokens-*/")
    return told.seconds, peak.most, TokenStore(store)


def best_of(work: Callable[[], Any], runs: int = 3) -> float:
    """Seconds of the fastest run."""
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


def dissected(sub_units: int) -> Callable[[], Any]:
    rng = torch.Generator().manual_seed(0)
    activations, cosines = (torch.randn(400, n, generator=rng) for n in (sub_units, 300))
    return lambda: dissect(activations, 0.1 * cosines, Dissection(top_k=50), keep=32)


def matched(sub_units: int) -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (sub_units, 32)).astype(np.int32)
    scores, similarities = rng.random((sub_units, 32), np.float32), rng.random(WORDS)
    return lambda: [
        rank_sub_units(similarities, words, scores, kappa=24, by=by) for by in ("label", "score") for _ in range(5)
    ]


def slope(times: Sequence[int], seconds: Sequence[float]) -> float:
    return float(np.polyfit(np.log2(times), np.log2(np.maximum(seconds, 1e-6)), 1)[0])


def measured(times: int) -> dict[str, Any]:
    """Seconds of everything at one size, and the peak of the build."""
    hide_loading_bars()
    with tempfile.TemporaryDirectory() as name, worker_group(None, 1):
        stages, peak, store = built(IMAGES * times, Path(name))
        layer = es.Vlm.load("toyland/captioner").layer
        weight, bias = layer.weight.detach(), layer.bias.detach()
        q = store.read(0, INSTANCES * times)
        vectors = contributions(q, weight[3])
        seconds = {stage: stages[stage] for stage in ("collecting", "pooling", "scoring")}
        seconds["ranking"] = best_of(lambda: strongest_instances(store, weight[:64], bias[:64], 1000))
        for backend in ("exact", "fast"):
            seconds[f"clustering, {backend}"] = best_of(partial(cluster, vectors, backend=backend, min_cluster_size=30))
        seconds["naming"] = best_of(dissected(SUB_UNITS * times))
        seconds["matching"] = best_of(matched(LABELS * times), 9)
    return {"seconds": seconds, "peak": peak, "instances": len(vectors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if len(options.times) < 2:
        parser.error("--times wants at least two sizes, or there is no growth to see.")
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    found = []
    for times in options.times:
        child = subprocess.run([sys.executable, __file__, "--one", str(times)], capture_output=True, text=True)
        if child.returncode:
            raise SystemExit(child.stderr)
        found.append(json.loads(child.stdout.splitlines()[-1]))
    print(f"| | of | {' | '.join(f'{times}x, s' for times in options.times)} | slope | arithmetic |")
    print("|" + "---|" * (4 + len(options.times)))
    for name, (work, arithmetic) in ROWS.items():
        seconds = [one["seconds"][name] for one in found]
        shown = " | ".join(f"{s:.3g}" for s in seconds)
        print(f"| {name} | {work} | {shown} | {slope(options.times, seconds):.2f} | {arithmetic} |")
    peaks = " | ".join(f"{one['peak']:.0f}" for one in found)
    print(f"| memory of the build, MB | {_PICTURES} | {peaks} | | 0 |")
    if options.plot:
        points = {
            name: [(t, one["seconds"][name]) for t, one in zip(options.times, found, strict=True)] for name in ROWS
        }
        curves(points, x="times the work", y="seconds").save(options.plot)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
