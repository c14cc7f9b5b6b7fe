"""What an atlas is worth, in numbers and pictures: the measures of `evaluation`, beside the units as they were."""

from __future__ import annotations

import html
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from elude_steer import __version__
from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.errors import EludeSteerWarning, SpecError, did_you_mean
from elude_steer.evaluation.measures.classifier_head import head_accuracy
from elude_steer.evaluation.measures.efficiency import measure
from elude_steer.evaluation.measures.faithfulness import caption_agreement
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.monosemanticity import mean_percent
from elude_steer.evaluation.measures.stability import stability
from elude_steer.evaluation.one_pass import Viewing, items_of, read_items, source_of, tower_of, view
from elude_steer.method.layers import layer_parameters, split_layer
from elude_steer.models.hooks import swap_module
from elude_steer.models.vision import Tower
from elude_steer.models.vlm import Vlm, limit_logits
from elude_steer.utils import plotting
from elude_steer.utils.files import write_file

MEASURES = ("faithfulness", "monosemanticity", "dictionary", "efficiency")


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        measure: which file of `evaluation` it comes from.
        name: what it is.
        value: for the sub-units.
        units: for the units before the split, where that says something.
    """

    measure: str
    name: str
    value: float | None
    units: float | None = None


_R2 = "R2, explicit layer"
_TOO_FEW = "of {} pictures there is no MS-Score: it takes three or more that differ; give more of them."


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Measures of one atlas, and what it looks like.

    Attributes:
        atlas: the atlas.
        tower: its model.
        images: where the pictures come from.
        image_count: how many it was measured on.
        rows: the numbers.
        scores: `(S,)` MS-Score of every sub-unit, and `unit_scores` of every unit; None where not asked for.
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
        known = {"atlas": self.atlas.name, "model": self.atlas.about["model"], "layer": self.atlas.about["layer"]}
        seen = {"images": self.images, "pictures": self.image_count, "elude_steer": __version__}
        return {**known, **seen, "rows": [asdict(row) for row in self.rows]}

    def save(self, folder: Path) -> Path:
        """Writes evaluation.json and report.html; returns the page's path."""
        text, page = json.dumps(self.to_dict(), indent=1), _page(self)
        write_file(folder / "evaluation.json", lambda file: file.write(text.encode()))
        write_file(folder / "report.html", lambda file: file.write(page.encode()))
        return folder / "report.html"


def evaluate(
    atlas: str,
    *,
    images: Any = None,
    limit: int = 500,
    measures: Sequence[str] = MEASURES,
    again: str | None = None,
    model: str | None = None,
    device: str | None = None,
    warm_up: int = 10,
    runs: int = 50,
    compiled: bool = False,
    head: str | None = None,
    log: Callable[[str], object] = lambda line: None,
) -> Evaluation:
    """Measures an atlas.

    Args:
        atlas: a folder, a name, or a Hub id.
        images: pictures to measure on, as for a build; by default those of its recipe.
        limit: how many of them.
        measures: which, of `MEASURES`.
        again: the atlas of another run, for the stability.
        model: another copy of the model.
        device: where it runs.
        warm_up: passes that do not count for the efficiency; the paper has 100.
        runs: passes that do; the paper has 500.
        compiled: whether `torch.compile` makes a program of the model before it is timed, as the paper does.
        head: an image classifier on the same backbone, by folder or Hub id; its answers to pictures in folders named
            after their classes are counted with the layer as it is and with the explicit one.
        log: called with a line for each step.
    """
    measures = tuple(dict.fromkeys(measures))
    for name in measures or [""]:
        if name not in MEASURES:
            raise SpecError(
                f"there is no measure '{name}'.{did_you_mean(name, MEASURES)} There are {', '.join(MEASURES)}."
            )
    for given, name in ((again, "dictionary"), (head, "faithfulness")):
        if given is not None and name not in measures:
            raise SpecError(f"'{given}' is for the measure '{name}', which is not asked for; ask for it too.")
    loaded, other = Atlas.load(atlas), Atlas.load(again) if again is not None else None
    tower = tower_of(loaded, model, device)
    if other is not None:
        other.check(tower.layer)
    source = source_of(loaded, images, limit)
    items = items_of(source, limit)
    seen = Viewing(items)
    passes = {"sums": "faithfulness" in measures, "peaks": "monosemanticity" in measures}
    if any(passes.values()):  # one pass of the tower serves both
        log("what the layer sees")
        seen = view(loaded, tower, items, **passes)
    scores = {kind: peaks.scores() for kind, peaks in seen.peaks.items()}
    silent = [float(peaks.silent.double().mean()) for peaks in seen.peaks.values()]
    seen.peaks.clear()  # gigabytes at full size, which are no part of what a model takes
    rows: list[Row] = []
    for name in measures:
        log(name)
        if name == "faithfulness":
            rows += _faithfulness(loaded, tower, seen)
            if head is not None:
                names = [item.id for item in source.items()]
                kept, plain = head_accuracy(head, loaded, seen.items, names, device=device)
                rows.append(Row(name, f"accuracy of '{head}'", kept, plain))
        elif name == "monosemanticity":
            means = [None if values.isnan().all() else mean_percent(values) for values in scores.values()]
            rows += [Row(name, "MS-Score, %", *means), Row(name, "never fire, share", *silent)]
            if None in means:
                warnings.warn(_TOO_FEW.format(len(seen.items)), EludeSteerWarning, stacklevel=2)
        elif name == "dictionary":
            rows += _dictionary(loaded, other, str(again), tower)
        else:
            (batch,) = islice(read_items(seen.items, 8), 1)
            rows += _efficiency(loaded, tower, [picture for _, picture in batch], warm_up, runs, compiled)
    both = (scores.get("sub-units"), scores.get("units"))
    return Evaluation(loaded, tower, source.name, len(seen.items), tuple(rows), *both)


@torch.inference_mode()
def _faithfulness(atlas: Atlas, tower: Tower, seen: Viewing) -> list[Row]:
    rows = [Row("faithfulness", _R2, seen.r2.value)]
    if isinstance(tower, Vlm):
        explicit = split_layer(tower.layer, atlas.members().to(tower.device), atlas.units.to(tower.device))
        shown = seen.items[:50]
        share = caption_agreement(tower, explicit, (item.read()[0] for item in shown))
        rows.append(Row("faithfulness", f"same caption, {len(shown)} pictures", share))
    return rows


def _dictionary(atlas: Atlas, other: Atlas | None, name: str, tower: Tower) -> list[Row]:
    weight = layer_parameters(tower.layer)[0].float().cpu()

    def vectors(of: Atlas) -> list[torch.Tensor]:
        rows = of.sub_units(range(len(of)), tower.layer).weight.cpu()
        return [rows[list(of.sub_units_of(unit))][~of.dead[list(of.sub_units_of(unit))]] for unit in range(of.d_out)]

    own = vectors(atlas)
    alive = torch.cat(own)
    rows = [
        Row("dictionary", "effective rank of the incoming weights", effective_rank(alive), effective_rank(weight)),
        Row("dictionary", "collinearity (1 = duplicates)", collinearity(alive), collinearity(weight)),
    ]
    if other is not None:
        rows.append(Row("dictionary", f"stability against '{name}'", stability(own, vectors(other))))
    return rows


def _efficiency(
    atlas: Atlas, tower: Tower, pictures: Sequence[Any], warm_up: int, runs: int, compiled: bool
) -> list[Row]:
    inputs = tower.prepare(pictures)
    few = limit_logits(tower.model, 1)

    @cache  # made when its turn comes, so that the bare model's peak is without it
    def explicit() -> torch.nn.Module:
        return split_layer(tower.layer, atlas.members().to(tower.device), atlas.units.to(tower.device))

    def call() -> None:
        if isinstance(inputs, torch.Tensor):
            tower.model(inputs.to(tower.device))
        else:
            tower.model(**inputs, **few)

    ways: dict[str, Callable[[], Any]] = {
        "bare": nullcontext,
        "explicit": lambda: swap_module(tower.model, tower.layer_name, explicit()),
    }
    compiler = torch.compile if compiled else None
    costs = measure(call, ways, warm_up=warm_up, runs=runs, compiled=compiler, device=tower.device)
    own, plain = costs["explicit"], costs["bare"]
    batch = f"a batch of {len(pictures)}"
    return [
        Row("efficiency", f"explicit layer, ms {batch}", own.milliseconds, plain.milliseconds),
        Row("efficiency", "explicit layer, % more time, pass by pass", 100 * own.slower, 0.0),
        Row("efficiency", "explicit layer, peak MB", own.megabytes, plain.megabytes),
    ]


_STYLE = """
:root { color-scheme: light dark } body { margin: 0 auto; max-width: 1000px; padding: 36px 20px 60px;
  font: 16px/1.5 system-ui, sans-serif } h1 { font-size: 26px } h2 { font-size: 19px; margin: 34px 0 10px }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: 5px 12px 5px 0;
  border-bottom: 1px solid #8884 } td.n { text-align: right; font-variant-numeric: tabular-nums }
.soft { opacity: .7; font-size: 14px } img { max-width: 100%; border-radius: 6px; background: #fff }
.figures { display: flex; flex-wrap: wrap; gap: 20px } .parts { display: flex; flex-wrap: wrap; gap: 10px }
"""


def _page(found: Evaluation) -> str:
    atlas, about = found.atlas, found.atlas.about
    body = "".join(
        f'<tr><td>{html.escape(row.measure)}</td><td>{html.escape(row.name)}</td><td class="n">{_shown(row.value)}</td>'
        f'<td class="n">{_shown(row.units)}</td></tr>'
        for row in found.rows
    )
    counts = torch.bincount(atlas.units, minlength=atlas.d_out)
    charts = [
        (plotting.histogram(counts.tolist(), "sub-units of a unit"), "how many sub-units units have"),
        (
            plotting.histogram(atlas.rho[counts > 1].tolist(), "rho of the units that were split"),
            "rho of split units",
        ),
    ]
    if found.scores is not None and found.unit_scores is not None:
        own, before = ((scores[~scores.isnan()] * 100).tolist() for scores in (found.scores, found.unit_scores))
        for values, of in ((own, "sub-units"), (before, "units")):  # over one range, so that they can be compared
            charts.append(
                (plotting.histogram(values, f"MS-Score of {of}, %", axis_values=own + before), f"MS-Score of {of}")
            )
    r2 = next((row.value for row in found.rows if row.name == _R2), None)
    ms = next((row for row in found.rows if row.name == "MS-Score, %" and None not in (row.value, row.units)), None)
    if r2 is not None and ms is not None:
        points = [(float(ms.units or 0), 1.0), (float(ms.value or 0), r2)]
        names = ["units", "sub-units"]
        pareto = plotting.scatter(points, x="MS-Score, %", y="R2", marked=[1], names=names, side=380, y_min=0.0)
        charts.append((pareto, "MS-Score against R2 of units and sub-units"))
    images = "".join(f'<img alt="{says}" src="{plotting.data_uri(chart)}">' for chart, says in charts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(atlas.name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{html.escape(atlas.name)}</h1><p>{len(atlas):,} sub-units of {atlas.d_out:,} units of layer "
        f"<code>{html.escape(str(about['layer']))}</code>, measured on "
        f"{found.image_count:,} pictures of {html.escape(found.images)}.</p>"
        f"<table><thead><tr><th>measure</th><th></th><th>sub-units</th><th>units before</th></tr></thead>"
        f'<tbody>{body}</tbody></table><h2>The split</h2><div class="figures">{images}</div>{_collages(found)}'
        f'<p class="soft">elude_steer {__version__}</p></body></html>\n'
    )


def _collages(found: Evaluation, units: int = 4) -> str:
    """The units that fell into most parts: their sixteen strongest pictures, and four of each of their parts."""
    if not isinstance(found.tower, Vlm):
        return ""
    atlas, specimens = found.atlas, ReferenceImages(found.atlas, found.tower)
    counts = torch.bincount(atlas.units, minlength=atlas.d_out)
    shown = []
    for unit in counts.sort(descending=True, stable=True).indices[:units].tolist():
        rows = [("before the split", specimens.for_unit(unit, 16, 96))]
        rows += [
            (atlas.labels[one] if atlas.labels is not None else f"sub-unit {one}", specimens.for_sub_unit(one, 4, 96))
            for one in atlas.sub_units_of(unit)
        ]
        if rows[0][1]:
            whole = plotting.data_uri(plotting.collage(rows[:1], columns=16))
            parts = [plotting.data_uri(plotting.collage([row], columns=4, cell=64)) for row in rows[1:]]
            says = [html.escape(f"four pictures that {name} fires for") for name, _ in rows[1:]]
            pictures = "".join(f'<img alt="{said}" src="{part}">' for said, part in zip(says, parts, strict=True))
            title = f"<h2>Unit {unit}, and its {len(parts)} parts</h2>"
            first = f"sixteen pictures that unit {unit} fires for"
            shown.append(f'{title}<p><img alt="{first}" src="{whole}"></p><div class="parts">{pictures}</div>')
    told = '<p class="soft">Pictures that the atlas was built from, where each fires most; the patch is framed.</p>'
    return "".join(shown[:1] and [told, *shown])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
