"""Two stages: rank each unit's strongest instances, then cluster their contributions (paper 3.1 and 3.2)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from elude_steer.atlas.build.stages import Build, StageFolder, block_path, warn
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.method.clustering import cluster
from elude_steer.method.contributions import contributions, no_clusters, summarize_clusters
from elude_steer.specs import ClustersSpec
from elude_steer.utils import optional
from elude_steer.utils.files import read_array, write_array, write_tensors


def rank_instances(build: Build, tokens: StageFolder) -> StageFolder:
    """Write the row numbers of each unit's strongest instances, one file for each block of units."""
    store, k = TokenStore(tokens.path), build.spec.clusters.top_k
    if k > len(store) and build.is_main:
        warn(f"clusters.top_k is {k}, but only {len(store)} instances are stored: all of them are used.")
    # The layer's weights are part of the tower's fingerprint, and so of the tokens' key.
    folder = build.open_stage("rows", tokens.key, min(k, len(store)))

    def work(block: range) -> None:
        weight, bias = build.weight[block.start : block.stop], build.bias[block.start : block.stop]
        _, rows = strongest_instances(store, weight, bias, k)
        write_array(block_path(folder, block, ".npy"), rows.int().cpu().numpy())

    blocks = build.unit_blocks(_count_split_units(build))
    build.run_pieces("ranking", blocks, lambda block: block_path(folder, block, ".npy"), work, "blocks")
    return folder


def cluster_units(build: Build, tokens: StageFolder, rows: StageFolder) -> StageFolder:
    """Write the representatives, mean inputs and sizes of each unit's clusters, one file for each unit."""
    spec = replace(build.spec.clusters, backend=cast(Any, build.backend))
    packages = ["hdbscan", *["cuml-cu12"] * (spec.backend == "cuml"), *["umap-learn"] * bool(spec.umap_components)]
    folder = build.open_stage("clusters", rows.key, asdict(spec), *(optional.version(name) for name in packages))
    store = TokenStore(tokens.path)
    blocks = {unit: block for block in build.unit_blocks() for unit in block}

    def work(unit: int) -> None:
        if unit >= _count_split_units(build):
            write_tensors(clusters_path(folder, unit), no_clusters(build.weight.shape[1]))
            return
        block = blocks[unit]
        numbers = read_array(block_path(rows, block, ".npy"))[unit - block.start]
        clusters = cluster_unit(store.gather(np.asarray(numbers)), build.weight[unit].cpu(), spec)
        write_tensors(clusters_path(folder, unit), clusters)

    units = range(len(build.weight))
    build.run_pieces("clustering", units, lambda unit: clusters_path(folder, unit), work, "units")
    return folder


def cluster_unit(q: torch.Tensor, weight: torch.Tensor, spec: ClustersSpec) -> dict[str, torch.Tensor]:
    """Summary of the clusters among a unit's strongest inputs, `(instances, d_in)`."""
    c = contributions(q, weight)
    clusters = cluster(
        c,
        backend=spec.backend,
        selection=spec.selection,
        min_cluster_size=spec.min_cluster_size,
        min_samples=spec.min_samples,
        umap_components=spec.umap_components,
        umap_neighbors=spec.umap_neighbors,
        seed=spec.seed,
    )
    return summarize_clusters(q, c, clusters)


def clusters_path(folder: StageFolder, unit: int) -> Path:
    """The file of a unit's clusters."""
    return folder.path / f"unit-{unit:06d}.safetensors"


def _count_split_units(build: Build) -> int:
    """How many units are split: the first `clusters.units`, or all."""
    return min(len(build.weight), build.spec.clusters.units or len(build.weight))
