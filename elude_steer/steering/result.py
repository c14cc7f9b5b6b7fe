"""The result of steering one image: both captions, where concepts fire and change, and notes on what went wrong."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.familiarity import describe_image
from elude_steer.atlas.manifest import other_shipped_atlases
from elude_steer.atlas.matching import normalize_word
from elude_steer.atlas.vocabulary import FUNCTION_WORDS
from elude_steer.errors import AtlasError
from elude_steer.models.vlm import PatchGrid
from elude_steer.steering.plan import Plan
from elude_steer.steering.sub_unit_source import SubUnitSource
from elude_steer.utils.files import WORLDS
from elude_steer.utils.plotting import data_uri, heatmap

# Half-transparent colours, and styles on the tags themselves, because a notebook may be dark and may drop style sheets.
_GONE = "background:rgba(248,81,73,.2);border-radius:3px;padding:0 2px"
_NEW = "background:rgba(46,160,67,.28);border-radius:3px;padding:0 2px;text-decoration:none;font-weight:600"
_SMALL = "font-size:.85em;opacity:.75"


@dataclass(frozen=True, eq=False)
class SteeredCaption:
    """The captions of an image without and with a plan, and how one became the other.

    Attributes:
        baseline: the caption without edits; None if it was not asked for.
        caption: the caption under the plan.
        plan: the edits.
        maps: word -> how strongly its concept fires, and which share of its sub-units was changed; `(tiles, patches)`
            each.
        grid: where the patches lie in the image.
        image: the image.
        notes: sentences on what the user should know.
        provenance: model, atlas, prompt, settings and versions.
        seconds: how long it took; of images that are captioned together, each one's share.
        seen: minus word -> how much of what it reaches in images with it, it reaches in this one; only in mode place.

    Example:
        >>> from elude_steer import steer
        >>> result = steer("demos/images/toyland-dog.png", minus=["dog"], plus=["biker"])
        >>> result.baseline, result.gone, result.new
        ('a dog on a motorcycle with sunglasses on a street', ('dog',), ('biker',))
        >>> result.heatmap("dog").size
        (480, 480)
    """

    baseline: str | None
    caption: str
    plan: Plan
    maps: Mapping[str, tuple[np.ndarray, np.ndarray]]
    grid: PatchGrid
    image: Any
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    seen: Mapping[str, float] = field(default_factory=dict)

    @property
    def gone(self) -> tuple[str, ...]:
        """Words of the baseline that are not in the caption; none without a baseline."""
        return () if self.baseline is None else _words_only_in(self.baseline, self.caption)

    @property
    def new(self) -> tuple[str, ...]:
        """Words of the caption that are not in the baseline; none without a baseline."""
        return () if self.baseline is None else _words_only_in(self.caption, self.baseline)

    def heatmap(self, word: str, *, side: int = 480) -> Any:
        """The image with the patches where a concept fires; those are framed where at least a quarter was changed."""
        known = {normalize_word(name).casefold(): name for name in self.maps}
        name = known.get(normalize_word(word).casefold())
        if name is None:
            raise AtlasError(
                f"there is no map of '{word}'; the plan has maps of {', '.join(map(repr, self.maps)) or 'no words'}."
            )
        fires, touched = self.maps[name]
        return heatmap(self.image, self.grid, fires, touched, side=side)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        maps = {
            word: {"fires": fires.round(4).tolist(), "touched": touched.astype(float).round(4).tolist()}
            for word, (fires, touched) in self.maps.items()
        }
        return {
            "baseline": self.baseline,
            "caption": self.caption,
            "gone": self.gone,
            "new": self.new,
            "plan": self.plan.to_dict(),
            "maps": maps,
            "seen": {word: round(share, 4) for word, share in self.seen.items()},
            "notes": self.notes,
            "provenance": dict(self.provenance),
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return self.caption

    def __repr__(self) -> str:
        rows = [] if self.baseline is None else [("baseline", self.baseline)]
        rows += [("steered", self.caption), ("", str(self.plan))]
        rows += [("note", note) for note in self.notes]
        lines = [(name if first else "", line) for name, text in rows for first, line in _lines(text)]
        return "\n".join(f"{name:<10}{line}" for name, line in lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: both captions, a map for each word, notes, and the plan."""
        notes = "".join(f'<div style="{_SMALL}">{html.escape(note)}</div>' for note in self.notes)
        plan = (
            f'<details style="{_SMALL}"><summary>what was done</summary>'
            f'<div style="white-space:pre-wrap">{html.escape(str(self.plan))}</div></details>'
        )
        return f'<div style="max-width:720px">{render_captions(self)}{render_maps(self)}{notes}{plan}</div>'


def render_captions(result: SteeredCaption) -> str:
    """Render the captions as HTML, one below the other: removed words are struck through, new ones marked."""
    rows = "".join(
        f'<div style="{_SMALL}">{name}</div><div>{text}</div>' for name, text in mark_changes(result).items()
    )
    return (
        '<div style="display:grid;grid-template-columns:auto 1fr;gap:2px 12px;align-items:baseline;text-align:left">'
        f"{rows}</div>"
    )


def mark_changes(result: SteeredCaption) -> dict[str, str]:
    """Render `baseline`, if there is one, and `steered` as HTML, with the words that are only in one of them marked."""
    steered = {"steered": _mark_words(result.caption, result.new, "ins", _NEW)}
    if result.baseline is None:
        return steered
    return {"baseline": _mark_words(result.baseline, result.gone, "del", _GONE), **steered}


def mark_difference(text: str, other: str) -> str:
    """Render a text as HTML: words that another text does not have are marked, those that only it has follow."""
    gone = " ".join(f'<del style="{_GONE}">{html.escape(word)}</del>' for word in _words_only_in(other, text))
    return f"{_mark_words(text, _words_only_in(text, other), 'ins', _NEW)} {gone}".strip()


def render_maps(result: SteeredCaption, *, side: int = 200, density: int = 1) -> str:
    """Render a map for each word as HTML, side by side.

    Args:
        result: holds the maps.
        side: length of the longer side on the page.
        density: pixels of the image file for one pixel on the page.
    """
    figures = []
    for word, (fires, _) in result.maps.items():
        image = result.heatmap(word, side=side * density)
        sign = "+" if word in result.plan.words("plus") else "-"
        name, source = html.escape(word), data_uri(image)
        figures.append(
            f'<figure style="margin:0;width:{image.width // density}px;max-width:100%">'
            f'<img alt="where {name} fires" src="{source}" style="width:100%;display:block;border-radius:6px">'
            f'<figcaption style="font-size:.85em;text-align:left"><b>{sign}{name}</b> '
            f'<span style="opacity:.75">fires up to {float(fires.max(initial=0)):.0%}</span></figcaption></figure>'
        )
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px;margin:8px 0">{"".join(figures)}</div>' if figures else ""


def _mark_words(text: str, words: tuple[str, ...], tag: str, style: str) -> str:
    tags = {
        word: f'<{tag} style="{style}">{html.escape(word)}</{tag}>' for word in text.split() if _plain(word) in words
    }
    return " ".join(tags.get(word, html.escape(word)) for word in text.split())


def _words_only_in(one: str, other: str) -> tuple[str, ...]:
    """Words of one text that the other does not have, each once, without function words."""
    ignored = {_plain(word) for word in other.split()} | {"", *FUNCTION_WORDS}
    return tuple(dict.fromkeys(word for word in map(_plain, one.split()) if word not in ignored))


def content_words(text: str) -> tuple[str, ...]:
    """The words of a text, each once and in lower case, without function words."""
    return _words_only_in(text, "")


def _plain(word: str) -> str:
    return re.sub(r"^\W+|\W+$", "", word.lower())


def _lines(text: str) -> list[tuple[bool, str]]:
    """The lines of a text, each with whether it is the first; an empty text has one."""
    return [(number == 0, line) for number, line in enumerate(text.splitlines() or [""])]


def result_notes(
    baseline: str | None,
    caption: str,
    plan: Plan,
    maps: Mapping[str, tuple[np.ndarray, np.ndarray]],
    seen: Mapping[str, float],
) -> list[str]:
    """Sentences that explain a result that is probably not what the user wanted."""
    if not plan.concepts:
        return ["nothing was asked for: name a word in minus or plus."]
    notes, missed = [], unseen_words(plan, seen)
    homeless = [c.word for c in plan.concepts if plan.needs_free_place(c) and c.word in maps]
    homeless = [word for word in homeless if not maps[word][1].any()]
    left = [concept for concept in plan.concepts if (plan.partner(concept) or concept).word in missed]
    for concept in plan.concepts:
        if concept.word in missed:
            what = "nothing was changed" if len(left) == len(plan.concepts) else "it was left as it is"
            reached = f"{max(0.0, seen[concept.word]):.1f} of what it reaches where it is"
            notes.append(f"'{concept.word}' is not seen in this image ({reached}); {what}; `--force` edits anyway.")
        elif concept.role == "minus" and concept.word not in seen and _peak(maps, concept.word) < 0.1:
            notes.append(f"'{concept.word}' hardly fires in this image: there may be nothing to remove.")
        elif concept.word in homeless:
            notes.append(
                f"there is no free place for '{concept.word}' in this image, so it was left out: name what it replaces "
                "(`--minus`), mark a region (`--where`), or take the place that is claimed least (`--force`)."
            )
    if caption == baseline and not missed and not homeless:
        placed = any(concept.settings.mode == "place" for concept in plan.concepts)
        notes.append(
            "the caption did not change; try "
            + (
                "more strength, or a smaller fit."
                if placed
                else "more sub-units (kappa), more patches (nu), stronger gains (alpha, gamma), or mode place."
            )
        )
    return notes


def _peak(maps: Mapping[str, tuple[np.ndarray, np.ndarray]], word: str) -> float:
    return float(maps[word][0].max()) if word in maps else 1.0


def unseen_words(plan: Plan, seen: Mapping[str, float]) -> list[str]:
    """The minus words that were left as they are because the image does not show them."""
    return [
        concept.word
        for concept in plan.concepts
        if concept.word in seen
        and seen[concept.word] < concept.settings.seen
        and not concept.settings.force
        and plan.marked_region(concept) is None
    ]


def image_notes(source: SubUnitSource, q: torch.Tensor, positions: torch.Tensor) -> list[str]:
    """A sentence if an image is unlike those that an atlas was built from.

    Args:
        source: an atlas; one without `familiarity`, or a dictionary in its place, gives no note.
        q: `(tiles, tokens, d_in)` inputs of the layer.
        positions: the tokens of a tile that count as patches.
    """
    if not isinstance(source, Atlas) or source.familiarity is None:
        return []
    return [unlike_note(source)] if source.familiarity.is_unlike(describe_image(q, positions)) else []


def unlike_note(source: SubUnitSource, count: int = 1, images: int = 1) -> str:
    """The sentence for an image, or for `count` of several `images`, that an atlas was not built for."""
    what, caption, it = "this image is", "its caption", "it"
    if images > 1:
        what, caption, it = f"{count} of {images} images are", "their captions", "them"
    others = other_shipped_atlases(source.name, source.folder) if isinstance(source, Atlas) else []
    choices = " or ".join(f"--atlas {name} ({WORLDS[name]})" for name in others)
    cure = f"; another atlas may suit {it}: {choices}" if others else ""
    return f"{what} unlike the images that atlas '{source.name}' was built from, so {caption} may mean little{cure}."
