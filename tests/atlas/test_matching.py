import numpy as np
import pytest

from elude_steer.atlas.matching import group_redundant, normalize_word, rank_sub_units
from elude_steer.errors import SpecError


def test_ranking_by_label_breaks_ties_by_score_then_index():
    words = np.array([[0, 1], [1, 0], [0, 2], [-1, -1], [0, 1]])
    scores = np.array([[5.0, 1], [9, 8], [7, 1], [-np.inf, -np.inf], [5, 0]])
    found = rank_sub_units(np.array([0.9, 0.5, 0.1]), words, scores, kappa=10)
    assert found.sub_units.tolist() == [2, 0, 4, 1]  # 3 has no name
    assert found.similarity.tolist() == [0.9, 0.9, 0.9, 0.5]
    assert rank_sub_units(np.array([0.9, 0.5, 0.1]), words, scores, kappa=2).sub_units.tolist() == [2, 0]


def test_ranking_by_score_uses_all_words_of_a_sub_unit():
    words = np.array([[0, 1], [1, 0], [2, 1], [2, 3]])
    scores = np.array([[5.0, 1], [9, 8], [7, 6], [9, 1]])
    found = rank_sub_units(np.array([0.9, 0.5, 0.1, 0.0]), words, scores, kappa=10, by="score")
    assert found.sub_units.tolist() == [1, 0]  # 8 for word 0 in second place, 5 in first; 2 and 3 never heard of it
    near = rank_sub_units(np.array([0.9, 0.885, 0.1, 0.0]), words, scores, kappa=10, by="score")
    assert near.sub_units.tolist() == [1, 2, 0]
    assert near.via.tolist() == [1, 1, 0]
    with pytest.raises(SpecError, match="by is 'rank'; it is 'label' or 'score'"):
        rank_sub_units(np.array([0.9]), words, scores, kappa=1, by="rank")


def test_entry_points_take_in_other_units_only_and_do_not_chain():
    correlations = np.array([
        [1.0, 0.9, 0.1, 0.9],
        [0.9, 1.0, 0.9, 0.0],
        [0.1, 0.9, 1.0, 0.0],
        [0.9, 0.0, 0.0, 1.0],
    ])  # fmt: skip
    groups = group_redundant(correlations, np.array([0, 1, 2, 0]), np.array([3.0, 2, 1, 1]), 0.8)
    # 0 leads and takes 1; 2 goes with 1 but not with 0; 3 is of the same unit as 0
    assert groups.tolist() == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("word", "message"), [("  ", "a concept is a word, not '  '"), (3, "not an int"), (["dog"], "not a list")]
)
def test_a_concept_that_is_not_a_word_is_refused(word, message):
    with pytest.raises(SpecError, match=message):
        normalize_word(word)
