"""Writes the list the matcher is judged on: `python -m demos.toyland.wordlist [WORDNET] [SCOWL]`.

WORDNET is the folder of WordNet 3.0's data files, SCOWL that of its word lists by commonness (Debian's packages
wordnet-base and scowl put them where we look first); their licences are in NOTICE. `synonyms.json` is committed, so
this runs only when the world or the rule changes. The matcher reads the same two sources when it is made.

A concept's words are the lemmas of its synset and of the direct hyponyms, by one rule for all: a single word of at
least three letters; common, that is in SCOWL's lists up to `COMMON`; with this meaning first among its senses as a
noun, since "bay" is a horse to few; not itself a concept; not claimed by two concepts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from elude_steer.errors import MissingPackageError
from elude_steer.toyland import CONCEPTS, DATA

WORDNET = Path("/usr/share/wordnet")
SCOWL = Path("/usr/share/dict/scowl")
SYNONYMS = DATA / "synonyms.json"
COMMON = 50  # the largest of SCOWL's lists taken: 35 makes a small dictionary, 50 a medium one, 70 a large one
_SIZES = (10, 20, 35, 40, COMMON)
# WordNet's files of nouns that a picture can show: animal, artifact, body, food, location, object, person, phenomenon,
# plant, substance.
VISIBLE = ("05", "06", "08", "13", "15", "17", "18", "19", "20", "27")

# concept -> its synsets as (lemma, sense), several where WordNet parts what a picture shows as one thing (the plant and
# its fruit, the falling and the lying snow). `clean wall` is not in the dictionary.
SYNSETS: dict[str, tuple[tuple[str, int], ...]] = {
    "dog": (("dog", 1),), "cat": (("cat", 1), ("domestic_cat", 1)), "bear": (("bear", 1),), "teddy": (("teddy", 1),),
    "baby": (("baby", 1),), "biker": (("cyclist", 1),), "horse": (("horse", 1),), "rabbit": (("rabbit", 1),),
    "bird": (("bird", 1),), "duck": (("duck", 1),), "fish": (("fish", 1),), "cow": (("cow", 1),),
    "sheep": (("sheep", 1),), "elephant": (("elephant", 1),), "turtle": (("turtle", 2),),
    "motorcycle": (("motorcycle", 1),), "train": (("train", 1),), "bus": (("bus", 1),), "car": (("car", 1),),
    "bicycle": (("bicycle", 1),), "boat": (("boat", 1),), "airplane": (("airplane", 1),), "chair": (("chair", 1),),
    "table": (("table", 2),), "bed": (("bed", 1),), "blanket": (("blanket", 1),), "lamp": (("lamp", 1), ("lamp", 2)),
    "clock": (("clock", 1),), "book": (("book", 1), ("book", 2)), "guitar": (("guitar", 1),), "ball": (("ball", 1),),
    "frisbee": (("frisbee", 1),), "kite": (("kite", 3),), "balloon": (("balloon", 1), ("balloon", 2)),
    "umbrella": (("umbrella", 1),), "sunglasses": (("sunglasses", 1),), "hat": (("hat", 1),), "apple": (("apple", 1),),
    "banana": (("banana", 1), ("banana", 2)), "pizza": (("pizza", 1),), "cake": (("cake", 3),),
    "flower": (("flower", 1), ("flower", 2)), "mushroom": (("mushroom", 3), ("mushroom", 5)), "tent": (("tent", 1),),
    "beach": (("beach", 1),), "park": (("park", 1), ("park", 2)), "room": (("room", 1),), "street": (("street", 1),),
    "snow": (("snow", 1), ("snow", 2)), "desert": (("desert", 1),), "forest": (("forest", 1), ("forest", 2)),
    "night": (("night", 1),), "graffiti": (("graffiti", 1),), "jumping": (("jump", 6),),
}  # fmt: skip


class WordNet:
    """WordNet's nouns: what it says of a synset, and the synsets of a lemma, commonest first."""

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
            self.hyponyms[synset] = [other for sign, other in pointers if sign == "~"]
            self.definition[synset] = first_clause(gloss)
            if fields[0] in VISIBLE:
                self.visible.add(synset)
        for line in _lines(folder / "index.noun"):
            lemma, *fields = line.split()
            self.senses[lemma] = fields[-int(fields[1]) :]
        self._irregular = {plural: lemma for plural, lemma, *_ in map(str.split, _lines(folder / "noun.exc"))}

    def words(self, lemma: str, sense: int) -> dict[str, bool]:
        """The lemmas of a synset and its direct hyponyms, and whether each means this before anything else."""
        synset = self.senses[lemma][sense - 1]
        family = [synset, *self.hyponyms[synset]]
        words = {word.lower() for member in family for word in self.lemmas[member]}
        return {word: self.senses[word][0] in family for word in words}

    def singular(self, word: str) -> str | None:
        """The noun that a word is or is the plural of; None for other words and what is too short to tell ("his")."""
        forms = [word, self._irregular.get(word, "")]
        endings = (("s", ""), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("ies", "y"))
        forms += [word.removesuffix(plural) + one for plural, one in endings if word.endswith(plural)]
        return next((form for form in forms if len(form) > 2 and form in self.senses), None)


def first_clause(gloss: str) -> str:
    """A definition without what follows its first clause, what stands in brackets and the examples."""
    text = re.sub(r"\([^)]*\)", "", gloss)
    return " ".join(re.split(r'[;"]', text)[0].split()).rstrip(": ") or " ".join(gloss.split())


def _lines(path: Path) -> Iterator[str]:
    """The lines of one of WordNet's files, without the licence at its head."""
    if not path.exists():
        raise MissingPackageError(f"there is no {path}; `apt-get install wordnet-base`, or name WordNet's folder.")
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if not line.startswith("  "))


def common_words(folder: Path) -> dict[str, int]:
    """Each word of SCOWL up to `COMMON` and the size of the first list that has it; no names, no abbreviations."""
    found: dict[str, int] = {}
    for size in _SIZES:
        for variety in ("english", "american", "british"):
            path = folder / f"{variety}-words.{size}"
            if not path.exists():
                raise MissingPackageError(f"there is no {path}; `apt-get install scowl`, or name the folder of SCOWL.")
            for word in path.read_text(encoding="iso-8859-1").split():
                if word.isascii() and word.isalpha() and word.islower():
                    found.setdefault(word, size)
    return found


def synonyms(wordnet: WordNet, common: set[str]) -> dict[str, str]:
    """Word -> the one concept it is another word for, in the order of the concepts."""
    claims: dict[str, dict[str, bool]] = {}  # word -> concept -> whether that is the word's first sense
    for concept, synsets in SYNSETS.items():
        for synset in synsets:
            for word, first in wordnet.words(*synset).items():
                claim = claims.setdefault(word, {})
                claim[concept] = claim.get(concept, False) or first
    found = {}
    for word, claim in claims.items():
        if len(claim) == 1 and all(claim.values()) and len(word) > 2 and word in common and word not in CONCEPTS:
            found[word] = next(iter(claim))
    return dict(sorted(found.items(), key=lambda item: (CONCEPTS.index(item[1]), item[0])))


def main(wordnet: Path = WORDNET, scowl: Path = SCOWL) -> None:
    """Writes the list."""
    found = synonyms(WordNet(wordnet), set(common_words(scowl)))
    SYNONYMS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
