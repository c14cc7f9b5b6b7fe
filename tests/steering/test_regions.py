"""Regions: boxes and masks that the user marks, and the strongest patches."""

from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from elude_steer.errors import ImageError, SpecError
from elude_steer.steering.regions import (
    Region,
    cover_block,
    find_connected_region,
    find_free_blocks,
    measure_claims,
    overview_tile,
    patches_inside,
    strongest_mask,
)


def grid(rows, columns):
    """Patches of one tile over the whole image, `(1, rows * columns, 4)`."""
    at = [(c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r in range(rows) for c in range(columns)]
    return np.array([at])


def covered(where, rows=2, columns=2, size=(100, 100)):
    return (
        Region.from_value(where).covered_patches(grid(rows, columns), size).reshape(rows, columns).astype(int).tolist()
    )


# Boxes and masks


def test_none_and_regions_pass_through_from_value():
    region = Region.from_value((1, 2, 3, 4))
    assert Region.from_value(None) is None
    assert Region.from_value(region) is region


@pytest.mark.parametrize("box", [(0, 0, 50, 50), [0, 0, 50.0, 50], np.array([0, 0, 50, 50])], ids=repr)
def test_a_box_covers_the_patches_inside_it(box):
    assert Region.from_value(box) == Region(box=(0.0, 0.0, 50.0, 50.0))
    assert covered(box) == [[1, 0], [0, 0]]
    assert covered(box, size=(50, 100)) == [[1, 1], [0, 0]]


def test_a_patch_counts_from_half_of_its_area():
    assert covered((0, 0, 75, 100)) == [[1, 1], [1, 1]]
    assert covered((0, 0, 74, 100)) == [[1, 0], [1, 0]]
    # 0.3 of ten columns is not exactly three of them in floating point
    assert covered((0, 0, 35, 100), 1, 10) == [[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]


def test_a_region_smaller_than_a_patch_covers_the_best_patch():
    assert covered((60, 10, 70, 20)) == [[0, 1], [0, 0]]
    assert covered((45, 10, 60, 20)) == [[0, 1], [0, 0]]
    assert covered((45, 45, 55, 55)) == [[1, 1], [1, 1]]  # all equally


def test_a_box_may_cross_the_border_of_the_image_but_not_lie_outside():
    assert covered((-50, -50, 50, 50)) == [[1, 0], [0, 0]]
    assert covered((50, 0, 900, 900)) == [[0, 1], [0, 1]]
    for box in [(200, 200, 300, 300), (100, 0, 120, 50), (-9, 0, 0, 50)]:
        with pytest.raises(SpecError, match=r"the box \(.*\) lies outside the image, which is 100 x 80 pixels\."):
            Region.from_value(box).covered_patches(grid(2, 2), (100, 80))


def test_patches_in_the_padding_of_a_tile_are_not_covered():
    boxes = np.array([[[0, -0.5, 1, 0], [0, 0, 1, 0.5], [0, 0.5, 1, 1], [0, 1, 1, 1.5]]])
    for where in [(0, 0, 100, 100), np.ones((3, 3))]:
        assert Region.from_value(where).covered_patches(boxes, (100, 100)).tolist() == [[False, True, True, False]]


def test_a_patch_on_the_edge_counts_with_the_part_inside_the_image():
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
def test_masks_of_every_type_give_the_same_region(mask):
    assert Region.from_value(mask) == Region(mask=("001", "011"))
    assert covered(mask, 2, 3) == MASK.tolist()


@pytest.mark.parametrize("name", ["mask.png", "with space.png", "1,2,3,4"])
@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF"])
def test_a_mask_can_be_a_file(tmp_path, name, format):
    Image.fromarray(MASK.astype(np.uint8) * 255).save(tmp_path / name, format)
    assert Region.from_value(tmp_path / name) == Region.from_value(str(tmp_path / name)) == Region.from_value(MASK)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_a_mask_file_of_any_colour_mode_equals_its_image(tmp_path, mode):
    image = Image.fromarray(MASK.astype(np.uint8) * 255).convert(mode)
    image.save(tmp_path / "mask.png")
    assert Region.from_value(tmp_path / "mask.png") == Region.from_value(image) == Region.from_value(MASK)


def test_a_mask_file_is_relative_to_the_current_folder(tmp_path, monkeypatch):
    Image.fromarray(MASK.astype(bool)).save(tmp_path / "mask.png")
    monkeypatch.chdir(tmp_path)
    assert Region.from_value("mask.png") == Region.from_value(Path("mask.png")) == Region.from_value(MASK)


def test_a_file_without_a_mask_is_refused(tmp_path):
    path = tmp_path / "mask.png"
    path.write_text("1,2,3,4")
    with pytest.raises(ImageError, match=r"mask\.png' cannot be read as an image: no image in a format"):
        Region.from_value(path)
    Image.new("RGB", (3, 3)).save(path)
    with pytest.raises(SpecError, match="the mask marks nothing; make the region white"):
        Region.from_value(str(path))
    with pytest.raises(SpecError, match=r"^where is a box"):
        Region.from_value(tmp_path)  # a folder


def test_grey_values_count_from_half_of_the_brightest():
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
def test_a_mask_of_any_size_is_stretched_over_the_image(mask, expected):
    assert covered(np.array(mask), 1, 8) == expected


@hypothesis.settings(deadline=None)
@given(st.tuples(*[st.integers(0, 12)] * 4), st.integers(1, 6), st.integers(1, 6))
def test_a_mask_of_a_box_covers_the_same_patches_as_the_box(corners, rows, columns):
    left, right = sorted(corners[:2])
    top, bottom = sorted(corners[2:])
    if left == right or top == bottom:
        return
    mask = np.zeros((12, 12), bool)
    mask[top:bottom, left:right] = True
    assert covered(mask, rows, columns, (12, 12)) == covered((left, top, right, bottom), rows, columns, (12, 12))


@hypothesis.settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), *[st.integers(1, 6)] * 4)
def test_shares_of_a_mask_equal_those_of_its_pixels(seed, rows, columns, high, wide):
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
def test_values_that_are_neither_box_nor_mask_are_refused(where):
    with pytest.raises(SpecError, match=r"^where is a box \(left, top, right, bottom in pixels\), a mask, or the file"):
        Region.from_value(where)


@pytest.mark.parametrize("box", [(5, 5, 5, 9), (9, 0, 5, 9), (0, 0, float("nan"), 5), (0, 0, float("inf"), 5)])
def test_empty_boxes_are_refused(box):
    with pytest.raises(SpecError, match=r"^the box \(.*\) is empty; give left, top, right, bottom in pixels\.$"):
        Region.from_value(box)


@pytest.mark.parametrize("mask", [np.zeros((4, 4)), np.full((2, 2), np.nan), Image.new("1", (3, 3)), [[0, 0]]])
def test_masks_that_mark_nothing_are_refused(mask):
    with pytest.raises(SpecError, match="the mask marks nothing; make the region white"):
        Region.from_value(mask)


# Where a concept fires


@hypothesis.settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 40))
def test_the_strongest_mask_has_the_nu_largest_activations(seed, tiles, patches, m, nu):
    values = torch.randn(tiles, patches, m, generator=torch.Generator().manual_seed(seed))
    for per in ("tile", "image"):
        mask = strongest_mask(values, nu, per)
        groups = [(values[t], mask[t]) for t in range(tiles)]
        if per == "image":
            groups = [(values.flatten(0, 1), mask.flatten(0, 1))]
        for value, chosen in groups:
            for i in range(m):
                inside, outside = value[chosen[:, i], i], value[~chosen[:, i], i]
                assert len(inside) == min(nu, len(value))
                assert not len(outside) or inside.min() >= outside.max()
        assert (strongest_mask(values, nu + 1, per) | mask).equal(strongest_mask(values, nu + 1, per))
    everything = strongest_mask(values, "all", "tile")
    assert everything.all()
    assert everything.equal(strongest_mask(values, tiles * patches, "image"))


def test_equal_activations_give_no_more_than_nu_patches():
    for per, count in (("tile", 6), ("image", 3)):
        assert int(strongest_mask(torch.zeros(2, 5, 1), 3, per).sum()) == count


def test_tile_and_image_are_the_same_for_one_tile():
    values = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(strongest_mask(values, 4, "tile"), strongest_mask(values, 4, "image"))


# Free places


def corners(blocks):
    """Top, left, bottom and right of each block; None for an empty one."""
    found = []
    for block in blocks:
        rows, columns = block.nonzero()
        found.append((rows.min(), columns.min(), rows.max() + 1, columns.max() + 1) if len(rows) else None)
        assert not len(rows) or block.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    return found


def test_a_word_that_reads_the_same_everywhere_claims_nothing():
    readings = torch.zeros(64, 3)
    readings[:, 0] = 1.0  # a place
    readings[10:20, 1] = 1.0
    claims = measure_claims(readings)
    assert (claims[10:20] > 0.8).all() and not claims[:10].any() and not claims[20:].any()
    torch.testing.assert_close(measure_claims(readings + 5), claims)


def test_free_blocks_lie_where_nothing_is_planted():
    claims = np.ones((8, 8))
    claims[4:7, 1:4] = 0
    claims[0:3, 5:8] = 0.2
    every = np.ones((8, 8), bool)
    assert corners(find_free_blocks(claims, every, [1, 1])) == [(4, 1, 7, 4), (0, 5, 3, 8)]
    assert corners(find_free_blocks(claims, every, [1, 0.1, 1])) == [(4, 1, 7, 4), None, (0, 5, 3, 8)]
    usable = every.copy()
    usable[5, 2] = False
    assert corners(find_free_blocks(claims, usable, [1])) == [(0, 5, 3, 8)]
    assert not usable[5, 2] and usable.sum() == 63  # the caller's array is unchanged


def test_where_everything_is_claimed_no_block_is_free():
    even, every = np.ones((8, 8)), np.ones((8, 8), bool)
    assert corners(find_free_blocks(even, every, [1, np.inf])) == [None, (0, 0, 3, 3)]  # of equal blocks the first
    assert corners(find_free_blocks(even, ~every, [1, np.inf])) == [None, None]
    assert corners(find_free_blocks(0 * even, every, [1, np.inf])) == [(0, 0, 3, 3), (0, 3, 3, 6)]


@pytest.mark.parametrize(
    ("shape", "block"), [((1, 1), (1, 1)), ((1, 10), (1, 4)), ((27, 27), (10, 10)), ((2, 16), (1, 6))]
)
def test_free_blocks_have_three_eighths_of_each_side(shape, block):
    assert corners(find_free_blocks(np.zeros(shape), np.ones(shape, bool), [1])) == [(0, 0, *block)]


def test_a_block_covers_the_same_part_of_all_tiles():
    whole = grid(4, 4)[0]
    quarter = whole * 0.5  # the upper left one
    padded = whole * [1, 2, 1, 2] - [0, 0.5, 0, 0.5]  # the image is in the second and the third row
    boxes = np.stack([quarter, whole, padded])
    assert overview_tile(boxes) == 1
    assert patches_inside(whole).all()
    assert patches_inside(padded).reshape(4, 4).all(1).tolist() == [False, True, True, False]
    block = np.zeros((4, 4), bool)
    block[:2, :2] = True
    covered_by = cover_block(block.ravel(), whole, boxes).reshape(3, 4, 4)
    assert covered_by[0].all() and (covered_by[1] == block).all()
    assert np.argwhere(covered_by[2]).tolist() == [[1, 0], [1, 1]]
    assert not cover_block(~block.ravel() & block.ravel(), whole, boxes).any()


# Where a detector reads


READINGS = """
    10  4  0  0  0  4
     0  4  0  0  0  0
     0  0  4  0  7  0
     4  0  0  0  4  0
"""


def connected(fit, tiles=1):
    one = torch.tensor([[float(n) for n in line.split()] for line in READINGS.strip().splitlines()])
    region = find_connected_region(one.reshape(1, -1).expand(tiles, -1), fit, tuple(one.shape))
    return ["".join("X" if there else "." for there in row) for row in region.reshape(-1, one.shape[1]).tolist()]


def test_stray_patches_are_in_no_region_but_a_second_thing_is():
    """Parts hang together by corners, too; one that nowhere comes near the peak is left out."""
    assert connected(0.3) == ["XX....", ".X....", "..X.X.", "....X."]
    assert connected(0.3, tiles=2) == connected(0.3) * 2


def test_a_high_fit_is_a_threshold_alone_and_none_takes_every_patch():
    assert connected(0.6) == connected(0.7) == ["X.....", "......", "....X.", "......"]
    assert connected(0.71) == ["X.....", "......", "......", "......"]
    assert connected(0) == ["XXXXXX"] * 4


def test_patches_of_different_tiles_are_not_neighbours():
    readings = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    assert find_connected_region(readings, 0.3, (2, 2)).tolist() == [[True, False, False, False], [False] * 4]


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_where_a_detector_reads_nothing_there_is_no_region(value):
    assert not find_connected_region(torch.full((2, 4), value), 0.3, (2, 2)).any()
