import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.manifest import write_manifest
from elude_steer.atlas.weights import check_weights, describe_weights, weights_hash
from elude_steer.errors import AtlasError
from elude_steer.models.vlm import Vlm
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import save_llava

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYER = "layers.1.mlp.fc2"


def make_layer(stored=torch.float32, seed=0):
    """A layer with the values of a checkpoint in a data type: one is too small for float16, many round twice."""
    torch.manual_seed(seed)
    layer = nn.Linear(300, 40)
    with torch.no_grad():
        layer.weight[0, 0] = 1e-9
    return layer.to(stored).float()


def load_as(layer, dtype):
    return copy.deepcopy(layer).to(dtype)


def describe(layer, *, old=False, dtype="float32"):
    recorded = describe_weights(layer)
    if old:
        del recorded["weights_by_dtype"]
    sizes = {"d_out": layer.out_features, "d_in": layer.in_features}
    return {"name": "small", "model": {"id": "some/model"}, **sizes, "spec": {"model": {"dtype": dtype}}, **recorded}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def test_rounding_twice_is_not_rounding_once():
    layer = make_layer()
    assert weights_hash(layer) != weights_hash(load_as(layer, torch.float16))
    check_weights(describe(layer), load_as(layer, torch.float16))


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("built", DTYPES, ids=str)
@pytest.mark.parametrize("loaded", DTYPES, ids=str)
@pytest.mark.parametrize("old", [False, True], ids=["new atlas", "old atlas"])
def test_every_dtype_of_a_checkpoint_passes_and_other_weights_never_do(stored, built, loaded, old):
    checkpoint = make_layer(stored)
    about = describe(load_as(checkpoint, built), old=old, dtype=name_of(built))
    check_weights(about, load_as(checkpoint, loaded), lambda: [(checkpoint.weight, checkpoint.bias)])

    other = copy.deepcopy(checkpoint)
    with torch.no_grad():
        other.weight[3, 5] *= 1.02  # more than two roundings change
    with pytest.raises(AtlasError, match=r"built for other weights of this layer \(hash [0-9a-f]{8}…, loaded"):
        check_weights(about, load_as(other, loaded), lambda: [(other.weight, other.bias)])
    # the right checkpoint on the disk says nothing about other weights in memory
    with pytest.raises(AtlasError, match=r"other weights|load the model in float32"):
        check_weights(about, load_as(other, loaded), lambda: [(checkpoint.weight, checkpoint.bias)])


def test_the_smallest_change_is_found_in_the_dtype_of_the_build():
    layer = make_layer()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight[3, 5] = torch.nextafter(other.weight[3, 5], torch.tensor(9.0))
    with pytest.raises(AtlasError, match="other weights"):
        check_weights(describe(layer), other)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_a_copy_stored_in_half_precision_passes_in_float32(stored):
    layer = make_layer()
    check_weights(describe(layer), make_layer(stored))


@pytest.mark.parametrize(("built", "loaded"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)])
def test_two_half_precisions_without_the_checkpoint_are_refused_with_a_way_out(built, loaded):
    checkpoint = make_layer()
    about = describe(load_as(checkpoint, built))
    with pytest.raises(AtlasError, match=r"cannot be compared .* load the model in float32 \(dtype='float32', --dtype"):
        check_weights(about, load_as(checkpoint, loaded))
    check_weights(about, checkpoint)


def as_old_atlas(atlas, folder):
    """Save an atlas as versions before `weights_by_dtype` did."""
    atlas.save(folder)
    about = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {k: v for k, v in about.items() if k not in ("weights_by_dtype", "files", "checksum")})
    return Atlas.load(folder)


def test_toyland_in_float16_takes_its_atlas_and_one_of_before(steerer, tmp_path):
    half = Vlm.load("toyland/captioner", layer=steerer.vlm.layer_name, dtype="float16")
    for atlas in (steerer.atlas, as_old_atlas(steerer.atlas, tmp_path / "old")):
        assert Steerer.from_parts(half, atlas, steerer.matcher).atlas.fingerprint == steerer.atlas.fingerprint


@pytest.mark.parametrize("sharded", [False, True])
def test_the_layer_is_read_from_the_checkpoint_in_a_folder(tmp_path, sharded):
    folder = save_llava(tmp_path / "model")
    if sharded:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        for number in range(2):
            part = {name: tensors[name] for name in names[number::2]}
            save_file(part, folder / f"model-0000{number + 1}-of-00002.safetensors", metadata={"format": "pt"})
        index = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    full = Vlm.load(str(folder), layer=LAYER)
    (stored,) = full.read_stored()
    assert torch.equal(stored[0], full.layer.weight) and torch.equal(stored[1], full.layer.bias)
    about = describe(load_as(full.layer, torch.bfloat16))
    half = Vlm.load(str(folder), layer=LAYER, dtype="float16")
    check_weights(about, half.layer, half.read_stored)
    with pytest.raises(AtlasError, match="load the model in float32"):
        check_weights(about, half.layer, Vlm.from_model(half.model, half.processor, layer=LAYER).read_stored)


def test_the_layer_is_read_from_the_cache_of_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    cached = tmp_path / "models--me--model"
    folder = save_llava(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    half = Vlm.load(str(folder), layer=LAYER, dtype="float16")
    named = Vlm.from_model(half.model, half.processor, layer=LAYER, id="me/model")
    (stored,) = named.read_stored()
    assert torch.equal(stored[0].half(), half.layer.weight)
