"""Writes the list of nouns that pictures can show: `python -m demos.make_nouns [WORDNET] [SCOWL]`.

WORDNET and SCOWL are the folders that `elude_steer.toyland.wordlist` reads; their licences are in NOTICE. `nouns.txt`
is committed, so this runs only when the rule changes.

A word is in the list if it has at least three letters; is common, that is in SCOWL's lists up to `COMMON`; is not the
plural of another common noun; was met as a noun in the texts that WordNet counts, or not met as anything else; and one
of its first two meanings as a noun can be seen. Of people only those are taken whom a picture tells from others, by
their work, clothes or age: nobody looks like a liar. Words that WordNet calls offensive are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from demos.toyland.wordlist import SCOWL, WORDNET, WordNet, common_words
from elude_steer.atlas.vocabulary import WORDS
from elude_steer.errors import MissingPackageError

COMMON = 40
# All kinds of these are taken, and of the others only the word itself.
KINDS = (
    "worker", "professional", "serviceman", "athlete", "entertainer", "traveler", "clergyman", "sovereign", "relative",
    "juvenile",
)  # fmt: skip
PEOPLE = ("person", "adult", "man", "woman", "lady", "boy", "girl", "baby", "bride")
_OFFENSIVE = re.compile("slur|offensive|obscene|vulgar|insult|prostitute")


def nouns(wordnet: WordNet, common: dict[str, int], counted: dict[str, tuple[int, int]]) -> list[str]:
    """The list, in alphabetical order.

    Args:
        wordnet: the dictionary.
        common: each common word and its size in SCOWL.
        counted: how often a word was met as a noun and as anything else, for words that were met.
    """
    known = {word for word, size in common.items() if size <= COMMON and len(word) > 2 and word in wordnet.senses}
    unseen = _kinds(wordnet, ["person"]) - _kinds(wordnet, KINDS) - {wordnet.senses[word][0] for word in PEOPLE}

    def seen(word: str) -> bool:
        senses = [synset for synset in wordnet.senses[word] if word in wordnet.lemmas[synset]]  # no Turkey for turkey
        if any(_OFFENSIVE.search(wordnet.definition[synset]) for synset in senses[:2]):
            return False
        # Most names of animals are also called at people: a tiger is a person first.
        return any(synset in wordnet.visible for synset in [s for s in senses if s not in unseen][:2])

    def noun(word: str) -> bool:
        as_noun, otherwise = counted.get(word, (0, 0))
        return as_noun > 0 or otherwise == 0

    return sorted(word for word in known if noun(word) and not known & _singulars(word) and seen(word))


def count(path: Path) -> dict[str, tuple[int, int]]:
    """How often WordNet's texts have each word as a noun and as anything else, from its file `cntlist.rev`."""
    if not path.exists():
        raise MissingPackageError(f"there is no {path}; `apt-get install wordnet-base`, or name WordNet's folder.")
    counted: dict[str, tuple[int, int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, number = line.split()
        word, _, sense = key.partition("%")
        as_noun, otherwise = counted.get(word, (0, 0))
        met = int(number)
        counted[word] = (as_noun + met, otherwise) if sense.startswith("1:") else (as_noun, otherwise + met)
    return counted


def _kinds(wordnet: WordNet, words: Iterable[str]) -> set[str]:
    """The synsets of the words' first meanings with all below them."""
    found: set[str] = set()
    waiting = [wordnet.senses[word][0] for word in words]
    while waiting:
        synset = waiting.pop()
        if synset not in found:
            found.add(synset)
            waiting += wordnet.hyponyms[synset]
    return found


def _singulars(word: str) -> set[str]:
    """What a word may be the plural of."""
    if not word.endswith("s") or word.endswith("ss"):
        return set()
    return {word[:-1], word[:-2], word.removesuffix("ies") + "y"}


def main(wordnet: Path = WORDNET, scowl: Path = SCOWL) -> None:
    """Writes the list."""
    found = nouns(WordNet(wordnet), common_words(scowl), count(wordnet / "cntlist.rev"))
    (WORDS / "nouns.txt").write_text("\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
