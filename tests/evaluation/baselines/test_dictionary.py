"""What ELUDe is held against: every dictionary reads, writes and steers by the same rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from elude_steer import toyland
from elude_steer.evaluation.baselines.dictionary import (
    Latents,
    Levels,
    NamedDictionary,
    by_unit,
    difference_of_means,
    of_atlas,
    of_sae,
    raw_units,
)
from elude_steer.evaluation.baselines.sae import KINDS, Sae, SaeSpec, train_sae
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


def test_parts_of_units_add_up_to_the_layer(steerer, tokens):
    layer = steerer.vlm.layer
    elude = of_atlas("ELUDe", layer, steerer.atlas)
    with torch.no_grad():
        for dictionary in (raw_units(layer), elude):
            assert torch.allclose(dictionary.reconstruct(tokens), layer(tokens), atol=1e-4)
    assert len(raw_units(layer)) == layer.out_features
    assert sum(map(len, by_unit(elude.atoms, elude.units))) == int((~steerer.atlas.dead).sum())


def test_latents_of_an_sae_read_what_the_layer_gives(steerer, tokens, sae):
    layer = steerer.vlm.layer
    dictionary = of_sae(sae, layer)
    with torch.no_grad():
        assert torch.equal(dictionary.read(tokens), sae.encode(layer(tokens)))
        assert torch.allclose(dictionary.reconstruct(tokens), sae.decode(sae.encode(layer(tokens))))
    assert dictionary.name == "topk SAE"


def test_a_transcoder_reads_what_the_layer_is_given(steerer, tokens):
    layer = steerer.vlm.layer
    with torch.no_grad():
        outputs = layer(tokens)
    made = train_sae(SaeSpec("transcoder", 64, epochs=1, batch_size=256), tokens, outputs)
    dictionary = of_sae(made, layer)
    assert torch.equal(dictionary.read(tokens), made.encode(tokens))
    assert dictionary.write.shape == (64, layer.out_features)


def test_difference_of_means_points_from_where_a_thing_is_not_to_where_it_is(steerer):
    vlm = steerer.vlm
    pictures = []
    for scene in toyland.scenes(9, 40):
        q = vlm.encode([scene.image])[0].flatten(0, 1)
        pictures.append((q, scene.names_at(vlm.grid(scene.image.size).boxes.reshape(-1, 4))))
    found = difference_of_means(vlm.layer, pictures, list(toyland.OBJECTS))
    assert set(found.names) <= set(toyland.OBJECTS)
    assert torch.allclose(found.atoms.norm(dim=1), torch.ones(len(found)), atol=1e-5)
    with torch.no_grad():
        values = torch.cat([found.read(q) for q, _ in pictures])
    shown = np.concatenate([np.asarray(names) for _, names in pictures])
    for number, word in enumerate(found.names):
        here = torch.from_numpy(shown == word)
        assert values[here, number].mean() > values[~here, number].mean()


def lexicon_of(dictionary, steerer):
    """With the names and references of an atlas that it was made from."""
    atlas = steerer.atlas
    return NamedDictionary(
        dictionary, atlas.require_labels(), Levels(atlas.references.activation), atlas.streams, atlas.about
    )


def test_an_atlas_as_a_dictionary_steers_as_the_atlas_does(steerer):
    """The general way, with a product for what is written, and the atlas's own are one arithmetic."""
    lexicon = lexicon_of(of_atlas("toyland", steerer.vlm.layer, steerer.atlas), steerer)
    general = Steerer(steerer.vlm, lexicon, steerer.matcher)
    numbers = torch.tensor([3, 4, 5, 700])
    for level in ("reference", "stream"):
        assert torch.allclose(
            lexicon.target_levels(numbers, level), steerer.atlas.target_levels(numbers, level), atol=1e-3
        )
    assert torch.allclose(lexicon.stream_outside(numbers), steerer.atlas.stream_outside(numbers), atol=1e-3)
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


def test_an_edit_of_latents_adds_what_they_write(steerer, sae):
    dictionary = of_sae(sae, steerer.vlm.layer)
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


def test_off_is_exact_for_latents_too(steerer, sae):
    """An SAE gives the output only roughly; an edit adds a change to the true one, and none where there is none."""
    from elude_steer.atlas.labels import Labels

    dictionary = of_sae(sae, steerer.vlm.layer)
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


def test_an_sae_lies_where_its_tokens_do():
    """On a device that only knows shapes: what is made elsewhere and used there is refused, as on a GPU."""
    inputs = torch.zeros(50, 4, device="meta")
    for kind in sorted(set(KINDS) - {"archetypal"}):  # whose points are rows that have to be there
        made = Sae(SaeSpec(kind, 8), inputs, inputs)
        assert {tensor.device.type for tensor in (*made.parameters(), *made.buffers())} == {"meta"}
        if kind not in ("batch_topk", "matryoshka"):
            assert made.encode(inputs).shape == (50, 8)


def test_lexicons_with_other_names_or_levels_are_others(steerer):
    made = of_atlas("ELUDe", steerer.vlm.layer, steerer.atlas)
    labels, on = steerer.atlas.require_labels(), steerer.atlas.references.activation
    whole = NamedDictionary(made, labels, Levels(on), steerer.atlas.streams)
    others = [
        NamedDictionary(made, replace(labels, words=labels.words[::-1].copy()), Levels(on), steerer.atlas.streams),
        NamedDictionary(made, labels, Levels(2 * on), steerer.atlas.streams),
        NamedDictionary(made, labels, Levels(on)),
    ]
    assert len({lexicon.fingerprint for lexicon in (whole, *others)}) == 4
