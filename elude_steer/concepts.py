"""Words to sub-units: how close a wanted word is to every word the sub-units are named by, and who comes first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from elude_steer.errors import ModelError, SpecError, StorageError
from elude_steer.storage import home, read_array, resolve_id, write_array

# Two words of the vocabulary are equally close to the wanted one if their cosines differ by no more than this.
NEAR = 0.02
_VECTORS: dict[str, np.ndarray] = {}  # of vocabularies, by content and matcher
_PROBES = ("dog", "a red car", "Häuser", "the sea at night", "42")


@dataclass(frozen=True, eq=False)
class Matcher:
    """A sentence-transformers model that places words; `key` tells models apart by what they do."""

    id: str
    key: str
    model: Any

    def embed(self, words: Sequence[str]) -> np.ndarray:
        """Unit vectors of some words, `(words, width)` float32."""
        return _embed(self.model, words)


def load_matcher(
    id: str, *, revision: str | None = None, trust_remote_code: bool = False, device: str | None = None
) -> Matcher:
    """The matcher of a Hub id or folder, loaded once a process.

    Args:
        id: e.g. `perplexity-ai/pplx-embed-v1-0.6b`, or `toyland/matcher`.
        revision: commit or tag on the Hub.
        trust_remote_code: whether code that comes with the model may run here.
        device: where it computes.

    Example:
        >>> load_matcher("toyland/matcher").embed(["puppy", "dog"]) @ ...
    """
    return _loaded(resolve_id(id), id, revision, trust_remote_code, device or "cpu")


@lru_cache(maxsize=4)
def _loaded(where: str, id: str, revision: str | None, trust_remote_code: bool, device: str) -> Matcher:
    from pathlib import Path

    from sentence_transformers import SentenceTransformer

    if where.startswith((".", "/")) and not Path(where).is_dir():
        raise ModelError(f"there is no folder '{id}' to load a matcher from; check matcher.id, or give a Hub id.")
    local = {"local_files_only": True} if Path(where).is_dir() else {}
    try:
        model = SentenceTransformer(
            where, revision=revision, trust_remote_code=trust_remote_code, device=device, **local
        )
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                f"matcher '{id}' brings code of its own, which is not run unasked; read it, then set "
                "matcher.trust_remote_code: true (--trust-remote-code), and pin matcher.revision."
            ) from error
        raise ModelError(f"matcher '{id}' could not be loaded: {cause}") from error
    # What a few words become tells models apart as surely as their weights do, without reading gigabytes.
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{id}{revision}".encode() + _embed(model, _PROBES).tobytes())
    return Matcher(id, digest.hexdigest(), model)


def _embed(model: Any, words: Sequence[str]) -> np.ndarray:
    # Some models give un-normalised int8, whose products overflow.
    raw = np.asarray(model.encode(list(words), convert_to_numpy=True, show_progress_bar=False), dtype=np.float32)
    return raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-12)


def check_word(word: object) -> str:
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


def rank(similarities: np.ndarray, words: np.ndarray, scores: np.ndarray, *, kappa: int, by: str = "label") -> Ranking:
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
    near = similarities >= similarities.max() - NEAR
    hit = near[words] & (words >= 0)
    named = np.flatnonzero(hit.any(1))
    at = np.where(hit[named], scores[named], -np.inf).argmax(1)
    via, score = words[named, at], scores[named, at]
    order = np.lexsort((named, -score))[:kappa]
    return Ranking(named[order], via[order], similarities[via][order], score[order])


def redundant(correlations: np.ndarray, units: np.ndarray, strength: np.ndarray, least: float = 0.8) -> np.ndarray:
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


def vocabulary_vectors(matcher: Matcher, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Unit vectors of a whole vocabulary, `(M, width)`: embedded once, then kept in memory and on the disk."""
    key = hashlib.blake2b("\n".join((matcher.key, *vocabulary)).encode(), digest_size=12).hexdigest()
    if key not in _VECTORS:
        path = home() / "cache" / f"words-{key}.npy"
        try:
            vectors = np.array(read_array(path)) if path.exists() else None
        except StorageError:
            vectors = None  # damaged: made again
        if vectors is None or len(vectors) != len(vocabulary):
            vectors = matcher.embed(vocabulary)
            with suppress(StorageError):  # a place that cannot be written only costs time
                write_array(path, vectors)
        _VECTORS[key] = vectors
    return _VECTORS[key]
