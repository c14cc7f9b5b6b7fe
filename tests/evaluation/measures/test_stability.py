"""Stability against closed forms."""

import pytest
import torch

from elude_steer.evaluation.measures.stability import stability


def rows(count, d, seed=0):
    return torch.randn(count, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_stability_of_a_permuted_dictionary_is_one():
    units = [rows(k, 12, seed=k) for k in (1, 3, 8)]
    shuffled = [unit[torch.randperm(len(unit), generator=torch.Generator().manual_seed(1))] for unit in units]
    assert stability(units, shuffled) == pytest.approx(1, abs=1e-12)
    assert stability(units, [3 * unit for unit in units]) == pytest.approx(1, abs=1e-12)


def test_stability_falls_with_missing_extra_and_opposite_vectors():
    eye = torch.eye(4)
    assert stability([eye[:2]], [eye[2:]]) == pytest.approx(0, abs=1e-12)
    assert stability([eye[:2]], [eye]) == pytest.approx(1 - 2 / 4)  # the same two, and two extra
    assert stability([eye[:2], eye], [eye[:2], -eye]) == pytest.approx((1 + 0) / 2)  # opposite vectors are not similar
    assert stability([eye[:1], eye[:0]], [eye[:1], eye[:0]]) == 1
    with pytest.raises(ValueError, match="runs of 1 and 2 units cannot be compared"):
        stability([eye], [eye, eye])
