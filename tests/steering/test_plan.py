import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elude_steer.errors import ImageError, SpecError
from elude_steer.steering.plan import Concept, Edit, Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings


def grid(rows, columns):
    """Patches of one tile over the whole picture, `(1, rows * columns, 4)`."""
    at = [(c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r in range(rows) for c in range(columns)]
    return np.array([at])


def covered(where, rows=2, columns=2, size=(100, 100)):
    return (
        Region.from_value(where).covered_patches(grid(rows, columns), size).reshape(rows, columns).astype(int).tolist()
    )


def edit(sub_unit=3, kind="scale", amount=-15.0, via="dog", similarity=1.0):
    return Edit(sub_unit, sub_unit // 2, kind, amount, "puppy", via, similarity, 2.5)


def concept(*edits, word="dog", role="minus", **how):
    return Concept(word, role, merge_settings(how), edits)


# Regions


def test_no_region_stays_none_and_a_region_itself():
    region = Region.from_value((1, 2, 3, 4))
    assert Region.from_value(None) is None
    assert Region.from_value(region) is region


@pytest.mark.parametrize("box", [(0, 0, 50, 50), [0, 0, 50.0, 50], np.array([0, 0, 50, 50])], ids=repr)
def test_a_box_covers_the_patches_in_it(box):
    assert Region.from_value(box) == Region(box=(0.0, 0.0, 50.0, 50.0))
    assert covered(box) == [[1, 0], [0, 0]]
    assert covered(box, size=(50, 100)) == [[1, 1], [0, 0]]


def test_half_of_a_patch_is_enough_and_less_is_not():
    assert covered((0, 0, 75, 100)) == [[1, 1], [1, 1]]
    assert covered((0, 0, 74, 100)) == [[1, 0], [1, 0]]
    # 0.3 of ten columns is not exactly three of them in floating point
    assert covered((0, 0, 35, 100), 1, 10) == [[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]


def test_of_a_region_smaller_than_a_patch_the_best_counts():
    assert covered((60, 10, 70, 20)) == [[0, 1], [0, 0]]
    assert covered((45, 10, 60, 20)) == [[0, 1], [0, 0]]
    assert covered((45, 45, 55, 55)) == [[1, 1], [1, 1]]  # all equally


def test_a_box_may_reach_over_the_border_but_not_lie_outside():
    assert covered((-50, -50, 50, 50)) == [[1, 0], [0, 0]]
    assert covered((50, 0, 900, 900)) == [[0, 1], [0, 1]]
    for box in [(200, 200, 300, 300), (100, 0, 120, 50), (-9, 0, 0, 50)]:
        with pytest.raises(SpecError, match=r"the box \(.*\) lies outside the image, which is 100 x 80 pixels\."):
            Region.from_value(box).covered_patches(grid(2, 2), (100, 80))


def test_patches_over_the_padding_of_a_tile():
    boxes = np.array([[[0, -0.5, 1, 0], [0, 0, 1, 0.5], [0, 0.5, 1, 1], [0, 1, 1, 1.5]]])
    for where in [(0, 0, 100, 100), np.ones((3, 3))]:
        assert Region.from_value(where).covered_patches(boxes, (100, 100)).tolist() == [[False, True, True, False]]


def test_of_a_patch_on_the_edge_counts_what_shows_the_picture():
    boxes = np.array([[[0, -0.6, 1, 0.4], [0, 0.4, 1, 1]]])
    for where in [(0, 0, 100, 100), np.ones((3, 3))]:
        assert Region.from_value(where).covered_patches(boxes, (100, 100)).tolist() == [[True, True]]


MASK = np.array([[0, 0, 1], [0, 1, 1]])


@pytest.mark.parametrize(
    "mask",
    [
        MASK, MASK.astype(bool), MASK.astype(np.uint8), MASK.astype(np.uint8) * 255, MASK * 0.2, MASK - 1.0 + MASK,
        MASK.tolist(), Image.fromarray(MASK.astype(np.uint8) * 255), Image.fromarray(MASK.astype(bool)),
        Image.fromarray(MASK.astype(np.uint8) * 200).convert("RGB"),
    ],
)  # fmt: skip
def test_masks_of_every_kind_mean_the_same(mask):
    assert Region.from_value(mask) == Region(mask=("001", "011"))
    assert covered(mask, 2, 3) == MASK.tolist()


@pytest.mark.parametrize("name", ["mask.png", "with space.png", "1,2,3,4"])
@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF"])
def test_a_mask_may_be_a_file(tmp_path, name, format):
    Image.fromarray(MASK.astype(np.uint8) * 255).save(tmp_path / name, format)
    assert Region.from_value(tmp_path / name) == Region.from_value(str(tmp_path / name)) == Region.from_value(MASK)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_a_file_of_any_mode_means_what_the_picture_does(tmp_path, mode):
    picture = Image.fromarray(MASK.astype(np.uint8) * 255).convert(mode)
    picture.save(tmp_path / "mask.png")
    assert Region.from_value(tmp_path / "mask.png") == Region.from_value(picture) == Region.from_value(MASK)


def test_a_file_is_found_from_the_folder_one_is_in(tmp_path, monkeypatch):
    Image.fromarray(MASK.astype(bool)).save(tmp_path / "mask.png")
    monkeypatch.chdir(tmp_path)
    assert Region.from_value("mask.png") == Region.from_value(Path("mask.png")) == Region.from_value(MASK)


def test_a_file_that_holds_no_mask(tmp_path):
    path = tmp_path / "mask.png"
    path.write_text("1,2,3,4")
    with pytest.raises(ImageError, match=r"mask\.png' cannot be read as an image: no image in a format"):
        Region.from_value(path)
    Image.new("RGB", (3, 3)).save(path)
    with pytest.raises(SpecError, match="the mask marks nothing; make the region white"):
        Region.from_value(str(path))
    with pytest.raises(SpecError, match=r"^where is a box"):
        Region.from_value(tmp_path)  # a folder


def test_greys_count_from_half_of_the_brightest():
    mask = np.array([[0, 60, 130, 240]], dtype=np.uint8)
    assert Region.from_value(mask).mask == ("0011",)
    assert Region.from_value(Image.fromarray(mask)).mask == ("0011",)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 0]], [[1, 1, 1, 1, 0, 0, 0, 0]]),
        ([[0, 1]], [[0, 0, 0, 0, 1, 1, 1, 1]]),
        ([[0, 1, 0]], [[0, 0, 0, 1, 1, 0, 0, 0]]),
        ([[1] * 7 + [0] * 9], [[1, 1, 1, 1, 0, 0, 0, 0]]),
        ([[1] * 6 + [0] * 10], [[1, 1, 1, 0, 0, 0, 0, 0]]),
    ],
)
def test_a_mask_is_stretched_over_the_picture_whatever_its_size(mask, expected):
    assert covered(np.array(mask), 1, 8) == expected


@settings(deadline=None)
@given(st.tuples(*[st.integers(0, 12)] * 4), st.integers(1, 6), st.integers(1, 6))
def test_a_mask_of_a_box_covers_what_the_box_does(corners, rows, columns):
    left, right = sorted(corners[:2])
    top, bottom = sorted(corners[2:])
    if left == right or top == bottom:
        return
    mask = np.zeros((12, 12), bool)
    mask[top:bottom, left:right] = True
    assert covered(mask, rows, columns, (12, 12)) == covered((left, top, right, bottom), rows, columns, (12, 12))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), *[st.integers(1, 6)] * 4)
def test_a_mask_equals_itself_drawn_pixel_by_pixel(seed, rows, columns, high, wide):
    mask = np.random.default_rng(seed).random((high, wide)) < 0.5
    if not mask.any():
        return
    large = mask.repeat(60 // high, 0).repeat(60 // wide, 1)
    share = large.reshape(rows, 60 // rows, columns, 60 // columns).mean((1, 3))
    got = Region.from_value(mask)._share(grid(rows, columns), (60, 60)).reshape(rows, columns)
    np.testing.assert_allclose(got, share, atol=1e-9)


@pytest.mark.parametrize(
    "where",
    [
        "10,10,20,20", Path("no-such-mask.png"), 5,
        [0, 0, 5], [], [[1, 2], [3]], ["a", "b", "c", "d"], np.ones((2, 2, 3)), np.array([["a"]]),
        np.ones((0, 4)),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_neither_box_nor_mask(where):
    with pytest.raises(SpecError, match=r"^where is a box \(left, top, right, bottom in pixels\), a mask, or the file"):
        Region.from_value(where)


@pytest.mark.parametrize("box", [(5, 5, 5, 9), (9, 0, 5, 9), (0, 0, float("nan"), 5), (0, 0, float("inf"), 5)])
def test_empty_boxes(box):
    with pytest.raises(SpecError, match=r"^the box \(.*\) is empty; give left, top, right, bottom in pixels\.$"):
        Region.from_value(box)


@pytest.mark.parametrize("mask", [np.zeros((4, 4)), np.full((2, 2), np.nan), Image.new("1", (3, 3)), [[0, 0]]])
def test_masks_that_mark_nothing(mask):
    with pytest.raises(SpecError, match="the mask marks nothing; make the region white"):
        Region.from_value(mask)


# Plans

PLANS = {
    "empty": Plan(),
    "scaled": Plan(
        (concept(edit(), edit(4)), concept(edit(7, amount=3.0), word="cat", role="plus")), None, "toy", "ab"
    ),
    "placed": Plan(
        (concept(edit(1, "set", 8.25), role="plus", mode="place"),), Region.from_value((1, 2, 3, 4)), "toy", "ab"
    ),
    "masked": Plan(
        (concept(edit(1, "set", 8.25), role="plus", mode="place"),), Region.from_value(np.eye(3)), "toy", "ab"
    ),
    "no edits": Plan((concept(word="zebra"),), None, "toy", "ab"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_survives_json(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.key == plan.key


def test_plans_that_differ_have_other_keys():
    plan = PLANS["scaled"]
    others = [
        *PLANS.values(),
        replace(plan, where=Region.from_value((1, 2, 3, 4))),
        replace(plan, where=Region.from_value((1, 2, 3, 5))),
        replace(plan, weights="cd"),
        replace(plan, concepts=plan.concepts[:1]),
        replace(plan, concepts=plan.concepts[::-1]),
        replace(plan, concepts=(concept(edit(), edit(4), nu="all"), plan.concepts[1])),
        replace(plan, concepts=(concept(edit(), edit(4, amount=2.0)), plan.concepts[1])),
    ]
    assert len({one.key for one in others}) == len(set(others)) == len(others)


def test_equal_plans_are_one_whatever_their_numbers_were_written_as():
    one, other = (Plan((concept(edit(), gamma=g, min_similarity=m),)) for g, m in [(-3, 0), (-3.0, 0.0)])
    assert one == other
    assert one.key == other.key


def test_what_a_plan_holds():
    plan = PLANS["scaled"]
    assert [one.sub_unit for one in plan.edits] == [3, 4, 7]
    assert (plan.words("minus"), plan.words("plus")) == (("dog",), ("cat",))
    assert (Plan().edits, Plan().words("minus")) == ((), ())


def test_a_gain_of_one_changes_nothing_and_a_set_always_may():
    assert not Plan().has_effect
    assert not PLANS["no edits"].has_effect
    assert not Plan((concept(edit(amount=1.0)),)).has_effect
    assert Plan((concept(edit(amount=1.0), edit(4, amount=0.0)),)).has_effect
    assert Plan((concept(edit(kind="set", amount=1.0)),)).has_effect


def test_a_plan_folds_where_every_patch_is_scaled():
    every, some = concept(edit(), nu="all"), concept(edit(), nu=50)
    placed = concept(edit(kind="set"), nu="all", role="plus", mode="place")
    assert Plan((every,)).is_linear
    assert Plan((every, concept(word="zebra", nu=3))).is_linear  # a word without sub-units does nothing
    assert Plan().is_linear
    for plan in (Plan((some,)), Plan((every, some)), Plan((placed,)), Plan((every, placed))):
        assert not plan.is_linear


def test_a_plan_says_what_it_will_do():
    many = [edit(i, via=f"word{i}", similarity=0.9 - i / 10) for i in range(6)]
    plan = Plan(
        (
            concept(edit(1), edit(2), edit(3, via="puppy", similarity=0.81), gamma=-10, nu=25, per="image"),
            concept(*many, word="hat", nu="all"),
            concept(edit(9, "set", 8.0, "cat"), word="cat", role="plus", mode="place", beta=4),
            concept(edit(10, "scale", 8.0, "cow"), word="cow", role="plus", alpha=8, nu=1),
        )
    )
    assert str(plan).splitlines() == [
        "-dog: 3 sub-units times -10 on 25 patches an image",
        "  2 by 'dog' (1.00), 1 by 'puppy' (0.81)",
        "-hat: 6 sub-units times -15 on every patch",
        "  1 by 'word0' (0.90), 1 by 'word1' (0.80), 1 by 'word2' (0.70), 1 by 'word3' (0.60) and 2 more words",
        "+cat: 1 sub-unit set to 4 x reference on a region of 50 patches a tile",
        "  1 by 'cat' (1.00)",
        "+cow: 1 sub-unit times 8 on 1 patch a tile",
        "  1 by 'cow' (1.00)",
    ]


def test_an_empty_plan_and_a_word_without_sub_units():
    assert str(Plan()) == "nothing is changed"
    assert str(PLANS["no edits"]) == "-zebra: 0 sub-units times -15 on 50 patches a tile"
