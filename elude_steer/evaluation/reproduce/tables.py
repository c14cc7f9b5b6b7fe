"""Runs the rows of a table, one piece after the other, and gathers ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elude_steer.evaluation.ablate import ablate
from elude_steer.evaluation.measures.llm_judges import Ranking, read_judge
from elude_steer.evaluation.report import MS_ROW
from elude_steer.evaluation.reproduce.experiment import RAW, Experiment, make_order
from elude_steer.evaluation.reproduce.ledger import Ledger
from elude_steer.evaluation.reproduce.paper import PaperRow, read_table
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.collages import Collage, make_collages
from elude_steer.evaluation.tables.properties import PropertyRow, run_properties
from elude_steer.evaluation.tables.run import TableRow, mean_and_deviation, run_table, summarize
from elude_steer.evaluation.tables.stability import run_stability
from elude_steer.utils import optional
from elude_steer.utils.files import write_file
from elude_steer.utils.plotting import data_uri, fit_within
from elude_steer.utils.yaml_schema import dump_document

PERCENT = 100.0
# Our measures under the paper's names, and what they are multiplied by.
MEASURES = {"MS-Score": 1.0, "accuracy": PERCENT, "R2": PERCENT, "expansion": 1.0}
# Our ratios to the backbone alone, and the paper's measures that they are ratios of.
RATIOS = {"slower, %": "ms per batch", "more memory, %": "peak MB"}
Confirm = Callable[[int], object]
_COLLAGES, _MOST_PARTS, _WIDTH = 3, 12, 1400  # of a backbone; of a unit that is shown; pixels


@dataclass(frozen=True)
class Number:
    """A measured value beside the paper's.

    Attributes:
        value: ours; None if it was not measured.
        deviation: ours over seeds; None for one seed.
        paper: the paper's; None where it has none.
        paper_deviation: the paper's over seeds.
    """

    value: float | None
    deviation: float | None = None
    paper: float | None = None
    paper_deviation: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.value is None or self.paper is None else self.value - self.paper

    def to_dict(self) -> dict[str, float | None]:
        """Plain values."""
        return {
            "value": self.value,
            "deviation": self.deviation,
            "paper": self.paper,
            "paper deviation": self.paper_deviation,
            "difference": self.difference,
        }


@dataclass(frozen=True)
class ResultRow:
    """One row of a reproduced table.

    Attributes:
        backbone: the recipe.
        method: the row.
        seeds: the draws, or runs, that it is a mean of.
        numbers: by measure.
    """

    backbone: str
    method: str
    seeds: Sequence[int]
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        numbers = {name: number.to_dict() for name, number in self.numbers.items()}
        return {"backbone": self.backbone, "method": self.method, "seeds": list(self.seeds), "numbers": numbers}


Values = Mapping[str, tuple[float, float | None]]


def run_experiment(experiment: Experiment, ledger: Ledger, confirm: Confirm = lambda count: None) -> list[ResultRow]:
    """All rows of a table; finished pieces are read.

    Args:
        experiment: the table and what of it is run.
        ledger: counts what every piece takes.
        confirm: called with the number of questions before judges are asked.
    """
    rows: list[ResultRow] = []
    for backbone in experiment.backbones:
        found = _RUNNERS[experiment.name](experiment, backbone, ledger, confirm)
        for method in experiment.methods(backbone):
            paper = experiment.table.find(backbone, method)
            if method in found:
                rows.append(_join(experiment, backbone, method, found[method], paper))
    return rows


def _join(experiment: Experiment, backbone: str, method: str, values: Values, paper: PaperRow | None) -> ResultRow:
    numbers, sizes = {}, read_table("configurations").find(backbone, method)
    theirs: tuple[float | None, float | None]
    for measure in experiment.table.columns:
        value, deviation = values.get(measure, (None, None))
        theirs = (None, None) if paper is None else paper.values.get(measure, (None, None))
        numbers[measure] = Number(value, deviation, *theirs)
    for measure in values:  # such as the expansion, which stands in a table of its own
        theirs = (None, None) if sizes is None else sizes.values.get(measure, (None, None))
        if measure in RATIOS:  # which the paper's table leaves to the reader
            theirs = (experiment.table.more_than(backbone, RAW, method, RATIOS[measure]), None)
        numbers.setdefault(measure, Number(*values[measure], *theirs))
    return ResultRow(backbone, method, experiment.seeds, numbers)


def _run_measures(
    experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Rows of interpretability and generalization."""
    setup, rows = experiment.setup(backbone), list[TableRow]()
    methods = experiment.methods(backbone)
    for method in make_order(methods):
        for seed in experiment.seeds:
            with ledger.count(f"{backbone}: {method}, seed {seed}"):
                rows += run_table(setup, [method], [seed])
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    several = len(experiment.seeds) > 1
    for method, measures in summarize(rows).items():
        found[method] = {
            name: (scale * measures[name][0], scale * measures[name][1] if several else None)
            for name, scale in MEASURES.items()
            if name in measures
        }
    if experiment.options.judges:
        rates = _ask_judges(experiment, backbone, methods, ledger, confirm).rates
        order = sorted(rates, key=lambda name: -rates[name])
        for method in rates:
            found[method]["LLM rank"] = (order.index(method) + 1.0, None)
    return found


def measure_properties(experiment: Experiment, ledger: Ledger) -> dict[str, list[PropertyRow]]:
    """The measured properties of the methods of each backbone, in the paper's order."""
    found: dict[str, list[PropertyRow]] = {}
    for backbone in experiment.backbones:
        names, setup, rows = experiment.property_methods(backbone), experiment.setup(backbone), dict[str, PropertyRow]()
        for method in make_order(names):
            with ledger.count(f"{backbone}: {method}, properties"):
                (rows[method],) = run_properties(setup, [method], seed=experiment.seeds[0], runs=experiment.runs)
        found |= {backbone: [rows[name] for name in names]} if names else {}
    return found


def draw_collages(experiment: Experiment, ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """Collages of some units of each backbone: `unit`, `parts`, `method` and `image`, a data URI."""
    found: dict[str, list[dict[str, Any]]] = {}
    for backbone in experiment.backbones:
        method, setup, seed = experiment.collage_method(backbone), experiment.setup(backbone), experiment.seeds[0]
        if method is None:
            continue

        def draw(setup: Any = setup, method: str = method, seed: int = seed) -> dict[str, Any]:
            setup.log(f"{setup.name}: collages")
            made = make_collages(setup, method=method, seed=seed, count=_COLLAGES, most=_MOST_PARTS)
            return {"units": [_as_json(collage, method) for collage in made]}

        with ledger.count(f"{backbone}: collages"):
            found[backbone] = load_or_make(experiment.collages_path(backbone), draw)["units"]
    return found


def _as_json(collage: Collage, method: str) -> dict[str, Any]:
    image = collage.image if max(collage.image.size) <= _WIDTH else fit_within(collage.image, _WIDTH)
    return {"unit": collage.unit, "parts": collage.parts, "method": method, "image": data_uri(image, quick=True)}


def _run_judges(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> dict[str, Any]:
    ranking = _ask_judges(experiment, backbone, experiment.methods(backbone), ledger, confirm)
    return {
        method: {"win rate": (PERCENT * rate, PERCENT * (ranking.intervals[method][1] - ranking.intervals[method][0]))}
        for method, rate in ranking.rates.items()
    }


def _ask_judges(
    experiment: Experiment, backbone: str, methods: Sequence[str], ledger: Ledger, confirm: Confirm
) -> Ranking:
    from elude_steer.evaluation.tables.judging import judge_methods

    setup, options = experiment.setup(backbone), experiment.options
    with ledger.count(f"{backbone}: judges"):
        judges = [read_judge(text) for text in options.judges]
        return judge_methods(setup, judges, methods, experiment.seeds, count=options.pairs, confirm=confirm)


def _run_stability(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> dict[str, Any]:
    setup, found = experiment.setup(backbone), dict[str, Any]()
    seed = experiment.seeds[0]
    for method in make_order(experiment.methods(backbone)):
        with ledger.count(f"{backbone}: {method}, runs on seed {seed}"):
            (row,) = run_stability(setup, [method], seed=seed)
        found[method] = {
            "stability": (PERCENT * row.runs, PERCENT * row.runs_std),
            "effective rank": (row.effective_rank, row.effective_rank_std),
            "collinearity": (PERCENT * row.collinearity, PERCENT * row.collinearity_std),
        }
    return found


def _run_efficiency(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> dict[str, Any]:
    from elude_steer.evaluation.tables.efficiency import BARE, run_efficiency

    setup, protocol = experiment.setup(backbone), experiment.protocol
    methods = [name for name in make_order(experiment.methods(backbone)) if name != RAW]
    measured: dict[str, list[Any]] = {}
    for seed in experiment.seeds[:1]:  # what a pass costs does not depend on the draw of tokens
        with ledger.count(f"{backbone}: passes, seed {seed}"):
            for row in run_efficiency(setup, methods, protocol=protocol, seed=seed):
                measured.setdefault(RAW if row.method == BARE else row.method, []).append(row)
    found: dict[str, Any] = {}
    for method, rows in measured.items():
        columns = {"input dim": "input_dim", "ms per batch": "milliseconds", "peak MB": "megabytes"}
        found[method] = {}
        for measure, name in columns.items():
            values = [getattr(row, name) for row in rows if getattr(row, name)]
            if values:
                mean, deviation = mean_and_deviation(values)
                found[method][measure] = (mean, deviation if len(values) > 1 and measure != "input dim" else None)
        ratios = {"slower, %": [row.slower for row in rows], "more memory, %": [row.larger for row in rows]}
        for measure, shares in ratios.items():
            known = [share for share in shares if share is not None]
            if known:
                found[method][measure] = (PERCENT * mean_and_deviation(known)[0], None)
    return found


def _run_ablations(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> dict[str, Any]:
    options, spec = experiment.options, experiment.spec(backbone)
    path = options.work / f"{spec.name}.yaml"
    text = dump_document(spec)
    write_file(path, lambda file: file.write(text.encode()))
    images = options.limited(options.images, spec, options.limit)
    held_out = options.limited(options.measured_on, spec, options.held_out_limit)
    found: dict[str, Any] = {}
    for row, setting, value in experiment.variations(backbone):
        if setting == "clusters.umap_components" and not optional.is_installed("umap"):
            options.log(f"{row} is left out: it needs `pip install 'elude-steer[umap]'`")
            continue
        scores = []
        for seed in experiment.seeds:
            changes = ("labels.scorer=null", f"tokens.seed={seed}", *([f"{setting}={value}"] if setting else []))
            with ledger.count(f"{backbone}: {row}, seed {seed}"):
                (measured,) = ablate(
                    str(path),
                    {},
                    options.work,
                    probing=images,
                    images=held_out,
                    limit=options.count(options.measured_on, options.held_out_limit),
                    settings=changes,
                    device=options.device,
                    threads=options.threads,
                    trust_remote_code=options.trust_remote_code,
                    log=lambda line, row=row, seed=seed: options.log(f"{spec.name}: {row}, seed {seed}"),  # type: ignore[misc]
                )
            scores.append(measured)
        found[row] = {
            name: _over_seeds([float(one[key]) for one in scores])
            for name, key in {"MS-Score": MS_ROW, "expansion": "a unit"}.items()
        }
    return found


def _over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    mean, deviation = mean_and_deviation(values)
    return mean, deviation if len(values) > 1 else None


_RUNNERS: Mapping[str, Callable[[Experiment, str, Ledger, Confirm], Any]] = {
    "interpretability": _run_measures,
    "generalization": _run_measures,
    "ablations": _run_ablations,
    "stability": _run_stability,
    "efficiency": _run_efficiency,
    "judge": _run_judges,
}
