"""Settings found for an image or a world of images, and where they are saved."""

import shutil
from dataclasses import replace
from typing import get_args

import pytest

from elude_steer import steer, toyland
from elude_steer.errors import ImageError, SpecError, StorageError
from elude_steer.evaluation.edits import Kind
from elude_steer.evaluation.edits.benchmark import Reading, World, toyland_world
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.evaluation.edits.tune import (
    GRIDS,
    TuningResult,
    default_grid,
    save_settings,
    tune,
    tune_on_image,
    tune_on_world,
)
from elude_steer.recipe_files import load_recipe
from elude_steer.steering.run_recipe import run_recipe
from elude_steer.steering.steerer import Steerer
from tests.evaluation.edits.test_sweep import BARE


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


def test_the_best_settings_for_an_image_steer_it(steerer, scene, tmp_path):
    path, word = tmp_path / "scene.png", scene.objects[0]
    scene.image.save(path)
    found = tune(steerer, path, minus=word, grid={"gamma": [1, -50], "nu": [6, "all"]})
    assert found.best == {name: found.rows[0][name] for name in ("gamma", "nu")}
    assert found.rows[0]["success"]
    assert len(found.rows) == 4
    assert steerer.steer(path, minus=[word], **found.best).caption == found.rows[0]["caption"]
    lines = repr(found).splitlines()
    assert lines[0].split() == ["gamma", "nu", "success", "kept", "caption"]
    assert lines[1].endswith(found.rows[0]["caption"])
    assert lines[-1] == f"baseline: {steerer.vlm.caption([scene.image])[0]}"
    # A list of one word, as `steer` takes it, is also allowed.
    assert tune(steerer, scene.image, minus=[word], grid={"gamma": [1, -50], "nu": [6, "all"]}) == found


def test_a_world_is_tuned_by_its_own_concepts(steerer):
    grid = {"gamma": [1, -50], **BARE}
    found = tune(steerer, toyland_world(60_003, 6), grid=grid, min_kept=0.5)
    assert found.best == {"gamma": -50, **{name: value for name, (value,) in BARE.items()}}
    assert [row["gamma"] for row in found.rows] == [-50, 1]
    assert found.notes == ()
    assert "harmonic" in repr(found).splitlines()[0]
    kept = tune(steerer, toyland_world(60_003, 6), grid=grid, by="kept")
    assert kept.best["gamma"] == 1


def test_well_formed_is_a_column_only_with_a_grammar(steerer):
    world = toyland_world(60_003, 2)
    bare = World("bare", world.cases, world.vocabulary, lambda caption: Reading(world.read(caption).objects))
    without, with_grammar = (tune(steerer, one, grid={"gamma": [-50]}) for one in (bare, world))
    assert set(with_grammar.columns) - set(without.columns) == {"well_formed"}


def test_a_note_says_if_no_point_keeps_enough(steerer):
    found = tune(steerer, toyland_world(60_003, 6), grid={"gamma": [-50]}, min_kept=1.01)
    assert found.notes == ("no point of the grid keeps 101% of everything else; the first row keeps most.",)


def test_the_default_grid_depends_on_the_mode_of_the_atlas_and_the_edit(steerer, scene):
    word = scene.objects[0]
    other = next(w for w in toyland.OBJECTS if w not in scene.objects)
    removed, replaced = tune(steerer, scene.image, minus=word), tune(steerer, scene.image, minus=word, plus=other)
    assert removed.columns[:2] == replaced.columns[:2] == ("strength", "fit")
    assert len(removed.rows) == len(replaced.rows) == 12
    assert repr(removed).splitlines()[11] == "and 2 more"
    for grid in GRIDS.values():
        assert len(grid_points(grid)) == 12
    assert tune(steerer, toyland_world(60_003, 2), kind="two").columns[:2] == ("strength", "fit")
    scaling = replace(steerer, atlas=with_mode(steerer.atlas, "scale"))
    first = [next(iter(default_grid(scaling, kind))) for kind in get_args(Kind)]
    assert first == ["gamma", "alpha", "alpha", "alpha", "gamma", "alpha"]
    assert default_grid(replace(steerer, atlas=with_mode(steerer.atlas, None)), "remove") is GRIDS["scale", "remove"]


def with_mode(atlas, mode):
    """The atlas with another default mode."""
    return replace(atlas, about={**atlas.about, "spec": {**atlas.about["spec"], "steering": {"mode": mode}}})


def test_notes_tell_about_absent_words_and_failed_edits(steerer, scene):
    absent = next(w for w in toyland.OBJECTS if w not in scene.objects)
    found = tune(steerer, scene.image, minus=absent, grid={"gamma": [1]})
    assert found.notes[1].startswith(f"the baseline does not say '{absent}'")
    undone = tune(steerer, scene.image, minus=scene.objects[0], grid={"gamma": [1], **BARE})
    assert undone.notes[1].startswith("no point of the grid achieved the edit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"name the concept to remove: tune\(steerer, image, minus='dog'\)"),
        ({"plus": "dog"}, "name the concept to remove"),
        ({"minus": "dog", "kind": "replace"}, r"so plus is needed: tune\(steerer, image, minus='dog', plus='biker'\)"),
        ({"minus": "dog", "kind": "swap"}, "kind is 'swap'; an edit is 'remove', .* 'absent' or 'add'"),
        ({"minus": ["dog", "cat"]}, "one concept at a time: minus='dog'"),
        ({"minus": 5}, "a concept is a word, not an int"),
        ({"minus": "dog", "by": "gone"}, "by is 'gone'"),
        ({"minus": "dog", "grid": {"gama": [1]}}, "Did you mean 'gamma'"),
    ],
)
def test_invalid_arguments_for_an_image_are_refused(options, message, steerer, scene):
    with pytest.raises(SpecError, match=message):
        tune(steerer, scene.image, **options)


def test_invalid_arguments_for_a_world_are_refused(steerer):
    world = toyland_world(60_003, 1)
    with pytest.raises(SpecError, match="minus and plus are for one image; a world brings its own concepts"):
        tune(steerer, world, minus="dog")
    with pytest.raises(SpecError, match="by is 'gone'"):
        tune(steerer, world, by="gone")
    with pytest.raises(SpecError, match="--scenes is 'coco:1'; write toyland:SEED"):
        tune_on_world(steerer, "remove", "coco:1", None, 2)


def test_the_best_settings_can_be_written_as_a_recipe(steerer, scene, tmp_path):
    path, written = tmp_path / "scene.png", tmp_path / "best.yaml"
    scene.image.save(path)
    grid = {"force": [True, False], "mode": ["place"], "strength": [1.5]}
    found = tune_on_image(steerer, scene.image, scene.objects[0], None, grid, write=written, path=str(path))
    recipe = load_recipe(str(written))
    assert recipe.steps[0].settings.force is found.best["force"]
    assert run_recipe(recipe, steerer)[0].result.caption == found.rows[0]["caption"]
    with pytest.raises(StorageError, match="already exists"):
        tune_on_image(steerer, scene.image, scene.objects[0], None, grid, write=written)


def test_the_best_settings_can_be_saved_in_the_atlas(steerer, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(steerer.atlas.folder, folder)
    mine = Steerer.load(str(folder))
    grid = {"strength": [0.5, 1.0], "force": [False]}
    found = tune_on_world(mine, "remove", "toyland:60003", None, 3, grid, save_to_atlas=True, plot=tmp_path / "p.png")
    assert [note.split(":")[0] for note in found.notes[-2:]] == [
        "plot of success against kept",
        "new default settings of atlas 'toyland'",
    ]
    again = Steerer.load(str(folder)).defaults
    assert {name: again[name] for name in grid} == found.best
    assert {**again, **found.best} == {**mine.defaults, **found.best}  # the others are unchanged
    with pytest.raises(StorageError, match="is shipped with the package and is read-only"):
        tune_on_world(steerer, "remove", "toyland:60003", None, 3, grid, save_to_atlas=True)


def test_a_table_is_aligned():
    found = TuningResult({"nu": 8}, [{"nu": 8, "kept": 1 / 3}, {"nu": "all", "kept": 0.5}], ("nu", "kept"), ("a note",))
    assert repr(found).splitlines() == ["nu   kept", "8    0.333", "all  0.500", "a note"]
    assert found.table(1).splitlines() == ["nu  kept", "8   0.333"]


def test_the_best_settings_of_an_image_or_a_world_work_in_steer(steerer):
    scene = next(scene for scene in toyland.scenes(seed=50_002, n=40) if len(scene.things) == 2)
    word = scene.objects[0]
    found = tune(steerer, scene.image, minus=word, grid={"fit": [0.3, 0.6], "strength": [0.0, 1.0]})
    assert len(found.rows) == 4
    assert set(found.best) == {"fit", "strength"}
    assert word not in steerer.steer(scene.image, minus=[word], **found.best).caption
    world = toyland_world(50_003, 6)
    found = tune(steerer, world, kind="remove", grid={"strength": [0, 1]}, by="clean")
    assert found.best == {"strength": 1}
    with pytest.raises(ImageError):
        tune(steerer, "nowhere.png", minus="dog")


@pytest.mark.filterwarnings("ignore:the caption did not change")
def test_steer_loads_an_atlas_again_after_its_settings_change(steerer, scene, tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(steerer.atlas.folder, folder)
    monkeypatch.chdir(tmp_path)
    minus = scene.objects[:1]
    before = steer(scene.image, minus=minus, atlas="own").plan
    assert steer(scene.image, minus=minus, atlas=str(folder)).plan == before
    save_settings(Steerer.load(folder), {"strength": 0.1})
    after = steer(scene.image, minus=minus, atlas="own").plan
    assert [plan.concepts[0].settings.strength for plan in (before, after)] == [1.0, 0.1]
