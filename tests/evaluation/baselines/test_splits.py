"""Dictionaries of parts of units."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import group_by_unit
from elude_steer.evaluation.baselines.splits import from_atlas, raw_units, split_by_class, split_units


@pytest.fixture(scope="module")
def tokens(steerer):
    images = [scene.image for scene in toyland.scenes(9, 12)]
    return torch.cat([steerer.vlm.encode([image])[0].flatten(0, 1) for image in images]).clone()


def test_parts_of_units_add_up_to_the_layer(steerer, tokens):
    layer = steerer.vlm.layer
    raw, elude = raw_units("raw units", layer), from_atlas("ELUDe", layer, steerer.atlas)
    with torch.no_grad():
        for dictionary in (raw, elude):
            assert torch.allclose(dictionary.reconstruct(tokens), layer(tokens), atol=1e-4)
    assert len(raw) == layer.out_features
    assert sum(map(len, group_by_unit(elude.atoms, elude.units))) == int((~steerer.atlas.dead).sum())


class Store:
    """Instances in memory, with the interface of a token store."""

    def __init__(self, q):
        self.q, self.d_in = q, q.shape[1]

    def __len__(self):
        return len(self.q)

    def activations(self, weight, bias, start, stop):
        return (self.q[start:stop] @ weight.T + bias).T

    def gather(self, rows):
        return self.q[torch.from_numpy(rows)]


@pytest.fixture
def two_classes():
    """A unit that instances of two classes activate by inputs of their own, and both by inputs 8 to 11."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(60) % 3  # a third class has few strong instances
    q = 0.05 * torch.rand(60, 12, generator=generator)
    q[classes == 0, :4] += 1
    q[classes == 1, 4:8] += 1
    q[:, 8:] += 0.5
    layer = torch.nn.Linear(12, 2)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(0.3)
    clusters = {"top_k": 40, "min_cluster_size": 5}
    atlas = SimpleNamespace(units=torch.tensor([0, 0, 0, 1]), d_out=2, d_in=12, about={"spec": {"clusters": clusters}})
    return layer, Store(q), atlas, classes.numpy()


def test_classes_take_the_place_of_clusters_and_a_residual_takes_the_rest(two_classes):
    layer, store, atlas, classes = two_classes
    found = split_by_class("DPCiCNN", layer, store, atlas, classes)
    assert found.units.tolist() == [0, 0, 0, 1]  # two classes and a residual; the atlas leaves the second unit whole
    owned = found.atoms > 0
    assert owned[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert owned[1].nonzero()[:, 0].tolist() == [4, 5, 6, 7]
    assert owned[2].nonzero()[:, 0].tolist() == [8, 9, 10, 11]
    with torch.no_grad():
        assert torch.allclose(found.reconstruct(store.q), layer(store.q), atol=1e-5)


def test_without_two_classes_a_unit_stays_whole(two_classes):
    layer, store, atlas, classes = two_classes
    for useless in (np.full(60, -1), np.where(classes == 0, 0, -1)):
        assert len(split_by_class("DPCiCNN", layer, store, atlas, useless)) == 2
    shuffled = np.random.default_rng(0).permutation(classes)  # the control: labels that say nothing own nothing
    assert (split_by_class("DPCiCNN", layer, store, atlas, shuffled).atoms[:3] > 0).sum(1).tolist() == [0, 0, 12]


def test_all_pairs_of_too_many_instances_are_refused(two_classes, monkeypatch):
    layer, store, atlas, _ = two_classes
    monkeypatch.setattr("elude_steer.evaluation.baselines.splits.MAX_WARD", 39)
    with pytest.raises(SpecError, match=r"compare all pairs of a unit's 40 instances, .*; leave this method out"):
        split_units("clusters", "activations", layer, store, atlas)
