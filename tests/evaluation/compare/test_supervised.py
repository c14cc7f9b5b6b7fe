"""Steering that is told what every patch shows."""

import numpy as np
import pytest
import torch

from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.compare.supervised import calibrate_with_truth, true_directions


class Scenes:
    """Ten scenes of six patches; cats stand in even ones, dogs in odd ones, on grass."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.shown = [np.array(["cat" if n % 2 == 0 else "dog"] * 2 + ["grass"] * 4) for n in range(10)]
        means = {"cat": [1.0, 0, 0], "dog": [0, 1.0, 0], "grass": [0, 0, 1.0]}
        self.inputs = [
            torch.tensor([means[name] for name in names]) + 0.01 * torch.from_numpy(rng.normal(size=(6, 3))).float()
            for names in self.shown
        ]

    def layer_inputs(self):
        return iter(self.inputs)

    def activations(self):
        return ((q, 2 * q) for q in self.inputs)

    def shown_by_image(self):
        return iter(self.shown)


def test_true_directions_are_differences_of_means():
    found = true_directions(Scenes(), ["dog", "unicorn", "grass"])
    patches, shown = 2 * torch.cat(Scenes().inputs), np.concatenate(Scenes().shown)
    for row, word in ((0, "dog"), (2, "grass")):
        there = torch.from_numpy(shown == word)
        torch.testing.assert_close(found[row], patches[there].mean(0) - patches[~there].mean(0))
    assert not found[1].any()  # nobody shows a unicorn


def test_detectors_that_know_the_truth_find_it():
    eye, scenes = torch.eye(3), Scenes()
    names = ("cat", "dog")
    dictionary = Dictionary("means", lambda q: q, eye, torch.zeros(3), eye, torch.zeros(3), names)
    found = calibrate_with_truth(dictionary, scenes, ["grass", "dog", "cat"], 0.3)
    assert found.words.tolist() == [2, 1]
    for row, name in enumerate(names):
        weights, bias = found.detector(row)
        for q, shown in zip(scenes.layer_inputs(), scenes.shown_by_image(), strict=True):
            readings = q @ weights + bias
            if name in shown:
                assert readings[torch.from_numpy(shown == name)].min() > readings[torch.from_numpy(shown != name)].max()
            assert found.presence(row, readings) == pytest.approx(float(name in shown), abs=0.2)
    torch.testing.assert_close(found.directions.float(), true_directions(scenes, names), atol=2e-3, rtol=2e-3)
