"""Purity of planted latents."""

import numpy as np
import pytest
import torch

from elude_steer.evaluation.measures import purity
from elude_steer.evaluation.measures.purity import dominant_concepts


def test_a_latent_has_the_concept_that_most_of_its_strongest_tokens_show(monkeypatch):
    monkeypatch.setattr(purity, "STRONGEST", 4)
    shown = np.array(["dog", "cat", "dog", "cat", "dog", "cat"])
    activations = torch.tensor([[9.0, 1], [1, 9], [8, 2], [2, 8], [7, 3], [3, 7]])
    expected = [("dog", pytest.approx(3 / 4)), ("cat", pytest.approx(3 / 4))]
    for size in (1, 4, 6):
        assert dominant_concepts(activations.split(size), shown) == expected


def test_fewer_tokens_than_usual_are_all_counted():
    assert dominant_concepts([torch.ones(3, 1)], np.array(["dog", "dog", "cat"])) == [("dog", pytest.approx(2 / 3))]
