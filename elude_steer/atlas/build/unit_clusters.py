"""Two stages: rank each unit's strongest instances, then cluster their contributions (paper 3.1 and 3.2)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from elude_steer.atlas.build.sizes import clustering_size, fitting_backend, free_for_each
from elude_steer.atlas.build.stages import Build, StageFolder, block_path, warn
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.method.backends import EXACT_INSTANCES, ClusteringSize, memory_needed
from elude_steer.method.clustering import cluster
from elude_steer.method.contributions import ContributionRows, no_clusters, summarize_clusters
from elude_steer.method.rows import Rows
from elude_steer.specs import ClustersSpec
from elude_steer.utils import optional
from elude_steer.utils.files import read_array, read_json, write_array, write_file, write_tensors
from elude_steer.utils.fingerprint import make_key
from elude_steer.utils.memory import format_bytes
from elude_steer.utils.parallel import Slots


def rank_instances(build: Build, tokens: StageFolder) -> StageFolder:
    """Write the row numbers of each unit's strongest instances, one file for each block of units."""
    store, k = TokenStore(tokens.path), int(build.spec.clusters.top_k)
    if k > len(store) and build.is_main:
        warn(f"clusters.top_k is {k}, but only {len(store)} instances are stored: all of them are used.")
    # The layer's weights are part of the tower's fingerprint, and so of the tokens' key.
    folder = build.open_stage("rows", tokens.key, min(k, len(store)))

    def work(block: range) -> None:
        weight, bias = build.weight[block.start : block.stop], build.bias[block.start : block.stop]
        _, rows = strongest_instances(store, weight, bias, k)
        write_array(block_path(folder, block, ".npy"), rows.int().cpu().numpy())

    blocks = build.unit_blocks(_count_split_units(build))
    files = lambda block: (block_path(folder, block, ".npy"),)  # noqa: E731
    build.run_pieces("ranking", folder, blocks, files, work, "blocks", needs=[tokens])
    return folder


def cluster_units(build: Build, tokens: StageFolder, rows: StageFolder) -> StageFolder:
    """Write the representatives, mean inputs and sizes of each unit's clusters, one file for each unit."""
    store = TokenStore(tokens.path)
    size = clustering_size(build.spec.clusters, len(store), store.d_in)
    build.backend = _choose_backend(build, rows, size)
    spec = replace(build.spec.clusters, backend=cast(Any, build.backend))
    packages = ["hdbscan", *["cuml-cu12"] * (spec.backend == "cuml"), *["umap-learn"] * bool(spec.umap_components)]
    folder = build.open_stage("clusters", rows.key, asdict(spec), *(optional.version(name) for name in packages))
    blocks = {unit: block for block in build.unit_blocks() for unit in block}

    def work(unit: int) -> None:
        if unit >= _count_split_units(build):
            write_tensors(clusters_path(folder, unit), no_clusters(build.weight.shape[1]))
            return
        block = blocks[unit]
        numbers = read_array(block_path(rows, block, ".npy"))[unit - block.start]
        with slots:
            clusters = cluster_unit(StoredRows(store, np.asarray(numbers)), build.weight[unit].cpu(), spec)
        write_tensors(clusters_path(folder, unit), clusters)

    slots = Slots(_count_slots(build, size))
    units = range(len(build.weight))
    files = lambda unit: (clusters_path(folder, unit),)  # noqa: E731
    build.run_pieces("clustering", folder, units, files, work, "units", needs=[tokens, rows])
    return folder


def _choose_backend(build: Build, rows: StageFolder, size: ClusteringSize) -> str:
    """The backend that clusters all units, by all processes and also after an interruption.

    What `auto` chooses depends on the free memory, so the first choice is written down beside the ranks.
    """
    asked: str = build.spec.clusters.backend
    device, processes = build.tower.device, build.workers.local
    if asked == "auto":
        path = rows.path / f"backend-{make_key(asdict(build.spec.clusters))}.json"

        def choose() -> None:
            chosen = fitting_backend(asked, size, device, processes)
            if chosen == "fast" and size.instances <= EXACT_INSTANCES:
                warn(
                    f"clusters.backend auto takes 'fast', which approximates: 'exact' needs "
                    f"{format_bytes(memory_needed('exact', size))} of memory for {size}, which is not free."
                )
            write_file(path, lambda file: file.write(json.dumps(chosen).encode()))

        build.settle(rows, choose, path)
        asked = read_json(path, str)
    return fitting_backend(asked, size, device, processes)


def _count_slots(build: Build, size: ClusteringSize) -> int:
    """How many threads may cluster at a time: as many as there are, or as the free memory holds."""
    free = free_for_each(build.workers.local)
    fitting = build.workers.threads if free is None else free // memory_needed(build.backend, size)
    return max(1, min(build.workers.threads, fitting))


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The inputs of a unit's strongest instances, read from the store when they are needed."""

    store: TokenStore
    numbers: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Number of instances, then of inputs."""
        return len(self.numbers), self.store.d_in

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.store.gather(self.numbers[rows.numpy()])


def cluster_unit(q: Rows, weight: torch.Tensor, spec: ClustersSpec) -> dict[str, torch.Tensor]:
    """Summary of the clusters among a unit's strongest inputs, `(instances, d_in)`.

    The backend `fast` never holds all contributions: at 400,000 instances of 4,304 inputs they would take 7 GB.
    """
    c: Rows = ContributionRows(q, weight)
    if spec.backend != "fast" or spec.umap_components is not None:
        c = c[torch.arange(c.shape[0])]
    clusters = cluster(
        c,
        backend=spec.backend,
        selection=spec.selection,
        min_cluster_size=int(spec.min_cluster_size),
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
