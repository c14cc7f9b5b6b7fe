import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from elude_steer import toyland
from elude_steer.models.matcher import load_matcher
from elude_steer.models.static_embedding import StaticEmbedding, load_static_embedding
from tests.helpers.plain_child import PREPARE_TORCHVISION

TEXTS = ["dog", "a red car", "", "Häuser", "日本", "DOG ", "42", *toyland.CONCEPTS, "the sea at night " * 30]


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The same model loaded by sentence-transformers, and the folder that it writes."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(toyland.MATCHER), device="cpu", local_files_only=True)
    folder = tmp_path_factory.mktemp("peer")
    model.save_pretrained(str(folder), create_model_card=False)
    return model, folder


def test_vectors_are_those_of_sentence_transformers(peer):
    model, folder = peer
    expected = model.encode(TEXTS, convert_to_numpy=True, show_progress_bar=False)
    for source in (toyland.MATCHER, folder):
        embedding = load_static_embedding(source)
        assert isinstance(embedding, StaticEmbedding)
        np.testing.assert_array_equal(embedding.encode(TEXTS, convert_to_numpy=True), expected)
        assert embedding.encode([]).shape == (0, expected.shape[1])


@pytest.mark.parametrize("change", ["prompt", "truncate", "layers", "other", "half", "model2vec", "no modules"])
def test_anything_else_is_left_to_sentence_transformers(peer, tmp_path, change):
    for path in peer[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    modules = json.loads((tmp_path / "modules.json").read_text())
    config = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    weight = load_file(tmp_path / "model.safetensors")["embedding.weight"]
    tensors = {"embedding.weight": weight}
    if change == "prompt":
        config |= {"prompts": {"query": "a photo of "}, "default_prompt_name": "query"}
    elif change == "truncate":
        config["truncate_dim"] = 8
    elif change == "layers":
        modules.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"})
    elif change == "other":
        modules[0]["type"] = "my_code.StaticEmbedding"
    elif change == "half":
        tensors = {"embedding.weight": weight.half()}
    elif change == "model2vec":
        tensors = {"embeddings": weight, "weights": torch.ones(len(weight))}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    if change == "no modules":
        (tmp_path / "modules.json").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_static_embedding(tmp_path) is None


def test_such_a_folder_still_loads(peer, tmp_path):
    for path in peer[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weight = load_file(tmp_path / "model.safetensors")["embedding.weight"]
    save_file({"embedding.weight": weight.half()}, tmp_path / "model.safetensors")
    vectors = load_matcher(str(tmp_path)).embed(["dog", "puppy"])
    np.testing.assert_allclose(vectors, load_matcher("toyland/matcher").embed(["dog", "puppy"]), atol=1e-2)


def test_steering_does_not_import_sentence_transformers():
    """It takes longer to import than everything else that a caption needs, and brings pandas and scikit-learn."""
    code = PREPARE_TORCHVISION + (
        "import sys, transformers.generation.utils\n"
        "before = set(sys.modules)\n"  # transformers 5.18 imports scikit-learn by itself
        "import elude_steer\n"
        "elude_steer.Steerer.load('toyland').plan(minus=['teddy'])\n"
        "print(sorted({'sentence_transformers', 'sklearn', 'pandas', 'hdbscan', 'peft'} & set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
