"""Measures against closed forms: what they say where the answer is known."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from elude_steer.evaluation.measures.efficiency import measure
from elude_steer.evaluation.measures.faithfulness import R2, accuracy, caption_agreement
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.stability import stability
from elude_steer.method.layers import SplitLinear


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


def test_collinearity():
    x = rows(30, 40)
    assert collinearity(torch.eye(9)) == 0
    assert collinearity(torch.cat([x, -3 * x[4:5]])) == pytest.approx(1, abs=1e-12)
    unit = torch.nn.functional.normalize(x, dim=1)
    known = (unit @ unit.T).abs().fill_diagonal_(0).max()
    assert collinearity(x) == pytest.approx(float(known), abs=1e-12)
    assert collinearity(torch.cat([x, torch.zeros(2, 40)])) == pytest.approx(float(known), abs=1e-12)
    assert collinearity(x[:1]) == 0


def test_collinearity_in_pieces(monkeypatch):
    from elude_steer.evaluation.measures import geometry

    x = rows(30, 8)
    whole = collinearity(x)
    monkeypatch.setattr(geometry, "_BLOCK", 7)
    assert collinearity(x) == pytest.approx(whole, abs=1e-15)


def test_stability_of_a_permuted_dictionary_is_one():
    units = [rows(k, 12, seed=k) for k in (1, 3, 8)]
    shuffled = [unit[torch.randperm(len(unit), generator=torch.Generator().manual_seed(1))] for unit in units]
    assert stability(units, shuffled) == pytest.approx(1, abs=1e-12)
    assert stability(units, [3 * unit for unit in units]) == pytest.approx(1, abs=1e-12)


def test_stability_of_what_differs():
    eye = torch.eye(4)
    assert stability([eye[:2]], [eye[2:]]) == pytest.approx(0, abs=1e-12)
    assert stability([eye[:2]], [eye]) == pytest.approx(1 - 2 / 4)  # the same two, and two too many
    assert stability([eye[:2], eye], [eye[:2], -eye]) == pytest.approx((1 + 0) / 2)  # opposites are not alike
    assert stability([eye[:1], eye[:0]], [eye[:1], eye[:0]]) == 1
    with pytest.raises(ValueError, match="runs of 1 and 2 units cannot be compared"):
        stability([eye], [eye, eye])


def test_r2_in_pieces_is_that_of_the_whole():
    true, made = rows(100, 6, 1) + 1000, rows(100, 6, 1) + 1000 + 0.1 * rows(100, 6, 2)
    known = 1 - (true - made).square().sum() / (true - true.mean(0)).square().sum()
    for size in (100, 33, 1):
        r2 = R2()
        for a, b in zip(true.split(size), made.split(size), strict=True):
            r2.add(a, b)
        assert r2.value == pytest.approx(float(known), abs=1e-9)
    whole = R2()
    whole.add(true, true)
    assert whole.value == 1
    mean = R2()
    mean.add(true, true.mean(0).expand_as(true))
    assert mean.value == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="no outputs"):
        _ = R2().value


def test_accuracy_of_a_head():
    batches = [(torch.eye(3)[[0, 1, 2]], [0, 1, 1]), (torch.eye(3)[[2]], torch.tensor([2]))]
    assert accuracy(lambda x: x, batches) == 3 / 4
    with pytest.raises(ValueError, match="no pictures to classify"):
        accuracy(lambda x: x, [])


def test_the_explicit_layer_says_the_same_and_a_broken_one_does_not(steerer):
    from elude_steer import toyland

    vlm, atlas = steerer.vlm, steerer.atlas
    pictures = [scene.image for scene in toyland.scenes(5, 6)]
    assert caption_agreement(vlm, SplitLinear(vlm.layer, atlas.members(), atlas.units), pictures, size=4) == 1
    broken = nn.Linear(vlm.layer.in_features, vlm.layer.out_features)
    nn.init.normal_(broken.weight, std=3)
    assert caption_agreement(vlm, broken, pictures) < 1
    assert vlm.model.get_submodule(vlm.layer_name) is vlm.layer


@pytest.mark.parametrize("compiled", [None, lambda call: call], ids=["in turns", "one by one"])
def test_costs_are_told_beside_the_bare_model(compiled):
    work = [1]

    @contextmanager
    def heavy():
        work[0] = 6
        yield
        work[0] = 1

    x = torch.randn(300, 300)

    def call():
        for _ in range(work[0]):
            x @ x

    found = measure(call, {"bare": nullcontext, "heavy": heavy}, warm_up=2, runs=15, compiled=compiled)
    assert list(found) == ["bare", "heavy"]
    assert found["bare"].slower == 0
    assert found["heavy"].slower > 1
    assert found["heavy"].milliseconds > found["bare"].milliseconds
    assert found["bare"].megabytes is None or found["bare"].megabytes > 10
    with pytest.raises(ValueError, match="at least one way"):
        measure(call, {})


def test_the_bare_model_is_measured_before_the_other_is_made():
    made = []

    @contextmanager
    def other():
        made.append(len(passes))
        yield

    passes = []

    def call():
        passes.append(torch.is_inference_mode_enabled())

    measure(call, {"bare": nullcontext, "other": other}, warm_up=3, runs=2)
    assert made[0] == 4  # three to warm up, and the one whose peak counts
    assert all(passes)  # also those that warm up


def test_r2_of_nothing_and_of_what_does_not_fit():
    r2, y = R2(), torch.randn(20, 4)
    r2.add(y[:0], y[:0])
    r2.add(y, y)
    r2.add(y[:0], y[:0])
    assert r2.value == 1
    with pytest.raises(ValueError, match=r"\(20, 4\) are compared with \(20, 1\)"):
        r2.add(y, y[:, :1])


def test_directions_however_short_and_none_that_are_not_finite():
    assert collinearity(torch.full((2, 3), 1e-13, dtype=torch.float64)) == pytest.approx(1)
    with pytest.raises(ValueError, match="not finite"):
        collinearity(torch.tensor([[1.0, torch.nan], [0, 1]]))
