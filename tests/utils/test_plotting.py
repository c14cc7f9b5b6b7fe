import base64
import io

import numpy as np
import pytest
from PIL import Image

from elude_steer.models.vlm import PatchGrid
from elude_steer.utils.plotting import (
    _FRAME,
    add_title,
    collage,
    curves,
    data_uri,
    fit_within,
    heatmap,
    scatter,
    spread_over_image,
)

WHOLE = (0.0, 0.0, 1.0, 1.0)


def make_grid(*areas, rows=4, columns=4):
    """Tiles over these parts of the image."""
    boxes = [
        [
            (left + w * c / columns, top + h * r / rows, left + w * (c + 1) / columns, top + h * (r + 1) / rows)
            for r in range(rows)
            for c in range(columns)
        ]
        for left, top, right, bottom in areas
        for w, h in [(right - left, bottom - top)]
    ]
    return PatchGrid(np.array(boxes), (rows, columns))


def values_at(grid, *places, value=1.0):
    """Zero except at these `(tile, row, column)`."""
    values = np.zeros((grid.tiles, *grid.shape))
    for place in places:
        values[place] = value
    return values.reshape(grid.tiles, -1)


def warmth(image):
    """How much redder than blue, `(height, width)`."""
    pixels = np.asarray(image, float)
    return pixels[..., 0] - pixels[..., 2]


GREY = Image.new("RGB", (96, 96), (120, 120, 120))
SQUARE = make_grid(WHOLE)


# Spreading values over an image


def test_every_patch_fills_its_area():
    values = np.arange(16.0).reshape(1, 16)
    spread_out = spread_over_image(SQUARE, values, (40, 40), smooth=False)
    assert (spread_out == np.arange(16).reshape(4, 4).repeat(10, 0).repeat(10, 1)).all()


def test_overlapping_tiles_give_their_mean():
    grid = make_grid(WHOLE, (0, 0, 0.5, 1), (0.5, 0, 1, 1))
    values = np.stack([np.full(16, 1.0), np.full(16, 3.0), np.full(16, 0.0)])
    spread_out = spread_over_image(grid, values, (40, 20), smooth=False)
    assert (spread_out[:, :20] == 2).all()
    assert (spread_out[:, 20:] == 0.5).all()


def test_a_tile_beyond_the_border_is_cropped():
    grid = make_grid((0.0, -0.5, 1.0, 1.5))
    values = np.arange(16.0).reshape(1, 16)
    spread_out = spread_over_image(grid, values, (40, 40), smooth=False)
    assert (spread_out[:20] == np.arange(4, 8).repeat(10)).all()
    assert (spread_out[20:] == np.arange(8, 12).repeat(10)).all()


def test_equal_values_stay_equal():
    for smooth in (True, False):
        spread_out = spread_over_image(SQUARE, np.full((1, 16), 0.7), (50, 33), smooth=smooth)
        assert spread_out.shape == (33, 50)
        np.testing.assert_allclose(spread_out, 0.7, rtol=1e-5)


def test_smoothing_gives_no_negative_values():
    assert (spread_over_image(SQUARE, values_at(SQUARE, (0, 1, 1)), (96, 96)) >= 0).all()


# Heatmaps


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((96, 96), 480, (480, 480)), ((192, 96), 480, (480, 240)), ((96, 192), 100, (50, 100)),
        ((1000, 700), 480, (480, 336)), ((1000, 1), 100, (100, 1)),
    ],
)  # fmt: skip
def test_a_heatmap_has_the_requested_longer_side(size, side, expected):
    assert heatmap(Image.new("RGB", size), SQUARE, np.zeros((1, 16)), side=side).size == expected


def test_the_glow_is_only_where_something_fires():
    drawn = warmth(heatmap(GREY, SQUARE, values_at(SQUARE, (0, 0, 3)), side=96))
    row, column = np.unravel_index(drawn.argmax(), drawn.shape)
    assert row < 24
    assert column >= 72
    assert drawn[:24, 72:].mean() > 40
    assert abs(drawn[48:, :48]).max() == 0


def test_larger_values_glow_more_and_above_one_the_glow_is_relative():
    def glow(value):
        return warmth(heatmap(GREY, SQUARE, values_at(SQUARE, (0, 1, 1), value=value), side=96)).max()

    assert glow(0) < glow(0.2) < glow(0.5)
    # From "fully on" upwards the strongest patch looks the same.
    one, ten = (heatmap(GREY, SQUARE, np.full((1, 16), value), side=96) for value in (1.0, 10.0))
    assert (np.asarray(one) == np.asarray(ten)).all()


def test_a_heatmap_of_zeros_shows_only_the_paler_image():
    image = Image.new("RGB", (96, 96), (200, 40, 40))
    drawn = np.asarray(heatmap(image, SQUARE, np.zeros((1, 16)), np.zeros((1, 16), bool), side=96))
    assert (drawn == drawn[0, 0]).all()
    red, green, blue = (int(value) for value in drawn[0, 0])
    assert 200 > red > green == blue
    assert (np.asarray(heatmap(GREY, SQUARE, np.zeros((1, 16)), side=96)) == 120).all()


def framed(image):
    return (np.asarray(image) == _FRAME).all(-1)


def test_changed_patches_are_framed_together():
    changed = values_at(SQUARE, (0, 1, 1), (0, 1, 2)).astype(bool)
    found = framed(heatmap(GREY, SQUARE, np.zeros((1, 16)), changed, side=96))
    rows, columns = np.nonzero(found)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (24, 47, 24, 71)
    assert found[24, 24:72].all()
    assert found[24:48, 24].all()
    assert not found[30:42, 30:66].any()  # also not between the two patches


def test_the_frame_is_closed_at_the_border_of_the_image():
    found = framed(heatmap(GREY, SQUARE, np.zeros((1, 16)), np.ones((1, 16), bool), side=96))
    for edge in (found[0], found[-1], found[:, 0], found[:, -1]):
        assert edge.all()
    assert not found[4:-4, 4:-4].any()


def test_without_changed_patches_there_is_no_frame():
    activity = values_at(SQUARE, (0, 1, 1))
    without = heatmap(GREY, SQUARE, activity, side=96)
    assert not framed(without).any()
    assert (np.asarray(heatmap(GREY, SQUARE, activity, np.zeros((1, 16), bool), side=96)) == np.asarray(without)).all()


def test_unchanged_patches_are_dark_and_grey():
    changed = values_at(SQUARE, (0, 1, 1), (0, 1, 2)).astype(bool)
    red = Image.new("RGB", (96, 96), (200, 60, 60))
    drawn = np.asarray(heatmap(red, SQUARE, np.zeros((1, 16)), changed, side=96), float)
    inside, outside = drawn[36, 48], drawn[80, 48]
    assert inside.mean() > 1.5 * outside.mean()
    assert inside[0] > inside[2] + 80
    assert np.ptp(outside) == 0  # grey


@pytest.mark.parametrize(("side", "width"), [(96, 1), (200, 1), (320, 2), (480, 2), (960, 5)])
def test_the_width_of_the_frame_grows_with_the_image(side, width):
    found = framed(heatmap(GREY, SQUARE, np.zeros((1, 16)), np.ones((1, 16), bool), side=side))
    assert found[side // 2].nonzero()[0].tolist() == [*range(width), *range(side - width, side)]


def test_the_image_is_visible_under_the_glow():
    half = Image.fromarray(np.repeat(np.uint8([[0] * 48 + [255] * 48]), 96, 0))
    drawn = np.asarray(heatmap(half, SQUARE, np.full((1, 16), 5.0), side=96), float)
    assert abs(drawn[48, 70] - drawn[48, 20]).min() > 50


def test_a_wide_image_of_several_tiles():
    """A patch of the right tile is a quarter of half the image: half as wide as a patch of the whole."""
    grid = make_grid(WHOLE, (0, 0, 0.5, 1), (0.5, 0, 1, 1))
    wide = Image.new("RGB", (192, 96), (120, 120, 120))
    place = (2, 3, 3)  # the lower right corner of the right tile
    drawn = heatmap(wide, grid, values_at(grid, place), values_at(grid, place).astype(bool), side=192)
    assert drawn.size == (192, 96)
    rows, columns = np.nonzero(framed(drawn))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (72, 95, 168, 191)
    glow = warmth(drawn)
    glow[framed(drawn)] = 0
    assert glow[74:94, 170:190].max() > 20
    assert abs(glow[:, :96]).max() == 0


def test_an_image_of_any_mode_is_left_unchanged():
    for mode in ("L", "RGBA", "P", "1"):
        image = Image.new(mode, (30, 30))
        before = image.tobytes()
        assert heatmap(image, SQUARE, values_at(SQUARE, (0, 1, 1)), np.ones((1, 16), bool)).mode == "RGB"
        assert image.tobytes() == before


# Sizes and data URIs


def test_fit_within_sets_the_longer_side():
    assert fit_within(Image.new("P", (300, 100)), 90).size == (90, 30)
    assert fit_within(Image.new("L", (10, 40)), 90).size == (22, 90)
    assert fit_within(Image.new("1", (1000, 1)), 90).size == (90, 1)
    assert fit_within(GREY, 96).mode == "RGB"


def test_a_data_uri_holds_the_exact_image():
    head, _, data = data_uri(GREY).partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == GREY.tobytes()


# Sheets and charts


def test_a_title_is_above_the_image():
    sheet = add_title(GREY, "dog")
    assert sheet.size == (104, 122)
    pixels = np.asarray(sheet)
    assert (pixels[26:, 4:100] == 120).all()
    assert (pixels[:26] < 100).any()


def test_a_collage_has_one_row_per_title():
    rows = [("one", [GREY] * 3), ("two", [GREY] * 20), ("none", [])]
    sheet = collage(rows, cell=32, columns=4)
    assert sheet.size == (4 * 36 + 4, 3 * 56)
    assert collage([]).height > 0


def test_points_are_drawn_at_their_values():
    chart = np.asarray(scatter([(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)], x="kept", y="success", marked=[1], side=520))
    blue, red = ((chart == colour).all(-1) for colour in ((70, 110, 190), (205, 60, 40)))
    rows, columns = np.nonzero(red)
    assert (round(rows.mean()), round(columns.mean())) == (24, 64 + 424)
    assert blue[24 + 424, 64]
    assert blue[24 + 212, 64 + 212]


def test_axes_fit_the_points():
    crowd = [(0.61, 1.0), (0.62, 1.0), (0.615, 0.9)]
    chart = np.asarray(scatter(crowd, x="a", y="b", marked=[0], side=520))
    rows, columns = np.nonzero((chart == (205, 60, 40)).all(-1))
    assert abs(rows.mean() - 24) < 2 and columns.mean() < 64 + 40  # at the top left, though 0.61 is beyond the middle
    blue = (chart == (70, 110, 190)).all(-1)
    assert blue[:60].any() and blue[400:].any()
    scatter([(0.5, 0.5)], x="a", y="b")  # one point alone has axes too
    scatter([(0.0, 0.0)] * 40, x="a", y="b", names=["same"] * 40)  # all at one place


def test_named_points_get_numbers_and_a_list_beside_the_chart():
    points = [(0.2, 0.9), (0.7, 0.4)]
    plain, named = (np.asarray(scatter(points, x="a", y="b", names=n, side=520)) for n in ((), ("one", "another")))
    assert named.shape[1] > plain.shape[1] and named.shape[0] == plain.shape[0]
    beside = named[:, 520 - 4 :] < 128
    assert beside[24:44].any() and beside[46:66].any() and not beside[80:].any()  # a line each


def test_curves_follow_their_numbers():
    flat, steep = [(n, 1.0) for n in (1, 2, 4, 8)], [(n, float(n * n)) for n in (1, 2, 4, 8)]
    chart = np.asarray(curves({"flat": flat, "steep": steep}, x="times", y="seconds")).astype(int)
    red = (abs(chart - (205, 60, 40)).sum(-1) < 40)[:, :560]  # the higher one is drawn first
    blue = (abs(chart - (70, 110, 190)).sum(-1) < 40)[:, :560]
    tops = [np.flatnonzero(red[:, x]).min() for x in (80, 300, 550)]
    assert tops[0] > tops[1] > tops[2]
    rows = np.flatnonzero(blue.any(1))
    assert rows.max() - rows.min() <= 8  # a level line
