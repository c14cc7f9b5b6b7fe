import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from elude_steer.errors import LayerError, MissingPackageError, ModelError
from elude_steer.models import vision
from elude_steer.models.loading import as_dtype, refuse_partial_load
from elude_steer.models.vision import Tower, load_timm, load_vision, vision_part
from elude_steer.utils import optional


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count=3, size=(40, 30)):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)) for _ in range(count)]


# Tower on models of plain torch. A "picture" is a tensor here, and prepare stacks them.


class Shaped(nn.Module):
    """Brings its input into the shape that some architecture gives the layer, then runs it, then fails."""

    def __init__(self, layer, reshape):
        super().__init__()
        self.layer = layer
        self.reshape = reshape

    def forward(self, x):
        self.layer(self.reshape(x))
        raise AssertionError("the forward pass went past the layer")


def tower(layer, reshape, no_hooks_left, **options):
    model = no_hooks_left(Shaped(layer, reshape))
    return Tower(model, "layer", layer, prepare=torch.stack, **options)


def test_tokens_of_a_batch(no_hooks_left):
    pictures = list(randn(3, 5, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(pictures)
    assert [q.shape for q in encoded] == [(1, 5, 4)] * 3
    assert all(torch.equal(q[0], picture) for q, picture in zip(encoded, pictures, strict=True))


def test_one_vector_an_image(no_hooks_left):
    pictures = list(randn(3, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(pictures)
    assert [q.shape for q in encoded] == [(1, 1, 4)] * 3
    assert all(torch.equal(q[0, 0], picture) for q, picture in zip(encoded, pictures, strict=True))


def test_tokens_of_all_images_in_one_row(no_hooks_left):
    pictures = list(randn(3, 5, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1), no_hooks_left).encode(pictures)
    assert all(torch.equal(q[0], picture) for q, picture in zip(encoded, pictures, strict=True))


def test_windows_or_tiles_of_an_image_follow_each_other(no_hooks_left):
    pictures = list(randn(3, 2, 5, 4))  # two windows each
    encoded = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1), no_hooks_left).encode(pictures)
    assert all(torch.equal(q, picture) for q, picture in zip(encoded, pictures, strict=True))


def test_a_convolution_row_by_row(no_hooks_left):
    pictures = list(randn(2, 4, 3, 5))  # channels, height, width
    encoded = tower(nn.Conv2d(4, 2, 1), lambda x: x, no_hooks_left).encode(pictures)
    for q, picture in zip(encoded, pictures, strict=True):
        assert q.shape == (1, 15, 4)
        assert torch.equal(q[0, 5 * 2 + 3], picture[:, 2, 3])


def test_a_map_with_channels_last_row_by_row(no_hooks_left):
    pictures = list(randn(2, 3, 5, 4))  # height, width, channels
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(pictures)
    for q, picture in zip(encoded, pictures, strict=True):
        assert q.shape == (1, 15, 4)
        assert torch.equal(q[0, 5 * 2 + 3], picture[2, 3])


def test_a_strided_convolution_keeps_only_what_it_looks_at(no_hooks_left):
    pictures = list(randn(2, 4, 6, 6))
    encoded = tower(nn.Conv2d(4, 2, 1, stride=2), lambda x: x, no_hooks_left).encode(pictures)
    assert encoded[0].shape == (1, 9, 4)


def test_rows_that_cannot_be_told_apart(no_hooks_left):
    odd = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7, None], no_hooks_left)
    text = r"layer 'layer' has 7 rows for 2 images; which row .* is unknown; set tokens\.batch_size: 1\."
    with pytest.raises(ModelError, match=text):
        odd.encode(list(randn(2, 5, 4)))


def test_rows_that_cannot_be_told_apart_are_counted_right(no_hooks_left):
    odd = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7], no_hooks_left)
    with pytest.raises(ModelError, match=r"has 7 rows for 2 images"):
        odd.encode(list(randn(2, 5, 4)))


def test_one_image_is_always_told_apart(no_hooks_left):
    one = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7], no_hooks_left)
    assert one.encode([randn(9, 4)])[0].shape == (1, 7, 4)


def test_a_layer_that_does_not_run(no_hooks_left):
    layer = nn.Linear(4, 2)
    unused = Tower(no_hooks_left(nn.Sequential(nn.Linear(4, 4))), "layer", layer, prepare=torch.stack)
    with pytest.raises(LayerError, match="the layer ran 0 times"):
        unused.encode([randn(4)])


def test_a_mapping_is_given_as_keywords(no_hooks_left):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, *, pixels, scale):
            return self.fc(pixels * scale)

    model = no_hooks_left(Named())
    named = Tower(model, "fc", model.fc, prepare=lambda seen: {"pixels": torch.stack(seen), "scale": 3})
    pictures = list(randn(2, 5, 4))
    assert torch.equal(named.encode(pictures)[1][0], pictures[1] * 3)


def test_encode_makes_no_graph_and_leaves_the_pictures(no_hooks_left):
    pictures = list(randn(2, 5, 4))
    before = [picture.clone() for picture in pictures]
    encoded = tower(nn.Linear(4, 2), lambda x: x * 2, no_hooks_left).encode(pictures)
    assert not any(q.requires_grad for q in encoded)
    assert all(torch.equal(now, then) for now, then in zip(pictures, before, strict=True))


def test_nothing_is_left_where_the_model_fails(no_hooks_left):
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tower(nn.Linear(4, 2), interrupted, no_hooks_left).encode([randn(5, 4)])


def test_registers_are_no_instances(no_hooks_left):
    assert tower(nn.Linear(4, 2), None, no_hooks_left).token_indices(4).tolist() == [0, 1, 2, 3]
    assert tower(nn.Linear(4, 2), None, no_hooks_left, skip_tokens=(1, 2)).token_indices(5).tolist() == [0, 3, 4]


# The fingerprint


def two_part_tower(seed=0, **changed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"vision": nn.Linear(4, 3), "text": nn.Linear(3, 3)})
    options = {"layer_name": "vision", "within": "vision", "skip_tokens": (1,), "settings": {"size": 28}}
    return Tower(model, layer=model["vision"], prepare=torch.stack, **(options | changed))


def test_the_fingerprint_is_the_same_for_the_same_model():
    assert two_part_tower().fingerprint() == two_part_tower().fingerprint()


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"skip_tokens": ()}, {"settings": {"size": 32}}, {"layer_name": "other"}, {"within": ""}],
    ids=str,
)
def test_the_fingerprint_changes_with_what_the_inputs_depend_on(changed):
    assert two_part_tower(**changed).fingerprint() != two_part_tower().fingerprint()


def test_the_fingerprint_sees_a_single_bit():
    changed = two_part_tower()
    with torch.no_grad():
        weight = changed.model["vision"].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert changed.fingerprint() != two_part_tower().fingerprint()


def test_the_fingerprint_leaves_out_the_rest_of_the_model():
    changed = two_part_tower()
    nn.init.zeros_(changed.model["text"].weight)
    assert changed.fingerprint() == two_part_tower().fingerprint()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fingerprint_sees_the_dtype(dtype):
    half = two_part_tower()
    half.model.to(dtype)
    assert half.fingerprint() != two_part_tower().fingerprint()


def test_an_offloaded_tower_has_no_fingerprint():
    offloaded = two_part_tower()
    offloaded.model.to("meta")
    with pytest.raises(ModelError, match="part of the vision tower is offloaded; keep it in memory"):
        offloaded.fingerprint()


# Checkpoints of transformers, tiny and random. Tiles of 28 pixels, patches of 7: 16 patches.


def small(**options):
    return dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7, **options)


def bit_processor():
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    return BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory):
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dinov2")
    Dinov2Model(Dinov2Config(**small())).save_pretrained(folder)
    bit_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dinov2_with_registers(tmp_path_factory):
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dinov2-registers")
    Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**small(num_register_tokens=4))).save_pretrained(folder)
    bit_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    from transformers import SiglipConfig, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("siglip")
    text = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    words = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = SiglipConfig(vision_config=small(intermediate_size=40), text_config=text | words)
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def really_given(tower, pictures):
    """What the target layer gets when the whole model runs, kept by a hook of our own."""
    kept = []
    handle = tower.layer.register_forward_hook(lambda _module, args, _output: kept.append(args[0]))
    with torch.inference_mode():
        tower.model(**tower.prepare(pictures))
    handle.remove()
    return kept[0]


def test_dinov2_has_a_cls_token_which_counts(dinov2, no_hooks_left):
    loaded = load_vision(str(dinov2), layer="layer.1.mlp.fc2")
    no_hooks_left(loaded.model)
    assert loaded.layer_name == "encoder.layer.1.mlp.fc2"
    assert not loaded.model.training
    assert loaded.skip_tokens == ()
    encoded = loaded.encode(images())
    assert [q.shape for q in encoded] == [(1, 1 + 16, 64)] * 3
    assert torch.equal(torch.cat(encoded), really_given(loaded, images()))
    assert loaded.token_indices(17).tolist() == list(range(17))


def test_registers_of_dinov2_are_skipped(dinov2_with_registers):
    loaded = load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2")
    [q] = loaded.encode(images(1))
    assert q.shape == (1, 1 + 4 + 16, 64)
    assert loaded.skip_tokens == (1, 2, 3, 4)
    assert loaded.token_indices(q.shape[1]).tolist() == [0, *range(5, 21)]


def test_the_skipped_positions_are_the_registers(dinov2_with_registers):
    """In the model's own input sequence: changing the register parameters changes just these positions."""
    loaded = load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2")
    embeddings = loaded.model.get_submodule("embeddings")
    with torch.inference_mode():
        pixels = loaded.prepare(images(1))["pixel_values"]
        before = embeddings(pixels)
        embeddings.register_tokens.add_(1)
        changed = (embeddings(pixels) != before).any(-1)[0]
    assert tuple(changed.nonzero().flatten().tolist()) == loaded.skip_tokens


def test_of_a_dual_encoder_the_vision_half(siglip):
    loaded = load_vision(str(siglip), layer="encoder.layers.1.mlp.fc2")  # both halves have one
    assert type(loaded.model).__name__.startswith("SiglipVision")
    assert not any("text" in name for name, _ in loaded.model.named_modules())
    encoded = loaded.encode(images())
    assert [q.shape for q in encoded] == [(1, 16, 40)] * 3
    assert torch.equal(torch.cat(encoded), really_given(loaded, images()))


def test_a_layer_that_is_not_there_is_explained(dinov2):
    with pytest.raises(LayerError, match=r'it has layers 0 to 1\. The paper\'s "layer 2" is index 1\.'):
        load_vision(str(dinov2), layer="layer.2.mlp.fc2")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "auto"], ids=str)
def test_the_dtype_asked_for(dinov2, dtype):
    loaded = load_vision(str(dinov2), layer="layer.1.mlp.fc2", dtype=dtype)
    expected = {"bfloat16": torch.bfloat16, "auto": torch.float32}.get(dtype, dtype)
    assert loaded.layer.weight.dtype == expected
    assert loaded.encode(images(1))[0].dtype == expected


def test_two_loads_have_one_fingerprint(dinov2, dinov2_with_registers):
    prints = [load_vision(str(dinov2), layer="layer.1.mlp.fc2").fingerprint() for _ in range(2)]
    assert prints[0] == prints[1]
    assert load_vision(str(dinov2), layer="layer.0.mlp.fc2").fingerprint() != prints[0]
    assert load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2").fingerprint() != prints[0]


def edited(folder, to, edit):
    """A copy of a checkpoint with other tensors in it."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


FC2 = "encoder.layer.1.mlp.fc2.weight"


def test_a_checkpoint_with_a_tensor_missing(dinov2, tmp_path):
    folder = edited(dinov2, tmp_path / "copy", lambda tensors: tensors.pop(FC2))
    text = rf"copy' does not load completely: 1 missing keys \(first: '{FC2}'\); these weights would stay random"
    with pytest.raises(ModelError, match=text):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_checkpoint_with_a_tensor_too_many(dinov2, tmp_path):
    folder = edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update({"stray.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"does not load completely: 1 unexpected keys \(first: 'stray\.weight'\)"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_checkpoint_with_a_tensor_under_another_name(dinov2, tmp_path):
    folder = edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update(other=tensors.pop(FC2)))
    with pytest.raises(ModelError, match=r"1 missing keys .*, 1 unexpected keys \(first: 'other'\)"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_checkpoint_with_a_tensor_of_another_shape(dinov2, tmp_path):
    folder = edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update({FC2: torch.zeros(16, 63)}))
    with pytest.raises(ModelError, match="copy'"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_text_half_with_a_tensor_missing_is_refused_too(siglip, tmp_path):
    key = next(name for name in load_file(siglip / "model.safetensors") if name.startswith("text_model"))
    with pytest.raises(ModelError, match="does not load completely: 1 missing keys"):
        load_vision(edited(siglip, tmp_path / "copy", lambda tensors: tensors.pop(key)), layer="layers.1.mlp.fc2")


def test_what_does_not_fit_is_counted_by_kind():
    refuse_partial_load("x", {"missing_keys": [], "unexpected_keys": set(), "mismatched_keys": None})
    info = {"missing_keys": {"b", "a"}, "mismatched_keys": [("c", (1,), (2,))]}
    with pytest.raises(
        ModelError, match=r"'x' does not load completely: 2 missing keys \(first: 'a'\), 1 mismatched keys"
    ):
        refuse_partial_load("x", info)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"there is no folder '.*nowhere' to load a model from; check the path"):
        load_vision(str(tmp_path / "nowhere"), layer="fc2")
    with pytest.raises(ModelError, match=r"there is no folder '\./nowhere'"):
        load_vision("./nowhere", layer="fc2")


def test_a_folder_without_a_model_and_a_damaged_one(dinov2, tmp_path):
    with pytest.raises(ModelError, match=r"model '.*' could not be loaded: "):
        load_vision(str(tmp_path), layer="fc2")
    shutil.copytree(dinov2, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"copy' could not be loaded: ") as raised:
        load_vision(str(tmp_path / "copy"), layer="fc2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["float99", "nn", "fp16"])
def test_an_unknown_dtype(dinov2, dtype):
    text = rf"dtype '{dtype}' is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'\."
    with pytest.raises(ModelError, match=text):
        as_dtype(dtype)
    with pytest.raises(ModelError, match=text):
        load_vision(str(dinov2), layer="layer.1.mlp.fc2", dtype=dtype)


def test_a_model_without_a_vision_tower():
    with pytest.raises(ModelError, match=r"Text has no vision tower that its config describes \(no vision_config\)"):
        vision_part(type("Text", (nn.Module,), {"config": SimpleNamespace()})())


# timm, by a stand-in: its real package needs torchvision.


class TimmLike(nn.Module):
    num_prefix_tokens, num_reg_tokens = 5, 4

    def __init__(self):
        super().__init__()
        self.fc2 = nn.Linear(3, 2)

    def forward(self, pixels):
        tokens = pixels.flatten(2).transpose(1, 2)
        return self.fc2(torch.cat([tokens.new_zeros(len(tokens), self.num_prefix_tokens, 3), tokens], 1))


@pytest.fixture
def timm(monkeypatch):
    data = SimpleNamespace(
        resolve_model_data_config=lambda model: {"input_size": (3, 4, 4)},
        create_transform=lambda input_size, is_training: lambda image: torch.ones(input_size),
    )
    fake = SimpleNamespace(create_model=lambda name, pretrained: TimmLike(), data=data)
    monkeypatch.setattr(vision.optional, "require", lambda package, feature: fake)


def test_timm_skips_registers_and_keeps_cls(timm):
    loaded = load_timm("vit", layer="fc2", dtype="bfloat16")
    assert loaded.skip_tokens == (1, 2, 3, 4)
    [q, _] = loaded.encode(images(2))
    assert q.shape == (1, 21, 3)
    assert q.dtype == torch.bfloat16
    assert loaded.token_indices(21).tolist() == [0, *range(5, 21)]


def test_timm_takes_dtype_auto_like_the_others(timm):
    assert load_timm("vit", layer="fc2", dtype="auto").layer.weight.dtype == torch.float32


@pytest.mark.skipif(optional.is_installed("timm"), reason="timm is here")
def test_without_timm_the_pip_line_is_given():
    text = r"'timm' \(vit\) needs the package 'timm', which is not installed; `pip install 'elude-steer\[timm\]'`"
    with pytest.raises(MissingPackageError, match=text):
        load_timm("vit", layer="fc2")


def test_a_classifiers_head_has_no_place_in_the_backbone(tmp_path):
    from transformers import Dinov2Config, Dinov2ForImageClassification

    Dinov2ForImageClassification(Dinov2Config(**small())).save_pretrained(tmp_path)
    bit_processor().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"unexpected keys \(first: 'classifier\.bias'\)"):
        load_vision(str(tmp_path), layer="layer.1.mlp.fc2")
