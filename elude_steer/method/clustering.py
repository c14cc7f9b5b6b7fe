"""HDBSCAN clusters of contribution vectors, by one of four backends.

Labels are numbered by the first instance of each cluster, whatever numbers the backend uses. Instances come strongest
first, so cluster 0 holds the unit's strongest instance that is not noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elude_steer.errors import SpecError
from elude_steer.method.fast_hdbscan import fast_clusters
from elude_steer.method.rows import Rows, read_rows
from elude_steer.utils import optional

# Rows of one distance product. Fixed, because products of another shape may round differently.
_BLOCK = 1024
CUML_SAMPLES = 1023  # the largest min_samples of cuml


@dataclass(frozen=True)
class Clusters:
    """The clusters of one unit's instances.

    Attributes:
        labels: `(instances,)` int64, -1 for noise.
        probabilities: `(instances,)` float64, 0 for noise.
        count: the number of clusters, K.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    count: int


def cluster(
    vectors: Rows,
    *,
    backend: str = "exact",
    selection: str = "leaf",
    min_cluster_size: int = 1000,
    min_samples: int | None = None,
    umap_components: int | None = None,
    umap_neighbors: int = 15,
    seed: int = 42,
) -> Clusters:
    """HDBSCAN clusters of the rows of `vectors` by euclidean distance.

    Args:
        vectors: `(instances, dimensions)`; `fast` without UMAP reads them in pieces, all others read them at once.
        backend: `exact`, `fast`, `hdbscan` or `cuml`; `backends` resolves `auto`. `hdbscan` is the library. `exact`
            gives the library's labels above 60 dimensions; below, the library uses another algorithm, which
            orders equal distances differently. `fast` approximates distances and clusters a sample of more than
            10,000 instances; see `fast_hdbscan`. `cuml` runs on a GPU.
        selection: `leaf` or `eom`, the library's cluster_selection_method.
        min_cluster_size: size of the smallest group that counts as a cluster.
        min_samples: the neighbour whose distance is a point's core distance; None means `min_cluster_size`.
        umap_components: number of dimensions to reduce to with UMAP first; None skips UMAP.
        umap_neighbors: UMAP's n_neighbors.
        seed: UMAP's random_state.

    Example:
        >>> clusters = cluster(torch.randn(500, 64), min_cluster_size=20)
        >>> clusters.count, clusters.labels.shape
    """
    if backend not in _BACKENDS:
        raise SpecError(f"clusters.backend is '{backend}'; it is one of 'auto', {', '.join(map(repr, _BACKENDS))}.")
    if min_cluster_size < 2 or (min_samples is not None and min_samples < 1):
        raise SpecError(
            f"min_cluster_size must be at least 2 and min_samples at least 1, not {min_cluster_size} and {min_samples}."
        )
    instances, samples = vectors.shape[0], min_samples or min_cluster_size
    if instances < max(2, min_cluster_size):
        _read_all(vectors)
        return _all_noise(instances)  # no group can be large enough; the libraries fail on some such inputs
    if backend == "fast" and umap_components is None:
        return _renumber(*fast_clusters(vectors, selection, min_cluster_size, samples))
    whole = _read_all(vectors)
    if umap_components is not None:
        whole = _reduce(whole, umap_components, umap_neighbors, seed)
    return _renumber(*_BACKENDS[backend](whole, selection, min_cluster_size, samples))


def _read_all(vectors: Rows) -> torch.Tensor:
    """All rows as a tensor; raises if they are not finite."""
    numbers = torch.arange(vectors.shape[0])
    if isinstance(vectors, torch.Tensor):
        for block in numbers.split(_BLOCK):
            read_rows(vectors, block)
        return vectors
    out = torch.empty(*vectors.shape)
    for block in numbers.split(_BLOCK):
        out[block[0] : block[-1] + 1] = read_rows(vectors, block)
    return out


def distances(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean distances between all rows, `(n, n)` float64, by blocked matrix products."""
    x = vectors.double()
    squares = (x * x).sum(1)
    out = torch.empty(len(x), len(x), dtype=torch.float64)
    for start in range(0, len(x), _BLOCK):
        block = slice(start, start + _BLOCK)
        for other in range(0, start + 1, _BLOCK):  # the upper triangle mirrors the lower one
            columns = slice(other, other + _BLOCK)
            lengths = squares[block, None] + squares[None, columns]
            d2 = lengths - 2 * (x[block] @ x[columns].T)
            # Equal rows leave a rounding error, whose square root would separate them.
            piece = d2.masked_fill_(d2 <= 1e-12 * lengths, 0).sqrt_()
            out[block, columns] = piece
            out[columns, block] = piece.T
    out.fill_diagonal_(0)
    return out


def _exact(vectors: torch.Tensor, selection: str, size: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    # In many dimensions the library spends nearly all its time on distances and nearest neighbours. Both are computed
    # here from one n x n matrix; the library does the rest, from the spanning tree on.
    from hdbscan._hdbscan_linkage import label, mst_linkage_core
    from hdbscan.hdbscan_ import _tree_to_labels

    matrix = distances(vectors.cpu()).numpy()
    samples = min(len(matrix) - 1, samples)
    rows = (matrix[start : start + _BLOCK] for start in range(0, len(matrix), _BLOCK))
    # Copied, because a column of a sorted block would hold the whole block in memory.
    core = np.concatenate([np.partition(block, samples, axis=1)[:, samples].copy() for block in rows])
    np.maximum(matrix, core, out=matrix)
    np.maximum(matrix, core[:, None], out=matrix)
    edges = mst_linkage_core(matrix)  # of the mutual reachability distances
    del matrix
    # Many edges are equally long and their order decides which groups separate first, so sort as the library sorts.
    edges = edges[np.argsort(edges.T[2]), :]
    labels, probabilities, *_ = _tree_to_labels(None, label(edges), size, selection)
    return labels, probabilities


def _hdbscan(vectors: torch.Tensor, selection: str, size: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    from hdbscan import HDBSCAN

    model = HDBSCAN(min_cluster_size=size, min_samples=samples, cluster_selection_method=selection, core_dist_n_jobs=1)
    model.fit(vectors.double().cpu().numpy())
    return model.labels_, model.probabilities_


def require_cuml(samples: int) -> Any:
    """Return cuml; raise if it is not installed or does not take this min_samples."""
    cuml = optional.require("cuml", "clusters.backend 'cuml'", "set clusters.backend: auto")
    if samples > CUML_SAMPLES:
        raise SpecError(
            f"cuml takes min_samples up to {CUML_SAMPLES}, not {samples}; set clusters.min_samples: {CUML_SAMPLES}."
        )
    return cuml


def _cuml(vectors: torch.Tensor, selection: str, size: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    cuml = require_cuml(samples)
    model = cuml.cluster.hdbscan.HDBSCAN(
        min_cluster_size=size,
        min_samples=samples,
        metric="euclidean",
        cluster_selection_method=selection,
        output_type="numpy",
    )
    model.fit(vectors.float().cpu().numpy())  # cuML takes no CPU tensors
    return np.asarray(model.labels_), np.asarray(model.probabilities_)


_BACKENDS: dict[str, Callable[[torch.Tensor, str, int, int], tuple[np.ndarray, np.ndarray]]] = {
    "exact": _exact,
    "fast": fast_clusters,
    "hdbscan": _hdbscan,
    "cuml": _cuml,
}


def _reduce(vectors: torch.Tensor, components: int, neighbors: int, seed: int) -> torch.Tensor:
    umap = optional.require("umap", "clusters.umap_components", "leave umap_components out")
    reducer: Any = umap.UMAP(n_components=components, n_neighbors=neighbors, random_state=seed, n_jobs=1)
    return torch.from_numpy(reducer.fit_transform(vectors.float().cpu().numpy()))


def _renumber(labels: np.ndarray, probabilities: np.ndarray) -> Clusters:
    labels, probabilities = np.asarray(labels, np.int64), np.asarray(probabilities, np.float64)
    found, first = np.unique(labels[labels >= 0], return_index=True)
    order = np.empty(len(found), np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(found))
    new = np.full_like(labels, -1)
    new[labels >= 0] = order[np.searchsorted(found, labels[labels >= 0])]
    return Clusters(new, np.where(new >= 0, probabilities, 0.0), len(found))


def _all_noise(instances: int) -> Clusters:
    return Clusters(np.full(instances, -1, np.int64), np.zeros(instances), 0)
