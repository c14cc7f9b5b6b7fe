"""Difference of means."""

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.difference_of_means import difference_of_means


def test_directions_point_to_the_tokens_that_show_their_concept(steerer):
    vlm = steerer.vlm
    images = []
    for scene in toyland.scenes(9, 40):
        q = vlm.encode([scene.image])[0].flatten(0, 1)
        images.append((q, scene.names_at(vlm.grid(scene.image.size).boxes.reshape(-1, 4))))
    found = difference_of_means("means", vlm.layer, images, list(toyland.OBJECTS))
    assert set(found.names) <= set(toyland.OBJECTS)
    assert torch.allclose(found.atoms.norm(dim=1), torch.ones(len(found)), atol=1e-5)
    with torch.no_grad():
        values = torch.cat([found.read(q) for q, _ in images])
    shown = np.concatenate([np.asarray(names) for _, names in images])
    for number, concept in enumerate(found.names):
        here = torch.from_numpy(shown == concept)
        assert values[here, number].mean() > values[~here, number].mean()


def test_concepts_that_no_token_shows_are_left_out(steerer):
    layer = steerer.vlm.layer
    images = [(torch.randn(3, layer.in_features), ["dog", "dog", "park"])]
    assert difference_of_means("means", layer, images, ["cat", "dog"]).names == ("dog",)
    with pytest.raises(SpecError, match="no token shows any of the concepts"):
        difference_of_means("means", layer, images, ["cat"])
