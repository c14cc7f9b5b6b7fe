"""Write the vocabulary of nouns that images can show: `python -m demos.vocabulary.make_nouns [WORDNET] [SCOWL]`.

WORDNET is the folder of WordNet 3.0's data files and SCOWL the folder of SCOWL's word lists. The defaults are the
folders of Debian's packages wordnet-base and scowl; the licences of both are in NOTICE. The output, `nouns.txt` in
`elude_steer/atlas/vocabularies/`, is committed, so this script runs only when the rule changes.

A word is in the vocabulary if it

- has at least three letters,
- is common: it occurs in SCOWL's lists up to `COMMON`,
- is not the plural of another common noun,
- occurs as a noun in the texts that WordNet counts, or does not occur in them at all, and
- has a visible meaning among its first two as a noun.

Of people the vocabulary has only those whom an image tells apart, by their work, clothes or age: nobody looks like a
liar. It leaves out words that WordNet calls offensive.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from demos.vocabulary.wordnet import SCOWL, WORDNET, WordNet, common_words
from elude_steer.atlas.vocabulary import WORDS
from elude_steer.errors import MissingPackageError

COMMON = 40
# The vocabulary has all kinds of KINDS, and of PEOPLE only the word itself.
KINDS = (
    "worker", "professional", "serviceman", "athlete", "entertainer", "traveler", "clergyman", "sovereign", "relative",
    "juvenile",
)  # fmt: skip
PEOPLE = ("person", "adult", "man", "woman", "lady", "boy", "girl", "baby", "bride")
_OFFENSIVE = re.compile("slur|offensive|obscene|vulgar|insult|prostitute")


def select_nouns(wordnet: WordNet, common: dict[str, int], counts: dict[str, tuple[int, int]]) -> list[str]:
    """Select the vocabulary, in alphabetical order.

    Args:
        wordnet: the dictionary.
        common: word -> the size of SCOWL's first list with the word.
        counts: word -> how often it occurs as a noun and as anything else; only words that occur.
    """
    candidates = {word for word, size in common.items() if size <= COMMON and len(word) > 2 and word in wordnet.senses}
    other_people = _kinds(wordnet, ["person"]) - _kinds(wordnet, KINDS) - {wordnet.senses[word][0] for word in PEOPLE}

    def is_visible(word: str) -> bool:
        # Lemmas keep their capitals: the senses of "turkey" do not include "Turkey".
        senses = [synset for synset in wordnet.senses[word] if word in wordnet.lemmas[synset]]
        if any(_OFFENSIVE.search(wordnet.definition[synset]) for synset in senses[:2]):
            return False
        # WordNet lists people first for many names of animals, such as tiger.
        return any(synset in wordnet.visible for synset in [s for s in senses if s not in other_people][:2])

    def is_noun(word: str) -> bool:
        as_noun, otherwise = counts.get(word, (0, 0))
        return as_noun > 0 or otherwise == 0

    return sorted(
        word for word in candidates if is_noun(word) and not candidates & _singulars(word) and is_visible(word)
    )


def count_uses(path: Path) -> dict[str, tuple[int, int]]:
    """How often WordNet's texts use each word as a noun and as anything else, from its file `cntlist.rev`."""
    if not path.exists():
        raise MissingPackageError(f"there is no {path}; run `apt-get install wordnet-base`, or pass WordNet's folder.")
    counts: dict[str, tuple[int, int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, number = line.split()
        word, _, sense = key.partition("%")
        as_noun, otherwise = counts.get(word, (0, 0))
        uses = int(number)
        counts[word] = (as_noun + uses, otherwise) if sense.startswith("1:") else (as_noun, otherwise + uses)
    return counts


def _kinds(wordnet: WordNet, words: Iterable[str]) -> set[str]:
    """The synsets of the words' first meanings and all their hyponyms."""
    found: set[str] = set()
    waiting = [wordnet.senses[word][0] for word in words]
    while waiting:
        synset = waiting.pop()
        if synset not in found:
            found.add(synset)
            waiting += wordnet.hyponyms[synset]
    return found


def _singulars(word: str) -> set[str]:
    """The words that a word may be the plural of."""
    if not word.endswith("s") or word.endswith("ss"):
        return set()
    return {word[:-1], word[:-2], word.removesuffix("ies") + "y"}


def main(wordnet: Path = WORDNET, scowl: Path = SCOWL) -> None:
    """Write `nouns.txt`."""
    found = select_nouns(WordNet(wordnet), common_words(scowl), count_uses(wordnet / "cntlist.rev"))
    (WORDS / "nouns.txt").write_text("\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", nargs="?", type=Path, default=WORDNET)
    parser.add_argument("scowl", nargs="?", type=Path, default=SCOWL)
    options = parser.parse_args()
    main(options.wordnet, options.scowl)
