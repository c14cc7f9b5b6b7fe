"""Contribution vectors: which inputs of a unit drove it, for each of its strongest instances (paper 3.1 and 3.2)."""

from __future__ import annotations

import numpy as np
import torch

from elude_steer.method.clustering import cluster
from elude_steer.specs import ClustersSpec

EPS = 1e-12


def contributions(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What each input dimension added to the unit, each instance scaled to length one.

    Args:
        q: `(instances, d_in)` inputs of the layer.
        weight: `(d_in,)` the unit's row of the weight matrix.

    Returns:
        `(instances, d_in)`; an instance without any contribution stays zero.
    """
    c = q * weight
    return c / c.norm(dim=1, keepdim=True).clamp_min(EPS)


def representatives(c: torch.Tensor, labels: torch.Tensor, probabilities: torch.Tensor, clusters: int) -> torch.Tensor:
    """The probability-weighted mean direction of each cluster's contributions.

    Args:
        c: `(instances, d_in)` contribution vectors.
        labels: `(instances,)` cluster of each instance, -1 for noise.
        probabilities: `(instances,)` how surely it belongs there.
        clusters: their number, K.

    Returns:
        `(K, d_in)`, each of length one up to `EPS`.
    """
    r = _cluster_sums(c * probabilities[:, None], labels, clusters)
    return r / (r.norm(dim=1, keepdim=True) + EPS)


def cluster_means(q: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """The mean input of each cluster's instances, `(K, d_in)`; noise belongs to none."""
    sizes = torch.bincount(labels[labels >= 0], minlength=clusters)
    return _cluster_sums(q, labels, clusters) / sizes[:, None]


def _cluster_sums(x: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    # One cluster after the other: the order of the additions is fixed, as index_add's on a GPU is not.
    sums = x.new_zeros(clusters, x.shape[1])
    for number in range(clusters):
        sums[number] = x[labels == number].sum(0)
    return sums


def cluster_unit(q: torch.Tensor, weight: torch.Tensor, spec: ClustersSpec) -> dict[str, torch.Tensor]:
    """Representatives, means and sizes of the clusters of a unit's strongest inputs, `(instances, d_in)`."""
    c = contributions(q, weight)
    found = cluster(
        c,
        backend=spec.backend,
        selection=spec.selection,
        min_cluster_size=spec.min_cluster_size,
        min_samples=spec.min_samples,
        umap_components=spec.umap_components,
        umap_neighbors=spec.umap_neighbors,
        seed=spec.seed,
    )
    labels, sizes = torch.from_numpy(found.labels), np.bincount(found.labels[found.labels >= 0], minlength=found.count)
    return {
        "representatives": representatives(c, labels, torch.from_numpy(found.probabilities).float(), found.count),
        "means": cluster_means(q, labels, found.count),
        "sizes": torch.from_numpy(sizes.astype(np.int32)),
    }


def unclustered(d_in: int) -> dict[str, torch.Tensor]:
    """What stands for the clusters of a unit that is not to be split."""
    nothing = torch.zeros(0, d_in)
    return {"representatives": nothing, "means": nothing.clone(), "sizes": torch.zeros(0, dtype=torch.int32)}
