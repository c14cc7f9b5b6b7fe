from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from elude_steer.errors import EludeSteerError, ImageError, SpecError
from elude_steer.recipe_files import load_recipe
from elude_steer.specs import ExpectSpec, Recipe, SteeringSpec, StepSpec
from elude_steer.steering.run_recipe import (
    StepResult,
    format_table,
    run_recipe,
    step_settings,
    step_title,
    unmet_expectations,
)

DOG = "demos/images/toyland-dog.png"


def step(gone=(), new=(), **more):
    return StepSpec(expect=ExpectSpec(tuple(gone), tuple(new)), **more)


def step_result(title_words, caption, baseline="a dog"):
    return StepResult(StepSpec(minus=tuple(title_words)), SimpleNamespace(baseline=baseline, caption=caption), ())


# Expectations


@pytest.mark.parametrize(
    ("gone", "new", "caption", "problems"),
    [
        ([], [], "anything at all", ()),
        (["dog"], [], "a man on a bike", ()),
        (["dog"], [], "a dog on a bike", ("'dog' is still there",)),
        (["dog"], [], "A Dog.", ("'dog' is still there",)),
        (["Dog"], [], 'so it says "dog"!', ("'Dog' is still there",)),
        (["dog"], [], "dogs, hotdogs and a dog-shaped cloud", ()),
        (["dog"], [], "the dog's bowl", ("'dog' is still there",)),
        (["dog", "cat"], [], "a cat; a dog", ("'dog' is still there", "'cat' is still there")),
        ([], ["rider", "man"], "a man.", ()),
        ([], ["rider", "man"], "a woman", ("none of 'rider', 'man' came",)),
        ([], ["dog-shaped"], "a dog-shaped balloon", ()),
        ([], ["clean wall"], "a train before a clean wall", ()),
        (["clean wall"], [], "a clean wall, a train", ("'clean wall' is still there",)),
        ([], ["clean wall"], "a wall that is clean", ("'clean wall' did not come",)),
        (["dog"], ["man"], "a dog", ("'dog' is still there", "'man' did not come")),
        (["a.c"], [], "abc", ()),
        (["dog"], ["man"], "", ("'man' did not come",)),
    ],
)
def test_unmet_expectations(gone, new, caption, problems):
    assert unmet_expectations(step(gone, new), caption) == problems


# Steps


def test_the_title_of_a_step():
    assert step_title(StepSpec(minus=("dog", "hot dog"), plus=("biker",))) == "-dog -hot dog +biker"
    assert step_title(StepSpec()) == "no edit"
    settings = SteeringSpec(kappa=6, fit=0.5, force=False)
    assert step_title(StepSpec(minus=("dog",), settings=settings)) == "-dog (fit 0.5, not force, kappa 6)"


def test_step_settings_are_those_that_the_step_names():
    assert step_settings(StepSpec()) == {}
    settings = SteeringSpec(mode="scale", gamma=0.0, nu="all", kappa=3)
    assert step_settings(StepSpec(settings=settings)) == {"mode": "scale", "gamma": 0.0, "nu": "all", "kappa": 3}


def test_the_table_has_a_row_for_each_edit():
    rows = [step_result(["dog"], "a bike"), step_result(["motorcycle"], "a dog on a road")]
    assert format_table(rows).splitlines() == [
        "baseline     a dog",
        "-dog         a bike",
        "-motorcycle  a dog on a road",
    ]
    assert format_table([]).strip() == "baseline"


# Running


class Echo:
    """A steerer that records its calls and answers with fixed captions."""

    def __init__(self):
        self.calls, self.plan_calls = [], []

    def plan(self, **call):
        self.plan_calls.append(call)
        return len(self.plan_calls)

    def explain_all(self, image, plans, **call):
        self.calls.append((image, plans, call))
        captions = [f"caption {number} with a man" for number in plans]
        return [SimpleNamespace(baseline="a dog", caption=caption, to_dict=dict) for caption in captions]


def test_each_step_edits_the_same_image(tmp_path):
    path = tmp_path / "own.png"
    Image.new("RGB", (7, 5)).save(path)
    steps = (
        StepSpec(minus=("dog",), settings=SteeringSpec(gamma=-3.0), expect=ExpectSpec(("man",))),
        StepSpec(plus=("cat",), where=(1.0, 2.0, 3.0, 4.0)),
    )
    recipe = Recipe("mine", "toyland", steps, str(path), "What is it?", 9)
    steerer = Echo()
    first, second = run_recipe(recipe, steerer)
    assert [(one.title, one.missing) for one in (first, second)] == [
        ("-dog (gamma -3)", ("'man' is still there",)),
        ("+cat", ()),
    ]
    ((image, plans, call),) = steerer.calls  # the tower runs once for all steps
    assert image.size == (7, 5)
    assert plans == [1, 2]
    assert call == {"prompt": "What is it?", "max_new_tokens": 9}
    first_call, other = steerer.plan_calls
    assert first_call == {"minus": ("dog",), "plus": (), "where": None, "gamma": -3.0}
    assert other["where"] == (1.0, 2.0, 3.0, 4.0)
    assert "gamma" not in other
    assert first.to_dict()["step"]["minus"] == ("dog",)


def test_an_image_argument_replaces_the_image_of_the_recipe():
    recipe = Recipe("mine", "toyland", (StepSpec(minus=("dog",)),), "/nowhere.png")
    steerer = Echo()
    run_recipe(recipe, steerer, Image.new("RGB", (3, 2)))
    assert steerer.calls[0][0].size == (3, 2)
    with pytest.raises(ImageError, match=r"'/nowhere.png' cannot be read"):
        run_recipe(recipe, steerer)


def test_a_recipe_without_an_image_explains_how_to_give_one():
    recipe = Recipe("llava-dog", "toyland", (StepSpec(minus=("dog",)),))
    with pytest.raises(SpecError, match="has no image; give one: `elude-steer run llava-dog --image FILE`"):
        run_recipe(recipe, Echo())


# Masks


@pytest.fixture
def masked(tmp_path):
    """A recipe with a mask beside it, and the mask."""
    mask = np.zeros((96, 96), bool)
    mask[5:50, 10:60] = True
    Image.fromarray(mask).save(tmp_path / "mark.png")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\natlas: toyland\nsteps:\n"
        "  - {minus: [dog], plus: [biker], mask: mark.png}\n  - {minus: [dog], plus: [biker], where: [10, 5, 60, 50]}\n"
    )
    return path, mask


def test_a_mask_of_a_recipe_works_like_a_mask_argument(steerer, masked):
    path, mask = masked
    by_file, by_box = run_recipe(load_recipe(path), steerer, DOG)
    by_hand = steerer.steer(DOG, minus=["dog"], plus=["biker"], where=mask)
    assert by_file.result.plan == by_hand.plan
    assert by_file.result.caption == by_hand.caption
    assert by_file.to_dict()["step"]["mask"] == str(path.parent / "mark.png")
    # A mask of a box says the same as the box.
    assert by_box.result.caption == by_file.result.caption
    for word, (_, touched) in by_file.result.maps.items():
        assert np.array_equal(touched, by_box.result.maps[word][1])


def test_empty_or_unreadable_masks_are_refused(steerer, masked):
    path, _ = masked
    mark = path.parent / "mark.png"
    Image.new("1", (9, 9)).save(mark)
    with pytest.raises(SpecError, match="the mask marks nothing; make the region white"):
        run_recipe(load_recipe(path), steerer, DOG)
    mark.write_text("no image")
    with pytest.raises(ImageError, match=r"mark\.png' cannot be read as an image"):
        run_recipe(load_recipe(path), steerer, DOG)


def test_a_missing_mask_file_is_named(steerer, masked):
    path, _ = masked
    (path.parent / "mark.png").unlink()
    with pytest.raises(EludeSteerError, match=r"mark\.png"):
        run_recipe(load_recipe(path), steerer, DOG)
