"""Grids of settings: their points, what they reach on scenes and on one picture, and which is best."""

import json
from dataclasses import replace

import numpy as np
import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.edits.benchmark import Outcome, Task, summarize, toyland_world
from elude_steer.evaluation.edits.sweep import Point, best_point, grid_points, single_image_world, sweep, try_settings

# A grid in which gamma alone decides: nothing fills, reaches or fits.
BARE = {"fill": [0], "reach": [0], "fit": [0], "kappa": [24]}


def point(success, kept, clean=0.0, **settings):
    outcome = Outcome(Task(0, "", "dog"), "", True, True, 1.0, (), True)
    score = summarize("remove", [outcome], rounds=2)
    harmonic = 2 * success * kept / (success + kept)
    return Point(settings, replace(score, success=success, kept=kept, clean=clean, harmonic=harmonic))


# Grids


def test_a_grid_is_every_combination_the_last_changing_fastest():
    points = grid_points({"gamma": [-15, -50], "nu": [10, "all"]})
    assert points == [{"gamma": g, "nu": n} for g in (-15, -50) for n in (10, "all")]
    assert grid_points({}) == [{}]  # the atlas's own settings


def test_values_of_numpy_become_plain():
    points = grid_points({"kappa": np.arange(8, 25, 8), "beta": np.linspace(1, 2, 2), "fill": range(2)})
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
        ({"smooth": [True, 3]}, "smooth"),
    ],
)
def test_every_value_is_checked_before_anything_runs(grid, message):
    with pytest.raises(SpecError, match=message):
        grid_points(grid)


# The best


def test_the_best_has_most_of_what_was_asked_for_among_those_that_keep_enough():
    bold, mild, shy = point(1.0, 0.7, nu=1), point(0.8, 0.92, 0.3, nu=2), point(0.5, 1.0, 0.5, nu=3)
    assert best_point([bold, mild, shy]) is mild
    assert best_point([bold, mild, shy], "clean") is shy
    assert best_point([bold, mild, shy], "success", min_kept=0.5) is bold
    assert best_point([bold, mild], min_kept=0.99) is mild  # none keeps enough: the one that keeps most
    with pytest.raises(SpecError, match="by is 'gone'; settings are ranked by harmonic, clean, success or kept"):
        best_point([bold], "gone")


# One picture


def test_words_are_read_whole_and_phrases_as_one():
    read = single_image_world(None, "A red car, and two dogs on the beach.", ["red car", "dog"]).read
    assert read("A red car, and two dogs.").objects == {"red car", "dog", "two"}
    assert read("a hotdog on a red carpet").objects == {"hotdog", "red", "carpet"}


def test_a_picture_says_what_steering_says_the_best_first(steerer, scene):
    word = scene.objects[0]
    grid = {"gamma": [1, -50], "nu": [6, 10], **BARE}
    baseline, tried = try_settings(steerer, scene.image, word, None, grid)
    assert len(tried) == 4
    assert baseline == steerer.vlm.caption([scene.image])[0]
    for one in tried:
        plan = steerer.plan(minus=[word], **one.settings)
        assert one.outcome.caption == steerer.captions([scene.image], [[plan]])[0][0]
    ranks = [(t.outcome.success, t.outcome.kept) for t in tried]
    assert ranks == sorted(ranks, reverse=True)
    assert tried[0].outcome.success
    assert tried[0].settings["gamma"] == -50
    # What keeps most is what changes nothing.
    (first, *_) = try_settings(steerer, scene.image, word, None, grid, by="kept")[1]
    assert first.outcome.kept == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("dog", "dog"), "'dog' is in minus and in plus"),
        ((" ", None), "a concept is a word"),
        (("dog", ""), "a concept is a word"),
        ((["dog"], None), "a concept is a word, not a list"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(given, message, steerer, scene):
    with pytest.raises(SpecError, match=message):
        try_settings(steerer, scene.image, *given, {"nu": [6]})


def test_a_point_without_a_place_for_the_new_word_does_nothing(steerer, scene):
    """With all sub-units both words have the same, and none is left to say where."""
    word, every = scene.objects[0], len(steerer.atlas)
    grid = {"mode": ["place"], "by": ["label"], "kappa": [every, 8]}
    baseline, tried = try_settings(steerer, scene.image, word, "zebra", grid)
    assert [t.outcome.caption == baseline for t in tried if t.settings["kappa"] == every] == [True]
    with pytest.raises(SpecError, match="nothing says where to place"):
        try_settings(steerer, scene.image, word, "zebra", grid | {"kappa": [every]})


# Many pictures


def test_a_sweep_is_in_the_order_of_its_grid_and_goes_on_where_it_was(steerer, tmp_path, monkeypatch):
    monkeypatch.setattr("elude_steer.evaluation.edits.sweep._PICTURES", 3)
    world, told = toyland_world(60_003, 5), []
    given = {"grid": {"gamma": [1, -50], **BARE}, "work": tmp_path, "step": told.append}
    points = sweep(steerer, world, "remove", **given)
    assert [p.settings["gamma"] for p in points] == [1, -50]
    assert points[0].score.kept == 1
    assert points[0].score.success == 0  # times 1 is no edit
    assert points[1].score.success > 0.5
    (folder,) = tmp_path.iterdir()
    parts = sorted(folder.iterdir())
    assert len(parts) == len(told) == 2
    assert sum(told) == points[0].score.edits
    # A part that is missing is made again; one that is there is not.
    parts[1].unlink()
    assert sweep(steerer, world, "remove", **given) == points
    said = json.loads(parts[0].read_text())
    parts[0].write_text(json.dumps([[own[1], own[1]] for own in said]))
    assert sweep(steerer, world, "remove", **given)[0].score.success > 0
    # Another grid is another work.
    sweep(steerer, world, "remove", **given | {"grid": {"gamma": [-50]}})
    assert len(list(tmp_path.iterdir())) == 2
