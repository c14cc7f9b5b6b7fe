"""Exported models and adapters are ordinary: transformers and peft load them where this package is missing."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import elude_steer as es
from elude_steer import toyland
from elude_steer.errors import SpecError, StorageError
from elude_steer.models.vlm import Vlm
from elude_steer.steering.export import export, export_adapter, measure_bias_error
from elude_steer.steering.steerer import Steerer
from tests.helpers.plain_child import needs_torchvision, run_without_package

# peft asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

ROOT = Path(__file__).parents[2]
TEDDY = ROOT / "demos" / "images" / "toyland-teddy.png"
SETTINGS = {"minus": ["teddy"], "mode": "scale", "nu": "all", "kappa": 24}


@pytest.fixture(scope="module")
def plan(steerer):
    return steerer.plan(**SETTINGS)


@pytest.fixture(scope="module")
def toyland_export(steerer, plan, tmp_path_factory):
    return export(steerer, plan, tmp_path_factory.mktemp("toyland") / "model")


@pytest.fixture(scope="module")
def full_size_export(tmp_path_factory):
    """The export of a tiny copy of the model that demos/full_size.py makes."""
    script = runpy.run_path(str(ROOT / "demos" / "benchmarks" / "full_size_model.py"))
    folder = tmp_path_factory.mktemp("full-size")
    model = script["save_model"](folder / "model", tiny=True)
    steerer = Steerer.load(str(script["save_atlas"](folder / "atlas", model)))
    return export(steerer, steerer.plan(minus=["dog"], mode="scale", nu="all", gamma=-50), folder / "exported")


@pytest.fixture(params=["toyland", "full_size"])
def exported(request):
    return request.getfixturevalue(f"{request.param}_export")


def card_code(folder, number):
    """A Python block of the model card, for this folder and an image."""
    block = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)[number]
    return block.replace("FOLDER", str(folder)).replace("photo.jpg", str(TEDDY))


def scenes(count):
    return [scene.image for scene in toyland.scenes(seed=50_004, n=count)]


def logits(vlm, images):
    with torch.inference_mode():
        return vlm.model(**vlm.inputs(images)).logits[:, -1]


# Checkpoints


def test_it_has_the_files_that_auto_processor_wants(exported):
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    assert (exported / "video_preprocessor_config.json").is_file()
    assert get_video_processor_config(str(exported))["size"]
    assert json.loads((exported / "tokenizer_config.json").read_text()).get("backend") != "pil"


@needs_torchvision
def test_auto_processor_and_a_pipeline_load_it_without_this_package(exported, tmp_path):
    code = (
        "from transformers import AutoProcessor\n"
        f"processor = AutoProcessor.from_pretrained({str(exported)!r})\n"
        "print(*(type(part).__name__ for part in (processor, processor.image_processor, processor.video_processor)))\n"
    )
    *_, names, said = run_without_package(code + card_code(exported, 0), tmp_path)
    assert names == "LlavaOnevisionProcessor LlavaOnevisionImageProcessor LlavaOnevisionVideoProcessor"
    assert said.strip() == Vlm.load(str(exported)).caption([teddy_image()])[0]


def test_the_card_says_how_to_do_without_torchvision(exported, tmp_path):
    card = (exported / "README.md").read_text()
    assert "`pip install torchvision`. Without it, use the image processor and the tokenizer:" in card
    said = run_without_package(card_code(exported, 1), tmp_path)[-1]
    assert said == Vlm.load(str(exported)).caption([teddy_image()])[0]


def teddy_image():
    from elude_steer.models.images import open_image

    return open_image(TEDDY)


def test_the_snippet_is_only_for_models_whose_prompt_it_makes(tmp_path):
    from elude_steer.steering.export import _expands_only_images
    from tests.helpers.tiny import save_family

    fits = {name: _expands_only_images(Vlm.load(str(save_family(name, tmp_path / name)))) for name in ("qwen2_vl",)}
    assert fits == {"qwen2_vl": True}


# Cards


MODEL = "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"


def card_metadata(folder):
    """A card's text, and its metadata as the Hub's library reads it."""
    from huggingface_hub import ModelCard

    text = (folder / "README.md").read_text()
    return text, ModelCard(text).data


def steerer_of(steerer, **model):
    """The same steerer, as if toyland's model were one of the Hub or of a folder."""
    about = {**steerer.atlas.about, "model": {**steerer.atlas.about["model"], "id": model["id"]}}
    return replace(steerer, vlm=replace(steerer.vlm, **model), atlas=replace(steerer.atlas, about=about))


@pytest.mark.parametrize("kind", ["checkpoint", "adapter"])
def test_the_card_names_the_base_model_and_what_was_done_to_it(steerer, plan, tmp_path, kind):
    from elude_steer.steering.export import _adapter_card, _checkpoint_card

    other = steerer_of(steerer, id=MODEL)
    card = _checkpoint_card(other, plan) if kind == "checkpoint" else _adapter_card(other, plan, 3, bias=True)
    (tmp_path / "README.md").write_text(card)
    text, data = card_metadata(tmp_path)
    assert data.base_model == MODEL
    assert data.get("base_model_relation") == {"checkpoint": "finetune", "adapter": "adapter"}[kind]
    assert data.library_name == {"checkpoint": "transformers", "adapter": "peft"}[kind]
    assert data.pipeline_tag == "image-text-to-text"
    assert "steering" in data.tags
    assert data.license is None  # no card of the model is within reach
    assert "On purpose, it says things about images that are not true." in text
    assert "-teddy: 24 sub-units times -15" in text


def test_a_model_that_is_not_on_the_hub_is_no_base_model(toyland_export, adapter):
    for folder in (toyland_export, adapter):
        data = card_metadata(folder)[1]
        assert data.base_model is None and data.get("base_model_relation") is None
        assert data.pipeline_tag == "image-text-to-text"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: mine\nlicense_link: https://x.org/l\ntags: [a]\n---\ntext",
            {"license": "other", "license_name": "mine", "license_link": "https://x.org/l"},
        ),
        ("# no metadata\n", {}),
        ("---\nlicense: [\n---\n", {}),
        (None, {}),
    ],
)
def test_the_licence_is_that_of_the_model(steerer, plan, tmp_path, card, expected):
    from elude_steer.steering.export import _checkpoint_card

    if card is not None:
        (tmp_path / "README.md").write_text(card)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text(_checkpoint_card(steerer_of(steerer, id=str(tmp_path)), plan))
    data = card_metadata(tmp_path / "out")[1].to_dict()
    assert {name: value for name, value in data.items() if name.startswith("license")} == expected
    assert "base_model" not in data


# Adapters


@pytest.fixture(scope="module")
def adapter(steerer, plan, tmp_path_factory):
    return export_adapter(steerer, plan, tmp_path_factory.mktemp("adapter") / "adapter")


def load_with_peft(folder):
    """Toyland's model with an adapter, loaded by peft."""
    peft = pytest.importorskip("peft")
    vlm = Vlm.load("toyland/captioner")
    model = peft.PeftModel.from_pretrained(vlm.model, folder)
    return Vlm.from_model(model.base_model.model, vlm.processor, layer="layers.5.mlp.fc2.base_layer")


def test_an_adapter_says_what_the_steered_model_says(steerer, plan, adapter):
    images = [teddy_image(), *scenes(7)]
    with steerer.applied(plan):
        captions, expected = steerer.vlm.caption(images), logits(steerer.vlm, images)
    loaded = load_with_peft(adapter)
    torch.testing.assert_close(logits(loaded, images), expected, rtol=0, atol=5e-5)
    assert loaded.caption(images) == captions
    assert steerer.vlm.caption(images) != captions


def test_an_adapter_is_the_changed_rows_and_a_choice_of_units(steerer, plan, adapter):
    from safetensors.torch import load_file

    weight, bias = steerer.gather_weights(plan).weight_change
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b, more_bias = (tensors[name] for name in sorted(tensors, key=lambda name: ("A" not in name, "bias" in name)))
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == len(a) == len({edit.unit for edit in plan.edits})
    assert config["target_modules"] == [steerer.vlm.layer_name]
    assert torch.equal(b @ a, weight)
    assert torch.equal(more_bias, bias)
    assert (b.sum(0) == 1).all() and ((b == 0) | (b == 1)).all()
    assert sum(file.stat().st_size for file in adapter.iterdir()) < 70_000


def test_the_card_of_an_adapter_loads_it(adapter, tmp_path):
    pytest.importorskip("peft")
    code = card_code(adapter, 0) + "print(type(model).__name__, model.active_adapter)\n"
    assert run_without_package(code, tmp_path)[-1] == "PeftModel default"


def test_without_its_bias_an_adapter_is_off_by_what_is_measured(steerer, plan, tmp_path):
    folder = export_adapter(steerer, plan, tmp_path / "adapter", bias=False)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_bias"] is False
    error = measure_bias_error(steerer, plan, TEDDY)
    with steerer.applied(plan):
        exact, caption = logits(steerer.vlm, [teddy_image()]), steerer.vlm.caption([teddy_image()])[0]
    loaded = load_with_peft(folder)
    measured = (logits(loaded, [teddy_image()]) - exact).abs().max().item()
    assert error.logits == pytest.approx(measured, rel=0.05)
    assert error.captions == (caption, loaded.caption([teddy_image()])[0])
    assert 0 < error.output < 0.01 * error.edit
    assert str(error).startswith("without the bias, the layer's output is off by at most 0.15")


# What cannot be exported


@pytest.mark.parametrize("write", [export, export_adapter])
def test_only_edits_of_every_patch_are_exported(steerer, tmp_path, write):
    with pytest.raises(SpecError, match=r"only an edit of every patch can be weights.*--set nu=all"):
        write(steerer, steerer.plan(minus=["dog"]), tmp_path / "out")
    with pytest.raises(SpecError, match="the plan changes nothing"):
        write(steerer, es.Plan(), tmp_path / "out")
    with pytest.raises(SpecError, match="not finite; use smaller gains"):
        write(steerer, steerer.plan(minus=["dog"], mode="scale", nu="all", gamma=-1e39), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", [export, export_adapter])
def test_nothing_is_overwritten(steerer, plan, tmp_path, write):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StorageError, match="already exists and is not an empty folder; give a new one"):
        write(steerer, plan, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
