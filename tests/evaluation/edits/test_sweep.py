"""Grids of settings: their points, their scores on scenes and on one image, and the best point."""

import json
from dataclasses import replace

import numpy as np
import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.edits.benchmark import Outcome, Task, summarize, toyland_world
from elude_steer.evaluation.edits.sweep import Point, best_point, grid_points, single_image_world, sweep, try_settings

# Settings under which gamma alone decides.
BARE = {"mode": ["scale"], "kappa": [24]}


def make_point(success, kept, clean=0.0, **settings):
    outcome = Outcome(Task(0, "", "dog"), "", True, True, 1.0, (), True)
    score = summarize("remove", [outcome], rounds=2)
    harmonic = 2 * success * kept / (success + kept)
    return Point(settings, replace(score, success=success, kept=kept, clean=clean, harmonic=harmonic))


# Grids


def test_a_grid_has_every_combination_the_last_changing_fastest():
    points = grid_points({"gamma": [-15, -50], "nu": [10, "all"]})
    assert points == [{"gamma": g, "nu": n} for g in (-15, -50) for n in (10, "all")]
    assert grid_points({}) == [{}]  # the settings of the atlas


def test_numpy_values_become_plain():
    points = grid_points({"kappa": np.arange(8, 25, 8), "strength": np.linspace(1, 2, 2), "nu": range(1, 3)})
    assert json.loads(json.dumps(points)) == points
    assert [type(value) for value in points[0].values()] == [int, float, int]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"gama": [1]}, "there is no setting 'gama'. Did you mean 'gamma'"),
        ({"gamma": []}, r"gamma needs a list of values to try, not \[\]"),
        ({"gamma": -5}, "gamma needs a list of values to try, not -5"),
        ({"nu": "all"}, "nu needs a list of values to try, not 'all'"),
        ({"kappa": [8, 0]}, "kappa: must be .*, not 0"),
        ({"force": [True, 3]}, "force"),
        ({"beta": [8, 16]}, "there is no setting 'beta' any more: .*; use strength"),
    ],
)
def test_invalid_grids_are_refused(grid, message):
    with pytest.raises(SpecError, match=message):
        grid_points(grid)


# The best point


def test_the_best_point_maximizes_the_criterion_among_those_that_keep_enough():
    bold, mild, shy = make_point(1.0, 0.7, nu=1), make_point(0.8, 0.92, 0.3, nu=2), make_point(0.5, 1.0, 0.5, nu=3)
    assert best_point([bold, mild, shy]) is mild
    assert best_point([bold, mild, shy], "clean") is shy
    assert best_point([bold, mild, shy], "success", min_kept=0.5) is bold
    assert best_point([bold, mild], min_kept=0.99) is mild  # none keeps enough, so the one that keeps most
    with pytest.raises(SpecError, match="by is 'gone'; settings are ranked by harmonic, clean, success or kept"):
        best_point([bold], "gone")


# One image


def test_captions_are_read_by_whole_words_and_phrases():
    read = single_image_world(None, "A red car, and two dogs on the beach.", ["red car", "dog"]).read
    assert read("A red car, and two dogs.").objects == {"red car", "dog", "two"}
    assert read("a hotdog on a red carpet").objects == {"hotdog", "red", "carpet"}


def test_trials_equal_steering_and_are_sorted_best_first(steerer, scene):
    word = scene.objects[0]
    grid = {"gamma": [1, -50], "nu": [6, 10], **BARE}
    baseline, trials = try_settings(steerer, scene.image, word, None, grid)
    assert len(trials) == 4
    assert baseline == steerer.vlm.caption([scene.image])[0]
    for trial in trials:
        plan = steerer.plan(minus=[word], **trial.settings)
        assert trial.outcome.caption == steerer.captions([scene.image], [[plan]])[0][0]
    ranks = [(t.outcome.success, t.outcome.kept) for t in trials]
    assert ranks == sorted(ranks, reverse=True)
    assert trials[0].outcome.success
    assert trials[0].settings["gamma"] == -50
    # An edit that changes nothing keeps most.
    (first, *_) = try_settings(steerer, scene.image, word, None, grid, by="kept")[1]
    assert first.outcome.kept == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dog", "dog"), "'dog' is in minus and in plus"),
        ((" ", None), "a concept is a word"),
        (("dog", ""), "a concept is a word"),
        ((["dog"], None), "a concept is a word, not a list"),
    ],
)
def test_invalid_words_are_refused(words, message, steerer, scene):
    with pytest.raises(SpecError, match=message):
        try_settings(steerer, scene.image, *words, {"nu": [6]})


def test_a_point_that_refuses_a_word_does_nothing(steerer, scene):
    """No label is as close to another word as 1."""
    word, grid = scene.objects[0], {"mode": ["place"], "min_similarity": [1.01, 0.0]}
    baseline, trials = try_settings(steerer, scene.image, word, "puppy", grid)
    assert [t.outcome.caption == baseline for t in trials if t.settings["min_similarity"] > 1] == [True]
    with pytest.raises(SpecError, match=f"atlas 'toyland' knows nothing like '{word}'"):
        try_settings(steerer, scene.image, word, "puppy", grid | {"min_similarity": [1.01]})


def test_strength_decides_in_mode_place(steerer, scene):
    word, grid = scene.objects[0], {"mode": ["place"], "strength": [0, 1]}
    baseline, trials = try_settings(steerer, scene.image, word, None, grid)
    assert [(t.settings["strength"], t.outcome.success, t.outcome.caption == baseline) for t in trials] == [
        (1, True, False),
        (0, False, True),
    ]


# Many images


def test_a_sweep_keeps_the_order_of_its_grid_and_resumes(steerer, tmp_path, monkeypatch):
    monkeypatch.setattr("elude_steer.evaluation.result_files.ITEMS_PER_FILE", 3)
    world, progress = toyland_world(60_003, 5), []
    options = {"grid": {"gamma": [1, -50], **BARE}, "work": tmp_path, "on_progress": progress.append}
    points = sweep(steerer, world, "remove", **options)
    assert [p.settings["gamma"] for p in points] == [1, -50]
    assert points[0].score.kept == 1
    assert points[0].score.success == 0  # a gain of 1 changes nothing
    assert points[1].score.success > 0.5
    (folder,) = tmp_path.iterdir()
    parts = sorted(folder.iterdir())
    assert len(parts) == len(progress) == 2
    assert sum(progress) == points[0].score.edits
    # A missing file is made again; an existing one is read.
    parts[1].unlink()
    assert sweep(steerer, world, "remove", **options) == points
    captions = json.loads(parts[0].read_text())
    parts[0].write_text(json.dumps([[row[1], row[1]] for row in captions]))
    assert sweep(steerer, world, "remove", **options)[0].score.success > 0
    # Another grid has another folder.
    sweep(steerer, world, "remove", **options | {"grid": {"gamma": [-50]}})
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["two", "place"])
def test_two_objects_and_places_can_be_swept(kind, steerer, tmp_path):
    world = toyland_world(60_003, 12)
    off, on = sweep(steerer, world, kind, grid={"strength": [0, steerer.defaults["strength"]]}, work=tmp_path)
    assert off.score.kind == on.score.kind == kind
    assert off.score.edits == on.score.edits > 4
    assert (off.score.success, off.score.kept) == (0, 1)
    assert on.score.success > 0.3
