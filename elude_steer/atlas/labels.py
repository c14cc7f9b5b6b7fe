"""The names of an atlas's sub-units: a vocabulary, each sub-unit's best words in it, and who says the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elude_steer.atlas.matching import normalize_word, rank_sub_units
from elude_steer.errors import AtlasError
from elude_steer.models.matcher import Matcher, vocabulary_vectors
from elude_steer.utils.files import read_tensors, write_file, write_tensors

_NAMES, _SCORES = "labels.json", "labels.safetensors"
_REMEMBERED = 256  # searches


class Match(NamedTuple):
    """A sub-unit that matches a word: found by the word `via` of the vocabulary, at this cosine, with this score."""

    sub_unit: int
    unit: int
    part: int
    label: str
    via: str
    similarity: float
    score: float


@dataclass(frozen=True, eq=False)
class Labels:
    """What sub-units are called.

    Attributes:
        vocabulary: all words that could be given.
        words: `(S, keep)` int32 each sub-unit's best words, best first; -1 for one without a name.
        scores: `(S, keep)` float32 how well they fit.
        groups: `(S,)` int32 the first sub-unit that says the same; itself where it is the only one.
        about: scorer, method and settings.
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
        """How many sub-units carry each label, most first, equals in the order of the alphabet."""
        found = Counter(self[i] for i in range(len(self)))
        found.pop("", None)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def best(self, sub_unit: int, limit: int = 5) -> list[tuple[str, float]]:
        """A sub-unit's best words with their scores."""
        pairs = zip(self.words[sub_unit, :limit].tolist(), self.scores[sub_unit, :limit].tolist(), strict=True)
        return [(self.vocabulary[word], score) for word, score in pairs if word >= 0]

    def redundant_groups(self) -> list[dict[str, Any]]:
        """The groups of sub-units that say the same, largest first; those alone are left out."""
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
        """Cosines of a word and the whole vocabulary, `(M,)`."""
        wanted = normalize_word(word)
        return vocabulary_vectors(matcher, self.vocabulary) @ matcher.embed([wanted])[0]

    def search(self, matcher: Matcher, word: str, units: np.ndarray, *, limit: int, by: str) -> list[Match]:
        """The sub-units that match a word, best first; `units` says which unit each belongs to."""
        key = (matcher.key, word, limit, by, len(units))
        if key not in self._found:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[key] = self._search(matcher, word, units, limit, by)
        return list(self._found[key])

    @cached_property
    def _found(self) -> dict[tuple[Any, ...], list[Match]]:
        """The last searches: a sweep asks for the same words at every point of its grid."""
        return {}

    def _search(self, matcher: Matcher, word: str, units: np.ndarray, limit: int, by: str) -> list[Match]:
        found = rank_sub_units(self.similarities(matcher, word), self.words, self.scores, kappa=limit, by=by)
        first = np.searchsorted(units, units[found.sub_units])
        rows = zip(found.sub_units, first, found.via, found.similarity, found.score, strict=True)
        return [
            Match(int(s), int(units[s]), int(s - at), self[int(s)], self.vocabulary[v], float(sim), float(score))
            for s, at, v, sim, score in rows
        ]

    def save(self, folder: Path) -> None:
        """Writes the two files of the labels."""
        import torch

        names = {
            "about": dict(self.about),
            "vocabulary": self.vocabulary,
            "labels": [self[i] for i in range(len(self))],
        }
        text = json.dumps(names, indent=0, ensure_ascii=False)
        write_file(folder / _NAMES, lambda file: file.write(text.encode()))
        arrays = {"words": self.words, "scores": self.scores, "groups": self.groups}
        write_tensors(
            folder / _SCORES, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        )

    @classmethod
    def load(cls, folder: Path) -> Labels | None:
        """The labels of an atlas, or None where it has none."""
        if not (folder / _NAMES).is_file():
            return None
        names = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        arrays = {name: tensor.numpy() for name, tensor in read_tensors(folder / _SCORES).items()}
        if len(names["labels"]) != len(arrays["words"]):
            raise AtlasError(f"atlas '{folder}' names {len(names['labels'])} sub-units and has {len(arrays['words'])}.")
        return cls(tuple(names["vocabulary"]), arrays["words"], arrays["scores"], arrays["groups"], names["about"])
