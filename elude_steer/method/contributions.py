"""Contribution vectors: what each input dimension adds to a unit, per instance (paper, sections 3.1 and 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from elude_steer.method.clustering import Clusters
from elude_steer.method.rows import Rows

EPS = 1e-12
ROWS = 65_536  # instances summed at a time, to limit memory; fixed, because sums in another order round differently
PIECE = 4096  # instances whose contributions are computed at a time


def contributions(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What each input dimension adds to the unit, each instance scaled to length one.

    Args:
        q: `(instances, d_in)` inputs of the layer.
        weight: `(d_in,)` the unit's row of the weight matrix.

    Returns:
        `(instances, d_in)`; an instance without contributions stays zero.
    """
    c = q * weight
    return c / c.norm(dim=1, keepdim=True).clamp_min(EPS)


@dataclass(frozen=True, eq=False)
class ContributionRows:
    """The contributions of instances, computed from their inputs each time they are asked for.

    Attributes:
        q: `(instances, d_in)` inputs of the layer.
        weight: `(d_in,)` the unit's row of the weight matrix.
        block: instances that are computed at a time; each is computed on its own, so it changes no bits.
    """

    q: Rows
    weight: torch.Tensor
    block: int = PIECE

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of instances, then of inputs."""
        return self.q.shape

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), self.shape[1])
        for part, numbers in zip(out.split(self.block), rows.split(self.block), strict=True):
            part.copy_(contributions(self.q[numbers], self.weight))
        return out


def representatives(c: Rows, labels: torch.Tensor, probabilities: torch.Tensor, clusters: int) -> torch.Tensor:
    """The mean direction of each cluster's contributions, weighted by probability.

    Args:
        c: `(instances, d_in)` contribution vectors.
        labels: `(instances,)` cluster of each instance, -1 for noise.
        probabilities: `(instances,)` membership probability of each instance.
        clusters: the number of clusters, K.

    Returns:
        `(K, d_in)`, each row of length one up to `EPS`.
    """
    r = _cluster_sums(c, labels, clusters, probabilities)
    return r / (r.norm(dim=1, keepdim=True) + EPS)


def cluster_means(q: Rows, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """The mean input of each cluster's instances, `(K, d_in)`; noise counts for no cluster."""
    sizes = torch.bincount(labels[labels >= 0], minlength=clusters)
    return _cluster_sums(q, labels, clusters) / sizes[:, None]


def _cluster_sums(x: Rows, labels: torch.Tensor, clusters: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each cluster's rows, `(K, …)`, each row times its factor.

    One cluster after the other, so that the order of additions is fixed; index_add on a GPU has no fixed order.
    """
    sums = []
    for number in range(clusters):
        parts = [_sum_rows(x, rows, factors) for rows in (labels == number).nonzero()[:, 0].split(ROWS)]
        sums.append(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0])
    return torch.stack(sums) if sums else torch.zeros(0, x.shape[1])


def _sum_rows(x: Rows, rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    # A function of its own, so that one part is freed before the next is read.
    values = x[rows]  # a copy
    return (values if factors is None else values.mul_(factors[rows, None])).sum(0)


def summarize_clusters(q: Rows, c: Rows, clusters: Clusters) -> dict[str, torch.Tensor]:
    """Summarise a unit's clusters by what splitting needs: `representatives`, `means` and `sizes`.

    Args:
        q: `(instances, d_in)` inputs of the unit's strongest instances.
        c: `(instances, d_in)` their contribution vectors.
        clusters: the clusters found among the contribution vectors.
    """
    labels = torch.from_numpy(clusters.labels)
    probabilities = torch.from_numpy(clusters.probabilities).float()
    sizes = np.bincount(clusters.labels[clusters.labels >= 0], minlength=clusters.count)
    return {
        "representatives": representatives(c, labels, probabilities, clusters.count),
        "means": cluster_means(q, labels, clusters.count),
        "sizes": torch.from_numpy(sizes.astype(np.int32)),
    }


def no_clusters(d_in: int) -> dict[str, torch.Tensor]:
    """The summary of a unit without clusters, which stays whole."""
    nothing = torch.zeros(0, d_in)
    return {"representatives": nothing, "means": nothing.clone(), "sizes": torch.zeros(0, dtype=torch.int32)}
