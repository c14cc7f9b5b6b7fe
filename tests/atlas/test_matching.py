import numpy as np
import pytest

from elude_steer.atlas.matching import group_redundant, normalize_word, rank_sub_units
from elude_steer.errors import ModelError, SpecError
from elude_steer.models import matcher as matcher_module
from elude_steer.models.matcher import Matcher, load_matcher, vocabulary_vectors
from elude_steer.toyland import CONCEPTS


@pytest.fixture(scope="module")
def matcher():
    return load_matcher("toyland/matcher")


def test_words_mean_what_they_mean(matcher):
    vectors = vocabulary_vectors(matcher, CONCEPTS)
    for word, concept in {"puppy": "dog", "locomotive": "train", "kitten": "cat", "Dog ": "dog"}.items():
        assert CONCEPTS[int((vectors @ matcher.embed([normalize_word(word)])[0]).argmax())] == concept
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_int8_embeddings_are_normalised_before_any_product():
    class Int8:
        def encode(self, words, **_):
            return np.array([[100, 100], [-120, 5], [127, 127]], np.int8)[: len(words)]

    vectors = Matcher("m", "k", Int8()).embed(["a", "b", "c"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[0] @ vectors[2], 1, rtol=1e-6)  # in int8 this would overflow


def test_ranking_by_label_breaks_ties_by_score_then_index():
    words = np.array([[0, 1], [1, 0], [0, 2], [-1, -1], [0, 1]])
    scores = np.array([[5.0, 1], [9, 8], [7, 1], [-np.inf, -np.inf], [5, 0]])
    found = rank_sub_units(np.array([0.9, 0.5, 0.1]), words, scores, kappa=10)
    assert found.sub_units.tolist() == [2, 0, 4, 1]  # 3 has no name
    assert found.similarity.tolist() == [0.9, 0.9, 0.9, 0.5]
    assert rank_sub_units(np.array([0.9, 0.5, 0.1]), words, scores, kappa=2).sub_units.tolist() == [2, 0]


def test_ranking_by_score_looks_at_every_place_of_the_list():
    words = np.array([[0, 1], [1, 0], [2, 1], [2, 3]])
    scores = np.array([[5.0, 1], [9, 8], [7, 6], [9, 1]])
    found = rank_sub_units(np.array([0.9, 0.5, 0.1, 0.0]), words, scores, kappa=10, by="score")
    assert found.sub_units.tolist() == [1, 0]  # 8 for word 0 in second place, 5 in first; 2 and 3 never heard of it
    near = rank_sub_units(np.array([0.9, 0.885, 0.1, 0.0]), words, scores, kappa=10, by="score")
    assert near.sub_units.tolist() == [1, 2, 0]
    assert near.via.tolist() == [1, 1, 0]
    with pytest.raises(SpecError, match="by is 'rank_sub_units'; it is 'label' or 'score'"):
        rank_sub_units(np.array([0.9]), words, scores, kappa=1, by="rank")


def test_groups_join_other_units_and_never_chain():
    correlations = np.array([
        [1.0, 0.9, 0.1, 0.9],
        [0.9, 1.0, 0.9, 0.0],
        [0.1, 0.9, 1.0, 0.0],
        [0.9, 0.0, 0.0, 1.0],
    ])  # fmt: skip
    groups = group_redundant(correlations, np.array([0, 1, 2, 0]), np.array([3.0, 2, 1, 1]), 0.8)
    # 0 leads and takes 1; 2 goes with 1 but not with 0; 3 is of the same unit as 0
    assert groups.tolist() == [0, 0, 2, 3]


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


@pytest.mark.parametrize(
    ("word", "message"), [("  ", "a concept is a word, not '  '"), (3, "not a int"), (["dog"], "not a list")]
)
def test_what_is_no_word(word, message):
    with pytest.raises(SpecError, match=message):
        normalize_word(word)


def test_missing_matchers_are_one_line():
    with pytest.raises(ModelError, match=r"no folder './nowhere' to load a matcher from; check matcher\.id"):
        load_matcher("./nowhere")


def test_code_of_a_model_is_not_run_unasked(tmp_path):
    """A folder whose modules are Python files of its own."""
    (tmp_path / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "", "type": "custom_code.MyModel"}]', encoding="utf-8"
    )
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "custom_code.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(ModelError, match=r"trust_remote_code|could not be loaded"):
        load_matcher(str(tmp_path))
