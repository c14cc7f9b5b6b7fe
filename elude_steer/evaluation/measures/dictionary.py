"""What a dictionary of sub-units is like as vectors: whether it comes out again, how much room it fills, duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK = 1024  # rows of one product, for the memory


def stability(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """How alike two runs are: 1 where every unit has the same sub-units, in any order.

    For each unit the vectors are matched one to one so that the cosines add up to the most, over as many as both have
    (the first of each); a run with more of them loses the share it has too many.

    Args:
        one: for each unit the vectors of its sub-units, `(k, d)`; dictionaries without units are one unit.
        other: the same of another run.
    """
    from scipy.optimize import linear_sum_assignment

    if len(one) != len(other) or not len(one):
        raise ValueError(f"runs of {len(one)} and {len(other)} units cannot be compared; take two runs of one layer.")
    found = []
    for a, b in zip(one, other, strict=True):
        if not len(a) and not len(b):
            continue  # nothing is found again as nothing
        count, most = min(len(a), len(b)), max(len(a), len(b))
        alike = 0.0
        if count:
            cosines = (_unit(a[:count]) @ _unit(b[:count]).T).numpy()
            alike = float(cosines[linear_sum_assignment(cosines, maximize=True)].mean())
        found.append(alike - (most - count) / most)
    return float(torch.tensor(found, dtype=torch.float64).mean())


def effective_rank(vectors: torch.Tensor) -> float:
    """How many directions the rows fill: exp of the entropy of their singular values, as shares of their sum."""
    values = torch.linalg.svdvals(vectors.double())
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float((-(shares * shares.log()).sum()).exp())


def collinearity(vectors: torch.Tensor) -> float:
    """The largest |cosine| between two rows; 1 says that there are duplicates. Rows without length do not count."""
    if not torch.isfinite(vectors).all():
        raise ValueError("vectors that are not finite have no angles.")
    unit = _unit(vectors[vectors.double().norm(dim=1) > 0])
    if len(unit) < 2:
        return 0.0
    largest = 0.0
    for start in range(0, len(unit), _BLOCK):
        cosines = (unit[start : start + _BLOCK] @ unit.T).abs()
        rows = torch.arange(len(cosines))
        cosines[rows, rows + start] = 0
        largest = max(largest, float(cosines.max()))
    return min(largest, 1.0)  # rounding


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    long = vectors.double()
    return long / long.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
