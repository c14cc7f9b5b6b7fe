"""The comparison of methods, at a size that takes a minute."""

import json

import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.sae import KINDS
from elude_steer.evaluation.compare.methods import GRIDS, METHODS, SMALL, Size
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.evaluation.compare.table import write_results
from elude_steer.evaluation.edits.sweep import grid_points

TRIED = ("ELUDe (gap)", "raw units", "k-means on contributions", "topk SAE", "difference of means (supervised)")


def test_everybody_has_a_grid_of_one_size():
    assert {len(grid_points(grid)) for grid in GRIDS.values()} == {12}
    assert len(METHODS) == len(set(METHODS)) == 2 + 1 + 3 + len(KINDS) + 1
    assert Size().seeds == (42, 123, 999)


def test_a_folder_belongs_to_a_comparison_of_one_size(tmp_path):
    Comparison(tmp_path, SMALL)._check_work()
    Comparison(tmp_path, SMALL)._check_work()
    with pytest.raises(SpecError, match=r"holds a comparison of another size.*; give another folder: --work"):
        Comparison(tmp_path).run()


def test_a_small_comparison(tmp_path, monkeypatch):
    """One test, so that one process does the work."""
    comparison = Comparison(tmp_path / "work", SMALL)
    rows = comparison.run(TRIED)
    every_method_and_seed_has_a_row(rows)
    parts_of_units_are_faithful_and_as_many_as_those_of_elude(rows)
    assert comparison.stability("raw units") == pytest.approx(1, abs=1e-12)
    assert comparison.stability("topk SAE") < 0.99
    assert comparison.repeated("ELUDe (gap)") == 1
    assert comparison.repeated("raw units") == pytest.approx(1, abs=1e-12)
    assert comparison.repeated("topk SAE") < 0.99
    with pytest.raises(SpecError, match="there is no method 'magic'; there are ELUDe"):
        comparison.run(["magic"])
    table = write_results(comparison, rows, tmp_path).read_text()
    for method in TRIED:
        assert table.count(f"| {method} |") == 1 + 8  # what latents mean; two modes of two kinds of edits at two points
    assert (tmp_path / "toyland-pareto.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "toyland.json").read_text())) == len(rows)
    again = Comparison(comparison.work, SMALL)  # goes on where it was
    monkeypatch.setattr(Comparison, "lexicon", lambda *_: pytest.fail("done already"))
    assert again.run(TRIED) == rows


def every_method_and_seed_has_a_row(rows):
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for m in TRIED for s in SMALL.seeds]
    for row in rows:
        assert 0 <= row["clean"] <= 1
        for part in ("scale remove", "scale replace", "place remove", "place replace"):
            assert 0 <= row[part]["success"] <= 1
            assert set(row[part]["intervals"]) >= {"success", "kept", "harmonic"}
            assert row[part]["settings"]["mode"] == part.split()[0]
            assert row[part]["cleanest"]["edits"] == row[part]["edits"]


def parts_of_units_are_faithful_and_as_many_as_those_of_elude(rows):
    of = {(row["method"], row["seed"]): row for row in rows}
    for seed in SMALL.seeds:
        assert of["ELUDe (gap)", seed]["latents"] == of["k-means on contributions", seed]["latents"]
        assert of["topk SAE", seed]["latents"] == of["ELUDe (gap)", seed]["latents"]
        for method in ("ELUDe (gap)", "raw units", "k-means on contributions"):
            assert of[method, seed]["R2"] == pytest.approx(1, abs=1e-5)
            assert of[method, seed]["same captions"] == 1
        assert of["topk SAE", seed]["R2"] < 0.999
