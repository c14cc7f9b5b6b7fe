import pytest

from elude_steer.evaluation.benchmarks.options import BenchmarkOptions
from elude_steer.evaluation.benchmarks.rows import erasing_rows, known_words, sparing_rows
from elude_steer.evaluation.benchmarks.untouched import run_absent, run_side_effects
from elude_steer.evaluation.edits.fluency import repetition

FORCED = "edit, without the gate"
SCALE = {"mode": "scale", "gamma": -50.0}


def test_repetition_counts_pairs_of_words():
    assert repetition("a dog and a dog and a cat") == pytest.approx(3 / 7)
    assert repetition("a dog on a street") == 0
    assert repetition("dog") == repetition("") == 0


def test_the_gate_spares_images_without_the_class(steerer, toyland_data):
    result = run_absent(steerer, toyland_data, BenchmarkOptions(limit=16, seed=4))
    assert [row.row for row in result.rows] == [
        "unsteered", "edit", FORCED, "random direction, without the gate",
    ]  # fmt: skip
    assert {row.group for row in result.rows} == {"a random class that is absent"}
    group = result.rows[0].group
    assert result.value("unsteered", group, "changed").value == 0
    assert result.value("edit", group, "changed").value <= 0.2
    assert result.value(FORCED, group, "changed").value >= result.value("edit", group, "changed").value
    assert result.value("edit", group, "kept").value >= 0.9


def test_side_effects_of_the_papers_mode_are_larger(steerer, toyland_data):
    place, scale = (
        run_side_effects(steerer, toyland_data, BenchmarkOptions(("dog",), settings=settings, limit=10))
        for settings in ({}, SCALE)
    )
    group = "without dog"
    assert place.value("unsteered", group, "KL").value == 0
    assert place.value("edit", group, "KL").value < scale.value("edit", group, "KL").value
    assert scale.value("random sub-units", group, "KL").value > 0
    assert scale.value("edit", group, "perplexity").value >= scale.value("unsteered", group, "perplexity").value > 1
    assert all(0 <= row.values["repetition"].value <= 1 for row in (*place.rows, *scale.rows))


def test_controls_change_as_much_but_something_else(steerer):
    options = BenchmarkOptions(("dog",), settings=SCALE, seed=3)
    rows = {row.name: row for row in erasing_rows(steerer, ["dog", "cat", "bus"], {"dog"}, options)}
    assert list(rows) == ["unsteered", "edit", "random sub-units", "another word (cat)"]
    assert rows["unsteered"].plan(("dog",)) is None
    edit, random = rows["edit"].plan(("dog",)), rows["random sub-units"].plan(("dog",))
    assert [e.amount for e in edit.edits] == [e.amount for e in random.edits]
    assert not {e.sub_unit for e in edit.edits} & {e.sub_unit for e in random.edits}
    assert rows["another word (cat)"].plan(("dog",)).words("minus") == ("cat",)
    assert known_words(steerer, ["zebra crossing", "cat"], {"min_similarity": 0.99}) == ["cat"]
    placed = sparing_rows(steerer, BenchmarkOptions(("dog",)))[-1].steerer.atlas.require_calibration()
    own = steerer.atlas.require_calibration()
    lengths = [calibration.directions.float().norm(dim=1) for calibration in (own, placed)]
    assert lengths[1].tolist() == pytest.approx(lengths[0].tolist(), rel=1e-3)
    cosines = (own.directions.float() * placed.directions).sum(1) / lengths[0] ** 2
    assert cosines.abs().max() < 0.5
    assert len(erasing_rows(steerer, ["cat"], {"dog"}, BenchmarkOptions(("dog",), controls=False))) == 2
