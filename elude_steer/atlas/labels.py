"""The labels of sub-units: a vocabulary, the best words of each sub-unit, and groups of redundant sub-units."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elude_steer.atlas.manifest_rules import LABEL_NAMES, LABEL_SCORES
from elude_steer.atlas.matching import normalize_word, rank_sub_units
from elude_steer.models.matcher import Matcher, vocabulary_vectors
from elude_steer.utils.files import write_file, write_tensors

_MAX_SEARCHES = 256  # that are remembered


class Match(NamedTuple):
    """A sub-unit that matches a word.

    Attributes:
        sub_unit: its number in the atlas.
        unit: the unit it belongs to.
        part: its number within the unit.
        label: its label.
        via: the word of the vocabulary that it was found by.
        similarity: the cosine of that word and the one searched for.
        score: how well that word fits the sub-unit.
    """

    sub_unit: int
    unit: int
    part: int
    label: str
    via: str
    similarity: float
    score: float


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of all sub-units.

    Attributes:
        vocabulary: all words that a label can be.
        words: `(S, keep)` int32, the best words of each sub-unit, best first; -1 for a sub-unit without a label.
        scores: `(S, keep)` float32, how well they fit.
        groups: `(S,)` int32, the first sub-unit of the redundant group that each belongs to; itself if it is alone.
        about: the scorer, the method and its settings.
    """

    vocabulary: tuple[str, ...]
    words: np.ndarray
    scores: np.ndarray
    groups: np.ndarray
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, sub_unit: int) -> str:
        word = int(self.words[sub_unit, 0])
        return self.vocabulary[word] if word >= 0 else ""

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of sub-units with each label, largest first, ties in alphabetical order."""
        found = Counter(self[i] for i in range(len(self)))
        found.pop("", None)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def best(self, sub_unit: int, limit: int = 5) -> list[tuple[str, float]]:
        """The best words of a sub-unit with their scores."""
        pairs = zip(self.words[sub_unit, :limit].tolist(), self.scores[sub_unit, :limit].tolist(), strict=True)
        return [(self.vocabulary[word], score) for word, score in pairs if word >= 0]

    def redundant_groups(self) -> list[dict[str, Any]]:
        """Groups of at least two redundant sub-units, largest first."""
        found: dict[int, list[int]] = {}
        for sub_unit, first in enumerate(self.groups.tolist()):
            found.setdefault(first, []).append(sub_unit)
        groups = [members for members in found.values() if len(members) > 1]
        groups.sort(key=lambda members: (-len(members), members[0]))
        return [
            {
                "sub_units": len(members),
                "label": Counter(self[member] for member in members).most_common(1)[0][0],
                "members": members,
            }
            for members in groups
        ]

    def similarities(self, matcher: Matcher, word: str) -> np.ndarray:
        """Cosines of a word and all words of the vocabulary, `(M,)`."""
        known = normalize_word(word).casefold()
        vector = matcher.embed([self._spellings.get(known, known)])[0]
        return vocabulary_vectors(matcher, self.vocabulary) @ vector

    @cached_property
    def _spellings(self) -> dict[str, str]:
        """The vocabulary's spelling of each word in lower case: `Dog` and `dog` are the same concept."""
        return {word.casefold(): word for word in reversed(self.vocabulary)}

    def search(self, matcher: Matcher, word: str, units: np.ndarray, *, limit: int, by: str) -> list[Match]:
        """The sub-units that match a word, best first; `units` is the unit of each sub-unit."""
        key = (matcher.key, word, limit, by, len(units))
        if key not in self._searches:
            if len(self._searches) >= _MAX_SEARCHES:
                self._searches.clear()
            self._searches[key] = self._search(matcher, word, units, limit, by)
        return list(self._searches[key])

    @cached_property
    def _searches(self) -> dict[tuple[Any, ...], list[Match]]:
        """Results of recent searches: a sweep searches the same words at every point of its grid."""
        return {}

    def _search(self, matcher: Matcher, word: str, units: np.ndarray, limit: int, by: str) -> list[Match]:
        found = rank_sub_units(self.similarities(matcher, word), self.words, self.scores, kappa=limit, by=by)
        first = np.searchsorted(units, units[found.sub_units])
        rows = zip(found.sub_units, first, found.via, found.similarity, found.score, strict=True)
        return [
            Match(int(s), int(units[s]), int(s - start), self[int(s)], self.vocabulary[v], float(cosine), float(score))
            for s, start, v, cosine, score in rows
        ]

    def save(self, folder: Path) -> None:
        """Write the two files of the labels."""
        import torch

        names = {
            "about": dict(self.about),
            "vocabulary": self.vocabulary,
            "labels": [self[i] for i in range(len(self))],
        }
        text = json.dumps(names, indent=0, ensure_ascii=False)
        write_file(folder / LABEL_NAMES, lambda file: file.write(text.encode()))
        arrays = {"words": self.words, "scores": self.scores, "groups": self.groups}
        write_tensors(
            folder / LABEL_SCORES,
            {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
        )
