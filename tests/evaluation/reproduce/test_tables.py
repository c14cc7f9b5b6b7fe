"""The rows of tables: which draws they are of, and what stands beside a number."""

import math

import pytest

from elude_steer.evaluation.measures.llm_judges import Ranking
from elude_steer.evaluation.reproduce import tables
from elude_steer.evaluation.reproduce.experiment import Experiment
from elude_steer.evaluation.reproduce.ledger import Ledger
from elude_steer.evaluation.reproduce.options import ReproduceOptions
from elude_steer.evaluation.reproduce.tables import Number, run_experiment
from elude_steer.evaluation.tables import efficiency
from elude_steer.evaluation.tables.efficiency import BARE, EfficiencyRow
from elude_steer.evaluation.tables.stability import StabilityRow

BACKBONE = {"dinov2-base-layer12": None}


def make(name, image_folder, tmp_path, **more):
    options = {"preset": "tiny", "backbones": BACKBONE, **more}
    experiment = Experiment(name, ReproduceOptions(str(image_folder), str(image_folder), tmp_path, **options))
    return experiment, run_experiment(experiment, Ledger(tmp_path / "hours.json", find_key=experiment.find_key))


def test_passes_are_timed_with_one_draw_and_have_the_deviation_of_passes(image_folder, tmp_path, monkeypatch):
    asked = []

    def time_passes(setup, methods, *, protocol, seed):
        asked.append((methods, seed))
        bare = EfficiencyRow("x", BARE, 0, 100.0, 2.5, 50.0, 0.0, 0.0)
        return [bare, EfficiencyRow("x", "topk SAE", 768, 110.0, 3.5, None, 0.1, None)]

    monkeypatch.setattr(efficiency, "run_efficiency", time_passes)
    experiment, rows = make("efficiency", image_folder, tmp_path, rows=("raw units", "topk SAE"))
    assert asked == [(["topk SAE"], 42)] and experiment.seeds == [42, 123]
    assert [(row.method, row.seeds) for row in rows] == [("raw units", [42]), ("topk SAE", [42])]
    bare, other = (row.numbers for row in rows)
    assert (bare["ms per batch"].value, bare["ms per batch"].deviation) == (100, 2.5)
    assert bare["ms per batch"].paper_deviation == 0.39
    assert other["input dim"].value == 768 and bare["input dim"].value is None
    assert other["slower, %"].value == pytest.approx(10) and other["slower, %"].paper == pytest.approx(11.89, abs=0.01)
    assert other["peak MB"].value is None and "more memory, %" not in other


def test_runs_on_one_draw_are_compared(image_folder, tmp_path, monkeypatch):
    asked = []

    def compare(setup, methods, *, seed):
        asked.append(seed)
        return [StabilityRow("x", methods[0], 0.5, 0.1, 0.4, 7.0, 0.2, 0.3, 0.01, 1.0)]

    monkeypatch.setattr(tables, "run_stability", compare)
    _, (row,) = make("stability", image_folder, tmp_path, rows=("topk SAE",), seeds=(123, 42))
    assert asked == row.seeds == [123]
    assert (row.numbers["stability"].value, row.numbers["stability"].deviation) == (50, 10)


def test_win_rates_have_both_intervals(image_folder, tmp_path, monkeypatch):
    rows = ("raw units", "ELUDe (unique)")
    ranking = Ranking(
        dict(zip(rows, (0.25, 0.75), strict=True)), {rows[0]: (0.2, 0.5), rows[1]: (0.5, 0.8)}, 4, 0, {}, {}
    )
    monkeypatch.setattr(tables, "_ask_judges", lambda *_: ranking)
    _, (first, second) = make("judge", image_folder, tmp_path, rows=rows, judges=("a@http://localhost/v1",))
    number = first.numbers["win rate"]
    assert (number.value, number.interval, number.deviation) == (25, (20, 50), None)
    assert number.paper_interval[0] < number.paper < number.paper_interval[1]
    assert second.numbers["win rate"].to_dict()["interval"] == [50, 80]
    assert second.seeds == [42, 123], "pooled over the draws"


@pytest.mark.parametrize(("source", "differs"), [("linear probe", False), ("head", True), ("timm head", True)])
def test_a_probe_is_no_head(source, differs, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "accuracy_source", lambda setup: source)
    options = ReproduceOptions(str(image_folder), str(image_folder), tmp_path, preset="tiny", backbones=BACKBONE)
    experiment = Experiment("interpretability", options)
    paper = experiment.table.find("dinov2-base-layer12", "raw units")
    values = {"accuracy": Number(50.0), "MS-Score": Number(40.0)}
    row = tables._join(experiment, "dinov2-base-layer12", "raw units", values, paper)
    accuracy = row.numbers["accuracy"]
    assert accuracy.paper == paper.values["accuracy"][0] and (accuracy.difference is not None) == differs
    assert math.isclose(row.numbers["MS-Score"].difference, 40 - paper.values["MS-Score"][0])
