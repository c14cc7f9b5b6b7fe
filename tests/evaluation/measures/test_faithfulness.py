"""Faithfulness against closed forms, and on toyland."""

import pytest
import torch
from torch import nn

from elude_steer import toyland
from elude_steer.evaluation.measures.faithfulness import R2, accuracy, caption_agreement, linear_head
from elude_steer.method.layers import SplitLinear


def rows(count, d, seed=0):
    return torch.randn(count, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_r2_does_not_depend_on_the_batches():
    true, approximate = rows(100, 6, 1) + 1000, rows(100, 6, 1) + 1000 + 0.1 * rows(100, 6, 2)
    known = 1 - (true - approximate).square().sum() / (true - true.mean(0)).square().sum()
    for size in (100, 33, 1):
        r2 = R2()
        for a, b in zip(true.split(size), approximate.split(size), strict=True):
            r2.add(a, b)
        assert r2.value == pytest.approx(float(known), abs=1e-9)
    perfect = R2()
    perfect.add(true, true)
    assert perfect.value == 1
    mean = R2()
    mean.add(true, true.mean(0).expand_as(true))
    assert mean.value == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="no outputs"):
        _ = R2().value


def test_r2_ignores_empty_batches_and_refuses_other_shapes():
    r2, y = R2(), torch.randn(20, 4)
    r2.add(y[:0], y[:0])
    r2.add(y, y)
    r2.add(y[:0], y[:0])
    assert r2.value == 1
    with pytest.raises(ValueError, match=r"\(20, 4\) are compared with \(20, 1\)"):
        r2.add(y, y[:, :1])


def test_accuracy_counts_correct_classes():
    batches = [(torch.eye(3)[[0, 1, 2]], [0, 1, 1]), (torch.eye(3)[[2]], torch.tensor([2]))]
    assert accuracy(lambda x: x, batches) == 3 / 4
    with pytest.raises(ValueError, match="no images to classify"):
        accuracy(lambda x: x, [])


def test_a_linear_head_separates_classes():
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 4, (400,), generator=generator) * 2  # classes without examples stay impossible
    features = torch.eye(8)[classes] * 3 + torch.randn(400, 8, generator=generator) * 0.3
    head = linear_head(features[:200], classes[:200])
    assert accuracy(head, [(features[200:], classes[200:])]) == 1
    assert head(features[:3]).shape == (3, 7)
    with pytest.raises(ValueError, match="at least three classes"):
        linear_head(features, classes.clamp_max(1))


def test_captions_agree_for_the_explicit_layer_and_not_for_a_broken_one(steerer):
    vlm, atlas = steerer.vlm, steerer.atlas
    images = [scene.image for scene in toyland.scenes(5, 6)]
    assert caption_agreement(vlm, SplitLinear(vlm.layer, atlas.members(), atlas.units), images, size=4) == 1
    broken = nn.Linear(vlm.layer.in_features, vlm.layer.out_features)
    nn.init.normal_(broken.weight, std=3)
    assert caption_agreement(vlm, broken, images) < 1
    assert vlm.model.get_submodule(vlm.layer_name) is vlm.layer
