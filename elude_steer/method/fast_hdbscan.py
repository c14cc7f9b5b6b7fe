"""Approximate HDBSCAN for many long vectors, in a fraction of the time.

There are two approximations, each with one constant.

- Distances. Compute `|x|^2 + |y|^2 - 2 x.y` with exact lengths, and with products within the `RANK` directions that
  hold most of all products (no other directions of that number have a smaller error). A projection alone would lose
  the part of noise outside these directions, and noise would crowd into clusters. Up to `EXACT_DIMENSIONS` dimensions
  the products are exact too.
- Instances. Of more than `SAMPLE` instances only an evenly spaced sample makes the tree, with min_cluster_size and
  min_samples reduced in proportion, so that densities are estimated at the same scale. The other instances join the
  tree as in HDBSCAN's own prediction: by their mutual reachability to the nearest instance of the sample. They are
  read in pieces, so that memory does not grow with their number.

This module exists because no library accepts approximate products: fast_hdbscan and scikit-learn take vectors of few
dimensions or all distances. hdbscan does everything from the spanning tree on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from elude_steer.method.rows import Rows, read_rows

RANK = 128
EXACT_DIMENSIONS = 1024  # up to here exact products cost little more than finding the directions
SAMPLE = 10_000
APPROXIMATION = (
    f"products within {RANK} directions above {EXACT_DIMENSIONS} dimensions, a sample above {SAMPLE:,} instances a unit"
)
_POWER_ITERATIONS = 2
_BASIS_ROWS = 5000  # rows that the directions are estimated from
_BLOCK = 1024  # rows of one product; fixed, because products of another shape may round differently


def fast_clusters(vectors: Rows, selection: str, size: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of the rows; the backend `fast` of `clustering.cluster`."""
    n, dimensions = vectors.shape
    chosen = np.arange(SAMPLE) * n // SAMPLE if n > SAMPLE else np.arange(n)
    fraction = len(chosen) / n
    size, samples = max(2, round(size * fraction)), max(1, round(samples * fraction))
    sample = read_rows(vectors, torch.from_numpy(chosen)).float()
    basis = directions(sample) if dimensions > EXACT_DIMENSIONS else None
    points = Sketch.from_rows(sample, basis)
    del sample
    squared = points.squared_distances(points)
    # The nearest entry of each row is the point itself.
    core = kth_smallest(squared.fill_diagonal_(0), min(samples, len(chosen) - 1))
    tree = ClusterTree.from_distances(squared.numpy(), core.numpy(), selection, size)
    del squared
    if n == len(chosen):
        return tree.labels, tree.probabilities
    labels, probabilities = np.full(n, -1, np.int64), np.zeros(n)
    labels[chosen], probabilities[chosen] = tree.labels, tree.probabilities
    others = np.setdiff1d(np.arange(n), chosen, assume_unique=True)
    for start in range(0, len(others), _BLOCK):
        rows = others[start : start + _BLOCK]
        new = Sketch.from_rows(read_rows(vectors, torch.from_numpy(rows)).float(), basis)
        squared = new.squared_distances(points)
        labels[rows], probabilities[rows] = tree.predict(squared, core, min(samples, len(chosen)) - 1)
    return labels, probabilities


def directions(x: torch.Tensor, rank: int = RANK) -> torch.Tensor:
    """An orthonormal basis of the directions that hold most of the rows' products, `(dimensions, rank)`."""
    rank = min(rank, *x.shape)
    generator = torch.Generator(device="cpu").manual_seed(0)
    basis = torch.randn(x.shape[1], rank, generator=generator).to(x)
    rows = x[:: max(1, len(x) // _BASIS_ROWS)]  # a part of the rows has the same main directions as all rows
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(_multiply_gram(rows, basis)).Q
    return basis


def _multiply_gram(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """`x.T @ x @ basis` in fixed blocks of rows."""
    total = torch.zeros_like(basis)
    for block in x.split(_BLOCK):
        total.addmm_(block.T, block @ basis)
    return total


@dataclass(frozen=True, eq=False)
class Sketch:
    """Rows projected to a few directions, with their exact squared lengths.

    The product of one sketch's `left` and another's `right` is the matrix of squared distances.

    Attributes:
        left: `(rows, rank + 2)`: projections, squared lengths, ones.
        right: `(rows, rank + 2)`: projections times -2, ones, squared lengths.
    """

    left: torch.Tensor
    right: torch.Tensor

    @classmethod
    def from_rows(cls, x: torch.Tensor, basis: torch.Tensor | None) -> Sketch:
        """Sketch some rows; without a basis keep all their dimensions."""
        projected = x if basis is None else torch.cat([block @ basis for block in x.split(_BLOCK)])
        squares = torch.cat([block.square().sum(1, keepdim=True) for block in x.split(_BLOCK)])
        ones = torch.ones_like(squares)
        return cls(torch.cat([projected, squares, ones], 1), torch.cat([-2 * projected, ones, squares], 1))

    def squared_distances(self, other: Sketch) -> torch.Tensor:
        """Squared distances to the rows of another sketch, `(rows, others)`; rounding may make them negative."""
        out = torch.empty(len(self.left), len(other.right))
        for start in range(0, len(out), _BLOCK):
            torch.mm(self.left[start : start + _BLOCK], other.right.T, out=out[start : start + _BLOCK])
        return out


def kth_smallest(squared: torch.Tensor, k: int) -> torch.Tensor:
    """The entry of each row that `k` entries precede in ascending order, `(rows,)`."""
    blocks = squared.split(_BLOCK)
    return torch.cat([block.topk(k + 1, 1, largest=False, sorted=False).values.amax(1) for block in blocks])


def spanning_tree(squared: np.ndarray, core: np.ndarray) -> np.ndarray:
    """A minimum spanning tree of the mutual reachability, by Prim's algorithm.

    hdbscan's own function needs the mutual reachability of all pairs in double precision, and does five times the work
    per step.

    Args:
        squared: `(n, n)` squared distances.
        core: `(n,)` squared core distances.

    Returns:
        `(n - 1, 3)` edges: from, to, squared mutual reachability.
    """
    n = len(squared)
    outside = np.arange(1, n)  # points outside the tree; for each, the shortest edge to the tree and where it starts
    length, origin = np.full(n - 1, np.inf, np.float32), np.zeros(n - 1, np.int64)
    edges, newest = np.empty((n - 1, 3)), 0
    for step in range(n - 1):
        row = np.maximum(squared[newest, outside], core[newest])
        np.maximum(row, core[outside], out=row)
        closer = row < length
        length[closer], origin[closer] = row[closer], newest
        best = int(length.argmin())
        newest = int(outside[best])
        edges[step] = origin[best], newest, length[best]
        for array in (outside, length, origin):  # the last entry replaces the one that joins the tree
            array[best] = array[-1]
        outside, length, origin = outside[:-1], length[:-1], origin[:-1]
    return edges


@dataclass(frozen=True, eq=False)
class ClusterTree:
    """The clusters of a sample, and the densities (1 / distance) that decide where further points belong.

    Attributes:
        labels: `(sample,)`, -1 for noise.
        probabilities: `(sample,)`.
        births: `(clusters,)` the density from which on points belong to a cluster and not to its parent.
        deaths: `(clusters,)` the density of a cluster's densest point, where the probability is 1.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    births: np.ndarray
    deaths: np.ndarray

    @classmethod
    def from_distances(cls, squared: np.ndarray, core: np.ndarray, selection: str, size: int) -> ClusterTree:
        """Cluster points by their squared distances `(n, n)` and squared core distances `(n,)`."""
        from hdbscan._hdbscan_linkage import label
        from hdbscan.hdbscan_ import _tree_to_labels

        edges = spanning_tree(squared, core)
        edges[:, 2] = np.sqrt(np.maximum(edges[:, 2], 0))
        edges = edges[np.argsort(edges[:, 2], kind="stable")]
        labels, probabilities, _, condensed, _ = _tree_to_labels(None, label(edges), size, selection)
        return cls(labels, probabilities, *_birth_and_death(condensed, labels))

    def predict(self, squared: torch.Tensor, core: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Labels and probabilities of further points.

        Args:
            squared: `(points, sample)` squared distances to the sample.
            core: `(sample,)` squared core distances of the sample.
            k: the points' core distance is the entry of their row that `k` entries precede.
        """
        point_core = kth_smallest(squared, k)
        reach, neighbor = torch.maximum(squared, core).clamp_min_(point_core[:, None]).min(1)
        density = 1 / np.sqrt(np.maximum(reach.double().numpy(), 1e-30))
        labels = self.labels[neighbor.numpy()]
        inside = (labels >= 0) & (density >= np.append(self.births, np.inf)[labels])
        probabilities = np.minimum(density / np.append(self.deaths, np.inf)[labels], 1)
        return np.where(inside, labels, -1), np.where(inside, probabilities, 0.0)


def _birth_and_death(condensed: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each label, the density where its cluster starts and the density of its densest point."""
    count, points = int(labels.max(initial=-1)) + 1, len(labels)
    parent, child, density = (condensed[name] for name in ("parent", "child", "lambda_val"))
    births, deaths = np.zeros(count), np.zeros(count)
    above = {int(c): (int(p), float(d)) for p, c, d in zip(parent, child, density, strict=True) if c >= points}
    leaves = child < points
    labelled = leaves & (labels[np.where(leaves, child, 0)] >= 0)
    np.maximum.at(deaths, labels[child[labelled]], density[labelled])
    # A node whose points all have one label is that label's cluster or a part of it; the uppermost is the cluster.
    node_labels: dict[int, set[int]] = {}
    for p, c in zip(parent[leaves], child[leaves], strict=True):
        node_labels.setdefault(int(p), set()).add(int(labels[c]))
    for c in sorted(above, reverse=True):  # children have larger numbers than their parents
        node_labels.setdefault(above[c][0], set()).update(node_labels.get(c, set()))
    for c in sorted(above):
        found = node_labels.get(c, set())
        if len(found) == 1 and (label := next(iter(found))) >= 0 and not births[label]:
            births[label] = above[c][1]
    return births, deaths
