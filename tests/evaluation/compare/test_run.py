"""The comparison of methods, at a size that takes a minute."""

import json
from dataclasses import replace

import pytest

from elude_steer.errors import SpecError, StorageError
from elude_steer.evaluation.compare.methods import METHODS, SMALL, find_methods
from elude_steer.evaluation.compare.run import Comparison
from elude_steer.evaluation.compare.table import write_results

NAMES = (
    "ELUDe (gap)",
    "raw units",
    "k-means on contributions",
    "topk SAE",
    "difference of means (supervised)",
    "DPCiCNN (supervised)",
)
SIZE = replace(SMALL, scenes=4, ms_scenes=12, tuning_scenes=3, edited_scenes=4)


def test_a_folder_belongs_to_a_comparison_of_one_size(tmp_path):
    Comparison(tmp_path, SMALL)._check_work()
    Comparison(tmp_path, SMALL)._check_work()
    size = json.loads((tmp_path / "size.json").read_text())
    (tmp_path / "size.json").write_text(json.dumps({**size, "methods": size["methods"][:-1]}))  # before one was added
    Comparison(tmp_path, SMALL)._check_work()
    with pytest.raises(SpecError, match=r"holds a comparison of another size.*; give another folder: --work"):
        Comparison(tmp_path).run()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_size_is_named(text, tmp_path):
    (tmp_path / "size.json").write_text(text)
    with pytest.raises(StorageError, match=r"size\.json' is damaged; delete it and run the same command again"):
        Comparison(tmp_path, SMALL)._check_work()


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"method": "none", "seed": 1}]', '[{"method": "raw units"}]'])
def test_damaged_results_of_an_earlier_run_are_named(text, tmp_path):
    (tmp_path / "toyland.json").write_text(text)
    with pytest.raises(StorageError, match=r"toyland\.json' is damaged; delete it and run the same command again"):
        write_results(SIZE, [{"method": "raw units", "seed": 0, "latents": 1}], tmp_path)


def test_damaged_costs_are_named(tmp_path):
    comparison, raw = Comparison(tmp_path, SIZE), METHODS["raw units"]
    path = comparison._cost_path(raw, 0)
    path.parent.mkdir(parents=True)
    path.write_text('"long"')
    with pytest.raises(StorageError, match="is damaged; delete it"), comparison._count_cost(raw, 0):
        pass


def test_a_small_comparison(tmp_path, monkeypatch):
    """One test, so that one process does the work."""
    comparison = Comparison(tmp_path / "work", SIZE)
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
    table = write_results(SIZE, rows, tmp_path).read_text()
    for name in NAMES:
        assert table.count(f"| {name} |") == 1 + 4  # what latents mean; two modes of two kinds of edits
    assert (tmp_path / "toyland-pareto.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "toyland.json").read_text())) == len(rows)
    check_that_one_part_of_the_results_can_be_made_alone(comparison, rows, tmp_path)
    resumed = Comparison(comparison.work, SIZE)
    monkeypatch.setattr(Comparison, "label", lambda *_: pytest.fail("this was done before"))
    assert resumed.run(methods) == rows


def check_that_every_method_and_seed_has_a_row(rows):
    assert [(row["method"], row["seed"]) for row in rows] == [(name, seed) for name in NAMES for seed in SIZE.seeds]
    for row in rows:
        assert 0 <= row["clean"] <= 1
        supervised = row["method"].startswith("difference of means")
        assert len(row["edits"]) == (4 if supervised else 6)
        for name, score in row["edits"].items():
            assert name.split()[0] == score["settings"]["mode"]
            assert set(score["intervals"]) >= {"success", "kept", "invented", "clean"}
            assert score["border"] == []  # a grid of one point has none
            assert ("absent" in score) == ("remove" in name)
            if "absent" in score:
                assert score["absent"]["kind"] == "absent"
                assert score["absent"]["edits"] >= score["edits"]


def check_that_one_part_of_the_results_can_be_made_alone(comparison, rows, out):
    raw, seed = METHODS["raw units"], SIZE.seeds[0]
    (edits,) = comparison.run([raw], [seed], ["edits"])
    (whole,) = (row for row in rows if (row["method"], row["seed"]) == ("raw units", seed))
    assert edits == {"method": "raw units", "seed": seed, "edits": whole["edits"]}
    before = json.loads((out / "toyland.json").read_text())
    changed = {**edits, "edits": {**edits["edits"], "place remove": {**edits["edits"]["place remove"], "kept": 0.125}}}
    write_results(SIZE, [changed], out)
    for old, new in zip(before, json.loads((out / "toyland.json").read_text()), strict=True):
        if (old["method"], old["seed"]) == ("raw units", seed):
            assert new.pop("edits")["place remove"]["kept"] == 0.125
            old.pop("edits")
        assert new == old


def check_that_splits_are_faithful_and_have_as_many_parts_as_elude(rows):
    found = {(row["method"], row["seed"]): row for row in rows}
    for seed in SIZE.seeds:
        assert found["ELUDe (gap)", seed]["latents"] == found["k-means on contributions", seed]["latents"]
        assert found["DPCiCNN (supervised)", seed]["R2"] == pytest.approx(1, abs=1e-9)
        assert found["topk SAE", seed]["latents"] == found["ELUDe (gap)", seed]["latents"]
        for name in ("ELUDe (gap)", "raw units", "k-means on contributions"):
            assert found[name, seed]["R2"] == pytest.approx(1, abs=1e-5)
            assert found[name, seed]["same captions"] == 1
        assert found["topk SAE", seed]["R2"] < 0.999
