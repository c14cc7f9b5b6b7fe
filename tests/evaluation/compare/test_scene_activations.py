"""Activations of scenes are stored once and come back as the tower gave them."""

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.evaluation.compare.scene_activations import SceneActivations, class_numbers


class Encoder:
    """Stands for the dual encoder."""

    def embed_images(self, images):
        return torch.tensor([[image.size[0], image.size[1]] for image in images], dtype=torch.float32)


@pytest.fixture(scope="module")
def scenes(steerer, tmp_path_factory):
    return SceneActivations.prepare(steerer.vlm, Encoder(), 9, 6, tmp_path_factory.mktemp("work"))


def test_activations_are_those_of_the_tower_in_float16(steerer, scenes):
    drawn = [scene.image for scene in toyland.scenes(9, 6)]
    for image, q, (again, stream) in zip(drawn, scenes.layer_inputs(), scenes.activations(), strict=True):
        ((inputs, behind),) = steerer.vlm.streams([image])
        assert torch.equal(q, inputs.flatten(0, 1).half().float())
        assert torch.equal(again, q)
        assert torch.equal(stream, behind.flatten(0, 1).half().float())
    assert len(scenes) == len(scenes.vectors) == 6


def test_every_token_has_what_it_shows(scenes):
    for q, shown in zip(scenes.layer_inputs(), scenes.shown_by_image(), strict=True):
        assert len(q) == len(shown)
    assert sum(scenes.counts) == len(scenes.shown)
    assert int(class_numbers(scenes.shown).min()) >= 0


@pytest.mark.parametrize("count", [1, 7, 50, 10**6])
def test_a_sample_takes_evenly_spread_tokens(scenes, count):
    inputs, shown = scenes.sample(count)
    everything = torch.cat(list(scenes.layer_inputs()))
    rows = np.linspace(0, len(everything) - 1, min(count, len(everything))).astype(int)
    assert torch.equal(inputs, everything[rows])
    assert (shown == scenes.shown[rows]).all()


def test_the_tower_runs_once_for_scenes_of_one_seed(steerer, scenes, monkeypatch):
    monkeypatch.setattr(type(steerer.vlm), "_call", lambda *_: pytest.fail("the tower ran again"))
    fewer = SceneActivations.prepare(steerer.vlm, Encoder(), 9, 4, scenes.cache.folder.parent)
    assert len(list(fewer.layer_inputs())) == 4
