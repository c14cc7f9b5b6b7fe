"""HDBSCAN of many long vectors in a fraction of the time: approximate distances, and a sample of the instances.

Two approximations, each with one constant.

- Distances. `|x|^2 + |y|^2 - 2 x.y` with the lengths as they are and the products within the `RANK` directions that
  hold most of all products (their error is the smallest that so few directions allow). A projection alone would lose
  what noise has outside these directions, and noise would crowd into clusters. Up to
  `EXACT_DIMENSIONS` dimensions nothing is left out.
- Beyond `SAMPLE` instances, every n-th makes the tree, with min_cluster_size and min_samples in proportion, so that
  densities are estimated at the same scale. The others join it as points of HDBSCAN's own prediction do: at their
  mutual reachability to the nearest of the sample.

Written by hand because no library takes approximate products: fast_hdbscan and scikit-learn want vectors of few
dimensions or all distances. Everything from the spanning tree on is hdbscan's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

RANK = 128
EXACT_DIMENSIONS = (
    1024  # up to so many dimensions products are taken as they are: that costs little more than finding directions
)
SAMPLE = 10_000
APPROXIMATION = (
    f"products within {RANK} directions above {EXACT_DIMENSIONS} dimensions, a sample above {SAMPLE:,} instances a unit"
)
_ROUNDS, _LEARN = 2, 5000  # of power iteration, and rows that directions are learnt from
_BLOCK = 1024  # rows of one product: fixed, because another shape may round differently


def fast_clusters(vectors: torch.Tensor, selection: str, size: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of the rows; see `clusters.cluster`."""
    n = len(vectors)
    chosen = np.arange(SAMPLE) * n // SAMPLE if n > SAMPLE else np.arange(n)
    share = len(chosen) / n
    size, samples = max(2, round(size * share)), max(1, round(samples * share))
    x = vectors.cpu().float()
    inside = x[torch.from_numpy(chosen)] if n > len(chosen) else x
    basis = directions(inside) if x.shape[1] > EXACT_DIMENSIONS else None
    points = Sketch.of(inside, basis)
    squared = points.squared_to(points)
    core = nearest(squared.fill_diagonal_(0), min(samples, len(chosen) - 1))  # the first of a row is the point itself
    tree = Tree.of(squared.numpy(), core.numpy(), selection, size)
    del squared
    if n == len(chosen):
        return tree.labels, tree.probabilities
    labels, probabilities = np.full(n, -1, np.int64), np.zeros(n)
    labels[chosen], probabilities[chosen] = tree.labels, tree.probabilities
    others = np.setdiff1d(np.arange(n), chosen, assume_unique=True)
    for start in range(0, len(others), _BLOCK):
        rows = others[start : start + _BLOCK]
        new = Sketch.of(x[torch.from_numpy(rows)], basis)
        labels[rows], probabilities[rows] = tree.joined(new.squared_to(points), core, min(samples, len(chosen)) - 1)
    return labels, probabilities


def directions(x: torch.Tensor, rank: int = RANK) -> torch.Tensor:
    """An orthonormal basis of the directions that hold most of the rows' products, `(dimensions, rank)`."""
    rank = min(rank, *x.shape)
    start = torch.Generator(device="cpu").manual_seed(0)
    basis = torch.randn(x.shape[1], rank, generator=start).to(x)
    some = x[:: max(1, len(x) // _LEARN)]  # what a part of the rows has in common, all have
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(_through(some, basis)).Q
    return basis


def _through(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """`x.T @ x @ basis` in fixed blocks of rows."""
    total = torch.zeros_like(basis)
    for block in x.split(_BLOCK):
        total.addmm_(block.T, block @ basis)
    return total


@dataclass(frozen=True, eq=False)
class Sketch:
    """Rows within some directions with the squares of their whole lengths, so that a product gives a distance.

    Attributes:
        here: `(rows, rank + 2)`, and `there`: their product with another sketch's is the squared distance.
    """

    here: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, basis: torch.Tensor | None) -> Sketch:
        """The sketch of some rows; without a basis in all their dimensions."""
        within = x if basis is None else torch.cat([block @ basis for block in x.split(_BLOCK)])
        squares = torch.cat([block.square().sum(1, keepdim=True) for block in x.split(_BLOCK)])
        one = torch.ones_like(squares)
        return cls(torch.cat([within, squares, one], 1), torch.cat([-2 * within, one, squares], 1))

    def squared_to(self, other: Sketch) -> torch.Tensor:
        """Squared distances to the rows of another sketch, `(rows, others)`; rounding may leave them below zero."""
        out = torch.empty(len(self.here), len(other.there))
        for start in range(0, len(out), _BLOCK):
            torch.mm(self.here[start : start + _BLOCK], other.there.T, out=out[start : start + _BLOCK])
        return out


def nearest(squared: torch.Tensor, number: int) -> torch.Tensor:
    """The entry of each row that so many are smaller than, `(rows,)`."""
    blocks = squared.split(_BLOCK)
    return torch.cat([block.topk(number + 1, 1, largest=False, sorted=False).values.amax(1) for block in blocks])


def spanning_tree(squared: np.ndarray, core: np.ndarray) -> np.ndarray:
    """The edges of a minimum spanning tree of the mutual reachability, `(n - 1, 3)` from, to, squared; Prim's way.

    hdbscan's own wants the mutual reachability of all pairs in double precision, and does five times the work a step.
    """
    n = len(squared)
    left = np.arange(1, n)  # not in the tree yet, and for each of them the shortest edge to it so far
    length, origin = np.full(n - 1, np.inf, np.float32), np.zeros(n - 1, np.int64)
    edges, at = np.empty((n - 1, 3)), 0
    for step in range(n - 1):
        row = np.maximum(squared[at, left], core[at])
        np.maximum(row, core[left], out=row)
        closer = row < length
        length[closer], origin[closer] = row[closer], at
        best = int(length.argmin())
        at = int(left[best])
        edges[step] = origin[best], at, length[best]
        for array in (left, length, origin):  # the last takes the place of the one that is in now
            array[best] = array[-1]
        left, length, origin = left[:-1], length[:-1], origin[:-1]
    return edges


@dataclass(frozen=True, eq=False)
class Tree:
    """The clusters of a sample, and what is needed to let other points join them.

    Attributes:
        labels, probabilities: of the sample.
        births: the density (1 / distance) from which on a cluster's points belong to it and not to its parent.
        deaths: the density of its densest point, where the probability is 1.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    births: np.ndarray
    deaths: np.ndarray

    @classmethod
    def of(cls, squared: np.ndarray, core: np.ndarray, selection: str, size: int) -> Tree:
        """The clusters of points with these squared distances and squared core distances."""
        from hdbscan._hdbscan_linkage import label
        from hdbscan.hdbscan_ import _tree_to_labels

        edges = spanning_tree(squared, core)
        edges[:, 2] = np.sqrt(np.maximum(edges[:, 2], 0))
        edges = edges[np.argsort(edges[:, 2], kind="stable")]
        labels, probabilities, _, condensed, _ = _tree_to_labels(None, label(edges), size, selection)
        return cls(labels, probabilities, *_densities(condensed, labels))

    def joined(self, squared: torch.Tensor, core: torch.Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Labels and probabilities of further points, by their squared distances to the sample, `(points, sample)`."""
        own = nearest(squared, number)
        reach, at = torch.maximum(squared, core).clamp_min_(own[:, None]).min(1)
        density = 1 / np.sqrt(np.maximum(reach.double().numpy(), 1e-30))
        labels = self.labels[at.numpy()]
        inside = (labels >= 0) & (density >= np.append(self.births, np.inf)[labels])
        probabilities = np.minimum(density / np.append(self.deaths, np.inf)[labels], 1)
        return np.where(inside, labels, -1), np.where(inside, probabilities, 0.0)


def _densities(condensed: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each label the densities where its cluster is born and where its densest point is."""
    count, points = int(labels.max(initial=-1)) + 1, len(labels)
    parent, child, density = (condensed[name] for name in ("parent", "child", "lambda_val"))
    births, deaths = np.zeros(count), np.zeros(count)
    above = {int(c): (int(p), float(d)) for p, c, d in zip(parent, child, density, strict=True) if c >= points}
    leaves = child < points
    named = leaves & (labels[np.where(leaves, child, 0)] >= 0)
    np.maximum.at(deaths, labels[child[named]], density[named])
    # Whose points all have one label is that label's cluster or part of it; the uppermost is the cluster.
    own: dict[int, set[int]] = {}
    for p, c in zip(parent[leaves], child[leaves], strict=True):
        own.setdefault(int(p), set()).add(int(labels[c]))
    for c in sorted(above, reverse=True):  # children have larger numbers than their parents
        own.setdefault(above[c][0], set()).update(own.get(c, set()))
    for c in sorted(above):
        found = own.get(c, set())
        if len(found) == 1 and (one := next(iter(found))) >= 0 and not births[one]:
            births[one] = above[c][1]
    return births, deaths
