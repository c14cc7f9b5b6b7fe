"""A plan of edits, made before anything runs: which concepts change, and how and where.

A concept is something to remove (`minus`) or to add (`plus`), named by a word. In mode `scale`, the sub-units whose
labels are closest to the word stand for it, and each is multiplied where it fires. In mode `place`, the detector of the
closest calibrated word reads the sub-units: it says whether a minus concept is in the image, and on which patches. What
the concept carries in the residual stream is taken out there, and what a plus concept carries is put in. The first plus
concept takes the region of the first minus concept, the second that of the second, unless the user marks a region. A
plus concept for which no minus concept is left goes to a free place, which is found in each image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from elude_steer.atlas.matching import normalize_word
from elude_steer.errors import SpecError
from elude_steer.specs import Settings
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings

if TYPE_CHECKING:
    from elude_steer.models.matcher import Matcher
    from elude_steer.steering.sub_unit_source import SubUnitSource

FAR = 0.45  # below this cosine a word counts as far from every label
_NAMED = 12  # sub-units of a detector that a plan names

NOT_LINEAR = (
    "only an edit of every patch can be weights; this plan chooses patches for each image. "
    "The closest that can: mode scale, nu all (`--set mode=scale --set nu=all`); check its captions first."
)

Words = str | Sequence[str] | Mapping[str, Mapping[str, Any]]  # as a mapping, each word has settings


@dataclass(frozen=True)
class Edit:
    """A sub-unit of a concept: `scale` multiplies its activation by `amount`; `read` gives it that weight and reads it.

    Of a detector, only the sub-units with the largest weights are named.
    """

    sub_unit: int
    unit: int
    kind: Literal["scale", "read"]
    amount: float
    label: str
    via: str
    similarity: float
    score: float


@dataclass(frozen=True)
class Detector:
    """The calibrated word that stands for a concept: its row in the calibration, and its cosine to the user's word."""

    row: int
    word: str
    similarity: float


@dataclass(frozen=True)
class Concept:
    """A concept to remove (`minus`) or add (`plus`), with its settings, its sub-units, its region and its detector."""

    word: str
    role: Literal["minus", "plus"]
    settings: Settings
    edits: tuple[Edit, ...]
    where: Region | None = None
    detector: Detector | None = None

    @property
    def is_placed(self) -> bool:
        """Whether something is put into a region: a plus concept in mode place."""
        return self.role == "plus" and self.settings.mode == "place"

    @property
    def is_regional(self) -> bool:
        """Whether the stream changes on a region, and not each sub-unit where it fires most."""
        return self.settings.mode == "place"


@dataclass(frozen=True, repr=False)
class Plan:
    """All edits of an image, before they are made.

    Attributes:
        concepts: minus concepts first, each role in the order of the words.
        where: the region of concepts that have none themselves; None is where the minus concepts fire, or a free place
            for plus concepts that outnumber them.
        atlas: the name of the atlas that numbers the sub-units.
        weights: the fingerprint of that atlas.

    Example:
        >>> from elude_steer import Plan, Steerer
        >>> plan = Steerer.load("toyland").plan(minus=["dog"])
        >>> print(plan)
        -dog: taken out with strength 1 where it reads at least 30% of its peak, if it is seen
          by 'dog' (1.00)
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    concepts: tuple[Concept, ...] = ()
    where: Region | None = None
    atlas: str = ""
    weights: str = ""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits of all concepts."""
        return tuple(edit for concept in self.concepts for edit in concept.edits)

    @property
    def has_effect(self) -> bool:
        """Whether the plan can change anything."""
        if any(edit.kind == "scale" and edit.amount != 1 for edit in self.edits):
            return True
        return any(concept.detector is not None and concept.settings.strength for concept in self.concepts)

    @property
    def is_linear(self) -> bool:
        """Whether the edit is linear in the layer's input: it scales on every patch, and chooses no region."""
        return not any(c.is_regional or c.settings.nu != "all" for c in self.concepts if c.edits or c.detector)

    @property
    def key(self) -> str:
        """A short hash of the whole plan."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def words(self, role: str) -> tuple[str, ...]:
        """The words of one role."""
        return tuple(concept.word for concept in self.concepts if concept.role == role)

    def marked_region(self, concept: Concept) -> Region | None:
        """The region that the user marked for a concept.

        The plan's region is for placed concepts; for removed ones only where nothing is placed.
        """
        elsewhere = concept.role == "minus" and any(other.is_placed for other in self.concepts)
        return concept.where or (None if elsewhere else self.where)

    def partner(self, concept: Concept) -> Concept | None:
        """The minus concept whose region a plus concept takes; None if its region is marked."""
        if self.marked_region(concept) is not None or not concept.is_placed:
            return None
        placed = [one for one in self.concepts if one.is_placed and self.marked_region(one) is None]
        removed = [one for one in self.concepts if one.role == "minus" and one.is_regional]
        number = placed.index(concept)
        return removed[number] if number < len(removed) else None

    def needs_free_place(self, concept: Concept) -> bool:
        """Whether a plus concept goes to a free place: no region is marked for it, and it takes that of no other."""
        return concept.is_placed and self.marked_region(concept) is None and self.partner(concept) is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `Plan.from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote."""
        concepts = tuple(
            Concept(
                c["word"],
                c["role"],
                Settings(**c["settings"]),
                tuple(Edit(**e) for e in c["edits"]),
                Region.from_dict(c.get("where")),
                Detector(**c["detector"]) if c.get("detector") else None,
            )
            for c in values["concepts"]
        )
        return cls(concepts, Region.from_dict(values.get("where")), values["atlas"], values["weights"])

    def __str__(self) -> str:
        if not self.concepts:
            return "nothing is changed"
        return "\n".join(line for concept in self.concepts for line in self._describe(concept))

    __repr__ = __str__  # the fields of a thousand edits would not be readable

    def _describe(self, concept: Concept) -> list[str]:
        settings, count = concept.settings, len(concept.edits)
        sign, gain = ("+", settings.alpha) if concept.role == "plus" else ("-", settings.gamma)
        if concept.is_regional:
            change = "put in" if concept.is_placed else "taken out"
            lines = [
                f"{sign}{concept.word}: {change} with strength {settings.strength:g} {self._describe_region(concept)}"
            ]
            if concept.detector is not None:
                lines.append(f"  by '{concept.detector.word}' ({concept.detector.similarity:.2f})")
            return lines
        nu, units = settings.nu, "sub-unit" if count == 1 else "sub-units"
        patches = f"{nu} patch{'' if nu == 1 else 'es'} {'an' if settings.per == 'image' else 'a'} {settings.per}"
        where = "every patch" if nu == "all" else patches
        lines = [f"{sign}{concept.word}: {count} {units} times {gain:g} on {where}"]
        counts: dict[tuple[str, float], int] = {}
        for edit in concept.edits:
            counts[edit.via, edit.similarity] = counts.get((edit.via, edit.similarity), 0) + 1
        matches = [f"{count} by '{via}' ({similarity:.2f})" for (via, similarity), count in counts.items()]
        more = f" and {len(matches) - 4} more words" if len(matches) > 4 else ""
        if matches:
            lines.append(f"  {', '.join(matches[:4])}{more}")
        return lines

    def _describe_region(self, concept: Concept) -> str:
        settings, partner = concept.settings, self.partner(concept)
        if self.marked_region(concept) is not None:
            return "in the marked region"
        if partner is not None:
            return f"in place of '{partner.word}'"
        if concept.is_placed:
            return "in a free place" if settings.fit else "in the whole image"
        where = f"where it reads at least {settings.fit:.0%} of its peak" if settings.fit else "in the whole image"
        return where if settings.force else f"{where}, if it is seen"


def make_plan(
    atlas: SubUnitSource,
    matcher: Matcher,
    *,
    minus: Words = (),
    plus: Words = (),
    where: Any = None,
    settings: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Plan, list[str]]:
    """Make a plan from words, with notes on what the user should know about it.

    Args:
        atlas: holds the sub-units.
        matcher: finds sub-units by word.
        minus: concepts to remove: one, several, or a mapping from words to settings, which may include `where`.
        plus: concepts to add.
        where: the region of concepts that have none themselves; see `Region.from_value`.
        settings: for all concepts.
        defaults: used where neither a word nor `settings` has a value; after them come the paper's values.
    """
    wanted, region = read_concepts(minus, plus, where, settings, defaults), Region.from_value(where)
    concepts: list[Concept] = []
    notes: list[str] = []
    for empty in wanted:
        if empty.settings.mode == "scale" and (empty.where or region) is not None:
            notes.append(
                f"mode scale changes '{empty.word}' where its sub-units fire; where (a box or mask) is only for mode "
                "place."
            )
        concept, more_notes = _find_concept(atlas, matcher, empty)
        concepts.append(concept)
        notes += more_notes
    return Plan(tuple(_share_out(concepts)), region, atlas.name, atlas.fingerprint), notes


def read_concepts(
    minus: Words = (),
    plus: Words = (),
    where: Any = None,
    settings: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> list[Concept]:
    """Read what the caller asks for, as concepts without edits; raises for all that is wrong without a model.

    Args:
        minus: concepts to remove.
        plus: concepts to add.
        where: the region of concepts that have none themselves.
        settings: for all concepts.
        defaults: used where neither a word nor `settings` has a value.
    """
    removed, added = _read_words("minus", minus), _read_words("plus", plus)
    if both := sorted(set(removed) & set(added)):
        raise SpecError(f"'{both[0]}' is in minus and in plus; a concept is either removed or added.")
    Region.from_value(where)
    merge_settings(settings or {}, defaults or {})  # wrong ones are refused even if there is no word
    concepts: list[Concept] = []
    roles: tuple[tuple[Literal["minus", "plus"], dict[str, tuple[str, Mapping[str, Any]]]], ...]
    roles = (("minus", removed), ("plus", added))
    for role, words in roles:
        for word, values in words.values():
            own = {name: value for name, value in values.items() if name != "where"}
            chosen = merge_settings(own, settings or {}, defaults or {})
            own_region = Region.from_value(values.get("where"))
            concepts.append(Concept(word, role, chosen, (), own_region))
    return concepts


def check_foldable(concepts: Sequence[Concept]) -> None:
    """Raise if no plan of these concepts can be linear, whatever its edits (see `Plan.is_linear`)."""
    for concept in concepts:
        if concept.is_regional or concept.settings.nu != "all":
            raise SpecError(NOT_LINEAR)


def _read_words(role: str, value: Any) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The words of one role as typed, with their settings, by the word in lower case."""
    value = [value] if isinstance(value, str) else value
    if value is not None and not isinstance(value, Mapping | Sequence | Set):
        raise SpecError(f"{role} is a word or a list of words, not {value!r}: {role}=['dog'].")
    pairs = value.items() if isinstance(value, Mapping) else ((word, {}) for word in value or ())
    words: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for word, settings in pairs:
        if not isinstance(settings, Mapping):
            raise SpecError(
                f"the settings of '{word}' are a mapping, not {settings!r}: {role}={{{word!r}: {{'nu': 6}}}}."
            )
        typed = normalize_word(word)
        first, known = words.setdefault(typed.casefold(), (typed, settings))
        if known != settings:
            raise SpecError(f"'{first}' and '{typed}' are one concept, with different settings in {role}; keep one.")
    return words


def _find_concept(atlas: SubUnitSource, matcher: Matcher, concept: Concept) -> tuple[Concept, list[str]]:
    """The concept with its sub-units or its detector, and notes if those are far from its word."""
    found = _find_detector if concept.is_regional else _find_sub_units
    return found(atlas, matcher, concept)


def _find_sub_units(atlas: SubUnitSource, matcher: Matcher, concept: Concept) -> tuple[Concept, list[str]]:
    word, settings, labels = concept.word, concept.settings, atlas.require_labels()
    matches = labels.search(matcher, word, atlas.units.numpy(), limit=settings.kappa, by=settings.by)
    close = [match for match in matches if match.similarity >= settings.min_similarity]
    if not close:
        raise _too_far(atlas, matcher, word, settings)
    amount = settings.alpha if concept.role == "plus" else settings.gamma
    edits = tuple(Edit(m.sub_unit, m.unit, "scale", amount, m.label, m.via, m.similarity, m.score) for m in close)
    return replace(concept, edits=edits), _note_far(atlas, word, close[0].via, close[0].similarity)


def _find_detector(atlas: SubUnitSource, matcher: Matcher, concept: Concept) -> tuple[Concept, list[str]]:
    calibration, labels, word = atlas.require_calibration(), atlas.require_labels(), concept.word
    similarities = labels.similarities(matcher, word)[calibration.words.numpy()]
    row = int(similarities.argmax())
    similarity, known = float(similarities[row]), labels.vocabulary[int(calibration.words[row])]
    if similarity < concept.settings.min_similarity:
        raise _too_far(atlas, matcher, word, concept.settings)
    weights = calibration.detector(row)[0] * atlas.references.activation.clamp_min(0)
    strongest = weights.sort(descending=True, stable=True).indices[:_NAMED].tolist()
    edits = tuple(
        Edit(n, int(atlas.units[n]), "read", float(weights[n]), labels[n], known, similarity, float(weights[n]))
        for n in strongest
        if weights[n] > 0
    )
    detector = Detector(row, known, similarity)
    return replace(concept, edits=edits, detector=detector), _note_far(atlas, word, known, similarity)


def _note_far(atlas: SubUnitSource, word: str, closest: str, similarity: float) -> list[str]:
    if similarity >= FAR:
        return []
    return [
        f"'{word}' is far from every label of atlas '{atlas.name}' (closest: '{closest}', {similarity:.2f}) and may "
        f"not mean it. See `elude-steer concepts {quote(atlas.name)} --like {quote(word)}`."
    ]


def _too_far(atlas: SubUnitSource, matcher: Matcher, word: str, settings: Settings) -> SpecError:
    """The error for a word that no label is close to, with the closest ones."""
    labels = atlas.require_labels()
    similarities = labels.similarities(matcher, word)
    order = (-similarities).argsort(kind="stable")[:3]
    closest = ", ".join(f"'{labels.vocabulary[i]}' {similarities[i]:.2f}" for i in order)
    if similarities.max() < 0.005:  # all are 0.00: there is no order
        return SpecError(f"atlas '{atlas.name}' knows nothing like '{word}': no label is close to it. Use its words.")
    return SpecError(
        f"atlas '{atlas.name}' knows nothing like '{word}' (closest: {closest}; at least {settings.min_similarity:g} "
        "is needed): use one of its words, or lower min_similarity."
    )


def _share_out(concepts: Sequence[Concept]) -> list[Concept]:
    """The concepts with every scaled sub-unit in one of them: in plus rather than minus, else in the first with it."""
    plus_units = {
        edit.sub_unit
        for concept in concepts
        if concept.role == "plus"
        for edit in concept.edits
        if edit.kind == "scale"
    }
    taken: set[int] = set()
    shared: list[Concept] = []
    for concept in concepts:
        if concept.is_regional:
            shared.append(concept)
            continue
        free = [e for e in concept.edits if e.sub_unit not in taken]
        if concept.role == "minus":
            free = [e for e in free if e.sub_unit not in plus_units]
        taken |= {e.sub_unit for e in free}
        shared.append(replace(concept, edits=tuple(free)))
    return shared
