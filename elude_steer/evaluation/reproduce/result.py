"""What `reproduce` found: as JSON, as a text table, and as a page, each beside the paper's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from elude_steer import __version__
from elude_steer.evaluation.report import PAGE_STYLE
from elude_steer.evaluation.reproduce.forecast import format_time
from elude_steer.evaluation.reproduce.paper import PaperTable, read_properties
from elude_steer.evaluation.reproduce.tables import Number, ResultRow
from elude_steer.evaluation.tables.properties import PROPERTIES, PropertyRow
from elude_steer.evaluation.tables.run import rows_as_json
from elude_steer.utils.files import write_file
from elude_steer.utils.html import escape, image_tag, page

STYLE = (
    PAGE_STYLE
    + """
body { max-width: 1180px } td, th { vertical-align: top } td.n, th.n { text-align: right; white-space: nowrap }
td small { display: block; opacity: .75; font-size: 12px } tr.ours td { font-weight: 600 }
tr.backbone td { padding-top: 20px; border-bottom: 2px solid #8888; font-weight: 600 }
figure { margin: 12px 0 24px } figure img { max-width: 100%; height: auto } figcaption { font-size: 13px; opacity: .8 }
.warn { border-left: 4px solid #c77700; padding: 4px 12px; margin: 12px 0 }
"""
)
# What stands behind our number; that of the paper is over its token seeds in all tables.
_SPREADS = {
    "stability": "± is the deviation over runs on the same tokens, of the stability over pairs of these",
    "efficiency": "± is the deviation of single passes, and in the paper's numbers that over seeds",
    "judge": "brackets hold 95 % intervals",
}
_TITLES = {"raw units": "backbone only", "as it is": "ELUDe, as it is"}


@dataclass(frozen=True, eq=False)
class TableResult:
    """A reproduced table.

    Attributes:
        table: the paper's.
        rows: ours beside the paper's.
        about: how it was run.
        hours: of the pieces, predicted and measured.
        notes: remarks as sentences.
        properties: what the methods of each backbone are, measured.
        collages: units of each backbone beside their parts; on the page only.
    """

    table: PaperTable
    rows: Sequence[ResultRow]
    about: Mapping[str, Any]
    hours: Mapping[str, Any]
    notes: Sequence[str] = field(default=())
    properties: Mapping[str, Sequence[PropertyRow]] = field(default_factory=dict)
    collages: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The measures: the paper's, then others that some row has."""
        return list(dict.fromkeys([*self.table.columns, *(name for row in self.rows for name in row.numbers)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.table.name,
            **self.about,
            "rows": [row.to_dict() for row in self.rows],
            **({"properties": self._properties_as_json()} if self.properties else {}),
            "notes": list(self.notes),
            "hours": dict(self.hours),
        }

    def _properties_as_json(self) -> dict[str, Any]:
        marks = read_properties()
        return {
            backbone: [{**row, "paper": marks.get(row["method"])} for row in rows_as_json(rows)]
            for backbone, rows in self.properties.items()
        }

    def text(self) -> list[list[str]]:
        """The table as text: a header, then a line for each row."""
        heads = [head for name in self.columns for head in (name, "paper", "difference")]
        lines = [["", "", *heads]]
        for row in self.rows:
            cells = [cell for name in self.columns for cell in _cells(row.numbers.get(name))]
            lines.append([row.backbone, _TITLES.get(row.method, row.method), *cells])
        return lines

    def properties_text(self) -> list[list[str]]:
        """The properties as text: a header, then a line for each method, each answer with its number."""
        lines = [["", "", *PROPERTIES]]
        for backbone, rows in self.properties.items():
            lines += [[backbone, row.method, *_with_marks(row, ", paper ")] for row in rows]
        return lines

    def save(self, folder: Path) -> Path:
        """Write the JSON file, the text table and the page, all named after the table; returns the page's path."""
        write_text(folder / f"{self.table.name}.json", json.dumps(self.to_dict(), indent=1))
        properties = f"\n{align(self.properties_text())}" if self.properties else ""
        write_text(folder / f"{self.table.name}.txt", align(self.text()) + properties)
        write_text(folder / f"{self.table.name}.html", self.page())
        return folder / f"{self.table.name}.html"

    def page(self) -> str:
        """The page."""
        better = {"higher": " ↑", "lower": " ↓", "": ""}
        heads = "".join(
            f'<th class="n">{escape(name)}{better[self.table.columns.get(name, "")]}</th>' for name in self.columns
        )
        lines = []
        for backbone, rows in groupby(self.rows, key=lambda row: row.backbone):
            model = self.about["models"].get(backbone, "")
            lines.append(
                f'<tr class="backbone"><td colspan="{len(self.columns) + 1}">{escape(backbone)} '
                f'<span class="soft">{escape(model)}</span></td></tr>'
            )
            for row in rows:
                cells = "".join(f'<td class="n">{_show(row.numbers.get(name))}</td>' for name in self.columns)
                ours = ' class="ours"' if "ELUDe" in _TITLES.get(row.method, row.method) else ""
                lines.append(f"<tr{ours}><td>{escape(_TITLES.get(row.method, row.method))}</td>{cells}</tr>")
        body = (
            f"<h1>{escape(self.table.title)}</h1>{_lead(self.about)}"
            f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
            f'<p class="soft">Each cell: ours; below it the value of the paper, and ours minus the paper\'s; '
            f"{_SPREADS.get(self.table.name, '± is the deviation over token seeds')}. Empty where nothing was measured."
            "</p>"
            f"{show_notes(self.notes)}{show_properties(self.properties)}{show_collages(self.collages)}"
            f"{show_hours(self.hours)}{show_about(self.about)}"
        )
        return page(self.table.title, body, style=STYLE)


def _cells(number: Number | None) -> list[str]:
    if number is None:
        return ["", "", ""]
    ours = _format(number.value, number.deviation, number.interval)
    difference = "" if number.difference is None else f"{number.difference:+.2f}"
    return [ours, _format(number.paper, number.paper_deviation, number.paper_interval), difference]


def _format(value: float | None, deviation: float | None = None, interval: tuple[float, float] | None = None) -> str:
    if value is None or value != value:
        return ""
    text = f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:,.2f}"
    if interval is not None:
        return f"{text} [{interval[0]:.1f}, {interval[1]:.1f}]"
    return text if deviation is None or deviation != deviation else f"{text} ± {deviation:.2f}"


def _show(number: Number | None) -> str:
    if number is None:
        return ""
    ours, paper, difference = _cells(number)
    below = f"<small>paper {escape(paper)}{f', {difference}' if difference else ''}</small>" if paper else ""
    return f"{escape(ours) or '&nbsp;'}{below}"


def _lead(about: Mapping[str, Any]) -> str:
    """One sentence on what was run, and a warning where that is not what the paper ran."""
    text = (
        f"{about['images']['count']:,} images of {about['images']['name']} to learn from, "
        f"{about['held out']['count']:,} of {about['held out']['name']} to measure on; token seed"
        f"{'s' * (len(about['seeds']) > 1)} {', '.join(map(str, about['seeds']))}."
    )
    differs = about["differs"]
    warning = f'<p class="warn">Not the paper\'s run: {escape("; ".join(differs))}.</p>' if differs else ""
    return f"<p>{escape(text)}</p>{warning}"


def show_notes(notes: Sequence[str]) -> str:
    """Remarks as paragraphs."""
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def show_properties(properties: Mapping[str, Sequence[PropertyRow]]) -> str:
    """What methods are, each answer with the number that it rests on."""
    if not properties:
        return ""
    heads, lines = "".join(f"<th>{escape(name)}</th>" for name in PROPERTIES), []
    for backbone, rows in properties.items():
        lines.append(f'<tr class="backbone"><td colspan="{len(PROPERTIES) + 1}">{escape(backbone)}</td></tr>')
        for row in rows:
            cells = "".join(f"<td>{answer}</td>" for answer in _with_marks(row, "<small>paper ", "</small>"))
            ours = ' class="ours"' if "ELUDe" in row.method else ""
            lines.append(f"<tr{ours}><td>{escape(row.method)}</td>{cells}</tr>")
    return (
        f'<section id="properties"><h2>Properties, measured</h2><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
        '<p class="soft">Stable: similarity of two runs on the same tokens. Training-free: trained parameters. '
        "Explicit: difference between how the stream changes when one part is removed and what that part writes. "
        "Lossless: error of all parts together, as a share of the layer's largest output. Unsupervised: labels of "
        f"images that were read.</p><p>{escape(_WHY_MARKS_DIFFER)}</p></section>"
    )


# Beside the paper's table, whose marks are judgements of the methods as they are published.
_WHY_MARKS_DIFFER = (
    "The paper's marks judge the methods as they are published, and ours can differ: stable here means that the two "
    "runs are the same (a similarity of 0.999), and explicit is what taking a part away in the model gives, where the "
    "clusters of activations and of contributions have been made parts by ELUDe's split."
)


def _with_marks(row: PropertyRow, before: str, after: str = "") -> list[str]:
    """The answers of a method, each with the paper's where it has one."""
    marks = read_properties().get(row.method)
    if marks is None:
        return row.answers()
    pairs = zip(PROPERTIES, row.answers(), strict=True)
    return [f"{answer}{before}{'yes' if marks[name] else 'no'}{after}" for name, answer in pairs]


def show_collages(collages: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Units beside their parts."""
    if not collages:
        return ""
    parts = []
    for backbone, units in collages.items():
        parts.append(f"<h3>{escape(backbone)}</h3>")
        for unit in units:
            text = f"unit {unit['unit']} and its {unit['parts']} part{'s' * (unit['parts'] != 1)}, {unit['method']}"
            parts.append(f"<figure>{image_tag(unit['image'], text)}<figcaption>{escape(text)}</figcaption></figure>")
    return (
        '<section id="collages"><h2>Units and their parts</h2><p class="soft">The sixteen images that activate a unit '
        "most, beside the four that activate each of its parts most. Units are chosen to have different numbers of "
        f"parts; each is the first with its number.</p>{''.join(parts)}</section>"
    )


def show_hours(hours: Mapping[str, Any]) -> str:
    """What the run took, predicted and measured."""
    if not hours["pieces"]:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{format_time(3600 * piece["predicted"])}</td>'
        f'<td class="n">{format_time(3600 * piece["measured"])}</td></tr>'
        for name, piece in hours["pieces"].items()
    )
    total = (
        f"Predicted {format_time(3600 * hours['predicted'])}, measured {format_time(3600 * hours['measured'])}"
        f"{' of one core' if hours['unit'] == 'CPU hours' else ''}; {format_time(3600 * hours['clock'])} by the clock."
    )
    return (
        f'<section id="hours"><h2>What it took</h2><p>{escape(total)}</p><details><summary>every piece</summary><table>'
        f'<thead><tr><th></th><th class="n">predicted</th><th class="n">measured</th></tr></thead><tbody>{rows}</tbody>'
        "</table></details></section>"
    )


def show_about(about: Mapping[str, Any]) -> str:
    """How it was run, in one small paragraph."""
    facts = {name: about[name] for name in ("preset", "changes", "versions") if about.get(name)}
    text = "; ".join(f"{name}: {_plain(value)}" for name, value in facts.items())
    return f'<p class="soft">{escape(text)}; elude_steer {__version__}.</p>'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items() if part)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_file(path, lambda file: file.write(text.encode()))
