from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from elude_steer.errors import LayerError, MissingPackageError, ModelError
from elude_steer.models import vision
from elude_steer.models.vision import Tower, load_timm, load_vision, vision_part
from elude_steer.utils import optional
from tests.models.conftest import bit_processor, small


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count=3, size=(40, 30)):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)) for _ in range(count)]


# Tower on models of plain torch. An image is a tensor here, and prepare stacks them.


class Shaped(nn.Module):
    """Reshapes its input as some architecture does, runs the layer, and fails after it."""

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


def test_encode_splits_a_batch_of_tokens(no_hooks_left):
    inputs = list(randn(3, 5, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(inputs)
    assert [q.shape for q in encoded] == [(1, 5, 4)] * 3
    assert all(torch.equal(q[0], x) for q, x in zip(encoded, inputs, strict=True))


def test_encode_splits_one_vector_per_image(no_hooks_left):
    inputs = list(randn(3, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(inputs)
    assert [q.shape for q in encoded] == [(1, 1, 4)] * 3
    assert all(torch.equal(q[0, 0], x) for q, x in zip(encoded, inputs, strict=True))


def test_encode_splits_tokens_of_all_images_in_one_row(no_hooks_left):
    inputs = list(randn(3, 5, 4))
    encoded = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1), no_hooks_left).encode(inputs)
    assert all(torch.equal(q[0], x) for q, x in zip(encoded, inputs, strict=True))


def test_encode_groups_windows_or_tiles_by_image(no_hooks_left):
    inputs = list(randn(3, 2, 5, 4))  # two windows each
    encoded = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1), no_hooks_left).encode(inputs)
    assert all(torch.equal(q, x) for q, x in zip(encoded, inputs, strict=True))


def test_encode_flattens_a_convolution_row_by_row(no_hooks_left):
    inputs = list(randn(2, 4, 3, 5))  # channels, height, width
    encoded = tower(nn.Conv2d(4, 2, 1), lambda x: x, no_hooks_left).encode(inputs)
    for q, x in zip(encoded, inputs, strict=True):
        assert q.shape == (1, 15, 4)
        assert torch.equal(q[0, 5 * 2 + 3], x[:, 2, 3])


def test_encode_flattens_a_map_with_channels_last_row_by_row(no_hooks_left):
    inputs = list(randn(2, 3, 5, 4))  # height, width, channels
    encoded = tower(nn.Linear(4, 2), lambda x: x, no_hooks_left).encode(inputs)
    for q, x in zip(encoded, inputs, strict=True):
        assert q.shape == (1, 15, 4)
        assert torch.equal(q[0, 5 * 2 + 3], x[2, 3])


def test_a_strided_convolution_keeps_only_the_positions_it_reads(no_hooks_left):
    inputs = list(randn(2, 4, 6, 6))
    encoded = tower(nn.Conv2d(4, 2, 1, stride=2), lambda x: x, no_hooks_left).encode(inputs)
    assert encoded[0].shape == (1, 9, 4)


def test_rows_that_cannot_be_assigned_to_images_raise(no_hooks_left):
    uneven = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7, None], no_hooks_left)
    text = r"layer 'layer' has 7 rows for 2 images; which row .* is unknown; set tokens\.batch_size: 1\."
    with pytest.raises(ModelError, match=text):
        uneven.encode(list(randn(2, 5, 4)))


def test_the_error_counts_rows_before_reshaping(no_hooks_left):
    uneven = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7], no_hooks_left)
    with pytest.raises(ModelError, match=r"has 7 rows for 2 images"):
        uneven.encode(list(randn(2, 5, 4)))


def test_a_single_image_takes_all_rows(no_hooks_left):
    one = tower(nn.Linear(4, 2), lambda x: x.flatten(0, 1)[:7], no_hooks_left)
    assert one.encode([randn(9, 4)])[0].shape == (1, 7, 4)


def test_a_layer_that_does_not_run_raises(no_hooks_left):
    layer = nn.Linear(4, 2)
    unused = Tower(no_hooks_left(nn.Sequential(nn.Linear(4, 4))), "layer", layer, prepare=torch.stack)
    with pytest.raises(LayerError, match="the layer ran 0 times"):
        unused.encode([randn(4)])


def test_a_mapping_is_passed_as_keywords(no_hooks_left):
    class KeywordOnly(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, *, pixels, scale):
            return self.fc(pixels * scale)

    model = no_hooks_left(KeywordOnly())
    keyword_tower = Tower(model, "fc", model.fc, prepare=lambda images: {"pixels": torch.stack(images), "scale": 3})
    inputs = list(randn(2, 5, 4))
    assert torch.equal(keyword_tower.encode(inputs)[1][0], inputs[1] * 3)


def test_encode_records_no_gradients_and_keeps_its_inputs(no_hooks_left):
    inputs = list(randn(2, 5, 4))
    before = [x.clone() for x in inputs]
    encoded = tower(nn.Linear(4, 2), lambda x: x * 2, no_hooks_left).encode(inputs)
    assert not any(q.requires_grad for q in encoded)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_hooks_are_removed_when_the_model_fails(no_hooks_left):
    def interrupt(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tower(nn.Linear(4, 2), interrupt, no_hooks_left).encode([randn(5, 4)])


def test_registers_are_not_instances(no_hooks_left):
    assert tower(nn.Linear(4, 2), None, no_hooks_left).token_indices(4).tolist() == [0, 1, 2, 3]
    assert tower(nn.Linear(4, 2), None, no_hooks_left, skip_tokens=(1, 2)).token_indices(5).tolist() == [0, 3, 4]


# The fingerprint


def two_part_tower(seed=0, **changes):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"vision": nn.Linear(4, 3), "text": nn.Linear(3, 3)})
    options = {"layer_name": "vision", "within": "vision", "skip_tokens": (1,), "settings": {"size": 28}}
    return Tower(model, layer=model["vision"], prepare=torch.stack, **(options | changes))


def test_the_fingerprint_is_the_same_for_the_same_model():
    assert two_part_tower().fingerprint() == two_part_tower().fingerprint()


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"skip_tokens": ()}, {"settings": {"size": 32}}, {"layer_name": "other"}, {"within": ""}],
    ids=str,
)
def test_the_fingerprint_changes_with_what_the_inputs_depend_on(changes):
    assert two_part_tower(**changes).fingerprint() != two_part_tower().fingerprint()


def test_the_fingerprint_changes_with_a_single_bit():
    changed = two_part_tower()
    with torch.no_grad():
        weight = changed.model["vision"].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert changed.fingerprint() != two_part_tower().fingerprint()


def test_the_fingerprint_ignores_the_rest_of_the_model():
    changed = two_part_tower()
    nn.init.zeros_(changed.model["text"].weight)
    assert changed.fingerprint() == two_part_tower().fingerprint()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fingerprint_changes_with_the_dtype(dtype):
    half = two_part_tower()
    half.model.to(dtype)
    assert half.fingerprint() != two_part_tower().fingerprint()


def test_an_offloaded_tower_has_no_fingerprint():
    offloaded = two_part_tower()
    offloaded.model.to("meta")
    with pytest.raises(ModelError, match="part of the vision tower is offloaded; keep it in memory"):
        offloaded.fingerprint()


# Checkpoints of transformers, tiny and random. Tiles of 28 pixels, patches of 7: 16 patches.


@pytest.fixture(scope="module")
def dinov2_with_registers(tmp_path_factory):
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dinov2-registers")
    Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**small(num_register_tokens=4))).save_pretrained(folder)
    bit_processor().save_pretrained(folder)
    return folder


def layer_inputs(tower, images):
    """The inputs of the target layer in a run of the complete model, recorded by a plain hook."""
    inputs = []
    handle = tower.layer.register_forward_hook(lambda _module, args, _output: inputs.append(args[0]))
    with torch.inference_mode():
        tower.model(**tower.prepare(images))
    handle.remove()
    return inputs[0]


def test_the_cls_token_of_dinov2_is_an_instance(dinov2, no_hooks_left):
    loaded = load_vision(str(dinov2), layer="layer.1.mlp.fc2")
    no_hooks_left(loaded.model)
    assert loaded.layer_name == "encoder.layer.1.mlp.fc2"
    assert not loaded.model.training
    assert loaded.skip_tokens == ()
    encoded = loaded.encode(images())
    assert [q.shape for q in encoded] == [(1, 1 + 16, 64)] * 3
    assert torch.equal(torch.cat(encoded), layer_inputs(loaded, images()))
    assert loaded.token_indices(17).tolist() == list(range(17))


def test_registers_of_dinov2_are_skipped(dinov2_with_registers):
    loaded = load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2")
    [q] = loaded.encode(images(1))
    assert q.shape == (1, 1 + 4 + 16, 64)
    assert loaded.skip_tokens == (1, 2, 3, 4)
    assert loaded.token_indices(q.shape[1]).tolist() == [0, *range(5, 21)]


def test_skipped_positions_are_the_registers(dinov2_with_registers):
    """Changing the register parameters changes only these positions of the embeddings."""
    loaded = load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2")
    embeddings = loaded.model.get_submodule("embeddings")
    with torch.inference_mode():
        pixels = loaded.prepare(images(1))["pixel_values"]
        before = embeddings(pixels)
        embeddings.register_tokens.add_(1)
        changed = (embeddings(pixels) != before).any(-1)[0]
    assert tuple(changed.nonzero().flatten().tolist()) == loaded.skip_tokens


def test_the_vision_half_of_a_dual_encoder_is_loaded(siglip):
    loaded = load_vision(str(siglip), layer="encoder.layers.1.mlp.fc2")  # both halves have one
    assert type(loaded.model).__name__.startswith("SiglipVision")
    assert not any("text" in name for name, _ in loaded.model.named_modules())
    encoded = loaded.encode(images())
    assert [q.shape for q in encoded] == [(1, 16, 40)] * 3
    assert torch.equal(torch.cat(encoded), layer_inputs(loaded, images()))


def test_a_missing_layer_is_explained(dinov2):
    with pytest.raises(LayerError, match=r'it has layers 0 to 1\. The paper\'s "layer 2" is index 1\.'):
        load_vision(str(dinov2), layer="layer.2.mlp.fc2")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "auto"], ids=str)
def test_the_model_has_the_requested_dtype(dinov2, dtype):
    loaded = load_vision(str(dinov2), layer="layer.1.mlp.fc2", dtype=dtype)
    expected = {"bfloat16": torch.bfloat16, "auto": torch.float32}.get(dtype, dtype)
    assert loaded.layer.weight.dtype == expected
    assert loaded.encode(images(1))[0].dtype == expected


def test_two_loads_have_the_same_fingerprint(dinov2, dinov2_with_registers):
    fingerprints = [load_vision(str(dinov2), layer="layer.1.mlp.fc2").fingerprint() for _ in range(2)]
    assert fingerprints[0] == fingerprints[1]
    assert load_vision(str(dinov2), layer="layer.0.mlp.fc2").fingerprint() != fingerprints[0]
    assert load_vision(str(dinov2_with_registers), layer="layer.1.mlp.fc2").fingerprint() != fingerprints[0]


def test_a_model_without_a_vision_tower_raises():
    with pytest.raises(ModelError, match=r"Text has no vision tower that its config describes \(no vision_config\)"):
        vision_part(type("Text", (nn.Module,), {"config": SimpleNamespace()})())


# timm, replaced by a stub: the package needs torchvision.


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


def test_timm_accepts_dtype_auto(timm):
    assert load_timm("vit", layer="fc2", dtype="auto").layer.weight.dtype == torch.float32


@pytest.mark.skipif(optional.is_installed("timm"), reason="timm is installed")
def test_a_missing_timm_raises_an_error_with_the_pip_line():
    text = r"'timm' \(vit\) needs the package 'timm', which is not installed; `pip install 'elude-steer\[timm\]'`"
    with pytest.raises(MissingPackageError, match=text):
        load_timm("vit", layer="fc2")
