import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from elude_steer.errors import ModelError
from elude_steer.models.loading import as_dtype, refuse_partial_load
from elude_steer.models.vision import load_vision
from elude_steer.models.vlm import Vlm
from tests.models.conftest import bit_processor, small


def copy_edited(folder, to, edit):
    """Copy a checkpoint and change its tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


FC2 = "encoder.layer.1.mlp.fc2.weight"


def test_a_missing_tensor_is_refused(dinov2, tmp_path):
    folder = copy_edited(dinov2, tmp_path / "copy", lambda tensors: tensors.pop(FC2))
    text = rf"copy' does not load completely: 1 missing keys \(first: '{FC2}'\); these weights would stay random"
    with pytest.raises(ModelError, match=text):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_left_over_tensor_is_refused(dinov2, tmp_path):
    folder = copy_edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update({"stray.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"does not load completely: 1 unexpected keys \(first: 'stray\.weight'\)"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_renamed_tensor_is_refused(dinov2, tmp_path):
    folder = copy_edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update(other=tensors.pop(FC2)))
    with pytest.raises(ModelError, match=r"1 missing keys .*, 1 unexpected keys \(first: 'other'\)"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_tensor_of_another_shape_is_refused(dinov2, tmp_path):
    folder = copy_edited(dinov2, tmp_path / "copy", lambda tensors: tensors.update({FC2: torch.zeros(16, 63)}))
    with pytest.raises(ModelError, match="copy'"):
        load_vision(folder, layer="layer.1.mlp.fc2")


def test_a_missing_tensor_of_the_text_half_is_refused(siglip, tmp_path):
    key = next(name for name in load_file(siglip / "model.safetensors") if name.startswith("text_model"))
    with pytest.raises(ModelError, match="does not load completely: 1 missing keys"):
        load_vision(copy_edited(siglip, tmp_path / "copy", lambda tensors: tensors.pop(key)), layer="layers.1.mlp.fc2")


def test_weights_in_a_pickle_are_refused(dinov2, tmp_path):
    folder = shutil.copytree(dinov2, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"could not be loaded: .*safetensors"):
        load_vision(str(folder), layer="layer.1.mlp.fc2")


def test_the_error_counts_keys_by_kind():
    refuse_partial_load("x", {"missing_keys": [], "unexpected_keys": set(), "mismatched_keys": None})
    info = {"missing_keys": {"b", "a"}, "mismatched_keys": [("c", (1,), (2,))]}
    with pytest.raises(
        ModelError, match=r"'x' does not load completely: 2 missing keys \(first: 'a'\), 1 mismatched keys"
    ):
        refuse_partial_load("x", info)


def test_a_missing_folder_raises_a_one_line_error(tmp_path):
    with pytest.raises(ModelError, match=r"there is no folder '.*nowhere' to load a model from; check the path"):
        load_vision(str(tmp_path / "nowhere"), layer="fc2")
    with pytest.raises(ModelError, match=r"there is no folder '\./nowhere'"):
        load_vision("./nowhere", layer="fc2")


def test_empty_and_damaged_folders_raise_a_one_line_error(dinov2, tmp_path):
    with pytest.raises(ModelError, match=r"model '.*' could not be loaded: "):
        load_vision(str(tmp_path), layer="fc2")
    shutil.copytree(dinov2, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"copy' could not be loaded: ") as raised:
        load_vision(str(tmp_path / "copy"), layer="fc2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", ["float99", "nn", "fp16"])
def test_an_unknown_dtype_is_refused(dinov2, dtype):
    text = rf"dtype '{dtype}' is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'\."
    with pytest.raises(ModelError, match=text):
        as_dtype(dtype)
    with pytest.raises(ModelError, match=text):
        load_vision(str(dinov2), layer="layer.1.mlp.fc2", dtype=dtype)


def test_a_classifier_is_not_loaded_as_a_backbone(tmp_path):
    from transformers import Dinov2Config, Dinov2ForImageClassification

    Dinov2ForImageClassification(Dinov2Config(**small())).save_pretrained(tmp_path)
    bit_processor().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"unexpected keys \(first: 'classifier\.bias'\)"):
        load_vision(str(tmp_path), layer="layer.1.mlp.fc2")


# Vision-language models


def test_a_vlm_loads_without_torchvision(tiny_vlm, tiny_llava):
    from transformers.utils import is_torchvision_available

    assert type(tiny_vlm.model).__name__ == "LlavaOnevisionForConditionalGeneration"
    assert tiny_vlm.id == str(tiny_llava)
    assert not tiny_vlm.model.training
    if not is_torchvision_available():
        assert type(tiny_vlm.processor.image_processor).__name__.endswith("Pil")
        assert getattr(tiny_vlm.processor, "video_processor", None) is None


@pytest.mark.parametrize("end", ["layers.1.mlp.fc2.weight", "norm.weight", "image_newline"])  # one of each part
def test_a_missing_tensor_of_any_part_of_a_vlm_is_refused(tiny_llava, tmp_path, end):
    def remove(tensors):
        [key] = [name for name in tensors if name.endswith("." + end) or name == end]
        del tensors[key]

    with pytest.raises(ModelError, match=rf"copy' does not load completely: 1 missing keys \(first: '.*{end}'\)"):
        Vlm.load(copy_edited(tiny_llava, tmp_path / "copy", remove))


def test_a_left_over_tensor_of_a_vlm_is_refused(tiny_llava, tmp_path):
    folder = copy_edited(
        tiny_llava, tmp_path / "copy", lambda tensors: tensors.update({"stray.weight": torch.zeros(2)})
    )
    with pytest.raises(ModelError, match=r"does not load completely: 1 unexpected keys \(first: 'stray\.weight'\)"):
        Vlm.load(folder)


def test_a_missing_folder_of_a_vlm_raises_a_one_line_error(tmp_path):
    with pytest.raises(ModelError, match=r"there is no folder '.*nowhere' to load a model from"):
        Vlm.load(str(tmp_path / "nowhere"))


def test_another_kind_of_model_is_not_loaded_as_a_vlm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    with pytest.raises(ModelError, match=r"could not be loaded: "):
        Vlm.load(str(tmp_path))


def test_an_unknown_dtype_of_a_vlm_is_refused(tiny_llava):
    with pytest.raises(ModelError, match=r"dtype 'float99' is unknown; use 'auto', 'float32'"):
        Vlm.load(str(tiny_llava), dtype="float99")
