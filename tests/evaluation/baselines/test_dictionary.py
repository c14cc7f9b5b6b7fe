"""A dictionary reads and writes latents, and steers in place of an atlas."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.atlas.labels import Labels
from elude_steer.errors import AtlasError, SpecError
from elude_steer.evaluation.baselines.dictionary import Latents, Levels, NamedDictionary
from elude_steer.evaluation.baselines.sae import SaeSpec, from_sae, train_sae
from elude_steer.evaluation.baselines.splits import from_atlas
from elude_steer.evaluation.compare.labelling import Vocabulary, calibrate_dictionary
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
    """The dictionary with the labels, references and calibration of the atlas that it was made from."""
    atlas = steerer.atlas
    return NamedDictionary(
        dictionary, atlas.require_labels(), Levels(atlas.references.activation), atlas.calibration, atlas.about
    )


def test_a_dictionary_of_an_atlas_steers_as_the_atlas_does(steerer):
    """The matrix product of a dictionary gives the same change as the atlas's own arithmetic."""
    labelled = label_like_atlas(from_atlas("toyland", steerer.vlm.layer, steerer.atlas), steerer)
    general = Steerer(steerer.vlm, labelled, steerer.matcher)
    scene = next(scene for scene in toyland.scenes(3, 20) if len(scene.things) > 1)
    image, words = scene.image, scene.objects
    q = steerer.vlm.encode([image])[0]
    for row in (0, 7, 50):
        expected = steerer.atlas.detector(row, steerer.vlm.layer)(q)
        torch.testing.assert_close(labelled.detector(row, steerer.vlm.layer)(q), expected, rtol=1e-3, atol=1e-3)
    for minus, plus, settings in (
        ([words[0]], [], {}),
        ([words[0]], ["biker"], {}),
        ([words[0]], ["biker"], {"strength": 2, "fit": 0.2}),
        ([words[0]], [], {"mode": "scale", "gamma": -20, "nu": 8}),
    ):
        plans = [
            one.prepare_plan(minus, plus, settings={**steerer.defaults, **settings})[0] for one in (steerer, general)
        ]
        prepared = [one.gather_weights(plan) for one, plan in zip((steerer, general), plans, strict=True)]
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


def test_the_fingerprint_depends_on_labels_levels_and_calibration(steerer):
    made = from_atlas("ELUDe", steerer.vlm.layer, steerer.atlas)
    labels, on = steerer.atlas.require_labels(), steerer.atlas.references.activation
    whole = NamedDictionary(made, labels, Levels(on), steerer.atlas.calibration)
    others = [
        NamedDictionary(made, replace(labels, words=labels.words[::-1].copy()), Levels(on), steerer.atlas.calibration),
        NamedDictionary(made, labels, Levels(2 * on), steerer.atlas.calibration),
        NamedDictionary(made, labels, Levels(on)),
        NamedDictionary(made, labels, Levels(on), replace(steerer.atlas.calibration, fit=torch.tensor(0.9))),
    ]
    assert len({labelled.fingerprint for labelled in (whole, *others)}) == 5


# Mode place


class Scenes:
    """What calibration needs of many scenes: the inputs of the layer, the stream, and the dual encoder's vectors."""

    def __init__(self, steerer, encoder, count):
        images = [scene.image for scene in toyland.scenes(8, count)]
        batches = [images[start : start + 40] for start in range(0, count, 40)]
        pairs = [pair for batch in batches for pair in steerer.vlm.streams(batch)]
        self.pairs = [(q.flatten(0, 1), stream.flatten(0, 1)) for q, stream in pairs]
        self.vectors = encoder.embed_images(images).numpy()

    def layer_inputs(self):
        return (q for q, _ in self.pairs)

    def activations(self):
        return iter(self.pairs)


@pytest.fixture(scope="module")
def vocabulary(steerer):
    return Vocabulary.load(steerer.atlas.about["spec"])


def test_a_calibrated_dictionary_steers_in_place(steerer, sae, vocabulary):
    """Whatever the latents are: the detectors of words are fitted to them, and the directions to the stream."""
    dictionary = from_sae("topk SAE", sae, steerer.vlm.layer)
    found = calibrate_dictionary(dictionary, Scenes(steerer, vocabulary.encoder, 160), vocabulary, 0.3)
    assert found.weights.shape == (len(vocabulary.words), len(dictionary))
    assert found.directions.shape == (len(vocabulary.words), steerer.atlas.d_out)
    count = len(dictionary)
    labels = Labels(
        tuple(vocabulary.words),
        np.zeros((count, 1), np.int32),
        np.ones((count, 1), np.float32),
        np.arange(count, dtype=np.int32),
        {},
    )
    general = Steerer(
        steerer.vlm, NamedDictionary(dictionary, labels, Levels(torch.ones(count)), found), steerer.matcher
    )
    settings = {"mode": "place", "strength": 2, "fit": 0.3, "force": True}
    shares, gone = [], []
    for scene in [scene for scene in toyland.scenes(3, 45) if len(scene.things) > 1][:12]:
        absent = [word for word in toyland.OBJECTS if word not in scene.objects][:2]
        plans = [general.prepare_plan([word], settings=settings)[0] for word in (scene.objects[0], *absent)]
        ((bare, after, *_),) = general.captions([scene.image], [[None, *plans]])
        if scene.objects[0] in bare.split():
            gone.append(scene.objects[0] not in after.split())
        q = steerer.vlm.encode([scene.image])[0]
        there, *others = (sum(general.gather_weights(plan).presences(q).values()) for plan in plans)
        shares.append(there > max(others))
        (region,) = {float(one.max()) for _, one in general.gather_weights(plans[0]).maps(q).values()}
        assert region == 1
    assert np.mean(shares) >= 0.75
    assert np.mean(gone) >= 0.5


def test_a_dictionary_without_calibration_only_scales(steerer, sae):
    made = from_sae("topk SAE", sae, steerer.vlm.layer)
    bare = NamedDictionary(made, steerer.atlas.require_labels(), Levels(torch.ones(len(made))))
    general = Steerer(steerer.vlm, bare, steerer.matcher)
    with pytest.raises(AtlasError, match="the dictionary 'topk SAE' is not calibrated; use mode scale"):
        general.prepare_plan(["dog"], settings={"mode": "place"})


def test_there_must_be_images_to_calibrate_with(steerer, sae, vocabulary):
    made = from_sae("topk SAE", sae, steerer.vlm.layer)
    scenes = Scenes(steerer, vocabulary.encoder, 40)
    scenes.pairs, scenes.vectors = [], scenes.vectors[:0]
    with pytest.raises(SpecError, match="there are no images to calibrate with"):
        calibrate_dictionary(made, scenes, vocabulary, 0.3)
