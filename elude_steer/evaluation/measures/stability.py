"""Stability: whether two runs find the same vectors for every unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elude_steer.evaluation.measures.geometry import normalize_rows
from elude_steer.utils.progress import track


def stability(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Similarity of two runs: 1 where every unit has the same sub-units, in any order.

    The vectors of each unit are matched one to one so that the sum of their cosines is largest. Only the first `count`
    vectors of each run take part, where `count` is the smaller of the two numbers. The surplus of the larger run is
    subtracted as a share of its size.

    Args:
        one: for each unit the vectors of its sub-units, `(k, d)`; a dictionary without units counts as one unit.
        other: the same of another run.
    """
    from scipy.optimize import linear_sum_assignment

    if len(one) != len(other) or not len(one):
        raise ValueError(f"runs of {len(one)} and {len(other)} units cannot be compared; take two runs of one layer.")
    similarities = []
    for a, b in track(zip(one, other, strict=True), "matching", "units", len(one)):
        if not len(a) and not len(b):
            continue  # a unit without vectors in both runs says nothing
        smaller, larger = min(len(a), len(b)), max(len(a), len(b))
        similarity = 0.0
        if smaller:
            cosines = (normalize_rows(a[:smaller]) @ normalize_rows(b[:smaller]).T).numpy()
            similarity = float(cosines[linear_sum_assignment(cosines, maximize=True)].mean())
        similarities.append(similarity - (larger - smaller) / larger)
    return float(torch.tensor(similarities, dtype=torch.float64).mean())
