"""Quantised language models: names, refusals and, where the packages are installed, real ones."""

import copy
import json

import pytest
import torch
from torch import nn

from elude_steer.errors import EludeSteerWarning, MissingPackageError, ModelError
from elude_steer.models.execution import quantized
from elude_steer.models.execution.quantized import (
    QUANTIZERS,
    check_quantizer,
    is_quantized,
    modules_to_keep,
    refuse_quantized_target,
)
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from elude_steer.utils import optional

NAMES = [name for name, package in QUANTIZERS.items() if optional.is_installed(package)]


class StoredWeight(nn.Linear):
    """A layer whose weight is stored in bytes, as those of bitsandbytes."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.weight = nn.Parameter(torch.zeros(layer.out_features, layer.in_features, dtype=torch.uint8), False)


def test_everything_outside_the_language_model_is_kept(steerer, tiny_vlm):
    for vlm in (steerer.vlm, tiny_vlm):
        keep = modules_to_keep(vlm.model)
        assert sorted(keep) == ["lm_head", "model.multi_modal_projector", "model.vision_tower"]
        kept = {one for name in keep for one in vlm.model.get_submodule(name).modules()}
        assert not kept & set(vlm.model.model.language_model.modules())


def test_an_unknown_name_and_a_missing_package_are_refused(monkeypatch):
    with pytest.raises(ModelError, match="quantize is 'int3'; it is one of 'torchao-int8', "):
        check_quantizer("int3")
    monkeypatch.setattr(optional, "is_installed", lambda package: False)
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'elude-steer\[quantize\]'"):
        check_quantizer("torchao-int8")


def test_a_quantised_target_is_refused_and_a_quantised_tower_noted(tiny_vlm):
    model = copy.deepcopy(tiny_vlm.model)
    block = model.get_submodule(tiny_vlm.layer_name.removesuffix(".mlp.fc2"))
    refuse_quantized_target(model, tiny_vlm.within, tiny_vlm.layer_name)
    block.mlp.fc1 = StoredWeight(block.mlp.fc1)
    assert is_quantized(block.mlp.fc1)
    with pytest.warns(EludeSteerWarning, match="1 layers of the vision tower are quantised"):
        refuse_quantized_target(model, tiny_vlm.within, tiny_vlm.layer_name)
    block.mlp.fc2 = StoredWeight(block.mlp.fc2)
    with pytest.raises(ModelError, match=r"mlp\.fc2' is quantised, .* --quantize NAME"):
        Vlm.from_model(model, tiny_vlm.processor, layer="layers.1.mlp.fc2")


def test_bitsandbytes_gets_no_kernel_of_the_hub_without_permission(monkeypatch):
    import sys

    seen = []
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.setattr(optional, "is_installed", lambda package: True)
    monkeypatch.setattr(quantized.optional, "require", lambda *_: seen.append(sys.modules.get("kernels", "free")))
    for allowed in (False, True):
        quantized.import_bitsandbytes(allowed)
    assert seen == [None, "free"]
    assert "kernels" not in sys.modules or sys.modules["kernels"] is not None


@pytest.mark.skipif(not NAMES, reason="neither torchao nor bitsandbytes is installed")
@pytest.mark.parametrize("name", NAMES)
def test_an_edit_of_a_quantised_model_is_the_layers_own(name, steerer, scene):
    found = Steerer.load("toyland", quantize=name)
    text = found.vlm.model.model.language_model
    assert is_quantized(text.layers[0].mlp.up_proj)
    assert torch.equal(found.vlm.layer.weight, steerer.vlm.layer.weight)
    plan = found.plan(minus=[scene.things[0].name])
    edited, plain = found.captions([scene.image], [[plan, None]])[0]
    assert plain == found.vlm.caption([scene.image])[0]
    assert torch.equal(found.embeds(scene.image, plan), steerer.embeds(scene.image, plan))
    with found.applied(plan):
        assert found.vlm.caption([scene.image])[0] == edited


MAP = {
    "model.vision_tower": "disk",
    "model.multi_modal_projector": "cpu",
    "model.language_model": "disk",
    "lm_head": "cpu",
}


@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_an_offloaded_model_is_steered_as_the_one_in_memory(steerer, scene):
    found = Steerer.load("toyland", device_map=MAP | {"model.image_newline": "cpu"})
    weights = {name: parameter.device.type for name, parameter in found.vlm.model.named_parameters()}
    assert weights["model.language_model.layers.0.mlp.up_proj.weight"] == "meta"
    assert weights["model.vision_tower.encoder.layers.0.mlp.fc2.weight"] == "meta"
    assert torch.equal(found.vlm.layer.weight, steerer.vlm.layer.weight)
    plan = found.plan(minus=[scene.things[0].name])
    assert torch.equal(found.embeds(scene.image, plan), steerer.embeds(scene.image, plan))
    assert found.captions([scene.image], [[plan, None]]) == steerer.captions([scene.image], [[plan, None]])


def test_the_command_line_reads_device_maps(run, tmp_path, monkeypatch):
    image = "demos/images/toyland-dog.png"
    code, _, err = run("caption", image, "--device-map", "everywhere")
    assert code
    assert "--device-map is 'everywhere'; give auto, balanced" in err
    (tmp_path / "map.json").write_text(json.dumps(["cpu"]))
    code, _, err = run("caption", image, "--device-map", tmp_path / "map.json")
    assert code
    assert "must be an object of module names and devices" in err
    code, _, err = run("caption", image, "--device", "cpu", "--device-map", "auto")
    assert code
    assert "give it or --device-map" in err
    (tmp_path / "map.json").write_text(json.dumps({"": "cpu"}))
    code, out, _ = run("caption", image, "--device-map", tmp_path / "map.json")
    assert (code, out.strip()) == (0, run("caption", image)[1].strip())
