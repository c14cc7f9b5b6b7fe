"""Which implementation of HDBSCAN clusters a unit: by the size of the problem and the memory that is free.

`memory_needed` is an upper bound for one unit: its contributions, and the most that clustering and summarizing need
beside them. `demos/benchmarks/cluster_memory.py` compares it with what is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from elude_steer.errors import SpecError
from elude_steer.method.clustering import CUML_SAMPLES, require_cuml
from elude_steer.method.contributions import PIECE, ROWS
from elude_steer.method.fast_hdbscan import EXACT_DIMENSIONS, SAMPLE
from elude_steer.utils import optional
from elude_steer.utils.memory import format_bytes

EXACT_INSTANCES = (
    20_000  # above, `auto` takes `fast`: exact distances need 3.2 GB, and four times that at twice as many
)
_BLOCK = 1024  # rows of one product in both backends of our own
_PER_INSTANCE = 256  # bytes of labels, probabilities and row numbers, and of their copies
_FIXED = 64_000_000  # bytes of what does not grow: blocks of products, and what the allocator keeps


@dataclass(frozen=True)
class ClusteringSize:
    """The size of one unit's clustering.

    Attributes:
        instances: how many vectors.
        dimensions: of each.
        samples: HDBSCAN's min_samples.
        reduced: dimensions after UMAP; None without.
    """

    instances: int
    dimensions: int
    samples: int = 1000
    reduced: int | None = None

    def __str__(self) -> str:
        return f"{self.instances:,} instances of {self.dimensions:,} inputs"


def memory_needed(backend: str, size: ClusteringSize) -> int:
    """Bytes of main memory that clustering one unit needs at most, with its contributions."""
    n, d = size.instances, size.dimensions
    x = d if size.reduced is None else size.reduced
    sample = min(n, SAMPLE)
    copies = 3 if x <= EXACT_DIMENSIONS else 1  # of the sample's vectors, which products need
    held = 4 * n * d if backend != "fast" or size.reduced is not None else 4 * sample * d  # contributions
    beside = {
        "exact": 8 * n * n + 8 * n * x + 16 * _BLOCK * n,  # all distances; vectors in double precision; blocks of rows
        "fast": 4 * sample * sample + 4 * copies * sample * x + 16 * _BLOCK * sample,
        "hdbscan": 16 * n * x + 16 * n * min(n, size.samples),  # a tree of vectors; neighbours and their distances
        "cuml": 4 * n * x,
    }[backend]
    summary = 4 * min(n, ROWS) * d  # a copy of a part of a cluster
    if backend == "fast" and size.reduced is None:
        summary += 12 * PIECE * d  # contributions are computed anew, a piece at a time
    return held + max(beside, summary) + _PER_INSTANCE * n + _FIXED


def gpu_memory_needed(size: ClusteringSize) -> int:
    """Bytes of a GPU's memory that `cuml` needs about: the vectors, and the neighbours of each."""
    x = size.dimensions if size.reduced is None else size.reduced
    return 4 * size.instances * x + 16 * size.instances * size.samples + _FIXED


def resolve_backend(
    backend: str,
    size: ClusteringSize,
    *,
    free: int | None = None,
    device: torch.device | str = "cpu",
    free_gpu: int | None = None,
) -> str:
    """The backend that clusters units of this size; raises if it does not fit.

    `auto` is `cuml` if the device is a GPU on which it fits and cuml is installed, else `exact` up to
    `EXACT_INSTANCES` instances if it fits, else `fast`.

    Args:
        backend: what the spec asks for.
        size: of one unit.
        free: bytes of free main memory; None if unknown, and then everything fits.
        device: where the model runs.
        free_gpu: bytes of free memory of that device; None if unknown.
    """
    if backend == "auto":
        backend = _choose(size, free, device, free_gpu)
    if backend == "cuml":
        require_cuml(size.samples)
        if free_gpu is not None and gpu_memory_needed(size) > free_gpu:
            text = (
                f"{format_bytes(gpu_memory_needed(size))} of memory for {size}, and {format_bytes(free_gpu)} of the GPU"
            )
            raise SpecError(f"clusters.backend 'cuml' needs {text} are free; {_alternatives('cuml', size, free)}.")
    if free is not None and memory_needed(backend, size) > free:
        text = f"{format_bytes(memory_needed(backend, size))} of memory for {size}, and {format_bytes(free)}"
        raise SpecError(f"clusters.backend '{backend}' needs {text} are free; {_alternatives(backend, size, free)}.")
    return backend


def _choose(size: ClusteringSize, free: int | None, device: torch.device | str, free_gpu: int | None) -> str:
    on_gpu = torch.device(device).type == "cuda" and optional.is_installed("cuml")
    if on_gpu and size.samples <= CUML_SAMPLES and (free_gpu is None or gpu_memory_needed(size) <= free_gpu):
        return "cuml"
    fits = free is None or memory_needed("exact", size) <= free
    return "exact" if size.instances <= EXACT_INSTANCES and fits else "fast"


def largest_that_fits(backend: str, size: ClusteringSize, free: int) -> int:
    """The largest number of instances that fits, in two digits so that it reads well; 0 if none does."""
    low, high = 0, size.instances + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = memory_needed(backend, replace(size, instances=middle)) <= free
        low, high = (middle, high) if fits else (low, middle)
    digit = 10 ** max(0, len(str(low)) - 2)
    return low // digit * digit


def _alternatives(backend: str, size: ClusteringSize, free: int | None) -> str:
    """The settings that would fit, in words."""
    found = []
    needed = memory_needed("fast", size)
    if backend != "fast" and (free is None or needed <= free):
        found.append(f"clusters.backend: fast, which needs {format_bytes(needed)}")
    if backend != "cuml" and free is not None and (largest := largest_that_fits(backend, size, free)) >= 2:
        found.append(f"clusters.top_k: {largest}")
    if not found and free is not None and (largest := largest_that_fits("fast", size, free)) >= 2:
        found.append(f"clusters.backend: fast and clusters.top_k: {largest}")
    return f"set {', or '.join(found)}" if found else "free some memory, or use another machine"
