"""The result of an evaluation, and its HTML page with charts and collages."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.card import describe_measurement
from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.models.vision import Tower
from elude_steer.models.vlm import Vlm
from elude_steer.utils import plotting
from elude_steer.utils.files import write_file
from elude_steer.utils.html import escape, image_tag, page

R2_ROW, MS_ROW = "R2, explicit layer", "MS-Score, %"  # names of the rows that the page plots
PAGE_STYLE = """
:root { color-scheme: light dark } body { margin: 0 auto; max-width: 1000px; padding: 36px 20px 60px;
  font: 16px/1.5 system-ui, sans-serif } h1 { font-size: 26px } h2 { font-size: 19px; margin: 34px 0 10px }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: 5px 12px 5px 0;
  border-bottom: 1px solid #8884 } td.n { text-align: right; font-variant-numeric: tabular-nums }
.soft { opacity: .7; font-size: 14px } img { max-width: 100%; border-radius: 6px; background: #fff }
.figures { display: flex; flex-wrap: wrap; gap: 20px } .parts { display: flex; flex-wrap: wrap; gap: 10px }
"""


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        measure: the measure that it belongs to.
        name: what the number says.
        value: for the sub-units.
        units: for the units before the split, where that makes sense.
    """

    measure: str
    name: str
    value: float | None
    units: float | None = None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Measures of one atlas.

    Attributes:
        atlas: the atlas.
        tower: its model.
        images: name of the image source.
        image_count: number of images that it was measured on.
        rows: the numbers.
        scores: `(S,)` MS-Score of every sub-unit; None where it was not asked for.
        unit_scores: `(d_out,)` the same for every unit before the split.
    """

    atlas: Atlas
    tower: Tower
    images: str
    image_count: int
    rows: tuple[Row, ...]
    scores: torch.Tensor | None = None
    unit_scores: torch.Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "atlas": self.atlas.name,
            "model": self.atlas.about["model"],
            "layer": self.atlas.about["layer"],
            "images": self.images,
            "pictures": self.image_count,
            "elude_steer": __version__,
            "rows": [asdict(row) for row in self.rows],
        }

    def for_card(self) -> dict[str, Any]:
        """The results that `Atlas.update_card` writes into the atlas's card."""
        return describe_measurement(self.images, self.image_count, __version__, [asdict(row) for row in self.rows])

    def save(self, folder: Path) -> Path:
        """Write evaluation.json and report.html; returns the path of the page."""
        text, report = json.dumps(self.to_dict(), indent=1), _write_page(self)
        write_file(folder / "evaluation.json", lambda file: file.write(text.encode()))
        write_file(folder / "report.html", lambda file: file.write(report.encode()))
        return folder / "report.html"


def _write_page(evaluation: Evaluation) -> str:
    atlas = evaluation.atlas
    rows = "".join(
        f'<tr><td>{escape(row.measure)}</td><td>{escape(row.name)}</td><td class="n">{_format_number(row.value)}</td>'
        f'<td class="n">{_format_number(row.units)}</td></tr>'
        for row in evaluation.rows
    )
    charts = "".join(image_tag(plotting.data_uri(chart), text) for chart, text in _draw_charts(evaluation))
    body = (
        f"<h1>{escape(atlas.name)}</h1><p>{len(atlas):,} sub-units of {atlas.d_out:,} units of layer "
        f"<code>{escape(atlas.about['layer'])}</code>, measured on "
        f"{evaluation.image_count:,} images of {escape(evaluation.images)}.</p>"
        f"<table><thead><tr><th>measure</th><th></th><th>sub-units</th><th>units before</th></tr></thead>"
        f'<tbody>{rows}</tbody></table><h2>The split</h2><div class="figures">{charts}</div>{_show_units(evaluation)}'
        f'<p class="soft">elude_steer {__version__}</p>'
    )
    return page(atlas.name, body, style=PAGE_STYLE)


def _draw_charts(evaluation: Evaluation) -> list[tuple[Image.Image, str]]:
    """Charts, each with a description."""
    atlas = evaluation.atlas
    counts = torch.bincount(atlas.units, minlength=atlas.d_out)
    rho = atlas.rho[counts > 1].tolist()
    charts = [
        (plotting.histogram(counts.tolist(), "sub-units of a unit"), "how many sub-units units have"),
        (plotting.histogram(rho, "rho of the units that were split"), "rho of split units"),
    ]
    if evaluation.scores is not None and evaluation.unit_scores is not None:
        after, before = (
            (scores[~scores.isnan()] * 100).tolist() for scores in (evaluation.scores, evaluation.unit_scores)
        )
        for values, kind in ((after, "sub-units"), (before, "units")):  # over one range, so that they can be compared
            chart = plotting.histogram(values, f"MS-Score of {kind}, %", axis_values=after + before)
            charts.append((chart, f"MS-Score of {kind}"))
    rows = {row.name: row for row in evaluation.rows}
    r2, ms = rows.get(R2_ROW), rows.get(MS_ROW)
    if r2 is not None and r2.value is not None and ms is not None and None not in (ms.value, ms.units):
        points = [(float(ms.units or 0), 1.0), (float(ms.value or 0), r2.value)]
        names = ["units", "sub-units"]
        pareto = plotting.scatter(points, x=MS_ROW, y="R2", marked=[1], names=names, side=380, y_min=0.0)
        charts.append((pareto, "MS-Score against R2 of units and sub-units"))
    return charts


def _show_units(evaluation: Evaluation, count: int = 4) -> str:
    """Collages of the units with most sub-units: their sixteen strongest images, and four of each sub-unit."""
    atlas = evaluation.atlas
    if not isinstance(evaluation.tower, Vlm):
        return ""
    images = ReferenceImages(atlas, evaluation.tower)
    counts = torch.bincount(atlas.units, minlength=atlas.d_out)
    sections = []
    for unit in counts.sort(descending=True, stable=True).indices[:count].tolist():
        if strongest := images.for_unit(unit, 16, 96):
            sections.append(_show_unit(atlas, images, unit, strongest))
    note = '<p class="soft">Images that the atlas was built from, where each fires most; the patch is framed.</p>'
    return "".join([note, *sections] if sections else [])


def _show_unit(atlas: Atlas, images: ReferenceImages, unit: int, strongest: list[Image.Image]) -> str:
    before = plotting.data_uri(plotting.collage([("before the split", strongest)], columns=16))
    parts = []
    for sub_unit in atlas.sub_units_of(unit):
        name = atlas.labels[sub_unit] if atlas.labels is not None else f"sub-unit {sub_unit}"
        row = plotting.collage([(name, images.for_sub_unit(sub_unit, 4, 96))], columns=4, cell=64)
        parts.append(image_tag(plotting.data_uri(row), f"four images that {name} fires for"))
    return (
        f"<h2>Unit {unit}, and its {len(parts)} parts</h2>"
        f"<p>{image_tag(before, f'sixteen images that unit {unit} fires for')}</p>"
        f'<div class="parts">{"".join(parts)}</div>'
    )


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
