"""Find the concepts that a caption names, by their names, synonyms and plurals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from elude_steer.errors import SpecError
from elude_steer.utils.files import read_bytes

_MAX_BYTES = 2**24  # of a list of classes
_PLURALS = {
    "person": "people", "child": "children", "mouse": "mice", "knife": "knives", "pocketknife": "pocketknives",
    "calf": "calves", "goose": "geese", "ox": "oxen",
}  # fmt: skip


class CaptionReader:
    """Reads captions for a list of concepts. The longest name counts, so a hot dog is no dog.

    Attributes:
        names: the concepts, in the order of the list.
        synonyms: concept -> its synonyms.
        other_meanings: phrases that contain a name and mean something else.
        concepts: name, synonym or plural -> its concept; an empty string for a phrase that means something else.

    Args:
        classes: a line per concept, `dog: puppy, hound`.
        other_meanings: phrases that contain the name of a concept and mean something else, separated by commas.
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
        patterns: Mapping[str, str] | None = None,
    ) -> None:
        lines = [line.partition(":") for line in classes.strip().splitlines()]
        self.synonyms = {name.strip(): _split(others) for name, _, others in lines}
        self.names = tuple(self.synonyms)
        self.other_meanings = tuple(_split(other_meanings))
        singular = dict.fromkeys(self.other_meanings, "")
        singular |= {other: name for name, others in self.synonyms.items() for other in (name, *others)}
        self.concepts = {_plain(form): name for one, name in singular.items() for form in (one, plural(one))}
        own = patterns or {}
        parts = [
            own.get(form) or re.escape(form).replace(r"\ ", r"[\s-]+")
            for form in sorted(self.concepts, key=len, reverse=True)
        ]
        self._pattern = re.compile(rf"\b(?:{'|'.join(parts)})\b")

    @classmethod
    def from_file(cls, path: Path, *, patterns: Mapping[str, str] | None = None) -> CaptionReader:
        """The reader of a file: lines as for `classes`, `: phrase, phrase` for other meanings, # for comments.

        Args:
            path: the file.
            patterns: regular expressions to use in place of a name.
        """
        try:
            lines = [line.strip() for line in read_bytes(path, _MAX_BYTES).decode().lower().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise SpecError(f"'{path}' cannot be read: {reason}; give a line per class: dog: puppy, hound") from error
        lines = [line for line in lines if line and not line.startswith("#")]
        for line in lines:
            if ":" not in line:
                raise SpecError(
                    f"'{path}' has a line '{line}' without a colon; write a class and its synonyms: 'dog: puppy'."
                )
        own = [line for line in lines if not line.startswith(":")]
        if not own:
            raise SpecError(f"'{path}' names no class; write a line per class: 'dog: puppy, hound'.")
        others = [line.removeprefix(":") for line in lines if line.startswith(":")]
        return cls("\n".join(own), other_meanings=",".join(others), patterns=patterns)

    def read(self, caption: str) -> frozenset[str]:
        """The concepts that a caption names."""
        return frozenset(self.count(caption))

    def count(self, caption: str) -> Counter[str]:
        """How often a caption names each of its concepts."""
        found = (_plain(match.group()) for match in self._pattern.finditer(caption.lower()))
        return Counter(concept for name in found if (concept := self.concepts[name]))


def _split(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


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
