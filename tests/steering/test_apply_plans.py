"""Edited image embeddings, and edits around `get_image_features`: what serving engines are given."""

import pytest
import torch

from elude_steer import toyland
from elude_steer.errors import ModelError
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import save_family

PLANS = {
    "nothing": {},
    "place": {"minus": ["dog"]},
    "replace": {"minus": ["dog"], "plus": ["biker"]},
    "box": {"plus": ["biker"], "where": (10, 10, 60, 60)},
    "scale": {"minus": ["dog"], "mode": "scale", "nu": 8},
    "scale all": {"minus": ["dog"], "mode": "scale", "nu": "all", "gamma": -50},
}


@pytest.fixture(scope="module")
def images():
    """Square scenes and wide ones."""
    scenes = list(toyland.scenes(seed=50_005, n=40))
    square = [scene.image for scene in scenes if scene.image.size == (96, 96)]
    wide = [scene.image for scene in scenes if scene.image.size != (96, 96)]
    return [square[0], wide[0], square[1], wide[1]]


@pytest.fixture(params=PLANS)
def plan(request, steerer):
    return steerer.plan(**PLANS[request.param]) if PLANS[request.param] else None


@torch.inference_mode()
def caption_embeddings(vlm, image, embeddings):
    """Caption image embeddings with the bare model, through `inputs_embeds`."""
    inputs = vlm.inputs([image])
    words = vlm.model.get_input_embeddings()(inputs["input_ids"])
    words[inputs["input_ids"] == vlm.model.config.image_token_id] = embeddings
    tokens = vlm.model.generate(
        inputs_embeds=words, attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=64
    )
    return vlm.processor.tokenizer.decode(tokens[0], skip_special_tokens=True).strip()


@torch.inference_mode()
def image_features(model, inputs):
    given = {name: inputs[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in inputs}
    return list(model.get_image_features(**given).pooler_output)


def test_the_bare_model_captions_embeddings_as_the_hook_does(steerer, images, plan):
    (*captions,) = (caption for (caption,) in steerer.captions(images, [[plan]] * len(images)))
    bare = [caption_embeddings(steerer.vlm, image, steerer.embeds(image, plan)) for image in images]
    assert bare == captions
    if plan is None:
        assert bare == steerer.vlm.caption(images)


def test_embeddings_without_a_plan_are_the_models_own(steerer, images):
    for image in images:
        inputs = steerer.vlm.inputs([image])
        (own,) = image_features(steerer.vlm.model, inputs)
        assert torch.equal(steerer.embeds(image), own)
        assert steerer.embeds(image).shape == (int((inputs["input_ids"] == 4).sum()), 128)


def test_plans_hold_around_get_image_features(steerer, images, plan):
    """One image or a batch, of the model or of the model inside it, by keyword or by position; and not outside."""
    model = steerer.vlm.model
    expected = [steerer.embeds(image, plan) for image in images]
    alone, batch = [steerer.vlm.inputs([image]) for image in images], steerer.vlm.inputs(images)
    before = image_features(model, batch)
    with steerer.applied(plan), torch.inference_mode():
        single = [image_features(model, inputs)[0] for inputs in alone]
        together = image_features(model.model, batch)
        by_position = model.get_image_features(alone[1]["pixel_values"], alone[1]["image_sizes"]).pooler_output[0]
    for found in (single, together):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(by_position, single[1])
    after = image_features(model, batch)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_each_image_gets_its_plan(steerer, images):
    plans = [steerer.plan(**PLANS["place"]), None, steerer.plan(**PLANS["replace"]), steerer.plan(**PLANS["scale"])]
    with steerer.applied(plans):
        found = image_features(steerer.vlm.model, steerer.vlm.inputs(images))
    expected = [steerer.embeds(image, plan) for image, plan in zip(images, plans, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


def test_calls_of_all_kinds_may_follow_each_other(steerer, images):
    """The image of an earlier call is never taken for that of a later one, even if its tiles have the same shape."""
    plan = steerer.plan(minus=["dog"], where=(0, 0, 48, 48))
    wide, high = images[1].resize((192, 96)), images[1].resize((96, 192))
    with steerer.applied(plan):
        caption = steerer.vlm.caption([wide])
        (found,) = image_features(steerer.vlm.model, steerer.vlm.inputs([high]))
        assert steerer.vlm.caption([wide]) == caption
    torch.testing.assert_close(found, steerer.embeds(high, plan), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llava", "llava_next", "idefics3", "qwen2_vl", "qwen2_5_vl", "gemma3", "internvl"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_other_families_give_their_embeddings(name, tmp_path, images):
    vlm = Vlm.load(str(save_family(name, tmp_path)))
    for image in images[:2]:
        inputs = vlm.inputs([image])
        (found,) = vlm.embed_images(inputs)
        own = torch.cat([one.reshape(-1, one.shape[-1]) for one in features_of(vlm.model, inputs)])
        torch.testing.assert_close(found, own)


@torch.inference_mode()
def features_of(model, inputs):
    names = ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask")
    given = {name: inputs[name] for name in names if name in inputs}
    return model.get_image_features(**given).pooler_output


def test_tiles_that_could_be_of_any_image_are_refused(tmp_path, images):
    vlm = Vlm.load(str(save_family("internvl", tmp_path)))
    steerer = Steerer(vlm, None, None)
    with steerer.applied(None), pytest.raises(ModelError, match="which of them belong together; call the model itself"):
        features_of(vlm.model, vlm.inputs(images[:1]))
