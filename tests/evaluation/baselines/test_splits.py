"""Dictionaries of parts of units."""

import pytest
import torch

from elude_steer import toyland
from elude_steer.evaluation.baselines.dictionary import group_by_unit
from elude_steer.evaluation.baselines.splits import from_atlas, raw_units


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
