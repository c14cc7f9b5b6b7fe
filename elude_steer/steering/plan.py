"""A plan of edits, made before anything runs: which sub-units stand for a concept, and how and where they change.

A concept is something to remove (`minus`) or to add (`plus`), named by a word. The sub-units whose labels are closest
to the word stand for it. In mode `scale`, each of them is multiplied where it fires. In mode `place`, plus concepts are
*placed*: their sub-units are set to a value on a region, by default the one where the minus concepts fire. The region
of a removed concept can be *filled* with the sub-units that fire around it. The *stream* is the residual stream behind
the layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
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

NOT_LINEAR = (
    "only an edit of every patch can be weights; this plan chooses patches, or sets values, for each image. "
    "The closest that can: mode scale, nu all (`--set mode=scale --set nu=all`); check its captions first."
)

Words = str | Sequence[str] | Mapping[str, Mapping[str, Any]]  # as a mapping, each word has settings


@dataclass(frozen=True)
class Edit:
    """The change of one sub-unit: `scale` multiplies its activation by `amount`, `set` replaces it with `amount`."""

    sub_unit: int
    unit: int
    kind: Literal["scale", "set"]
    amount: float
    label: str
    via: str
    similarity: float
    score: float


@dataclass(frozen=True)
class Concept:
    """A concept to remove (`minus`) or add (`plus`), with its settings, the edits of its sub-units, and its region."""

    word: str
    role: Literal["minus", "plus"]
    settings: Settings
    edits: tuple[Edit, ...]
    where: Region | None = None

    @property
    def is_placed(self) -> bool:
        """Whether its sub-units are set and not scaled."""
        return bool(self.edits) and self.edits[0].kind == "set"


@dataclass(frozen=True, repr=False)
class Plan:
    """All edits of an image, before they are made.

    Attributes:
        concepts: minus concepts first, each role in the order of the words.
        where: the region of concepts that have none themselves; None is where the minus concepts fire.
        atlas: the name of the atlas that numbers the sub-units.
        weights: the fingerprint of that atlas.

    Example:
        >>> from elude_steer import Plan, Steerer
        >>> plan = Steerer.load("toyland").plan(minus=["dog"], kappa=4, fill=0, reach=0)
        >>> print(plan)
        -dog: 4 sub-units times -15 on the region with 35% of its peak, at most 12 patches a tile
          4 by 'dog' (1.00)
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
        some = any(edit.kind == "set" or edit.amount != 1 for edit in self.edits)
        return some or any(self.is_filled(concept) or self.stream_reach(concept) for concept in self.concepts)

    @property
    def is_linear(self) -> bool:
        """Whether the edit is linear in the layer's input: it scales on every patch, and sets nothing."""
        touched = [c for c in self.concepts if c.edits]
        if not all(c.settings.nu == "all" for c in touched):
            return False
        return not any(
            c.is_placed or c.settings.fits_region or self.is_filled(c) or self.stream_reach(c) for c in touched
        )

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

    def stream_reach(self, concept: Concept) -> float:
        """Multiple of the mean residual stream added to units that hold none of the concept's sub-units.

        Negative when removing; 0 for a removed concept if another one is placed.
        """
        settings = concept.settings
        if settings.mode != "place" or not concept.edits:
            return 0.0
        if concept.is_placed:
            return settings.reach
        if any(other.is_placed for other in self.concepts) or not self.has_surroundings(concept):
            return 0.0
        return -settings.reach

    def has_surroundings(self, concept: Concept) -> bool:
        """Whether the region of a removed concept leaves any patches around it."""
        settings = concept.settings
        return settings.nu != "all" or settings.fits_region or self.marked_region(concept) is not None

    def is_filled(self, concept: Concept) -> bool:
        """Whether the region of a removed concept is filled with its surroundings: not if something is placed there."""
        settings = concept.settings
        removed = concept.role == "minus" and settings.mode == "place" and bool(concept.edits)
        if not removed or settings.fill <= 0 or not self.has_surroundings(concept):
            return False
        return not any(c.is_placed and self.marked_region(c) is None for c in self.concepts)

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
        level = f"set to {settings.beta:g} x {settings.level}"
        change = level if concept.is_placed else f"times {gain:g}"
        units = "sub-unit" if count == 1 else "sub-units"
        lines = [f"{sign}{concept.word}: {count} {units} {change} on {self._describe_region(concept)}"]
        counts: dict[tuple[str, float], int] = {}
        for edit in concept.edits:
            counts[edit.via, edit.similarity] = counts.get((edit.via, edit.similarity), 0) + 1
        matches = [f"{count} by '{via}' ({similarity:.2f})" for (via, similarity), count in counts.items()]
        more = f" and {len(matches) - 4} more words" if len(matches) > 4 else ""
        if matches:
            lines.append(f"  {', '.join(matches[:4])}{more}")
        if reach := self.stream_reach(concept):
            lines.append(f"  the units without one moved by {reach:g} x stream")
        if self.is_filled(concept):
            lines.append(f"  in its place {settings.fill} sub-units of the surroundings, {level}")
        return lines

    def _describe_region(self, concept: Concept) -> str:
        settings, nu = concept.settings, concept.settings.nu
        if (concept.is_placed or settings.fits_region) and self.marked_region(concept):
            return "the marked region"
        patches = f"{nu} patch{'' if nu == 1 else 'es'} {'an' if settings.per == 'image' else 'a'} {settings.per}"
        if settings.fits_region:
            limit = "" if nu == "all" else f", at most {patches}"
            return f"the region with {settings.fit:.0%} of its peak{limit}"
        if nu == "all":
            return "every patch"
        return f"a region of {patches}" if concept.is_placed else patches


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
        _check_streams(atlas, empty.role, empty.settings)
        concept, more_notes = _find_concept(atlas, matcher, empty)
        concepts.append(concept)
        notes += more_notes
    concepts = _share_out(atlas, concepts)
    needs_region = any(concept.is_placed and concept.where is None for concept in concepts)
    has_region = any(concept.role == "minus" and (concept.edits or concept.where) for concept in concepts)
    if needs_region and region is None and not has_region:
        raise SpecError(
            "nothing says where to place: the sub-units of the minus words all belong to plus words, or are below "
            "min_similarity; lower kappa, or give where."
        )
    return Plan(tuple(concepts), region, atlas.name, atlas.fingerprint), notes


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
    region = Region.from_value(where)
    merge_settings(settings or {}, defaults or {})  # wrong ones are refused even if there is no word
    concepts: list[Concept] = []
    roles: tuple[tuple[Literal["minus", "plus"], dict[str, tuple[str, Mapping[str, Any]]]], ...]
    roles = (("minus", removed), ("plus", added))
    for role, words in roles:
        for word, values in words.values():
            own = {name: value for name, value in values.items() if name != "where"}
            chosen = merge_settings(own, settings or {}, defaults or {})
            own_region = Region.from_value(values.get("where"))
            if chosen.mode == "place" and role == "plus" and not (own_region or region or removed):
                raise SpecError(
                    f"'{word}' can only be placed somewhere: name what it replaces (minus), or give where (a box or "
                    "mask)."
                )
            concepts.append(Concept(word, role, chosen, (), own_region))
    return concepts


def check_foldable(concepts: Sequence[Concept]) -> None:
    """Raise if no plan of these concepts can be linear, whatever its edits (see `Plan.is_linear`)."""
    for concept in concepts:
        placed = concept.settings.mode == "place" and concept.role == "plus"
        if placed or concept.settings.nu != "all" or concept.settings.fits_region:
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


def _check_streams(atlas: SubUnitSource, role: str, settings: Settings) -> None:
    """Raise if the settings need streams that the atlas does not have."""
    if settings.mode == "place" and role == "minus" and settings.fill:
        atlas.target_levels([], settings.level)
    if settings.mode == "place" and settings.reach:
        atlas.target_levels([], "stream")


def _find_concept(atlas: SubUnitSource, matcher: Matcher, concept: Concept) -> tuple[Concept, list[str]]:
    """The concept with the edits of its sub-units, and notes if those are far from its word."""
    word, role, settings = concept.word, concept.role, concept.settings
    labels, notes = atlas.require_labels(), []
    matches = labels.search(matcher, word, atlas.units.numpy(), limit=settings.kappa, by=settings.by)
    close = [match for match in matches if match.similarity >= settings.min_similarity]
    if not close:
        best = max(matches, key=lambda match: match.similarity) if matches else None
        near = f" (closest: '{best.via}', {best.similarity:.2f})" if best else ""
        notes.append(
            f"'{word}' is left out: no sub-unit of atlas '{atlas.name}' reaches min_similarity "
            f"{settings.min_similarity:g}{near}."
        )
    elif close[0].similarity < FAR:
        best = close[0]
        notes.append(
            f"'{word}' is far from every label of atlas '{atlas.name}' (closest: '{best.via}', {best.similarity:.2f}): "
            f"its {len(close)} sub-units may not mean it. See `elude-steer concepts {atlas.name} --like '{word}'`."
        )
    is_placed = settings.mode == "place" and role == "plus"
    kind: Literal["scale", "set"] = "set" if is_placed else "scale"
    amounts = [settings.alpha if role == "plus" else settings.gamma] * len(close)
    if is_placed:
        amounts = _place_amounts(atlas, [match.sub_unit for match in close], settings)
    edits = tuple(
        Edit(match.sub_unit, match.unit, kind, amount, match.label, match.via, match.similarity, match.score)
        for match, amount in zip(close, amounts, strict=True)
    )
    return replace(concept, edits=edits), notes


def _share_out(atlas: SubUnitSource, concepts: Sequence[Concept]) -> list[Concept]:
    """The concepts with every sub-unit in one of them: in plus rather than minus, else in the first that has it."""
    plus_units = {edit.sub_unit for concept in concepts if concept.role == "plus" for edit in concept.edits}
    taken: set[int] = set()
    shared: list[Concept] = []
    for concept in concepts:
        free = [e for e in concept.edits if e.sub_unit not in taken]
        if concept.role == "minus":
            free = [e for e in free if e.sub_unit not in plus_units]
        taken |= {e.sub_unit for e in free}
        if len(free) < len(concept.edits) and concept.is_placed:  # sub-units of one unit share its level
            amounts = _place_amounts(atlas, [e.sub_unit for e in free], concept.settings)
            free = [replace(edit, amount=amount) for edit, amount in zip(free, amounts, strict=True)]
        shared.append(replace(concept, edits=tuple(free)))
    return shared


def _place_amounts(atlas: SubUnitSource, sub_units: list[int], settings: Settings) -> list[float]:
    return [float(value) for value in settings.beta * atlas.target_levels(sub_units, settings.level)]
