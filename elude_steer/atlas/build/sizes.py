"""The sizes of a build: what `auto` means for its images and instances, and whether the memory holds them.

The paper's values suit a million images. For fewer, more tokens of each image are stored, and the number of instances
a unit and the size of a cluster follow the number that is stored; `demos/benchmarks/default_settings.py` measures what
that is worth. `check_memory` refuses what cannot fit before an image is read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from elude_steer.method.backends import ClusteringSize, resolve_backend
from elude_steer.specs import AtlasSpec, ClustersSpec
from elude_steer.utils.memory import free_bytes, free_gpu_bytes

PER_IMAGE = 2  # tokens of an image if there are many: the paper's
STORED = 10_000  # tokens to store in all, if there are too few images for that at two of each
SHARE = 20  # one stored instance in so many is among a unit's strongest
MIN_TOP_K, MAX_TOP_K = 100, 10_000
CLUSTERS = 40  # so many clusters of the smallest size would hold all instances of a unit
SMALLEST = 5  # the mean of fewer instances is mostly noise


def tokens_per_image(images: int) -> int:
    """How many tokens of each image `auto` stores for so many images."""
    return max(PER_IMAGE, -(-STORED // max(1, images)))


def default_top_k(instances: int) -> int:
    """How many instances a unit `auto` takes of those that are stored."""
    return max(2, min(MAX_TOP_K, max(instances // SHARE, min(MIN_TOP_K, instances // 2))))


def default_cluster_size(top_k: int) -> int:
    """The smallest cluster that `auto` accepts among so many instances."""
    return max(2, min(SMALLEST, top_k // 10), top_k // CLUSTERS)


def resolve_tokens(spec: AtlasSpec, images: int | None) -> AtlasSpec:
    """The spec with `tokens.per_image` as a number; unchanged while the number of images is unknown."""
    if spec.tokens.per_image != "auto" or images is None:
        return spec
    return replace(spec, tokens=replace(spec.tokens, per_image=tokens_per_image(images)))


def resolve_clusters(spec: AtlasSpec, instances: int) -> AtlasSpec:
    """The spec with `clusters.top_k` and `clusters.min_cluster_size` as numbers."""
    top_k, smallest = spec.clusters.top_k, spec.clusters.min_cluster_size
    top_k = default_top_k(instances) if top_k == "auto" else top_k
    smallest = default_cluster_size(min(int(top_k), instances)) if smallest == "auto" else smallest
    return replace(spec, clusters=replace(spec.clusters, top_k=top_k, min_cluster_size=smallest))


def expected_size(spec: AtlasSpec, images: int | None, d_in: int) -> ClusteringSize:
    """The largest size that one unit's clustering can have, before any image is read."""
    per_image = resolve_tokens(spec, images).tokens.per_image
    known = images is not None and per_image != "all"
    stored = (images or 0) * int(per_image) if known else 10**12
    return clustering_size(resolve_clusters(spec, stored).clusters, stored, d_in)


def clustering_size(clusters: ClustersSpec, instances: int, d_in: int) -> ClusteringSize:
    """The size of one unit's clustering by resolved settings, if so many instances are stored."""
    samples = clusters.min_samples or int(clusters.min_cluster_size)
    return ClusteringSize(min(int(clusters.top_k), instances), d_in, samples, clusters.umap_components)


def fitting_backend(backend: str, size: ClusteringSize, device: torch.device, processes: int) -> str:
    """The backend for this size; raises if it does not fit the memory that is free for each process of this machine."""
    free, free_gpu = free_for_each(processes), free_gpu_bytes(device)
    return resolve_backend(backend, size, free=free, device=device, free_gpu=free_gpu)


def free_for_each(processes: int) -> int | None:
    """Bytes of free memory for each of the processes on this machine."""
    free = free_bytes()
    return None if free is None else free // processes


def check_memory(spec: AtlasSpec, images: int | None, d_in: int, device: torch.device, processes: int = 1) -> None:
    """Raise if one unit's clustering cannot fit the free memory, with the setting that would.

    Args:
        spec: the settings.
        images: how many; None if unknown.
        d_in: inputs of the layer.
        device: of the model.
        processes: how many share this machine's memory.
    """
    fitting_backend(spec.clusters.backend, expected_size(spec, images, d_in), device, processes)
