"""From words to sub-units: rank sub-units by how close their words are to a given word, and group redundant ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elude_steer.errors import SpecError, type_with_article

# Words of the vocabulary whose cosines differ from the best by no more than this count as equally close.
TIE_MARGIN = 0.02


def normalize_word(word: object) -> str:
    """The word with single spaces and none around it; raises if it is empty or no string."""
    if not isinstance(word, str):
        raise SpecError(f"a concept is a word, not {type_with_article(word)} ({word!r}).")
    if not word.strip():
        raise SpecError(f"a concept is a word, not {word!r}; say what to remove or to add, such as 'dog'.")
    return " ".join(word.split())


@dataclass(frozen=True, eq=False)
class Ranking:
    """Sub-units that match a word, best first.

    Attributes:
        sub_units: `(n,)` int64.
        via: `(n,)` int64, the word of the vocabulary that each was found by.
        similarity: `(n,)`, the cosine of that word and the one searched for.
        score: `(n,)`, how well that word fits the sub-unit.
    """

    sub_units: np.ndarray
    via: np.ndarray
    similarity: np.ndarray
    score: np.ndarray


def rank_sub_units(
    similarities: np.ndarray, words: np.ndarray, scores: np.ndarray, *, kappa: int, by: str = "label"
) -> Ranking:
    """The `kappa` sub-units that match a word best.

    Args:
        similarities: `(M,)`, cosines of the word and the vocabulary.
        words: `(S, keep)`, the best words of each sub-unit, best first; -1 for sub-units without a label.
        scores: `(S, keep)`, how well they fit.
        kappa: how many; fewer if fewer have labels.
        by: `label` ranks by the similarity of each sub-unit's best word, ties by its score (as in the paper); `score`
            ranks by how well the closest words fit the sub-unit, wherever they are in its list.
    """
    if by == "label":
        labelled = np.flatnonzero(words[:, 0] >= 0)
        via, score = words[labelled, 0], scores[labelled, 0]
        similarity = similarities[via]
        order = np.lexsort((labelled, -score, -similarity))[:kappa]
        return Ranking(labelled[order], via[order], similarity[order], score[order])
    if by != "score":
        raise SpecError(f"by is '{by}'; it is 'label' or 'score'.")
    near = similarities >= similarities.max() - TIE_MARGIN
    hits = near[words] & (words >= 0)
    matching = np.flatnonzero(hits.any(1))
    column = np.where(hits[matching], scores[matching], -np.inf).argmax(1)
    via, score = words[matching, column], scores[matching, column]
    order = np.lexsort((matching, -score))[:kappa]
    return Ranking(matching[order], via[order], similarities[via][order], score[order])


def group_redundant(
    correlations: np.ndarray, units: np.ndarray, strength: np.ndarray, min_correlation: float = 0.8
) -> np.ndarray:
    """Group sub-units that are redundant: the number of its group's first member for each, `(S,)` int64.

    The strongest sub-unit without a group leads a new one and takes in all sub-units of other units that correlate with
    it. So no chain of small steps joins sub-units that differ.

    Args:
        correlations: `(S, S)`.
        units: `(S,)`, the unit of each sub-unit.
        strength: `(S,)`; the strongest lead first.
        min_correlation: the correlation from which two sub-units are redundant.
    """
    groups = np.full(len(units), -1, np.int64)
    for leader in np.lexsort((np.arange(len(units)), -strength)):
        if groups[leader] >= 0:
            continue
        joins = (groups < 0) & (correlations[leader] >= min_correlation) & (units != units[leader])
        joins[leader] = True
        groups[joins] = leader
    first: dict[int, int] = {}
    for index, leader in enumerate(groups.tolist()):
        first.setdefault(leader, index)
    return np.array([first[leader] for leader in groups.tolist()], np.int64)
