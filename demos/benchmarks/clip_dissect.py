"""How long labelling takes, relative to its bare arithmetic.

    python demos/benchmarks/clip_dissect.py [--json OUT]

Dissects 2,000 sub-units by 5,000 images and 5,000 words with soft-WPMI, and compares with the bare arithmetic in the
same run: the product of image and text vectors, and one logarithm of as many values as the formula has. Then searches
for words among 10,000 labels.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.labels import Labels
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.models.matcher import load_matcher

SUB_UNITS, IMAGES, WORDS, WIDTH, TOP = 2000, 5000, 5000, 768, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(IMAGES, WIDTH, generator=generator), dim=1)
    texts = torch.nn.functional.normalize(torch.randn(WORDS, WIDTH, generator=generator), dim=1)
    activations = torch.randn(IMAGES, SUB_UNITS, generator=generator)
    ratios, ours, bare = [], [], []
    for _ in range(3):
        start = time.perf_counter()
        similarities = images @ texts.T
        values = torch.rand(TOP, WORDS, generator=generator)
        for _ in range(SUB_UNITS):
            torch.log(values)
        bare.append(time.perf_counter() - start)
        start = time.perf_counter()
        similarities = images @ texts.T
        dissect(activations, similarities, Dissection(top_k=TOP))
        ours.append(time.perf_counter() - start)
        ratios.append(ours[-1] / bare[-1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    ratio = statistics.median(ratios)
    print(f"dissecting {statistics.median(ours):.2f} s, bare {statistics.median(bare):.2f} s: {ratio:.2f} times")
    print(f"peak memory {peak:.2f} GB")

    rng = np.random.default_rng(0)
    labels = Labels(
        tuple(f"{word} {number}" for number in range(100) for word in ("dog", "cat", "red car", "tree", "sea") * 20),
        rng.integers(0, 10_000, (10_000, 32)).astype(np.int32),
        np.sort(rng.random((10_000, 32)).astype(np.float32))[:, ::-1],
        np.arange(10_000, dtype=np.int32),
    )
    matcher, units = load_matcher("toyland/matcher"), np.repeat(np.arange(1250), 8)
    times = []
    for word in ("puppy", "locomotive", "kitten", "seaside", "cyclist", "sofa"):
        start = time.perf_counter()
        labels.search(matcher, word, units, limit=100, by="label")
        times.append(time.perf_counter() - start)
    search = statistics.median(times[1:]) * 1000
    print(f"a word among 10,000 labels: {search:.1f} ms (the first {times[0] * 1000:.0f} ms)")
    if options.json:
        options.json.write_text(
            json.dumps({"ratio": ratio, "seconds": ours, "bare": bare, "peak_gb": peak, "search_ms": search})
        )


if __name__ == "__main__":
    main()
