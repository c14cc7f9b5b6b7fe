"""Folders of models whose settings, not whose files of code, reach for code, other files and other formats."""

import json
import pickle
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import sentence_transformers
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BertConfig, dynamic_module_utils

from elude_steer.errors import ModelError
from elude_steer.models import loading
from elude_steer.models.loading import inspect_folder
from elude_steer.models.matcher import load_matcher
from elude_steer.models.static_embedding import load_static_embedding
from elude_steer.models.vlm import Vlm
from elude_steer.trust import UntrustedCodeError, call_loader
from elude_steer.utils.files import resolve_id
from tests.helpers.strangers import COMMIT, Stranger, save_tiny_matcher

AUTO_MAP = {"AutoTokenizer": ["stranger.Tokenizer", "stranger.Tokenizer"]}


class Bomb:
    """A pickle of this leaves a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def matcher(tmp_path):
    return save_tiny_matcher(tmp_path / "matcher")


@pytest.fixture
def captioner(tmp_path):
    return Path(shutil.copytree(resolve_id("toyland/captioner"), tmp_path / "captioner"))


def save_word_embeddings(folder):
    """A matcher of word vectors, whose tokenizer is one of transformers."""
    inside = save_tiny_matcher(folder).rename(folder.with_name("tiny"))
    words = folder / "0_WordEmbeddings"
    words.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(inside / name, words)
    kind = "sentence_transformers.sentence_transformer.modules.tokenizer.TransformersTokenizerWrapper"
    change(words / "wordembedding_config.json", tokenizer_class=kind, update_embeddings=False, max_seq_length=9)
    save_file({"emb_layer.weight": torch.rand(40_000, 4)}, words / "model.safetensors")
    modules = [("0_WordEmbeddings", "WordEmbeddings"), ("1_Pooling", "Pooling")]
    change(folder / "1_Pooling" / "config.json", word_embedding_dimension=4, pooling_mode_mean_tokens=True)
    entries = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (path, kind) in enumerate(modules)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder


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


@pytest.fixture
def asked(monkeypatch):
    """What transformers asked on the terminal; whoever sits there says yes to everything."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    return questions


@pytest.mark.parametrize("file", ["processor_config.json", "audio_tokenizer_config.json"])
@pytest.mark.parametrize("other", ["code", "pickle"])
@pytest.mark.parametrize("part", ["captioner", "matcher"])
def test_a_processor_loads_no_other_model(part, other, file, request, tmp_path, asked):
    """transformers loads the audio tokenizer that its settings name with none of the checks of the model itself."""
    folder, stranger = request.getfixturevalue(part), Stranger(tmp_path, claims=False)
    if other == "pickle":
        config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        config.save_pretrained(tmp_path / "pickled")
        (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(stranger.marker)))
    name = str(tmp_path / "pickled") if other == "pickle" else stranger.model()
    named = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": name}
    change(folder / file, **({"audio_tokenizer": named} if file.startswith("processor") else named))
    with pytest.raises(UntrustedCodeError, match="brings an audio tokenizer, another model that it names, which does"):
        (Vlm.load if part == "captioner" else load_matcher)(str(folder))
    assert not stranger.code_ran and not asked


def test_a_loader_inside_another_asks_nobody(tmp_path, asked):
    """sentence-transformers does not hand on the refusal to the tokenizer of this module."""
    folder, stranger = save_word_embeddings(tmp_path / "matcher"), Stranger(tmp_path, claims=False)
    # Earlier versions load such a matcher, and fail to split words with its tokenizer.
    works = tuple(map(int, sentence_transformers.__version__.split(".")[:2])) >= (6, 2)
    with nullcontext() if works else pytest.raises(TypeError, match="has no len"):
        assert load_matcher(str(folder)).embed(["dog"]).shape == (1, 4)
    shutil.copytree(folder, copy := tmp_path / "copy")
    change(copy / "0_WordEmbeddings" / "tokenizer_config.json", tokenizer_class="Other", auto_map=AUTO_MAP)
    (copy / "0_WordEmbeddings" / "stranger.py").write_text(stranger.code())
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with pytest.raises(UntrustedCodeError, match="copy' brings code of its own, which does not run"):
        load_matcher(str(copy))
    assert not stranger.code_ran and not asked
    assert before == dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0


def test_calls_side_by_side_ask_nobody():
    """The first that ends leaves the refusal to the others, and the last one puts back what was there."""
    before, seen, second = dynamic_module_utils.TIME_OUT_REMOTE_CODE, [], threading.Event()
    look = lambda **_: seen.append(dynamic_module_utils.TIME_OUT_REMOTE_CODE)  # noqa: E731

    def first(**_):
        thread.start()
        second.wait(10)

    def wait(**_):
        second.set()
        ended.wait(10)
        look()

    ended, options = threading.Event(), {"subject": "x", "trust_remote_code": False}
    thread = threading.Thread(target=call_loader, args=(wait,), kwargs=options)
    call_loader(first, **options)
    ended.set()
    thread.join()
    assert seen == [0] and before == dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0
    call_loader(look, subject="x", trust_remote_code=True)
    assert seen == [0, before]


def test_what_is_loaded_is_the_commit_that_was_inspected(tmp_path, monkeypatch):
    """Whoever owns a repository can move its branch between the two."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    model = Stranger(tmp_path, tmp_path / "hub").disguised("captioner")
    repository = next((tmp_path / "hub").iterdir())
    shutil.copytree(repository / "snapshots" / COMMIT, repository / "snapshots" / ("d" * 40))
    for commit in (COMMIT, "d" * 40):
        change(repository / "snapshots" / commit / "config.json", commit=commit)
    inspect = loading._find_code

    def move_branch(*arguments):
        (repository / "refs" / "main").write_text("d" * 40)
        return inspect(*arguments)

    monkeypatch.setattr(loading, "_find_code", move_branch)
    loaded = loading.load_pretrained(AutoModelForImageTextToText, model)
    assert loaded.config.commit == COMMIT
    assert loading.load_pretrained(AutoModelForImageTextToText, model).config.commit == "d" * 40
