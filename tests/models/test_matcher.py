import numpy as np
import pytest

from elude_steer.atlas.matching import normalize_word
from elude_steer.errors import ModelError
from elude_steer.models import matcher as matcher_module
from elude_steer.models.matcher import Matcher, load_matcher, vocabulary_vectors
from elude_steer.toyland import CONCEPTS


@pytest.fixture(scope="module")
def matcher():
    return load_matcher("toyland/matcher")


def test_similar_words_have_similar_vectors(matcher):
    vectors = vocabulary_vectors(matcher, CONCEPTS)
    for word, concept in {"puppy": "dog", "locomotive": "train", "kitten": "cat", "Dog ": "dog"}.items():
        assert CONCEPTS[int((vectors @ matcher.embed([normalize_word(word)])[0]).argmax())] == concept
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_int8_vectors_are_normalised_in_float32():
    class Int8:
        def encode(self, words, **_):
            return np.array([[100, 100], [-120, 5], [127, 127]], np.int8)[: len(words)]

    vectors = Matcher("m", "k", Int8()).embed(["a", "b", "c"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[0] @ vectors[2], 1, rtol=1e-6)  # in int8 this would overflow


def test_vocabularies_are_embedded_once(matcher, tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path))
    monkeypatch.setattr(matcher_module, "_VECTORS", {})
    calls = []

    class Counting(Matcher):
        def embed(self, words):
            calls.append(len(words))
            return super().embed(words)

    counting = Counting(matcher.id, "other key", matcher.model)
    first = vocabulary_vectors(counting, CONCEPTS)
    assert vocabulary_vectors(counting, CONCEPTS) is first
    monkeypatch.setattr(matcher_module, "_VECTORS", {})  # as in a new process
    np.testing.assert_array_equal(vocabulary_vectors(counting, CONCEPTS), first)
    assert calls == [len(CONCEPTS)]
    file = next((tmp_path / "cache").iterdir())
    file.write_bytes(b"damaged")
    monkeypatch.setattr(matcher_module, "_VECTORS", {})
    np.testing.assert_array_equal(vocabulary_vectors(counting, CONCEPTS), first)


def test_a_missing_folder_raises_a_one_line_error():
    with pytest.raises(ModelError, match=r"no folder './nowhere' to load a matcher from; check matcher\.id"):
        load_matcher("./nowhere")


def test_code_of_a_model_does_not_run_unless_allowed(tmp_path):
    """The folder contains a module of its own."""
    (tmp_path / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "custom_code.MyModel"}]', encoding="utf-8"
    )
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "custom_code.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"matcher '.*' brings code of its own, .* add --trust-remote-code \(in Python"
    ):
        load_matcher(str(tmp_path))
