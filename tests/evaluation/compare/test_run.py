"""The comparison of methods, at a size that takes a minute."""

import json

import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.compare.methods import METHODS, SMALL, find_methods
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.evaluation.compare.table import write_results

NAMES = ("ELUDe (gap)", "raw units", "k-means on contributions", "topk SAE", "difference of means (supervised)")


def test_a_folder_belongs_to_a_comparison_of_one_size(tmp_path):
    Comparison(tmp_path, SMALL)._check_work()
    Comparison(tmp_path, SMALL)._check_work()
    with pytest.raises(SpecError, match=r"holds a comparison of another size.*; give another folder: --work"):
        Comparison(tmp_path).run()


def test_a_small_comparison(tmp_path, monkeypatch):
    """One test, so that one process does the work."""
    comparison = Comparison(tmp_path / "work", SMALL)
    methods = find_methods(NAMES)
    rows = comparison.run(methods)
    check_that_every_method_and_seed_has_a_row(rows)
    check_that_splits_are_faithful_and_have_as_many_parts_as_elude(rows)
    raw, sae, elude = METHODS["raw units"], METHODS["topk SAE"], METHODS["ELUDe (gap)"]
    assert comparison.stability_across_draws(raw) == pytest.approx(1, abs=1e-12)
    assert comparison.stability_across_draws(sae) < 0.99
    assert comparison.stability_across_runs(elude) == 1
    assert comparison.stability_across_runs(raw) == pytest.approx(1, abs=1e-12)
    assert comparison.stability_across_runs(sae) < 0.99
    table = write_results(comparison, rows, tmp_path).read_text()
    for name in NAMES:
        assert table.count(f"| {name} |") == 1 + 8  # what latents mean; two modes of two kinds of edits at two points
    assert (tmp_path / "toyland-pareto.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "toyland.json").read_text())) == len(rows)
    resumed = Comparison(comparison.work, SMALL)
    monkeypatch.setattr(Comparison, "label", lambda *_: pytest.fail("this was done before"))
    assert resumed.run(methods) == rows


def check_that_every_method_and_seed_has_a_row(rows):
    assert [(row["method"], row["seed"]) for row in rows] == [(name, seed) for name in NAMES for seed in SMALL.seeds]
    for row in rows:
        assert 0 <= row["clean"] <= 1
        for part in ("scale remove", "scale replace", "place remove", "place replace"):
            assert 0 <= row[part]["success"] <= 1
            assert set(row[part]["intervals"]) >= {"success", "kept", "harmonic"}
            assert row[part]["settings"]["mode"] == part.split()[0]
            assert row[part]["cleanest"]["edits"] == row[part]["edits"]


def check_that_splits_are_faithful_and_have_as_many_parts_as_elude(rows):
    found = {(row["method"], row["seed"]): row for row in rows}
    for seed in SMALL.seeds:
        assert found["ELUDe (gap)", seed]["latents"] == found["k-means on contributions", seed]["latents"]
        assert found["topk SAE", seed]["latents"] == found["ELUDe (gap)", seed]["latents"]
        for name in ("ELUDe (gap)", "raw units", "k-means on contributions"):
            assert found[name, seed]["R2"] == pytest.approx(1, abs=1e-5)
            assert found[name, seed]["same captions"] == 1
        assert found["topk SAE", seed]["R2"] < 0.999
