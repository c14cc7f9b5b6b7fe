"""How time and memory grow with the amount of work: collecting, ranking, clustering, labelling, matching.

    python demos/benchmarks/scaling.py [--times 1 2 4 8] [--plot OUT.png] [--json OUT]

The library's own functions run on toyland with one thread, each size in its own process. The slope of a row is that of
a line through its times on doubly logarithmic axes; the table also has the slope of the arithmetic, which is 1 if each
piece of work is done once, and 2 if every instance is compared with every other. Memory is the peak of the anonymous
memory of a process that builds an atlas, without the pages of memory-mapped files.
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

IMAGES, INSTANCES, SUB_UNITS, WORDS = 250, 1000, 4000, 4000  # at size 1; the number of words does not grow
LABELS = 20_000  # sub-units that matching ranks, at size 1
_IMAGES, _ROWS, _SUB_UNITS = f"{IMAGES:,} images", f"{INSTANCES:,} instances", f"{SUB_UNITS:,} sub-units"
# step -> its amount of work at size 1, and the slope of its arithmetic
ROWS = {
    "collecting": (_IMAGES, 1), "pooling": (_IMAGES, 1), "scoring": (_IMAGES, 1), "ranking": (_IMAGES, 1),
    "clustering, exact": (_ROWS, 2), "clustering, fast": (_ROWS, 2), "naming": (_SUB_UNITS, 1),
    "matching": (f"{LABELS:,} sub-units", 1),
}  # fmt: skip


class MemoryPeak(threading.Thread):
    """Records the peak of the anonymous memory of this process, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.finished = 0.0, threading.Event()

    def run(self) -> None:
        """Read the memory a hundred times a second."""
        while not self.finished.wait(0.01):
            text = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(text.partition("RssAnon:")[2].split()[0]) / 1024)


@contextmanager
def record_memory() -> Iterator[MemoryPeak]:
    """Record the memory peak inside the context."""
    recorder = MemoryPeak()
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.finished.set()
        recorder.join()


class StageSeconds(logging.Handler):
    """Collects the seconds of stages from the log of a build."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the name and seconds of a stage."""
        if isinstance(record.args, tuple) and len(record.args) == 3:
            self.seconds[str(record.args[0])] = float(record.args[1])  # type: ignore[arg-type]


def run_build(images: int, folder: Path) -> tuple[dict[str, float], float, TokenStore]:
    """Build an atlas from some images; returns the seconds of its stages, its memory peak in MB, and its tokens."""
    stages, log = StageSeconds(), logging.getLogger("elude_steer")
    log.setLevel(logging.INFO)
    log.handlers = [stages]
    settings = [f"images.limit={images}", "clusters.top_k=1000", "clusters.units=8"]
    with record_memory() as memory:
        es.build("toyland", settings=settings, out=folder / "atlas", work=folder / "work", threads=1, quiet=True)
    (store,) = (folder / "work").glob("tokens-*/")
    return stages.seconds, memory.peak, TokenStore(store)


def fastest_run(work: Callable[[], Any], runs: int = 3) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def dissection_task(sub_units: int) -> Callable[[], Any]:
    """A function that dissects random sub-units."""
    rng = torch.Generator().manual_seed(0)
    activations, cosines = (torch.randn(400, n, generator=rng) for n in (sub_units, 300))
    return lambda: dissect(activations, 0.1 * cosines, Dissection(top_k=50), keep=32)


def matching_task(sub_units: int) -> Callable[[], Any]:
    """A function that ranks random sub-units."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, WORDS, (sub_units, 32)).astype(np.int32)
    scores, similarities = rng.random((sub_units, 32), np.float32), rng.random(WORDS)
    return lambda: [
        rank_sub_units(similarities, words, scores, kappa=24, by=by) for by in ("label", "score") for _ in range(5)
    ]


def slope(times: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of a line through the logarithms."""
    return float(np.polyfit(np.log2(times), np.log2(np.maximum(seconds, 1e-6)), 1)[0])


def measure_size(times: int) -> dict[str, Any]:
    """The seconds of every step at one size, and the memory peak of the build."""
    hide_loading_bars()
    with tempfile.TemporaryDirectory() as name, worker_group(None, 1):
        stages, peak, store = run_build(IMAGES * times, Path(name))
        layer = es.Vlm.load("toyland/captioner").layer
        weight, bias = layer.weight.detach(), layer.bias.detach()
        q = store.read(0, INSTANCES * times)
        vectors = contributions(q, weight[3])
        seconds = {stage: stages[stage] for stage in ("collecting", "pooling", "scoring")}
        seconds["ranking"] = fastest_run(lambda: strongest_instances(store, weight[:64], bias[:64], 1000))
        for backend in ("exact", "fast"):
            seconds[f"clustering, {backend}"] = fastest_run(
                partial(cluster, vectors, backend=backend, min_cluster_size=30)
            )
        seconds["naming"] = fastest_run(dissection_task(SUB_UNITS * times))
        seconds["matching"] = fastest_run(matching_task(LABELS * times), 9)
    return {"seconds": seconds, "peak": peak, "instances": len(vectors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if len(options.times) < 2:
        parser.error("--times needs at least two sizes to compute a slope.")
    if options.one:
        print(json.dumps(measure_size(options.one)))
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
        seconds = [size["seconds"][name] for size in found]
        cells = " | ".join(f"{s:.3g}" for s in seconds)
        print(f"| {name} | {work} | {cells} | {slope(options.times, seconds):.2f} | {arithmetic} |")
    peaks = " | ".join(f"{size['peak']:.0f}" for size in found)
    print(f"| memory of the build, MB | {_IMAGES} | {peaks} | | 0 |")
    if options.plot:
        points = {
            name: [(t, size["seconds"][name]) for t, size in zip(options.times, found, strict=True)] for name in ROWS
        }
        curves(points, x="times the work", y="seconds").save(options.plot)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
