"""A dictionary reads and writes latents, and steers in place of an atlas."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.atlas.labels import Labels
from elude_steer.evaluation.baselines.dictionary import Latents, Levels, NamedDictionary
from elude_steer.evaluation.baselines.sae import SaeSpec, from_sae, train_sae
from elude_steer.evaluation.baselines.splits import from_atlas
from elude_steer.steering.steerer import Steerer


@pytest.fixture(scope="module")
def tokens(steerer):
    found = [steerer.vlm.encode([scene.image])[0].flatten(0, 1) for scene in toyland.scenes(9, 12)]
    return torch.cat(found).clone()


@pytest.fixture(scope="module")
def sae(steerer, tokens):
    with torch.no_grad():
        outputs = steerer.vlm.layer(tokens)
    return train_sae(SaeSpec("topk", 200, epochs=3, batch_size=256, learning_rate=3e-3), outputs)


def label_like_atlas(dictionary, steerer):
    """The dictionary with the labels and references of the atlas that it was made from."""
    atlas = steerer.atlas
    return NamedDictionary(
        dictionary, atlas.require_labels(), Levels(atlas.references.activation), atlas.streams, atlas.about
    )


def test_a_dictionary_of_an_atlas_steers_as_the_atlas_does(steerer):
    """The matrix product of a dictionary gives the same change as the atlas's own arithmetic."""
    labelled = label_like_atlas(from_atlas("toyland", steerer.vlm.layer, steerer.atlas), steerer)
    general = Steerer(steerer.vlm, labelled, steerer.matcher)
    numbers = torch.tensor([3, 4, 5, 700])
    for level in ("reference", "stream"):
        assert torch.allclose(
            labelled.target_levels(numbers, level), steerer.atlas.target_levels(numbers, level), atol=1e-3
        )
    assert torch.allclose(labelled.stream_outside(numbers), steerer.atlas.stream_outside(numbers), atol=1e-3)
    scene = next(scene for scene in toyland.scenes(3, 20) if len(scene.things) > 1)
    image, words = scene.image, scene.objects
    for minus, plus, settings in (
        ([words[0]], [], {}),
        ([words[0]], ["biker"], {}),
        ([words[0]], ["biker"], {"reach": 2}),
        ([words[0]], [], {"mode": "scale", "gamma": -20, "nu": 8}),
    ):
        plans = [
            one.prepare_plan(minus, plus, settings={**steerer.defaults, **settings})[0] for one in (steerer, general)
        ]
        prepared = [one.gather_weights(plan) for one, plan in zip((steerer, general), plans, strict=True)]
        q = steerer.vlm.encode([image])[0]
        changes = [one.output_change(q) for one in prepared]
        assert changes[0].abs().max() > 0
        assert torch.allclose(changes[0], changes[1], atol=2e-2 * float(changes[0].abs().max()))


def test_an_edit_adds_what_latents_write(steerer, sae):
    dictionary = from_sae("topk SAE", sae, steerer.vlm.layer)
    q = steerer.vlm.encode([next(toyland.scenes(4, 1)).image])[0]
    rows = torch.tensor([1, 7, 9])
    latents = Latents(dictionary, rows)
    now = latents.activations(q)
    total = torch.zeros(*q.shape[:2], steerer.vlm.layer.out_features)
    latents.add_change(total, 2 - now)
    with torch.no_grad():
        before = dictionary.read(q)
    after = before.clone()
    after[..., rows] = 2
    assert torch.allclose(total, (after - before) @ dictionary.write, atol=1e-4)
    assert torch.equal(latents.select(torch.tensor([2])).rows, torch.tensor([9]))
    assert torch.allclose(latents.mean_activations(q.flatten(0, 1)), now.flatten(0, 1).mean(0), atol=1e-5)


def test_an_edit_without_effect_leaves_the_caption_unchanged(steerer, sae):
    """An SAE reconstructs the output only roughly, but an edit adds its change to the true output."""
    dictionary = from_sae("topk SAE", sae, steerer.vlm.layer)
    words = tuple(toyland.OBJECTS)
    count = len(dictionary)
    labels = Labels(
        words,
        (np.arange(count, dtype=np.int32) % len(words))[:, None],
        np.ones((count, 1), np.float32),
        np.arange(count, dtype=np.int32),
        {},
    )
    general = Steerer(steerer.vlm, NamedDictionary(dictionary, labels, Levels(torch.ones(count))), steerer.matcher)
    image = next(toyland.scenes(4, 1)).image
    plan, _ = general.prepare_plan(["dog"], settings={"mode": "scale", "gamma": 1.0, "kappa": 3})
    strong, _ = general.prepare_plan(["dog"], settings={"mode": "scale", "gamma": -80.0, "kappa": 100, "nu": "all"})
    ((bare, off, _),) = general.captions([image], [[None, plan, strong]])
    assert off == bare == steerer.vlm.caption([image])[0]
    q = steerer.vlm.encode([image])[0]
    assert general.gather_weights(strong).output_change(q).abs().max() > 0


def test_the_fingerprint_depends_on_labels_levels_and_streams(steerer):
    made = from_atlas("ELUDe", steerer.vlm.layer, steerer.atlas)
    labels, on = steerer.atlas.require_labels(), steerer.atlas.references.activation
    whole = NamedDictionary(made, labels, Levels(on), steerer.atlas.streams)
    others = [
        NamedDictionary(made, replace(labels, words=labels.words[::-1].copy()), Levels(on), steerer.atlas.streams),
        NamedDictionary(made, labels, Levels(2 * on), steerer.atlas.streams),
        NamedDictionary(made, labels, Levels(on)),
    ]
    assert len({labelled.fingerprint for labelled in (whole, *others)}) == 4
