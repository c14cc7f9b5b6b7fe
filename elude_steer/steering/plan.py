"""Words become edits before anything runs: which sub-units, found by which word, changed how, and on which patches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from elude_steer.atlas.matching import normalize_word
from elude_steer.errors import SpecError
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import Settings

if TYPE_CHECKING:
    from elude_steer.atlas.atlas import Atlas
    from elude_steer.models.matcher import Matcher

FAR = 0.45  # below this cosine a word is said to be far from every label


@dataclass(frozen=True)
class Edit:
    """One sub-unit and what happens to it: `scale` multiplies its activation by `amount`, `set` makes it `amount`."""

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
    """A wanted word: whether it goes (`minus`) or comes (`plus`), how, the sub-units that stand for it, and where."""

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
    """Everything that will happen to a picture, before it happens.

    Attributes:
        concepts: minus words first, each in the order they were given.
        where: the region of words that have none of their own; None goes where the minus words fire.
        atlas: the name of the atlas the sub-units are numbered in.
        weights: the fingerprint of that atlas.
    """

    concepts: tuple[Concept, ...] = ()
    where: Region | None = None
    atlas: str = ""
    weights: str = ""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits of all words."""
        return tuple(edit for concept in self.concepts for edit in concept.edits)

    @property
    def has_effect(self) -> bool:
        """Whether anything can change at all."""
        some = any(edit.kind == "set" or edit.amount != 1 for edit in self.edits)
        return some or any(self.is_filled(concept) or self.stream_reach(concept) for concept in self.concepts)

    def stream_reach(self, concept: Concept) -> float:
        """How many times the stream the units without a word's sub-units are moved by: away where it is removed."""
        how = concept.settings
        if how.mode != "place" or not concept.edits:
            return 0.0
        if concept.is_placed:
            return how.reach
        return (
            0.0 if any(other.is_placed for other in self.concepts) or not self.has_surroundings(concept) else -how.reach
        )

    def has_surroundings(self, concept: Concept) -> bool:
        """Whether the region of a removed word leaves anything around it."""
        how = concept.settings
        return how.nu != "all" or how.fits or self.marked_region(concept) is not None

    def is_filled(self, concept: Concept) -> bool:
        """Whether the surroundings take the place of a removed word: not if something else is placed there."""
        how = concept.settings
        wanted = concept.role == "minus" and how.mode == "place" and how.fill > 0 and bool(concept.edits)
        return (
            wanted
            and self.has_surroundings(concept)
            and not any(c.is_placed and self.marked_region(c) is None for c in self.concepts)
        )

    def marked_region(self, concept: Concept) -> Region | None:
        """The region that the user marked for a word; the plan's is for what is placed, or else for what goes."""
        elsewhere = concept.role == "minus" and any(other.is_placed for other in self.concepts)
        return concept.where or (None if elsewhere else self.where)

    @property
    def is_linear(self) -> bool:
        """Whether the edit is linear in the layer's input: every patch, and nothing set."""
        touched = [c for c in self.concepts if c.edits]
        others = (c.is_placed or c.settings.fits or self.is_filled(c) or self.stream_reach(c) for c in touched)
        return all(c.settings.nu == "all" for c in touched) and not any(others)

    @property
    def key(self) -> str:
        """A short hash of the whole plan."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def words(self, role: str) -> tuple[str, ...]:
        """The words of one role."""
        return tuple(concept.word for concept in self.concepts if concept.role == role)

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
        lines = []
        for concept in self.concepts:
            s = concept.settings
            place = concept.is_placed
            patches = f"{s.nu} patch{'' if s.nu == 1 else 'es'} {'an' if s.per == 'image' else 'a'} {s.per}"
            amount = f"times {s.alpha if concept.role == 'plus' else s.gamma:g}"
            how = f"set to {s.beta:g} x {s.level}" if place else amount
            where = "every patch" if s.nu == "all" else (f"a region of {patches}" if place else patches)
            if s.fits:
                most = "" if s.nu == "all" else f", at most {patches}"
                where = f"the region with {s.fit:.0%} of its peak{most}"
            where = "the marked region" if (place or s.fits) and self.marked_region(concept) else where
            sign, units = "+" if concept.role == "plus" else "-", "sub-unit" if len(concept.edits) == 1 else "sub-units"
            lines.append(f"{sign}{concept.word}: {len(concept.edits)} {units} {how} on {where}")
            named: dict[tuple[str, float], int] = {}
            for edit in concept.edits:
                named[edit.via, edit.similarity] = named.get((edit.via, edit.similarity), 0) + 1
            found = [f"{count} by '{via}' ({similarity:.2f})" for (via, similarity), count in named.items()]
            more = f" and {len(found) - 4} more words" if len(found) > 4 else ""
            lines += [f"  {', '.join(found[:4])}{more}"] if found else []
            if reach := self.stream_reach(concept):
                lines.append(f"  the units without one moved by {reach:g} x stream")
            if self.is_filled(concept):
                lines.append(f"  in its place {s.fill} sub-units of the surroundings, set to {s.beta:g} x {s.level}")
        return "\n".join(lines)

    __repr__ = __str__  # of a thousand edits nobody wants to see the fields


def make_plan(
    atlas: Atlas,
    matcher: Matcher,
    *,
    minus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    plus: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    where: Any = None,
    settings: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Plan, list[str]]:
    """The plan of some words, and what is worth knowing about it.

    Args:
        atlas: whose sub-units.
        matcher: finds them.
        minus: words that should go; as a mapping, each with settings, and a `where`, of its own.
        plus: words that should come.
        where: the region for words that have none of their own; see `Region.from_value`.
        settings: for all words.
        defaults: what counts where nobody says anything, before the paper's values.
    """
    wanted = {word: dict(own) for word, own in (_words("minus", minus) | _words("plus", plus)).items()}
    places = {word: Region.from_value(own.pop("where", None)) for word, own in wanted.items()}
    minus_words = {word for word, role in wanted if role == "minus"}
    both = sorted(minus_words & {word for word, role in wanted if role == "plus"})
    if both:
        raise SpecError(f"'{both[0]}' is in minus and in plus; a word either goes or comes.")
    region = Region.from_value(where)
    concepts, notes = [], []
    for (word, role), own in wanted.items():
        how = Settings.of(own, settings or {}, defaults or {})
        place = places[word, role] or region
        if how.mode == "place" and role == "plus" and place is None and not minus_words:
            raise SpecError(
                f"'{word}' can only be placed somewhere: name what it replaces (minus), or give where (a box or mask)."
            )
        if how.mode == "scale" and place is not None:
            notes.append(f"mode scale changes '{word}' where its sub-units fire; where (a box or mask) is for place.")
        if how.mode == "place" and role == "minus" and how.fill:
            atlas.target_levels([], how.level)  # raises where the atlas has none
        if how.mode == "place" and how.reach:
            atlas.target_levels([], "stream")
        concept, note = _concept(atlas, matcher, word, role, how)
        concepts.append(replace(concept, where=places[word, role]))
        notes += note
    plus_units = {edit.sub_unit for concept in concepts if concept.role == "plus" for edit in concept.edits}
    kept: list[Concept] = []
    taken: set[int] = set()
    for concept in concepts:
        free = [e for e in concept.edits if e.sub_unit not in taken]
        if concept.role == "minus":  # a sub-unit wanted by both goes to plus
            free = [e for e in free if e.sub_unit not in plus_units]
        taken |= {e.sub_unit for e in free}
        if len(free) < len(concept.edits) and concept.is_placed:  # those of a unit share what it carries
            levels = _levels(atlas, [e.sub_unit for e in free], concept.settings)
            free = [replace(edit, amount=amount) for edit, amount in zip(free, levels, strict=True)]
        kept.append(replace(concept, edits=tuple(free)))
    homeless = any(concept.is_placed and concept.where is None for concept in kept)
    at_home = any(concept.role == "minus" and (concept.edits or concept.where) for concept in kept)
    if homeless and region is None and not at_home:
        raise SpecError(
            "nothing says where to place: the minus words' sub-units are plus ones too, or below min_similarity; "
            "lower kappa, or give where."
        )
    return Plan(tuple(kept), region, atlas.name, atlas.fingerprint), notes


def _words(role: str, given: Any) -> dict[tuple[str, str], Mapping[str, Any]]:
    if isinstance(given, str):
        raise SpecError(f"{role} is a list of words: {role}=[{given!r}].")
    if given is not None and not isinstance(given, Mapping | Sequence | Set):
        raise SpecError(f"{role} is a list of words, not {given!r}: {role}=['dog'].")
    pairs = given.items() if isinstance(given, Mapping) else ((word, {}) for word in given or ())
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for word, own in pairs:
        if not isinstance(own, Mapping):
            raise SpecError(f"the settings of '{word}' are a mapping, not {own!r}: {role}={{{word!r}: {{'nu': 6}}}}.")
        found[normalize_word(word), role] = own
    return found


def _levels(atlas: Atlas, sub_units: list[int], how: Settings) -> list[float]:
    return [float(value) for value in how.beta * atlas.target_levels(sub_units, how.level)]


def _concept(atlas: Atlas, matcher: Matcher, word: str, role: Any, how: Settings) -> tuple[Concept, list[str]]:
    labels, notes = atlas.require_labels(), []
    found = labels.search(matcher, word, atlas.units.numpy(), limit=how.kappa, by=how.by)
    close = [match for match in found if match.similarity >= how.min_similarity]
    if not close:
        best = max(found, key=lambda match: match.similarity) if found else None
        near = f" (closest: '{best.via}', {best.similarity:.2f})" if best else ""
        notes.append(
            f"no sub-unit of atlas '{atlas.name}' is as close to '{word}' as min_similarity {how.min_similarity:g} "
            f"asks{near}: it is left out."
        )
    elif close[0].similarity < FAR:
        best = close[0]
        notes.append(
            f"'{word}' is far from every label of atlas '{atlas.name}' (closest: '{best.via}', {best.similarity:.2f}): "
            f"its {len(close)} sub-units may not mean it. See `elude-steer concepts {atlas.name} --like '{word}'`."
        )
    place = how.mode == "place" and role == "plus"
    amounts = [how.alpha if role == "plus" else how.gamma] * len(close)
    if place:
        amounts = _levels(atlas, [match.sub_unit for match in close], how)
    kind: Literal["scale", "set"] = "set" if place else "scale"
    edits = tuple(
        Edit(match.sub_unit, match.unit, kind, amount, match.label, match.via, match.similarity, match.score)
        for match, amount in zip(close, amounts, strict=True)
    )
    return Concept(word, role, how, edits), notes
