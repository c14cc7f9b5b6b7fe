"""The paper's vision models, from a folder as on the Hub to an atlas: tiny and random, but with their real layers.

Images are prepared as the files on the Hub say, at the real size, so the number of tokens is real too.
"""

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import elude_steer as es
from elude_steer.atlas.build.pipeline import load_tower
from elude_steer.atlas.build.token_store import TokenStore
from elude_steer.method.layers import split_layer
from elude_steer.models.hooks import find_layer, swap_module
from elude_steer.recipe_files import load_spec, recipes_dir
from elude_steer.specs import ModelSpec
from elude_steer.utils import optional
from tests.helpers.checks import import_problem, run_in_own_environment, run_script
from tests.helpers.plain_child import GREY_LEVEL

# The preprocessor configs of these models on the Hub.
DINOV2_PREPROCESSOR = {
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "BitImageProcessor",
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 256},
}
SIGLIP2_PREPROCESSOR = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "SiglipProcessor",
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}
# Some tensor names of the files on the Hub; the tiny checkpoints must have them too.
DINOV2_NAMES = {
    "embeddings.cls_token",
    "embeddings.mask_token",
    "embeddings.position_embeddings",
    "encoder.layer.0.attention.attention.query.weight",
    "encoder.layer.0.attention.output.dense.weight",
    "encoder.layer.0.layer_scale1.lambda1",
    "encoder.layer.0.mlp.fc2.weight",
    "layernorm.weight",
}
SIGLIP2_NAMES = {
    "logit_scale",
    "text_model.head.weight",
    "vision_model.embeddings.patch_embedding.weight",
    "vision_model.encoder.layers.0.mlp.fc2.weight",
    "vision_model.head.probe",
}
LAYERS = {"small": 12, "base": 12, "large": 24}
WIDTHS = {"small": 384, "base": 768, "large": 1024}


def dinov2_config(layers, width, registers=0):
    """The model class and its config, which is for 518 pixels on the Hub although images have 224."""
    from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    heads = max(2, width // 64)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": 14}
    if registers:
        return Dinov2WithRegistersModel, Dinov2WithRegistersConfig(
            **sizes, image_size=518, num_register_tokens=registers
        )
    return Dinov2Model, Dinov2Config(**sizes, image_size=518)


def siglip2_config(layers, width):
    from transformers import SiglipConfig, SiglipModel

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": max(2, width // 64)}
    words = {"vocab_size": 40, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = sizes | {"num_hidden_layers": layers, "image_size": 224, "patch_size": 16}
    return SiglipModel, SiglipConfig(vision_config=vision, text_config=sizes | words)


def save(folder, class_and_config, preprocessor, names):
    """Write a folder as on the Hub, with weights that make tokens differ and units worth splitting."""
    torch.manual_seed(0)
    model_class, config = class_and_config
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "mlp" in name or "register" in name or "cls_token" in name:
                parameter.normal_(0, 0.5)
            elif "patch_embed" in name:
                parameter.mul_(20)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    assert names <= load_file(folder / "model.safetensors").keys()
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints by the ids of the paper's models, written when they are first used."""
    paths = {}

    def folder(model_id):
        if model_id not in paths:
            path, size = tmp_path_factory.mktemp("backbone"), model_id.rsplit("-", 1)[-1]
            if "siglip2" in model_id:
                paths[model_id] = save(path, siglip2_config(12, 16), SIGLIP2_PREPROCESSOR, SIGLIP2_NAMES)
            else:
                dinov2 = dinov2_config(LAYERS[size], 16, registers=4 if "registers" in model_id else 0)
                paths[model_id] = save(path, dinov2, DINOV2_PREPROCESSOR, DINOV2_NAMES)
        return paths[model_id]

    return folder


@pytest.fixture(autouse=True)
def separate_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


VISION = sorted(
    path.stem for path in (recipes_dir() / "atlases").glob("*.yaml") if load_spec(path.stem).model.kind == "vision"
)
SMALLER = [
    "clusters.top_k=200",
    "clusters.min_cluster_size=5",
    "clusters.backend=exact",
    "split.winner_rule=gap",
    "labels.scorer=null",
]


def open_images(folder, count=4):
    return [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.png"))[:count]]


# The recipes' layers in models of the real size, which take no memory on the meta device


def test_all_transformers_models_of_the_paper_have_recipes():
    ids = {load_spec(name).model.id for name in VISION}
    assert ids == {f"facebook/dinov2-{size}" for size in LAYERS} | {"google/siglip2-base-patch16-224"}


@pytest.mark.parametrize("name", VISION)
def test_the_layer_of_a_recipe_exists_and_has_the_stated_width(name):
    spec = load_spec(name)
    with torch.device("meta"):
        if "siglip2" in spec.model.id:
            model_class, config = siglip2_config(12, 768)
            model = model_class(config).vision_model
        else:
            size = spec.model.id.rsplit("-", 1)[1]
            model_class, config = dinov2_config(LAYERS[size], WIDTHS[size])
            model = model_class(config)
    found, layer = find_layer(model, spec.model.layer)
    assert found.endswith(spec.model.layer)
    number = int(re.search(r"layer(\d+)", name)[1])
    assert int(re.search(r"layers?\.(\d+)\.", found)[1]) == number - 1  # the paper counts from 1
    text = (recipes_dir() / "atlases" / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"x {layer.in_features} inputs" in text
    assert layer.in_features == 4 * layer.out_features


# From a folder to an atlas


@pytest.mark.parametrize("name", VISION)
def test_a_recipe_loads_its_model(name, folders, image_folder):
    spec = load_spec(name)
    tower = load_tower(ModelSpec(str(folders(spec.model.id)), spec.model.layer, kind="vision"))
    assert tower.layer_name.endswith(spec.model.layer)
    assert tower.skip_tokens == ()
    tokens = 14 * 14 if "siglip2" in name else 1 + 16 * 16  # the first token of DINOv2 is CLS, which is an instance
    encoded = tower.encode(open_images(image_folder))
    assert [q.shape for q in encoded] == [(1, tokens, 64)] * 4
    inputs = []
    handle = tower.layer.register_forward_hook(lambda _module, args, _output: inputs.append(args[0]))
    with torch.inference_mode():
        tower.model(**tower.prepare(open_images(image_folder)))
    handle.remove()
    assert torch.equal(torch.cat(encoded), inputs[0])
    streams = tower.streams(open_images(image_folder))
    assert [stream.shape for _, stream in streams] == [(1, tokens, 16)] * 4


@pytest.mark.parametrize(
    ("recipe", "model_id", "tokens"),
    [
        ("dinov2-small-layer12", "facebook/dinov2-small", 257),
        ("dinov2-base-layer11", "facebook/dinov2-base", 257),
        ("dinov2-large-layer23", "facebook/dinov2-large", 257),
        ("dinov2-base-layer12", "facebook/dinov2-with-registers-base", 257),
        ("siglip2-base-layer12", "google/siglip2-base-patch16-224", 196),
    ],
)
def test_a_recipe_builds_an_atlas(recipe, model_id, tokens, folders, image_folder, tmp_path):
    folder = str(folders(model_id))
    atlas = es.build(
        recipe,
        images=image_folder,
        out=tmp_path / "a",
        settings=[f"model.id={folder}", "tokens.per_image=6", *SMALLER],
        quiet=True,
    )
    spec = load_spec(recipe)
    assert atlas.about["layer"].endswith(spec.model.layer)
    assert (atlas.d_out, atlas.d_in) == (16, 64)
    assert len(atlas) > atlas.d_out, "some unit was split"
    assert (atlas.about["images"], atlas.about["instances"]) == (40, 40 * 6)
    tower = load_tower(ModelSpec(folder, spec.model.layer, kind="vision"))
    atlas.check(tower.layer)

    # The reference values are the activations of the sub-units at the stored positions.
    split = split_layer(tower.layer, atlas.members(), atlas.units)
    places = atlas.references.tokens
    assert int(places.max()) < tokens + len(tower.skip_tokens)
    assert not set(places.flatten().tolist()) & set(tower.skip_tokens)
    for sub_unit in (0, len(atlas) - 1):
        name = atlas.image_ids[int(atlas.references.images[sub_unit, 0])]
        [q] = tower.encode([Image.open(image_folder / name).convert("RGB")])
        value = split.sub_units(q[0, int(places[sub_unit, 0])].half().float())[sub_unit]
        torch.testing.assert_close(value, atlas.references.values[sub_unit, 0], rtol=1e-2, atol=1e-2)

    # Replacing the layer by its sub-units changes nothing.
    prepared = tower.prepare(open_images(image_folder))
    with torch.inference_mode():
        before = tower.model(**prepared).last_hidden_state
        with swap_module(tower.model, tower.layer_name, split):
            after = tower.model(**prepared).last_hidden_state
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_registers_never_reach_the_store(folders, image_folder, tmp_path):
    """With all tokens stored: CLS and 256 patches per image, with the right values."""
    folder = str(folders("facebook/dinov2-with-registers-base"))
    settings = [*SMALLER, f"model.id={folder}", "tokens.per_image=all", "tokens.dtype=float32", "images.limit=3"]
    atlas = es.build(
        "dinov2-base-layer12",
        images=image_folder,
        out=tmp_path / "a",
        settings=settings,
        quiet=True,
        work=tmp_path / "w",
    )
    assert atlas.about["instances"] == 3 * 257
    tower = load_tower(ModelSpec(folder, "encoder.layer.11.mlp.fc2", kind="vision"))
    assert tower.skip_tokens == (1, 2, 3, 4)
    [path] = (tmp_path / "w").rglob("tokens.bin")
    store = TokenStore(path.parent)
    assert store.places["token"].tolist() == 3 * [0, *range(5, 261)]
    paths = [image_folder / store.image_ids[i] for i in range(3)]
    encoded = torch.cat(tower.encode([Image.open(path).convert("RGB") for path in paths]))  # (3, 261, d_in)
    expected = torch.cat([encoded[:, :1], encoded[:, 5:]], 1).reshape(3 * 257, -1)
    torch.testing.assert_close(store.read(0, len(store)), expected)


# Preprocessing, compared with explicit steps


def test_images_for_dinov2_are_resized_cropped_and_normalised(folders):
    tower = load_tower(ModelSpec(str(folders("facebook/dinov2-small")), "encoder.layer.11.mlp.fc2", kind="vision"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    small = image.resize((341, 256), Image.Resampling.BICUBIC)  # the shorter side to 256
    left, top = (341 - 224) // 2, (256 - 224) // 2
    values = np.asarray(small.crop((left, top, left + 224, top + 224)), np.float32) / 255
    expected = (values - DINOV2_PREPROCESSOR["image_mean"]) / DINOV2_PREPROCESSOR["image_std"]
    pixels = tower.prepare([image])["pixel_values"]
    error = (pixels[0].permute(1, 2, 0).double() - torch.from_numpy(expected)).abs()
    assert (error <= 1e-5 + GREY_LEVEL / torch.tensor(DINOV2_PREPROCESSOR["image_std"])).all()
    assert error.mean() < 1e-3


def test_images_for_siglip2_are_stretched_to_a_square(folders):
    model_id = "google/siglip2-base-patch16-224"
    tower = load_tower(ModelSpec(str(folders(model_id)), "layers.11.mlp.fc2", kind="vision"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    values = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR), np.float32) / 255
    pixels = tower.prepare([image])["pixel_values"]
    error = (pixels[0].permute(1, 2, 0) - torch.from_numpy(2 * values - 1)).abs()
    assert error.max() <= 1e-5 + 2 * GREY_LEVEL
    assert error.mean() < 1e-3


# timm, where it can be imported


def test_the_recipes_of_timm_build(tmp_path):
    if not optional.is_installed("timm"):
        pytest.skip("timm is not installed: it needs torchvision; -m slow creates an environment for it")
    if cause := import_problem("timm"):
        pytest.skip(f"timm cannot be imported here: {cause}")
    run_script(sys.executable, "timm_check.py", tmp_path, "--tiny")


@pytest.mark.slow
def test_timm_in_its_own_environment():
    run_in_own_environment("timm_check.py", "timm")
