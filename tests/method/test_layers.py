from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from elude_steer.errors import LayerError
from elude_steer.method import layers
from elude_steer.method.layers import (
    SplitConv1x1,
    SplitLinear,
    SubUnits,
    divide_among_owners,
    layer_parameters,
    split_layer,
    sub_unit_parameters,
)
from elude_steer.method.splitting import memberships
from elude_steer.models.hooks import swap_module


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_split(d_out, d_in, seed=0):
    """Members and units of a layer whose units have 1, 2, 3, 4, 1, 2, … sub-units."""
    members, units = [], []
    for unit in range(d_out):
        found = memberships(randn(unit % 4 + 1, d_in, seed=seed + unit), 0.6)
        members.append(found)
        units += [unit] * len(found)
    return torch.cat(members), torch.tensor(units)


def r_squared(expected, got):
    expected, got = expected.double(), got.double()
    return float(1 - (got - expected).square().sum() / (expected - expected.mean()).square().sum())


def loop_sub_unit(x, weight, bias, members, units, which):
    """The activation of one sub-unit for one input vector, straight from the definition and in plain floats."""
    unit = int(units[which])
    siblings = [s for s in range(len(units)) if int(units[s]) == unit]
    total, share_sum = 0.0, 0.0
    for j in range(len(x)):
        if members[which, j]:
            share = 1 / sum(bool(members[s, j]) for s in siblings)
            total += float(weight[unit, j]) * share * float(x[j])
            share_sum += share
    return total + float(bias[unit]) * share_sum / len(x)


# Weights and biases of sub-units


def test_sub_unit_parameters_by_hand():
    weight = torch.tensor([[1.0, 1.0, 0.0, 2.0], [3.0, -6.0, 0.0, 9.0]])
    bias = torch.tensor([8.0, 0.0])
    members = torch.tensor(
        [
            [1, 0, 1, 1],  # unit 0: shares 1, 0, 1/2, 1/2, mean 1/2
            [0, 1, 1, 1],  #         shares 0, 1, 1/2, 1/2, mean 1/2
            [1, 1, 1, 1],  # unit 1: shares 1/3 each but for dimension 1, where 1/2
            [1, 0, 1, 1],  #
            [1, 1, 1, 1],
        ],
        dtype=torch.bool,
    )
    got, biases = sub_unit_parameters(weight, bias, members, torch.tensor([0, 0, 1, 1, 1]))
    expected = [[1, 0, 0, 1], [0, 1, 0, 1], [1, -3, 0, 3], [1, 0, 0, 3], [1, -3, 0, 3]]
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float32))
    assert biases.tolist() == [4, 4, 0, 0, 0]


def test_the_bias_is_divided_by_mean_share_even_if_weights_are_zero():
    # One of three owns dimension 0 alone, all own dimension 1: shares (1 + 1/3) / 2 = 2/3, 1/6, 1/6
    members = torch.tensor([[1, 1], [0, 1], [0, 1]], dtype=torch.bool)
    _, bias = sub_unit_parameters(torch.zeros(1, 2), torch.tensor([6.0]), members, torch.tensor([0, 0, 0]))
    assert torch.allclose(bias, torch.tensor([4.0, 1.0, 1.0]))


def test_a_dead_sub_unit_has_neither_weights_nor_bias():
    members = torch.tensor([[1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    weight, bias = sub_unit_parameters(randn(1, 3), torch.tensor([2.0]), members, torch.tensor([0, 0]))
    assert weight[1].tolist() == [0, 0, 0]
    assert bias.tolist() == [2, 0]


def test_a_selection_of_units_gets_the_same_parameters_as_in_the_whole_layer():
    weight, bias = randn(6, 9), randn(6, seed=1)
    members, units = random_split(6, 9)
    all_weights, all_biases = sub_unit_parameters(weight, bias, members, units)
    chosen = torch.tensor([s for s in reversed(range(len(units))) if units[s] in (1, 3, 4)])
    some_weights, some_biases = sub_unit_parameters(weight, bias, members[chosen], units[chosen])
    assert torch.equal(some_weights, all_weights[chosen])
    assert torch.equal(some_biases, all_biases[chosen])


# Few different values make ties and zeros frequent.
strengths = st.integers(1, 6).flatmap(
    lambda k: st.lists(st.lists(st.integers(-4, 4), min_size=k, max_size=k), min_size=1, max_size=8)
)


@settings(deadline=None)
@given(strengths, st.sampled_from(["unique", "gap", "winner"]))
def test_sub_units_add_up_to_the_unit_exactly(columns, rule):
    members = memberships(torch.tensor(columns).T.float(), 0.5, rule)
    k, d_in = members.shape
    # A weight of one makes the shares visible, rounded to float32.
    weight, bias = sub_unit_parameters(torch.ones(1, d_in), torch.tensor([1.0]), members, torch.zeros(k).long())
    exact = [[Fraction(value).limit_denominator(k) for value in row] for row in weight.tolist()]
    assert all(sum(row[j] for row in exact) == 1 for j in range(d_in))
    for row, got in zip(exact, bias.tolist(), strict=True):
        assert got == pytest.approx(float(sum(row) / d_in), rel=1e-6)


def test_layer_parameters_are_float32_and_a_missing_bias_is_zero():
    conv = nn.Conv2d(4, 3, 1, bias=False, dtype=torch.bfloat16)
    weight, bias = layer_parameters(conv)
    assert weight.shape == (3, 4)
    assert weight.dtype == bias.dtype == torch.float32
    assert bias.tolist() == [0, 0, 0]
    assert not weight.requires_grad
    with pytest.raises(LayerError, match=r"LayerNorm.* cannot be split; only nn\.Linear and 1x1 nn\.Conv2d can"):
        layer_parameters(nn.LayerNorm(4))


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1, groups=2)], ids=["3x3", "grouped"])
def test_a_convolution_that_is_not_linear_per_position_cannot_be_split(conv):
    with pytest.raises(LayerError, match=r"only nn\.Linear and 1x1 nn\.Conv2d can"):
        layer_parameters(conv)


# The split layer and the original


def linear(bias, dtype):
    torch.manual_seed(0)
    return nn.Linear(12, 6, bias=bias, dtype=dtype)


def conv(bias, dtype, **options):
    torch.manual_seed(0)
    return nn.Conv2d(12, 6, 1, bias=bias, dtype=dtype, **options)


CASES = {
    "2-D": (linear, (5, 12)),
    "3-D": (linear, (2, 5, 12)),
    "4-D": (linear, (2, 3, 4, 12)),
    "conv": (conv, (2, 12, 5, 4)),
    "strided conv": (lambda bias, dtype: conv(bias, dtype, stride=2), (2, 12, 5, 4)),
    "padded conv": (lambda bias, dtype: conv(bias, dtype, stride=(1, 2), padding=1), (2, 12, 5, 4)),
}
every_case = pytest.mark.parametrize("case", CASES)
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@every_case
@with_and_without_bias
@dtypes
@torch.inference_mode()
def test_the_split_layer_gives_the_output_of_the_original(case, bias, dtype):
    make, shape = CASES[case]
    layer, x = make(bias, dtype), randn(*shape, dtype=dtype)
    split = split_layer(layer, *random_split(6, 12))
    out = split(x)
    assert type(split) is (SplitConv1x1 if isinstance(layer, nn.Conv2d) else SplitLinear)
    assert out.dtype == dtype
    assert out.shape == layer(x).shape
    # bfloat16 keeps 8 bits of each share: a relative error near 2^-9, squared
    tolerance = {torch.float32: 1e-10, torch.float16: 1e-5, torch.bfloat16: 1e-4}[dtype]
    assert r_squared(layer(x), out) >= 1 - tolerance


@torch.inference_mode()
def test_sub_units_of_the_split_layer_equal_a_plain_loop():
    layer, x = linear(True, torch.float32), randn(3, 12)
    members, units = random_split(6, 12)
    got = split_layer(layer, members, units).sub_units(x)
    assert got.shape == (3, len(units))
    for row in range(3):
        for s in range(len(units)):
            expected = loop_sub_unit(x[row], layer.weight, layer.bias, members, units, s)
            assert float(got[row, s]) == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_adding_the_change_of_sub_units_scales_them():
    layer, x = linear(True, torch.float32), randn(2, 4, 12)
    members, units = random_split(6, 12)
    parts = SubUnits(*sub_unit_parameters(*layer_parameters(layer), members, units), units)
    gains = torch.linspace(-2, 5, len(units))
    out = layer(x)
    parts.add_change(out, (gains - 1) * parts.activations(x))
    expected = torch.zeros(2, 4, 6).index_add(-1, units, gains * split_layer(layer, members, units).sub_units(x))
    assert torch.allclose(out, expected, atol=1e-4)


@torch.inference_mode()
def test_silencing_all_sub_units_of_a_unit_silences_the_unit_and_leaves_the_others():
    layer, x = linear(True, torch.float32), randn(4, 12)
    members, units = random_split(6, 12)
    weight, bias = sub_unit_parameters(*layer_parameters(layer), members, units)
    parts = SubUnits(weight[units == 3], bias[units == 3], units[units == 3])
    out = layer(x)
    parts.add_change(out, -parts.activations(x))
    others = [0, 1, 2, 4, 5]
    assert torch.allclose(out[:, 3], torch.zeros(4), atol=1e-5)
    assert torch.equal(out[:, others], layer(x)[:, others])


def test_the_split_layer_keeps_the_original_layer_and_its_weights():
    layer = linear(True, torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    split, x = split_layer(layer, *random_split(6, 12)), randn(2, 12)
    original = x.clone()
    split(x)
    assert split.base_layer is layer
    assert torch.equal(x, original)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@torch.inference_mode()
def test_a_compiled_split_layer_gives_the_same_output():
    torch.compiler.reset()
    layer, x = linear(True, torch.float32), randn(7, 12)
    split = split_layer(layer, *random_split(6, 12))
    assert torch.allclose(torch.compile(split, fullgraph=True)(x), split(x), atol=1e-4)


# Inside models


def open_images(folder, count=4):
    found = []
    for path in sorted(folder.rglob("*.png"))[:count]:
        with Image.open(path) as image:
            found.append(image.convert("RGB"))
    return found


@pytest.fixture(scope="module")
def llava(tiny_vlm, image_folder):
    """The tiny LLaVA-OneVision, the name of its target layer, and a function that computes logits for four images."""
    inputs = tiny_vlm.inputs(open_images(image_folder))
    return tiny_vlm.model, tiny_vlm.layer_name, lambda: tiny_vlm.model(**inputs).logits


@pytest.fixture(scope="module")
def vit():
    """A ViT with a CLS token."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7)
    model = Dinov2Model(config).eval()
    nn.init.normal_(model.get_submodule("encoder.layer.1.mlp.fc2").bias)
    pixels = randn(3, 3, 28, 28)
    return model, "encoder.layer.1.mlp.fc2", lambda: model(pixels).last_hidden_state  # (3, 17, 16)


@pytest.fixture(scope="module")
def cnn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.GELU(), nn.Conv2d(10, 8, 1, stride=2), nn.BatchNorm2d(8)).eval()
    pixels = randn(3, 3, 12, 12)
    return model, "2", lambda: model(pixels)


@pytest.fixture(params=["llava", "vit", "cnn"])
def model_and_split(request, no_hooks_left):
    model, name, run = request.getfixturevalue(request.param)
    no_hooks_left(model)
    layer = model.get_submodule(name)
    members, units = random_split(*layer_parameters(layer)[0].shape)
    return model, name, run, layer, members, units


@torch.inference_mode()
def test_a_model_with_the_split_layer_gives_the_same_output_up_to_rounding(model_and_split):
    model, name, run, layer, members, units = model_and_split
    original = run()
    with swap_module(model, name, split_layer(layer, members, units)):
        assert r_squared(original, run()) >= 1 - 1e-10
    assert torch.equal(run(), original)


@torch.inference_mode()
def test_every_dimension_of_every_unit_is_owned_and_its_shares_add_to_one(model_and_split):
    *_, layer, members, units = model_and_split
    weight, _ = layer_parameters(layer)
    fractions, _ = sub_unit_parameters(torch.ones_like(weight), torch.zeros(len(weight)), members, units)
    for unit in range(len(weight)):
        for column in fractions[units == unit].T.tolist():
            exact = [Fraction(value).limit_denominator(len(column)) for value in column]
            assert any(exact)
            assert sum(exact) == 1


def test_weights_computed_in_pieces_are_the_same_bits(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(50, 96, generator=generator), torch.randn(50, generator=generator)
    members = torch.rand(50, 96, generator=generator) < 0.5
    owners = torch.randint(1, 9, (50, 96), generator=generator)
    whole = divide_among_owners(weight, bias, members, owners)
    monkeypatch.setattr(layers, "_ROWS", 7)
    assert all(
        torch.equal(a, b) for a, b in zip(whole, divide_among_owners(weight, bias, members, owners), strict=True)
    )
