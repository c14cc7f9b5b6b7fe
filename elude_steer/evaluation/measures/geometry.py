"""Geometry of a dictionary's vectors: how many dimensions they fill, and whether any two are duplicates."""

from __future__ import annotations

import torch

from elude_steer.utils.progress import track

_BLOCK = 1024  # rows of one product, to bound the memory


def effective_rank(vectors: torch.Tensor) -> float:
    """Number of dimensions that the rows fill: exp of the entropy of their singular values, as shares of their sum."""
    values = torch.linalg.svdvals(vectors.double())
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float((-(shares * shares.log()).sum()).exp())


def collinearity(vectors: torch.Tensor) -> float:
    """The largest |cosine| between two rows; 1 means that there are duplicates. Rows of length zero do not count."""
    if not torch.isfinite(vectors).all():
        raise ValueError("vectors that are not finite have no angles.")
    unit = normalize_rows(vectors[vectors.double().norm(dim=1) > 0])
    if len(unit) < 2:
        return 0.0
    largest = 0.0
    for start in track(range(0, len(unit), _BLOCK), "comparing", "blocks"):
        cosines = (unit[start : start + _BLOCK] @ unit.T).abs()
        rows = torch.arange(len(cosines))
        cosines[rows, rows + start] = 0
        largest = max(largest, float(cosines.max()))
    return min(largest, 1.0)  # rounding


def normalize_rows(vectors: torch.Tensor) -> torch.Tensor:
    """The rows as float64 of length 1; rows of length zero stay zero."""
    rows = vectors.double()
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
