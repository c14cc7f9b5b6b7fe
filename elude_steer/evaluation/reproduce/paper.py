"""The numbers and captions of the paper, which results are held against; a file for each table in `paper/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from elude_steer.errors import SpecError

TABLES = ("interpretability", "generalization", "ablations", "stability", "efficiency", "judge", "configurations")
AS_IT_IS = "as it is"  # the row of an ablation that changes nothing
_FOLDER = Path(__file__).with_name("paper")


@dataclass(frozen=True)
class PaperRow:
    """One row of a table.

    Attributes:
        backbone: the name of its recipe.
        method: the name of the method in this package; in the ablations the setting that is changed.
        values: measure -> mean, and deviation where the paper gives one.
        intervals: measure -> 95 % interval, where the paper gives one.
    """

    backbone: str
    method: str
    values: Mapping[str, tuple[float, float | None]]
    intervals: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        name: of its file.
        title: what it is about.
        columns: measure -> `higher` or `lower`, whichever is better; empty where neither is.
        rows: in the paper's order.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: tuple[PaperRow, ...]

    @property
    def backbones(self) -> tuple[str, ...]:
        """The recipes of its rows, in their order."""
        return tuple(dict.fromkeys(row.backbone for row in self.rows))

    def methods(self, backbone: str) -> tuple[str, ...]:
        """The methods of one backbone."""
        return tuple(row.method for row in self.rows if row.backbone == backbone)

    def find(self, backbone: str, method: str) -> PaperRow | None:
        """A row; None where the paper has none."""
        return next((row for row in self.rows if (row.backbone, row.method) == (backbone, method)), None)

    def more_than(self, backbone: str, base: str, method: str, measure: str) -> float | None:
        """By how many percent a method's value exceeds another's; None if the paper lacks either.

        Example:
            >>> read_table("efficiency").more_than("dinov2-base-layer12", "raw units", "transcoder", "ms per batch")
            89.21828637449781
        """
        rows = [self.find(backbone, name) for name in (base, method)]
        values = [None if row is None else row.values.get(measure, (None, None))[0] for row in rows]
        return None if values[0] is None or values[1] is None else 100 * (values[1] / values[0] - 1)


@dataclass(frozen=True)
class PaperEdit:
    """One of the fourteen edits.

    Attributes:
        row: its name here: `train-2`.
        recipe: the recipe whose step it is.
        minus: concepts that are removed.
        plus: concepts that are added.
        settings: alpha, gamma, kappa and nu; None where the paper gives none.
        baseline: the caption before.
        caption: the caption after.
    """

    row: str
    recipe: str
    minus: tuple[str, ...]
    plus: tuple[str, ...]
    settings: Mapping[str, Any] | None
    baseline: str
    caption: str


@cache
def read_table(name: str) -> PaperTable:
    """A table of the paper by its name.

    Example:
        >>> read_table("interpretability").find("dinov2-base-layer12", "ELUDe (unique)").values["MS-Score"]
        (64.85, 0.52)
    """
    if name not in TABLES:
        raise SpecError(f"there is no table '{name}' of the paper; there are {', '.join(TABLES)}.")
    found = _read(name)
    rows = tuple(
        PaperRow(
            row["backbone"],
            row["method"],
            {measure: (value[0], value[1] if len(value) > 1 else None) for measure, value in row["values"].items()},
            {measure: (low, high) for measure, (low, high) in row.get("intervals", {}).items()},
        )
        for row in found["rows"]
    )
    return PaperTable(name, found["title"], found["columns"], rows)


@cache
def read_properties() -> Mapping[str, Mapping[str, bool]]:
    """The paper's table of properties: method -> property -> its mark.

    Example:
        >>> read_properties()["archetypal SAE"]["stable"]
        True
    """
    found = _read("properties")
    return {row["method"]: dict(zip(found["columns"], row["values"], strict=True)) for row in found["rows"]}


@cache
def read_edits() -> tuple[PaperEdit, ...]:
    """The fourteen edits, in the paper's order."""
    return tuple(
        PaperEdit(
            row["row"],
            row["recipe"],
            tuple(row["minus"]),
            tuple(row["plus"]),
            row["settings"],
            row["baseline"],
            row["caption"],
        )
        for row in _read("steering")["rows"]
    )


def _read(name: str) -> Any:
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
