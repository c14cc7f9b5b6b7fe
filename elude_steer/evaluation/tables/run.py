"""A table: one row for each method and draw of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from elude_steer.evaluation.compare.methods import Method
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.measure import baseline_accuracy, measure_dictionary
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.utils.files import read_json, write_tensors


@dataclass(frozen=True)
class TableRow:
    """What one method is worth on one draw of tokens.

    Attributes:
        backbone: name of the backbone and layer.
        method: name of the method.
        seed: of the draw of tokens.
        measures: by name; `accuracy` and `baseline accuracy` are missing where images have no classes.
        seconds: CPU seconds to `make` and to `measure` the method, and of the `tower`'s pass over the probing images,
            which all methods and draws share; with `, clock` the time that passed.
    """

    backbone: str
    method: str
    seed: int
    measures: dict[str, float]
    seconds: dict[str, float]


def run_table(
    setup: TableSetup,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    *,
    on_row: Callable[[TableRow], object] = lambda row: None,
) -> list[TableRow]:
    """The rows of a table; those that are stored already are read, and an interrupted run continues.

    Args:
        setup: the backbone, the images and the budget.
        methods: names of the methods, by default those of the preset.
        seeds: some of the preset's seeds of tokens, by default all.
        on_row: called with every row as soon as it is there.
    """
    bench, rows = Bench(setup), []
    for method in setup.find_methods(methods):
        for seed in setup.find_seeds(seeds):
            if not _row_path(setup, method, seed).exists():
                setup.log(f"{setup.name}: {method.name}, seed {seed}")
                load_or_make(_row_path(setup, method, seed), lambda m=method, s=seed: _make_row(bench, m, s))  # type: ignore[misc]
            rows.append(_read_row(setup, method, seed))
            on_row(rows[-1])
    return rows


def list_rows(
    setup: TableSetup, methods: Sequence[str] | None = None, seeds: Sequence[int] | None = None
) -> list[tuple[str, int, bool]]:
    """Method and seed of each row of a table, and whether it is there already; loads no model."""
    return [
        (method.name, seed, _row_path(setup, method, seed).exists())
        for method in setup.find_methods(methods)
        for seed in setup.find_seeds(seeds)
    ]


def summarize(rows: Sequence[TableRow]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and deviation of each measure over the rows of each method."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, value in row.measures.items():
            found.setdefault(row.method, {}).setdefault(name, []).append(value)
    return {
        method: {name: mean_and_deviation(values) for name, values in measures.items()}
        for method, measures in found.items()
    }


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation of a sample; 0 for one value."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def _row_path(setup: TableSetup, method: Method, seed: int) -> Path:
    return setup.folder / "rows" / f"{method.number:02d}-{seed}.json"


def _read_row(setup: TableSetup, method: Method, seed: int) -> TableRow:
    found = read_json(_row_path(setup, method, seed), dict, ("measures", "costs"))
    return TableRow(setup.name, method.name, seed, found["measures"], found["costs"])


def _make_row(bench: Bench, method: Method, seed: int) -> dict[str, Any]:
    dictionary = bench.dictionary(method, seed)
    write_tensors(bench.vectors_path(method, seed), dictionary.vectors())
    _ = bench.held_out, bench.probe, baseline_accuracy(bench)  # first, because they cost the same for all methods
    cpu, clock = time.process_time(), time.perf_counter()
    with bench.tower.use_threads():
        measures = measure_dictionary(bench, dictionary)
    made, tower = bench.cost(f"{method.number:02d}-{seed}-0"), bench.cost("tower")
    costs = {
        "make": made["cpu"],
        "measure": time.process_time() - cpu,
        "tower": tower["cpu"],
        "make, clock": made["clock"],
        "measure, clock": time.perf_counter() - clock,
        "tower, clock": tower["clock"],
    }
    return {"measures": measures, "costs": costs}


def rows_as_json(rows: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Rows of any table of this package as plain values; NaN becomes None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        return None if isinstance(value, float) and value != value else value

    return [plain(asdict(row)) for row in rows]
