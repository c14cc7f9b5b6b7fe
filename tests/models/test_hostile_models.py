"""Folders of models whose settings, not whose files of code, reach for code, other files and other formats."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from elude_steer.errors import ModelError
from elude_steer.models.loading import inspect_folder
from elude_steer.models.matcher import load_matcher
from elude_steer.models.static_embedding import load_static_embedding
from elude_steer.models.vlm import Vlm
from elude_steer.trust import UntrustedCodeError
from elude_steer.utils.files import resolve_id
from tests.helpers.strangers import save_tiny_matcher


@pytest.fixture
def matcher(tmp_path):
    return save_tiny_matcher(tmp_path / "matcher")


@pytest.fixture
def captioner(tmp_path):
    return Path(shutil.copytree(resolve_id("toyland/captioner"), tmp_path / "captioner"))


def change(path, **values):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


@pytest.mark.parametrize("key", ["model_kwargs", "model_args"])
@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "stranger/kernel"},
        {"text_config": {"_attn_implementation": "stranger/kernel"}},
        {"use_kernels": True},
        {"kernel_config": [{"RMSNorm": "stranger/kernel:RMSNorm"}]},
    ],
)
def test_kernels_that_a_module_of_a_matcher_names_are_code(key, values, matcher):
    """sentence-transformers hands them to transformers, in a file that is not the model's `config.json`."""
    change(matcher / "sentence_bert_config.json", **{key: values})
    with pytest.raises(UntrustedCodeError, match=r"matcher' brings (the kernel 'stranger/kernel|kernels of the Hub)"):
        load_matcher(str(matcher))


def test_the_settings_of_further_modules_are_inspected(matcher):
    assert inspect_folder(matcher) is None
    change(matcher / "2_Router" / "router_config.json", parameters={"x": [{"attn_implementation": "a/b"}]})
    assert inspect_folder(matcher) == "the kernel 'a/b'"
    (matcher / "2_Router" / "router_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"could not be loaded: its 'router_config\.json' cannot be read"):
        load_matcher(str(matcher))


@pytest.mark.parametrize("activation", ["torch.hub.load", "torch.utils.model_dump.main", "os.system"])
def test_an_activation_is_a_module_of_torch(activation, matcher):
    settings = {"in_features": 8, "out_features": 8, "bias": True, "activation_function": activation}
    change(matcher / "2_Dense" / "config.json", **settings)
    modules = json.loads((matcher / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (matcher / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError):
        load_matcher(str(matcher))


@pytest.mark.parametrize("adapter", ["captioner", "matcher"])
def test_adapters_are_code(adapter, request):
    """peft imports modules that the settings of an adapter name, and transformers loads the base that they name."""
    folder = request.getfixturevalue(adapter)
    change(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="stranger/other", r=1)
    with pytest.raises(UntrustedCodeError, match="brings an adapter, whose settings can name code, which does not run"):
        (Vlm.load if adapter == "captioner" else load_matcher)(str(folder))


def test_weights_are_safetensors_also_where_an_index_or_the_settings_name_others(captioner):
    weights = load_file(captioner / "model.safetensors")
    (captioner / "model.safetensors").unlink()
    torch.save(weights, captioner / "w.bin")
    torch.save(weights, captioner / "adapter_model.bin")
    index = captioner / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "w.bin")}))
    with pytest.raises(ModelError, match=r"could not be loaded: its weights are in 'w\.bin'; only safetensors are"):
        Vlm.load(str(captioner))
    index.unlink()
    change(captioner / "config.json", transformers_weights="adapter_model.bin")
    with pytest.raises(ModelError, match=r"its weights are in 'adapter_model\.bin'; only safetensors"):
        Vlm.load(str(captioner))


def test_weights_lie_in_the_folder_of_the_model(captioner, tmp_path):
    names = load_file(captioner / "model.safetensors")
    (captioner / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = captioner / "model.safetensors.index.json"
    for place in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)}))
        with pytest.raises(ModelError, match=r"its weights are in '.*, outside the model"):
            Vlm.load(str(captioner))


def test_a_static_matcher_lies_in_its_folder(tmp_path):
    folder = Path(shutil.copytree(resolve_id("toyland/matcher"), tmp_path / "inside" / "matcher"))
    assert load_static_embedding(folder) is not None
    modules = json.loads((folder / "modules.json").read_text())
    below = modules[0]["path"]
    for place in (f"../matcher/{below}", str(folder / below)):
        modules[0]["path"] = place
        (folder / "modules.json").write_text(json.dumps(modules))
        assert load_static_embedding(folder) is None


def test_a_template_that_reaches_out_is_told_in_one_line(captioner):
    """Templates are programs; transformers runs them in a sandbox."""
    (captioner / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="the chat template of the model fails: access to attribute '__class__'"):
        Vlm.load(str(captioner)).caption([Image.new("RGB", (96, 96))])
