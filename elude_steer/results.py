"""A steered caption and what lies between before and after: words, maps, remarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elude_steer.errors import AtlasError
from elude_steer.figures import heatmap
from elude_steer.plans import Plan
from elude_steer.vlm import PatchGrid
from elude_steer.vocabulary import FUNCTION_WORDS


@dataclass(frozen=True, eq=False)
class SteeredCaption:
    """A caption before and after, and what lies between.

    Attributes:
        baseline: what the model says by itself.
        caption: what it says under the plan.
        plan: the edits.
        maps: word -> how strongly it fires and which patches were touched, `(tiles, patches)` each.
        grid: where the patches lie in the picture.
        image: the picture.
        notes: what is worth knowing, in sentences.
        provenance: model, atlas, prompt and versions.
        seconds: how long it took.
    """

    baseline: str
    caption: str
    plan: Plan
    maps: Mapping[str, tuple[np.ndarray, np.ndarray]]
    grid: PatchGrid
    image: Any
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gone(self) -> tuple[str, ...]:
        """Words of the baseline that the caption no longer says."""
        return _difference(self.baseline, self.caption)

    @property
    def new(self) -> tuple[str, ...]:
        """Words of the caption that the baseline does not say."""
        return _difference(self.caption, self.baseline)

    def heatmap(self, word: str, *, side: int = 480) -> Any:
        """The picture with the patches where a word's sub-units fire, those that were touched framed."""
        if word not in self.maps:
            raise AtlasError(
                f"there is no map of '{word}'; there is one of {', '.join(map(repr, self.maps)) or 'none'}."
            )
        fires, touched = self.maps[word]
        return heatmap(self.image, self.grid, fires, touched, side=side)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        maps = {w: {"fires": f.round(4).tolist(), "touched": t.tolist()} for w, (f, t) in self.maps.items()}
        return {
            "baseline": self.baseline,
            "caption": self.caption,
            "gone": self.gone,
            "new": self.new,
            "plan": self.plan.to_dict(),
            "maps": maps,
            "notes": self.notes,
            "provenance": dict(self.provenance),
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return self.caption

    def __repr__(self) -> str:
        return f"baseline  {self.baseline}\nsteered   {self.caption}\n" + "\n".join(
            f"          {line}" for line in str(self.plan).splitlines()
        )


def _difference(one: str, other: str) -> tuple[str, ...]:
    said = {word.strip(".,!?;:\"'").lower() for word in other.split()}
    words = (word.strip(".,!?;:\"'").lower() for word in one.split())
    return tuple(dict.fromkeys(word for word in words if word and word not in said and word not in FUNCTION_WORDS))


def remarks(baseline: str, caption: str, plan: Plan, maps: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """What a person should be told about a result that is not what they asked for."""
    if not plan.concepts:
        return ["nothing was asked for: name a word in minus or plus."]
    told = []
    for concept in plan.concepts:
        if concept.role == "minus" and concept.word in maps and maps[concept.word][0].max() < 0.1:
            told.append(f"'{concept.word}' hardly fires in this picture: there may be nothing of it to take away.")
    if caption == baseline:
        told.append(
            "the caption did not change; try more sub-units (kappa), more patches (nu), stronger gains (alpha, gamma), "
            "or mode place."
        )
    return told
