"""Tables as Markdown and JSON: a line for each method, mean and deviation over draws of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from elude_steer.evaluation.compare.methods import METHODS
from elude_steer.evaluation.tables.efficiency import EfficiencyRow
from elude_steer.evaluation.tables.properties import PROPERTIES, PropertyRow
from elude_steer.evaluation.tables.run import TableRow, rows_as_json, summarize
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.evaluation.tables.stability import StabilityRow
from elude_steer.utils.files import check_folder, write_file

_Row = TypeVar("_Row", TableRow, StabilityRow, PropertyRow, EfficiencyRow)
# Name of a measure, the head of its column, by what it is multiplied, and its digits.
_COLUMNS = (
    ("latents", "latents", 1, 0),
    ("MS-Score", "MS-Score", 1, 2),
    ("R2", "R2 (%)", 100, 2),
    ("accuracy", "accuracy (%)", 100, 2),
    ("never fire", "never fire (%)", 100, 1),
    ("dead", "dead (%)", 100, 1),
    ("active", "active a token", 1, 1),
    ("effective rank", "effective rank", 1, 1),
    ("collinearity", "collinearity", 1, 3),
)


def table_lines(rows: Sequence[TableRow]) -> list[str]:
    """A Markdown table of rows, in the order of the methods; the deviation is that over draws of tokens."""
    found, shown = summarize(rows), [column for column in _COLUMNS if any(column[0] in row.measures for row in rows)]
    heads = ["method", "draws", *(head for _, head, _, _ in shown), "CPU minutes to make", "to measure"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for name in sorted(found, key=lambda name: METHODS[name].number):
        own = [row for row in rows if row.method == name]
        cells = [name, str(len(own))]
        for measure, _, factor, digits in shown:
            cells.append(_spread(found[name].get(measure), factor, digits, alone=len(own) == 1))
        cells += [f"{sum(row.seconds[kind] for row in own) / len(own) / 60:.2f}" for kind in ("make", "measure")]
        lines.append(_line(cells))
    baseline = next((row.measures["baseline accuracy"] for row in rows if "baseline accuracy" in row.measures), None)
    return lines if baseline is None else [*lines, "", f"Accuracy of the unchanged backbone: {100 * baseline:.2f} %."]


def stability_lines(rows: Sequence[StabilityRow]) -> list[str]:
    """A Markdown table of the stability."""
    heads = ["method", "same tokens", "other draws", "effective rank", "collinearity"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: METHODS[row.method].number):
        cells = [row.method, _number(row.runs, 4), _number(row.draws, 4), f"{row.effective_rank:.1f}"]
        lines.append(_line([*cells, f"{row.collinearity:.3f}"]))
    return lines


def property_lines(rows: Sequence[PropertyRow]) -> list[str]:
    """A Markdown table of the properties, each with the number that it rests on."""
    heads = ["method", *PROPERTIES]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    return lines + [_line([row.method, *row.answers()]) for row in sorted(rows, key=_number_of_method)]


def _number_of_method(row: PropertyRow) -> int:
    return METHODS[row.method].number


def efficiency_lines(rows: Sequence[EfficiencyRow]) -> list[str]:
    """A Markdown table of times, and of memory where it is known."""
    known = any(row.megabytes is not None for row in rows)
    heads = ["method", "input width", "ms a batch", "deviation", "more time (%)"]
    heads += ["peak MB", "more memory (%)"] if known else []
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        memory = ["" if row.megabytes is None else f"{row.megabytes:.0f}"] if known else []
        memory += ["" if row.larger is None else f"{100 * row.larger:.1f}"] if known else []
        width = str(row.input_dim) if row.input_dim else ""
        times = [f"{row.milliseconds:.1f}", f"{row.deviation:.1f}", f"{100 * row.slower:.1f}"]
        lines.append(_line([row.method, width, *times, *memory]))
    return lines


def write_tables(
    setup: TableSetup,
    out: str | Path,
    rows: Sequence[TableRow],
    stability: Sequence[StabilityRow] = (),
    properties: Sequence[PropertyRow] = (),
    efficiency: Sequence[EfficiencyRow] = (),
    *,
    name: str = "tables",
    about: Sequence[str] = (),
) -> Path:
    """Write `tables.md` and `tables.json`; returns the path of the page.

    Args:
        setup: what the rows were made with.
        out: the folder to write to.
        rows: of `run_table`.
        stability: of `run_stability`.
        properties: of `run_properties`.
        efficiency: of `run_efficiency`.
        name: of the files.
        about: lines that say more about the setup.
    """
    folder, preset = check_folder(out), setup.preset
    parts = {"rows": rows, "stability": stability, "properties": properties, "efficiency": efficiency}
    content = {
        "backbone": setup.name,
        "layer": setup.spec.model.layer,
        "images": setup.image_set.length,
        "held out": setup.held_out_set.length,
        "preset": asdict(preset),
        "clusters": asdict(setup.spec.clusters),
        "tokens": asdict(setup.spec.tokens),
        **{kind: rows_as_json(list(found)) for kind, found in parts.items() if found},
    }
    write_file(folder / f"{name}.json", lambda file: file.write(json.dumps(content, indent=1).encode()))
    text = "\n".join(page_lines(content, about=about))
    write_file(folder / f"{name}.md", lambda file: file.write(text.encode()))
    return folder / f"{name}.md"


def page_lines(content: Mapping[str, Any], *, about: Sequence[str] = ()) -> list[str]:
    """The page of stored tables, from what `tables.json` holds.

    Args:
        content: of the JSON file.
        about: lines that say more about the setup.
    """
    rows = read_rows(TableRow, content["rows"])
    stability = read_rows(StabilityRow, content.get("stability", ()))
    properties = read_rows(PropertyRow, content.get("properties", ()))
    efficiency = read_rows(EfficiencyRow, content.get("efficiency", ()))
    sizes = f"{content['images']:,} images to learn from, {content['held out']:,} to measure on"
    seeds = ", ".join(str(seed) for seed in sorted({row.seed for row in rows}))
    lines = [
        f"# {content['backbone']}: ELUDe and the other methods",
        "",
        f"Layer `{content['layer']}`; {sizes}; budget `{content['preset']['name']}`; draws of tokens {seeds}.",
        *about,
        "",
        *table_lines(rows),
        "",
    ]
    for title, part in (
        ("Stability", stability_lines(stability) if stability else []),
        ("Properties, measured", property_lines(properties) if properties else []),
        ("Efficiency", efficiency_lines(efficiency) if efficiency else []),
    ):
        lines += [f"## {title}", "", *part, ""] if part else []
    return lines


def read_rows(kind: type[_Row], stored: Sequence[Mapping[str, Any]]) -> list[_Row]:
    """Rows from plain values, as `rows_as_json` gives them: None is NaN where a row always has a number."""
    may_lack = {one.name for one in fields(kind) if "None" in str(one.type)}

    def restore(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: restore(part) for name, part in value.items()}
        return float("nan") if value is None else value

    return [
        kind(**{name: value if name in may_lack else restore(value) for name, value in row.items()}) for row in stored
    ]


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _spread(found: tuple[float, float] | None, factor: float, digits: int, *, alone: bool) -> str:
    if found is None:
        return ""
    mean, deviation = (factor * value for value in found)
    return f"{mean:.{digits}f}" + ("" if alone or not digits else f" ± {deviation:.{digits}f}")


def _number(value: float, digits: int) -> str:
    return "" if value != value else f"{value:.{digits}f}"
