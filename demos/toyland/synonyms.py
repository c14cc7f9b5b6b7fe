"""Write the synonyms that the matcher is tested on: `python -m demos.toyland.synonyms [WORDNET] [SCOWL]`.

WORDNET is the folder of WordNet 3.0's data files and SCOWL the folder of SCOWL's word lists. The defaults are the
folders of Debian's packages wordnet-base and scowl; the licences of both are in NOTICE. `synonyms.json` is committed,
so this script runs only when the world or the rule changes. The matcher reads the same two sources when it is made.

One rule holds for all concepts. The synonyms of a concept are the lemmas of its synset and of the direct hyponyms that

- are a single word of at least three letters,
- are common: they occur in SCOWL's lists up to `COMMON`,
- have this meaning as the first of their senses as a noun ("bay" means a horse to few readers),
- are not concepts themselves, and
- are claimed by one concept only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demos.vocabulary.wordnet import SCOWL, WORDNET, WordNet, common_words
from elude_steer.toyland import CONCEPTS, DATA

SYNONYMS = DATA / "synonyms.json"

# concept -> its synsets as (lemma, sense). A concept has several synsets where WordNet separates what an image shows as
# one thing: the plant and its fruit, falling snow and lying snow. `clean wall` is not in WordNet.
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


def find_synonyms(wordnet: WordNet, common: set[str]) -> dict[str, str]:
    """Map each synonym to its concept, in the order of the concepts."""
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
    """Write `synonyms.json`."""
    found = find_synonyms(WordNet(wordnet), set(common_words(scowl)))
    SYNONYMS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", nargs="?", type=Path, default=WORDNET)
    parser.add_argument("scowl", nargs="?", type=Path, default=SCOWL)
    options = parser.parse_args()
    main(options.wordnet, options.scowl)
