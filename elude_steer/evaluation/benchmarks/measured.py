"""From counts of each image to numbers with 95 % intervals, and their change against the unsteered model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from elude_steer.evaluation.edits.benchmark import bootstrap_means, find_interval

ROUNDS = 1000
UNSTEERED = "unsteered"
# From mean counts `(…, k)` to a number `(…)`; NaN where nothing was counted.
Metric = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Value:
    """A number, with its 95 % interval over images.

    Attributes:
        value: None if nothing was counted.
        interval: None with the value.
        change: the value minus that of the unsteered model on the same images; None for that model itself.
        change_interval: of the change; images are drawn in pairs.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    change: float | None = None
    change_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ResultRow:
    """The numbers of one row of a benchmark on one group of questions or images.

    Attributes:
        row: `unsteered`, `edit`, or a control.
        group: such as a split of POPE, or the images that show the erased class.
        images: the number of images.
        values: by the name of the measure.
    """

    row: str
    group: str
    images: int
    values: Mapping[str, Value]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def ratio(top: int | Sequence[int], bottom: int | Sequence[int]) -> Metric:
    """The metric that divides the sum of some columns of counts by the sum of others."""
    over, under = ([columns] if isinstance(columns, int) else list(columns) for columns in (top, bottom))

    def divide(means: np.ndarray) -> np.ndarray:
        total = means[..., under].sum(-1)
        return np.where(total > 0, means[..., over].sum(-1) / np.where(total > 0, total, 1), np.nan)

    return divide


def measure_rows(
    group: str, counts: Mapping[str, np.ndarray], metrics: Mapping[str, Metric], seed: int = 0
) -> list[ResultRow]:
    """The numbers of all rows on one group.

    Args:
        group: its name.
        counts: row -> `(images, k)` counts; all rows have the same images in the same order.
        metrics: name of a measure -> what it makes of the counts.
        seed: seed of the resampling.
    """
    resampled = {row: _resample(own, seed) for row, own in counts.items() if len(own)}
    rows = []
    for row, own in counts.items():
        values = {}
        for name, metric in metrics.items():
            if not len(own):
                values[name] = Value(None)
                continue
            samples, before = metric(resampled[row]), None
            if row != UNSTEERED and UNSTEERED in counts:
                before = (metric(counts[UNSTEERED].mean(0)), metric(resampled[UNSTEERED]))
            values[name] = _make_value(metric(own.mean(0)), samples, before)
        rows.append(ResultRow(row, group, len(own), values))
    return rows


def _resample(counts: np.ndarray, seed: int) -> np.ndarray:
    """Mean counts of resampled images, `(rounds, k)`; the same images are drawn for every row."""
    return np.stack([bootstrap_means(column, seed, ROUNDS) for column in counts.astype(float).T], -1)


def _make_value(value: np.ndarray, samples: np.ndarray, before: tuple[np.ndarray, np.ndarray] | None) -> Value:
    if np.isnan(value):
        return Value(None)
    interval = find_interval(samples[~np.isnan(samples)])
    if before is None or np.isnan(before[0]):
        return Value(float(value), interval)
    changes = samples - before[1]
    return Value(float(value), interval, float(value - before[0]), find_interval(changes[~np.isnan(changes)]))
