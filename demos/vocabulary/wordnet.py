"""Readers of two dictionaries: WordNet's nouns and SCOWL's word lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elude_steer.errors import MissingPackageError

WORDNET = Path("/usr/share/wordnet")
SCOWL = Path("/usr/share/dict/scowl")
COMMON = 50  # the largest of SCOWL's lists taken: 35 makes a small dictionary, 50 a medium one, 70 a large one
_SIZES = (10, 20, 35, 40, COMMON)
# WordNet's files of nouns that an image can show: animal, artifact, body, food, location, object, person, phenomenon,
# plant, substance.
VISIBLE = ("05", "06", "08", "13", "15", "17", "18", "19", "20", "27")


class WordNet:
    """WordNet's nouns.

    Attributes:
        lemmas: synset -> its lemmas.
        hyponyms: synset -> its direct hyponyms.
        definition: synset -> the first clause of its gloss.
        visible: the synsets that an image can show.
        senses: lemma -> its synsets, most common first.
    """

    def __init__(self, folder: Path) -> None:
        self.lemmas: dict[str, list[str]] = {}
        self.hyponyms: dict[str, list[str]] = {}
        self.definition: dict[str, str] = {}
        self.visible: set[str] = set()
        self.senses: dict[str, list[str]] = {}
        for line in _lines(folder / "data.noun"):
            head, _, gloss = line.partition(" | ")
            synset, *fields = head.split()
            end = 3 + 2 * int(fields[2], 16)
            self.lemmas[synset] = fields[3:end:2]
            pointers = zip(fields[end + 1 :: 4], fields[end + 2 :: 4], strict=False)
            self.hyponyms[synset] = [other for symbol, other in pointers if symbol == "~"]
            self.definition[synset] = first_clause(gloss)
            if fields[0] in VISIBLE:
                self.visible.add(synset)
        for line in _lines(folder / "index.noun"):
            lemma, *fields = line.split()
            self.senses[lemma] = fields[-int(fields[1]) :]
        self._irregular = {plural: lemma for plural, lemma, *_ in map(str.split, _lines(folder / "noun.exc"))}

    def words(self, lemma: str, sense: int) -> dict[str, bool]:
        """The lemmas of a synset and its direct hyponyms, and whether this is the first sense of each."""
        synset = self.senses[lemma][sense - 1]
        family = [synset, *self.hyponyms[synset]]
        words = {word.lower() for member in family for word in self.lemmas[member]}
        return {word: self.senses[word][0] in family for word in words}

    def singular(self, word: str) -> str | None:
        """The noun that a word is, or is the plural of; None for other words and for very short nouns ("his")."""
        forms = [word, self._irregular.get(word, "")]
        endings = (("s", ""), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("ies", "y"))
        forms += [word.removesuffix(plural) + singular for plural, singular in endings if word.endswith(plural)]
        return next((form for form in forms if len(form) > 2 and form in self.senses), None)


def first_clause(gloss: str) -> str:
    """The first clause of a gloss, without brackets and examples."""
    text = re.sub(r"\([^)]*\)", "", gloss)
    return " ".join(re.split(r'[;"]', text)[0].split()).rstrip(": ") or " ".join(gloss.split())


def _lines(path: Path) -> Iterator[str]:
    """The lines of one of WordNet's files after the licence at its head."""
    if not path.exists():
        raise MissingPackageError(f"there is no {path}; run `apt-get install wordnet-base`, or pass WordNet's folder.")
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if not line.startswith("  "))


def common_words(folder: Path) -> dict[str, int]:
    """Words of SCOWL's lists up to `COMMON` -> the size of the first list with the word; no names, no abbreviations."""
    found: dict[str, int] = {}
    for size in _SIZES:
        for variety in ("english", "american", "british"):
            path = folder / f"{variety}-words.{size}"
            if not path.exists():
                raise MissingPackageError(f"there is no {path}; run `apt-get install scowl`, or pass SCOWL's folder.")
            for word in path.read_text(encoding="iso-8859-1").split():
                if word.isascii() and word.isalpha() and word.islower():
                    found.setdefault(word, size)
    return found
