import pytest
import torch

from elude_steer.models.hooks import replace_forward
from elude_steer.models.prefix_cache import Prefix, blocks_before, resume_from, run_prefix
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
