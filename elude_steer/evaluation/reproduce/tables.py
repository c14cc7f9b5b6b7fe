"""Runs the rows of a table, one piece after the other, and gathers ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elude_steer.evaluation.ablate import ablate
from elude_steer.evaluation.measures.llm_judges import Ranking, read_judge
from elude_steer.evaluation.report import MS_ROW
from elude_steer.evaluation.reproduce.experiment import RAW, UMAP_SETTING, Experiment, make_order
from elude_steer.evaluation.reproduce.ledger import Ledger
from elude_steer.evaluation.reproduce.paper import PaperRow, read_table
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.collages import Collage, make_collages
from elude_steer.evaluation.tables.measure import PROBE, accuracy_source
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
        deviation: ours over seeds, runs or passes; None for one of them.
        interval: our 95 % interval; None where there is none.
        paper: the paper's; None where it has none.
        paper_deviation: the paper's over seeds.
        paper_interval: the paper's 95 % interval.
        is_comparable: whether ours measures the same as the paper's.
    """

    value: float | None
    deviation: float | None = None
    interval: tuple[float, float] | None = None
    paper: float | None = None
    paper_deviation: float | None = None
    paper_interval: tuple[float, float] | None = None
    is_comparable: bool = True

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None where they measure different things."""
        if self.value is None or self.paper is None or not self.is_comparable:
            return None
        return self.value - self.paper

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        intervals = {"interval": self.interval, "paper interval": self.paper_interval}
        return {
            "value": self.value,
            "deviation": self.deviation,
            "paper": self.paper,
            "paper deviation": self.paper_deviation,
            "difference": self.difference,
            **{name: list(interval) for name, interval in intervals.items() if interval is not None},
        }


@dataclass(frozen=True)
class ResultRow:
    """One row of a reproduced table.

    Attributes:
        backbone: the recipe.
        method: the row.
        seeds: the draws of tokens that it is made from.
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


Measured = dict[str, dict[str, Number]]  # method -> measure -> ours


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


def _join(
    experiment: Experiment, backbone: str, method: str, values: Mapping[str, Number], paper: PaperRow | None
) -> ResultRow:
    numbers, sizes = {}, read_table("configurations").find(backbone, method)
    for measure in experiment.table.columns:
        numbers[measure] = _set_beside(values.get(measure, Number(None)), measure, paper)
    for measure, number in values.items():  # such as the expansion, which stands in a table of its own
        beside = _set_beside(number, measure, sizes)
        if measure in RATIOS:  # which the paper's table leaves to the reader
            beside = replace(number, paper=experiment.table.more_than(backbone, RAW, method, RATIOS[measure]))
        numbers.setdefault(measure, beside)
    if "accuracy" in numbers and accuracy_source(experiment.setup(backbone)) == PROBE:
        numbers["accuracy"] = replace(numbers["accuracy"], is_comparable=False)
    return ResultRow(backbone, method, experiment.draws, numbers)


def _set_beside(number: Number, measure: str, paper: PaperRow | None) -> Number:
    """Our number with the paper's."""
    if paper is None:
        return number
    value, deviation = paper.values.get(measure, (None, None))
    return replace(number, paper=value, paper_deviation=deviation, paper_interval=paper.intervals.get(measure))


def _run_measures(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> Measured:
    """Rows of interpretability and generalization."""
    setup, rows = experiment.setup(backbone), list[TableRow]()
    methods = experiment.methods(backbone)
    for method in make_order(methods):
        for seed in experiment.draws:
            with ledger.count(f"{backbone}: {method}, seed {seed}"):
                rows += run_table(setup, [method], [seed])
    found: Measured = {}
    several = len(experiment.draws) > 1
    for method, measures in summarize(rows).items():
        found[method] = {
            name: Number(scale * measures[name][0], scale * measures[name][1] if several else None)
            for name, scale in MEASURES.items()
            if name in measures
        }
    if experiment.options.judges:
        rates = _ask_judges(experiment, backbone, methods, ledger, confirm).rates
        order = sorted(rates, key=lambda name: -rates[name])
        for method in rates:
            found[method]["LLM rank"] = Number(order.index(method) + 1.0)
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


def _run_judges(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> Measured:
    ranking = _ask_judges(experiment, backbone, experiment.methods(backbone), ledger, confirm)
    found: Measured = {}
    for method, rate in ranking.rates.items():
        low, high = ranking.intervals[method]
        found[method] = {"win rate": Number(PERCENT * rate, interval=(PERCENT * low, PERCENT * high))}
    return found


def _ask_judges(
    experiment: Experiment, backbone: str, methods: Sequence[str], ledger: Ledger, confirm: Confirm
) -> Ranking:
    from elude_steer.evaluation.tables.judging import judge_methods

    setup, options = experiment.setup(backbone), experiment.options
    with ledger.count(f"{backbone}: judges"):
        judges = [read_judge(text) for text in options.judges]
        return judge_methods(setup, judges, methods, experiment.draws, count=options.pairs, confirm=confirm)


def _run_stability(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> Measured:
    setup, found = experiment.setup(backbone), Measured()
    (seed,) = experiment.draws
    for method in make_order(experiment.methods(backbone)):
        with ledger.count(f"{backbone}: {method}, runs on seed {seed}"):
            (row,) = run_stability(setup, [method], seed=seed)
        found[method] = {
            "stability": Number(PERCENT * row.runs, PERCENT * row.runs_std),
            "effective rank": Number(row.effective_rank, row.effective_rank_std),
            "collinearity": Number(PERCENT * row.collinearity, PERCENT * row.collinearity_std),
        }
    return found


def _run_efficiency(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> Measured:
    from elude_steer.evaluation.tables.efficiency import BARE, run_efficiency

    setup, protocol = experiment.setup(backbone), experiment.protocol
    methods = [name for name in make_order(experiment.methods(backbone)) if name != RAW]
    (seed,) = experiment.draws  # what a pass costs does not depend on the draw of tokens
    with ledger.count(f"{backbone}: passes, seed {seed}"):
        rows = run_efficiency(setup, methods, protocol=protocol, seed=seed)
    found: Measured = {}
    for row in rows:
        numbers = {
            "input dim": Number(row.input_dim or None),
            "ms per batch": Number(row.milliseconds, row.deviation),
            "peak MB": Number(row.megabytes or None),
            "slower, %": Number(PERCENT * row.slower),
            "more memory, %": Number(None if row.larger is None else PERCENT * row.larger),
        }
        known = {measure: number for measure, number in numbers.items() if number.value is not None}
        found[RAW if row.method == BARE else row.method] = known
    return found


def _run_ablations(experiment: Experiment, backbone: str, ledger: Ledger, confirm: Confirm) -> Measured:
    options, spec = experiment.options, experiment.spec(backbone)
    path = options.work / f"{spec.name}.yaml"
    text = dump_document(spec)
    write_file(path, lambda file: file.write(text.encode()))
    images = options.limited(options.images, spec, options.limit)
    held_out = options.limited(options.measured_on, spec, options.held_out_limit)
    found: Measured = {}
    for row, setting, value in experiment.variations(backbone):
        if setting == UMAP_SETTING and not optional.is_installed("umap"):
            options.log(f"{row} is left out: it needs `pip install 'elude-steer[umap]'`")
            continue
        scores = []
        for seed in experiment.draws:
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


def _over_seeds(values: Sequence[float]) -> Number:
    mean, deviation = mean_and_deviation(values)
    return Number(mean, deviation if len(values) > 1 else None)


_RUNNERS: Mapping[str, Callable[[Experiment, str, Ledger, Confirm], Measured]] = {
    "interpretability": _run_measures,
    "generalization": _run_measures,
    "ablations": _run_ablations,
    "stability": _run_stability,
    "efficiency": _run_efficiency,
    "judge": _run_judges,
}
