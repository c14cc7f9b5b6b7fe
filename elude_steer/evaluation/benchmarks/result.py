"""The result of a benchmark: its table as text, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elude_steer import __version__
from elude_steer.evaluation.benchmarks.dataset import AnnotatedSet
from elude_steer.evaluation.benchmarks.measured import ResultRow, Value
from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.report import PAGE_STYLE
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer
from elude_steer.utils.files import write_file
from elude_steer.utils.html import escape, image_tag, page
from elude_steer.utils.plotting import data_uri, fit_within

_WIDE_TABLE = """
body { max-width: 1400px } td.n { white-space: nowrap; font-size: 14px } td .soft { font-size: 12px }
"""
_TITLES = {
    "pope": "POPE: asking for what is and is not there",
    "chair": "CHAIR: what captions name that is not there",
    "absent": "Removing what is not there",
    "side-effects": "Side effects on images that the edit should not touch",
}


@dataclass(frozen=True, eq=False)
class Example:
    """An image that the edit changes something about.

    Attributes:
        case: the image, with its file as `source`.
        question: what was asked, or removed.
        answers: by row.
    """

    case: Any
    question: str
    answers: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"image": Path(self.case.source).name, "question": self.question, "answers": dict(self.answers)}


@dataclass(frozen=True, eq=False)
class BenchmarkResult:
    """The numbers of one benchmark.

    Attributes:
        benchmark: `pope`, `chair`, `absent` or `side-effects`.
        about: how it was measured.
        columns: the names of the measures, in the order of the table.
        rows: the numbers.
        examples: some images that the edit changes something about.
        notes: remarks as sentences.
    """

    benchmark: str
    about: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[ResultRow, ...]
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, row: str, group: str, column: str) -> Value:
        """One number of the table."""
        return next(one.values[column] for one in self.rows if (one.row, one.group) == (row, group))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "benchmark": self.benchmark,
            **self.about,
            "rows": [row.to_dict() for row in self.rows],
            "examples": [example.to_dict() for example in self.examples],
            "notes": list(self.notes),
        }

    def table(self) -> list[list[str]]:
        """The table as text: a header, then a line for each row and group."""
        lines = [["", "", "images", *self.columns]]
        for row in self.rows:
            values = [format_value(row.values.get(column)) for column in self.columns]
            lines.append([row.group, row.row, str(row.images), *values])
        return lines

    def save(self, folder: Path) -> Path:
        """Write the JSON file and the page, both named after the benchmark; returns the path of the page."""
        text, html = json.dumps(self.to_dict(), indent=1), _write_page(self)
        write_file(folder / f"{self.benchmark}.json", lambda file: file.write(text.encode()))
        write_file(folder / f"{self.benchmark}.html", lambda file: file.write(html.encode()))
        return folder / f"{self.benchmark}.html"


def describe_run(
    steerer: Steerer[Any], data: AnnotatedSet, options: BenchmarkOptions, prompt: str, images: int
) -> dict[str, Any]:
    """How a benchmark was measured, as plain values."""
    return {
        "atlas": steerer.atlas.name,
        "model": steerer.atlas.about["model"],
        "layer": steerer.atlas.about["layer"],
        "minus": list(options.minus),
        "plus": list(options.plus),
        "settings": asdict(merge_settings(options.settings, steerer.defaults)),
        "annotations": data.name,
        "captions": bool(data.named),
        "images": images,
        "balanced": options.balance,
        "prompt": prompt,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "elude_steer": __version__,
    }


def list_names(names: Sequence[str]) -> str:
    """`dog`, `dog and cat`, `dog, cat and bus`."""
    return " and ".join(", ".join(names).rsplit(", ", 1))


def format_value(value: Value | None) -> str:
    """`0.42 [0.35, 0.49]`; nothing where nothing was counted."""
    if value is None or value.value is None or value.interval is None:
        return ""
    low, high = value.interval
    return f"{value.value:.3f} [{low:.3f}, {high:.3f}]"


def _write_page(result: BenchmarkResult) -> str:
    about, title = result.about, _TITLES[result.benchmark]
    edit = [f"minus {list_names(about['minus'])}"] if about["minus"] else ["minus a random class that is absent"]
    edit += [f"plus {list_names(about['plus'])}"] if about["plus"] else []
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", "", "images", *result.columns))
    lines = []
    for row in result.rows:
        cells = "".join(f'<td class="n">{_show_value(row.values.get(column))}</td>' for column in result.columns)
        lines.append(
            f'<tr><td>{escape(row.group)}</td><td>{escape(row.row)}</td><td class="n">{row.images}</td>{cells}</tr>'
        )
    facts = {name: about[name] for name in ("atlas", "layer", "annotations", "prompt", "max_new_tokens", "seed")}
    settings = ", ".join(f"{name} {value}" for name, value in about["settings"].items())
    described = ", ".join(f"{name} {value}" for name, value in facts.items())
    body = (
        f"<h1>{escape(title)}</h1><p>{escape(', '.join(edit))}; {about['images']:,} images.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        '<p class="soft">In brackets 95 % intervals over images; below, in small, the change against the unsteered '
        f"model on the same images, with its interval.</p>{_show_notes(result.notes)}{_show_examples(result.examples)}"
        f'<p class="soft">{escape(described)}; settings: {escape(settings)}; elude_steer {__version__}.</p>'
    )
    return page(title, body, style=PAGE_STYLE + _WIDE_TABLE)


def _show_value(value: Value | None) -> str:
    text = escape(format_value(value))
    if value is None or value.change is None or value.change_interval is None:
        return text
    low, high = value.change_interval
    return f'{text}<br><span class="soft">{value.change:+.3f} [{low:+.3f}, {high:+.3f}]</span>'


def _show_notes(notes: Sequence[str]) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _show_examples(examples: Sequence[Example]) -> str:
    if not examples:
        return "<p>No image of these changed under the edit.</p>"
    parts = []
    for example in examples:
        image = image_tag(data_uri(fit_within(example.case.image, 200)), Path(example.case.source).name)
        rows = "".join(
            f"<tr><td>{escape(row)}</td><td>{escape(text)}</td></tr>" for row, text in example.answers.items()
        )
        question = f"<p>{escape(example.question)}</p>" if example.question else ""
        parts.append(f'<div class="figures"><div>{image}</div><div>{question}<table>{rows}</table></div></div>')
    return f"<h2>Images that the edit changes</h2>{''.join(parts)}"
