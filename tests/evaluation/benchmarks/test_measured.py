import numpy as np
import pytest

from elude_steer.evaluation.benchmarks.measured import measure_rows, ratio

METRICS = {"share": ratio(1, 0), "sum": ratio((0, 1), (0, 0))}


def test_values_are_ratios_of_sums_and_changes_are_paired():
    before, after = np.array([[1, 1], [2, 0], [1, 1.0]]), np.array([[1, 0], [2, 0], [1, 1.0]])
    rows = measure_rows("all", {"unsteered": before, "edit": after}, METRICS)
    assert [(row.row, row.group, row.images) for row in rows] == [("unsteered", "all", 3), ("edit", "all", 3)]
    assert rows[0].values["share"].value == pytest.approx(2 / 4)
    assert rows[0].values["share"].change is None
    edit = rows[1].values["share"]
    assert edit.value == pytest.approx(1 / 4) and edit.change == pytest.approx(-1 / 4)
    assert edit.interval[0] <= edit.value <= edit.interval[1]
    assert edit.change_interval[0] <= edit.change <= edit.change_interval[1] <= 0  # never more than before
    assert rows[1].values["sum"].value == pytest.approx(5 / 8)


def test_the_interval_of_a_share_is_about_that_of_the_binomial():
    counts = np.column_stack([np.ones(400), np.arange(400) % 4 == 0])
    (row,) = measure_rows("all", {"unsteered": counts}, {"share": ratio(1, 0)})
    low, high = row.values["share"].interval
    half = 1.96 * np.sqrt(0.25 * 0.75 / 400)
    assert (low, high) == (pytest.approx(0.25 - half, abs=0.01), pytest.approx(0.25 + half, abs=0.01))


def test_nothing_counted_gives_no_value():
    rows = measure_rows("all", {"unsteered": np.zeros((0, 2)), "edit": np.zeros((0, 2))}, METRICS)
    assert rows[1].values["share"].value is None
    rows = measure_rows("all", {"unsteered": np.zeros((3, 2)), "edit": np.ones((3, 2))}, METRICS)
    assert rows[0].values["share"].value is None
    assert (rows[1].values["share"].value, rows[1].values["share"].change) == (1, None)
