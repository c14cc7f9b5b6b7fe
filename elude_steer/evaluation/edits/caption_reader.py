"""Find the concepts that a caption names, by their names, synonyms and plurals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_PLURALS = {
    "person": "people", "child": "children", "mouse": "mice", "knife": "knives", "pocketknife": "pocketknives",
    "calf": "calves", "goose": "geese", "ox": "oxen",
}  # fmt: skip


class CaptionReader:
    """Reads captions for a list of concepts. The longest name counts, so a hot dog is no dog.

    Attributes:
        names: the concepts, in the order of the list.
        synonyms: concept -> its synonyms.
        concepts: name, synonym or plural -> its concept; an empty string for a phrase that means something else.

    Args:
        classes: a line per concept, `dog: puppy, hound`; a line that ends in a comma goes on in the next.
        other_meanings: phrases that contain the name of a concept and mean something else, separated by commas.
        further: further names and their concepts.
        patterns: regular expressions to use in place of a name.

    Example:
        >>> sorted(CaptionReader("dog: puppy, hound").read("Two puppies eat a hot dog."))
        ['dog']
    """

    def __init__(
        self,
        classes: str,
        *,
        other_meanings: str = "",
        further: Mapping[str, str] | None = None,
        patterns: Mapping[str, str] | None = None,
    ) -> None:
        lines = re.sub(r",\n\s+", ", ", classes.strip()).splitlines()
        self.synonyms = {name: others.split(", ") for name, others in (line.split(": ") for line in lines)}
        self.names = tuple(self.synonyms)
        singular = dict.fromkeys(other_meanings.split(", ") if other_meanings else (), "")
        singular |= {other: name for name, others in self.synonyms.items() for other in (name, *others)}
        singular |= further or {}
        self.concepts = {_plain(form): name for one, name in singular.items() for form in (one, plural(one))}
        own = patterns or {}
        parts = [
            own.get(form) or re.escape(form).replace(r"\ ", r"[\s-]+")
            for form in sorted(self.concepts, key=len, reverse=True)
        ]
        self._pattern = re.compile(rf"\b(?:{'|'.join(parts)})\b")

    def read(self, caption: str) -> frozenset[str]:
        """The concepts that a caption names."""
        return frozenset(self.count(caption))

    def count(self, caption: str) -> Counter[str]:
        """How often a caption names each of its concepts."""
        found = (_plain(match.group()) for match in self._pattern.finditer(caption.lower()))
        return Counter(concept for name in found if (concept := self.concepts[name]))


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", " ", name)


def plural(name: str) -> str:
    """The plural of an English noun, or of the last word of several."""
    *head, last = name.split(" ")
    if last in _PLURALS:
        last = _PLURALS[last]
    elif last.endswith("man"):
        last = last.removesuffix("man") + "men"
    elif re.search(r"[^aeiou]y$", last):
        last = last.removesuffix("y") + "ies"
    else:
        last += "es" if re.search(r"(?:s|x|z|ch|sh)$", last) else "s"
    return " ".join([*head, last])
