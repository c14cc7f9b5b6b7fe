"""Words to sub-units: how close a wanted word is to every word the sub-units are named by, and who comes first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elude_steer.errors import SpecError

# Two words of the vocabulary are equally close to the wanted one if their cosines differ by no more than this.
TIE_MARGIN = 0.02


def normalize_word(word: object) -> str:
    """The word as it is matched, without white space around it; raises where there is none."""
    if not isinstance(word, str):
        raise SpecError(f"a concept is a word, not a {type(word).__name__} ({word!r}).")
    if not word.strip():
        raise SpecError(f"a concept is a word, not {word!r}; name what should go or come, such as 'dog'.")
    return " ".join(word.split())


@dataclass(frozen=True, eq=False)
class Ranking:
    """Sub-units that match a word, best first.

    Attributes:
        sub_units: `(n,)` int64.
        via: `(n,)` int64 the word of the vocabulary that each was found by.
        similarity: `(n,)` cosine of that word and the wanted one.
        score: `(n,)` how well that word fits the sub-unit.
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
        similarities: `(M,)` cosines of the wanted word and the vocabulary.
        words: `(S, keep)` each sub-unit's best words, best first; rows of -1 are sub-units without a name.
        scores: `(S, keep)` how well they fit.
        kappa: how many; fewer where fewer are named.
        by: `label` goes by the closeness of each sub-unit's first word, ties by its score (the paper's); `score` by
            how well the words closest to the wanted one fit the sub-unit, whichever place they have in its list.
    """
    if by == "label":
        named = np.flatnonzero(words[:, 0] >= 0)
        via, score = words[named, 0], scores[named, 0]
        similarity = similarities[via]
        order = np.lexsort((named, -score, -similarity))[:kappa]
        return Ranking(named[order], via[order], similarity[order], score[order])
    if by != "score":
        raise SpecError(f"by is '{by}'; it is 'label' or 'score'.")
    near = similarities >= similarities.max() - TIE_MARGIN
    hit = near[words] & (words >= 0)
    named = np.flatnonzero(hit.any(1))
    at = np.where(hit[named], scores[named], -np.inf).argmax(1)
    via, score = words[named, at], scores[named, at]
    order = np.lexsort((named, -score))[:kappa]
    return Ranking(named[order], via[order], similarities[via][order], score[order])


def group_redundant(
    correlations: np.ndarray, units: np.ndarray, strength: np.ndarray, least: float = 0.8
) -> np.ndarray:
    """Which sub-units say the same: a group number each, `(S,)` int64, numbered by their first member.

    The strongest sub-unit that is in no group yet leads one and takes in everybody of other units who is correlated
    with it, so that no chain of small steps joins what differs.

    Args:
        correlations: `(S, S)`.
        units: `(S,)` of each sub-unit.
        strength: `(S,)` who leads first.
        least: correlation from which two say the same.
    """
    groups = np.full(len(units), -1, np.int64)
    for leader in np.lexsort((np.arange(len(units)), -strength)):
        if groups[leader] >= 0:
            continue
        joins = (groups < 0) & (correlations[leader] >= least) & (units != units[leader])
        joins[leader] = True
        groups[joins] = leader
    first: dict[int, int] = {}
    for index, leader in enumerate(groups.tolist()):
        first.setdefault(leader, index)
    return np.array([first[leader] for leader in groups.tolist()], np.int64)
