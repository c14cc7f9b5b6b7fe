"""Stability: whether a method finds the same again, from the same tokens and from other draws of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from elude_steer.evaluation.baselines.dictionary import group_by_unit
from elude_steer.evaluation.measures.stability import stability
from elude_steer.evaluation.result_files import load_or_make
from elude_steer.evaluation.tables.bench import Bench
from elude_steer.evaluation.tables.measure import measure_atoms
from elude_steer.evaluation.tables.run import mean_and_deviation
from elude_steer.evaluation.tables.setup import TableSetup
from elude_steer.utils.files import read_tensors, write_tensors


@dataclass(frozen=True)
class StabilityRow:
    """Whether a method finds the same again, and the geometry of what it finds.

    Attributes:
        backbone: name of the backbone and layer.
        method: name of the method.
        runs: mean similarity of two runs on the same tokens; NaN if there is one run.
        runs_std: its deviation over pairs of runs.
        draws: mean similarity of two draws of tokens, of those whose rows exist; NaN if there is one.
        effective_rank, effective_rank_std: over the runs.
        collinearity, collinearity_std: the same; 1 means that there are duplicates.
        seconds: CPU seconds of all runs but the first.
    """

    backbone: str
    method: str
    runs: float
    runs_std: float
    draws: float
    effective_rank: float
    effective_rank_std: float
    collinearity: float
    collinearity_std: float
    seconds: float


def run_stability(
    setup: TableSetup, methods: Sequence[str] | None = None, *, seed: int | None = None, runs: int | None = None
) -> list[StabilityRow]:
    """How stable each method is: over runs on the same tokens, and over the draws whose rows `run_table` has made.

    Args:
        setup: the backbone, the images and the budget.
        methods: names of the methods, by default those of the preset.
        seed: the draw of tokens that all runs learn from, by default the first.
        runs: number of runs compared, at most the preset's, which is the default.
    """
    bench, rows = Bench(setup), []
    seed = setup.find_seeds(None if seed is None else [seed])[0]
    for method in setup.find_methods(methods):
        count = (
            1 if method.kind == "units" else min(runs or setup.preset.runs, setup.preset.runs)
        )  # nothing about units can differ
        paths, seconds = [], 0.0
        for run in range(count):
            path = bench.vectors_path(method, seed, run)
            if not path.exists():
                setup.log(f"{setup.name}: {method.name}, run {run + 1}")
                write_tensors(path, bench.dictionary(method, seed, run).vectors())
            paths.append(path)
            seconds += bench.cost(f"{method.number:02d}-{seed}-{run}")["cpu"] if run else 0.0
        draws = [path for one in setup.preset.seeds if (path := bench.vectors_path(method, one)).exists()]
        key = f"{method.number:02d}-{seed}-{count}-{len(draws)}"

        def compute(paths: Sequence[Path] = tuple(paths), draws: Sequence[Path] = tuple(draws)) -> dict[str, Any]:
            return _compare_runs(paths, draws)

        found = load_or_make(setup.folder / "stability" / f"{key}.json", compute)
        found = {name: float("nan") if value is None else value for name, value in found.items()}
        rows.append(StabilityRow(setup.name, method.name, **{**found, "seconds": seconds}))
    return rows


def _compare_runs(paths: Sequence[Path], draws: Sequence[Path]) -> dict[str, Any]:
    runs = _similarities(paths)
    measured = [measure_atoms(read_tensors(path)["atoms"]) for path in paths]
    rank, angle = ([one[name] for one in measured] for name in ("effective rank", "collinearity"))
    across = _similarities(draws)
    return {
        "runs": mean(runs) if runs else None,
        "runs_std": mean_and_deviation(runs)[1] if runs else None,
        "draws": mean(across) if across else None,
        "effective_rank": mean(rank),
        "effective_rank_std": mean_and_deviation(rank)[1],
        "collinearity": mean(angle),
        "collinearity_std": mean_and_deviation(angle)[1],
    }


def _similarities(paths: Sequence[Path]) -> list[float]:
    """The similarity of each pair of stored dictionaries."""
    loaded = [group_by_unit(**read_tensors(path)) for path in paths]
    return [stability(one, other) for one, other in combinations(loaded, 2)]
