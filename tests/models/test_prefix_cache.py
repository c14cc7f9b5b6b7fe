import pytest
import torch

from elude_steer.errors import EludeSteerWarning
from elude_steer.models import prefix_cache
from elude_steer.models.hooks import replace_forward
from elude_steer.models.prefix_cache import Prefix, blocks_before, resume_from, run_prefix
from elude_steer.steering.apply_plans import resume_under_plans
from elude_steer.steering.intervention import make_resumed_forward
from elude_steer.steering.regions import ImagePatches
from tests.models.conftest import SCALE_SETTINGS, logits, make_plan

# PaliGemma's processor converts tensors to arrays in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_large_images_count_as_several_tiles():
    q = torch.zeros(1, 5300, 1), torch.zeros(3, 729, 1), torch.zeros(2, 16, 1)
    assert Prefix({}, q, {}, (), (), ()).tiles == [8, 3, 2]


def test_models_that_read_several_blocks_are_not_resumed(family, monkeypatch):
    vlm = family.vlm
    assert blocks_before(vlm)
    monkeypatch.setattr(vlm.model.config.vision_config, "deepstack_visual_indexes", [0], raising=False)
    assert blocks_before(vlm) == []


@pytest.mark.parametrize("kind", [*SCALE_SETTINGS, "place"])
def test_resuming_equals_a_complete_run(family_steerer, scenes, kind):
    """For images of several shapes, one of them twice."""
    steerer = family_steerer
    vlm, images = steerer.vlm, [scenes[0], scenes[1].resize((60, 90)), scenes[2].resize((90, 40))]
    plan, order = make_plan(steerer, kind), [2, 0, 2, 1]
    plans = [plan, None, None, plan]
    prefix = run_prefix(vlm, images)
    inputs = prefix.select(order)
    rows = [
        (i, steerer.gather_weights(one), ImagePatches(vlm, lambda i=i: prefix.sizes[i]))
        for i, one in zip(order, plans, strict=True)
    ]
    once = make_resumed_forward(prefix.q, rows, lambda parts: vlm.join_images(parts, inputs))
    with torch.inference_mode(), resume_from(vlm, prefix, order), replace_forward(vlm.layer, once):
        resumed = vlm.model(**inputs).logits
    ordered = [images[i] for i in order]
    with steerer.applied(plans):
        torch.testing.assert_close(resumed, logits(vlm, ordered), rtol=1e-3, atol=1e-3)
    assert blocks_before(vlm)[-1] in prefix.outputs


def test_resumed_logits_of_one_image_are_the_same_bits(family_steerer, scenes):
    """With an edit, `run_prefix` has proven the same of the embeddings, or nothing would be kept."""
    vlm = family_steerer.vlm
    prefix = run_prefix(vlm, scenes[3:4])
    assert prefix.outputs
    with torch.inference_mode(), resume_under_plans(vlm, prefix, [(0, None)]) as inputs:
        resumed = vlm.model(**inputs).logits
    assert torch.equal(resumed, logits(vlm, scenes[3:4]))


def test_captions_of_a_list_equal_those_of_the_model(family_steerer, scenes):
    plan = make_plan(family_steerer, "scale")
    (captions,) = family_steerer.captions(scenes[:1], [[None, plan]], max_new_tokens=8)
    assert captions[0] == family_steerer.vlm.caption(scenes[:1], max_new_tokens=8)[0]
    with family_steerer.applied(plan):
        assert captions[1] == family_steerer.vlm.caption(scenes[:1], max_new_tokens=8)[0]


def test_a_tower_that_cannot_be_resumed_runs_completely(family_steerer, scenes, monkeypatch):
    """If a module that runs behind the target were kept, captions would be wrong; that is noticed."""
    steerer, vlm = family_steerer, family_steerer.vlm
    monkeypatch.setattr(prefix_cache, "_KEPT", {})
    monkeypatch.setattr(prefix_cache, "_trial_edit", lambda output: output + torch.rand(()))
    with pytest.warns(EludeSteerWarning, match="cannot be resumed"):
        prefix = run_prefix(vlm, scenes[:1])
    assert prefix.outputs == {}
    plan = make_plan(steerer, "scale")
    with torch.inference_mode(), resume_under_plans(vlm, prefix, [(0, steerer.gather_weights(plan))]) as inputs:
        resumed = vlm.model(**inputs).logits
    with steerer.applied(plan):
        torch.testing.assert_close(resumed, logits(vlm, scenes[:1]), rtol=1e-4, atol=1e-4)
