"""Geometry against closed forms."""

import pytest
import torch

from elude_steer.evaluation.measures import geometry
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank


def rows(count, d, seed=0):
    return torch.randn(count, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_effective_rank_of_the_identity(n):
    assert effective_rank(torch.eye(n)) == pytest.approx(n, rel=1e-12)
    assert effective_rank(5 * torch.eye(n)) == pytest.approx(n, rel=1e-12)
    assert effective_rank(rows(1, 9).expand(n, 9)) == pytest.approx(1, abs=1e-6)


def test_effective_rank_of_two_directions():
    """Singular values 3 and 1: exp of the entropy of (3/4, 1/4)."""
    known = float(torch.exp(-torch.tensor([0.75, 0.25]).double().mul(torch.tensor([0.75, 0.25]).double().log()).sum()))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(known, rel=1e-9)


def test_collinearity_is_the_largest_cosine_of_two_rows():
    x = rows(30, 40)
    assert collinearity(torch.eye(9)) == 0
    assert collinearity(torch.cat([x, -3 * x[4:5]])) == pytest.approx(1, abs=1e-12)
    unit = torch.nn.functional.normalize(x, dim=1)
    known = (unit @ unit.T).abs().fill_diagonal_(0).max()
    assert collinearity(x) == pytest.approx(float(known), abs=1e-12)
    assert collinearity(torch.cat([x, torch.zeros(2, 40)])) == pytest.approx(float(known), abs=1e-12)
    assert collinearity(x[:1]) == 0


def test_collinearity_does_not_depend_on_the_block_size(monkeypatch):
    x = rows(30, 8)
    expected = collinearity(x)
    monkeypatch.setattr(geometry, "_BLOCK", 7)
    assert collinearity(x) == pytest.approx(expected, abs=1e-15)


def test_collinearity_of_tiny_and_of_infinite_vectors():
    assert collinearity(torch.full((2, 3), 1e-13, dtype=torch.float64)) == pytest.approx(1)
    with pytest.raises(ValueError, match="not finite"):
        collinearity(torch.tensor([[1.0, torch.nan], [0, 1]]))
