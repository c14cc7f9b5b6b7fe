"""A visitor's image file and the region marked on it."""

import base64
import re

import numpy as np
import pytest
from PIL import Image

from elude_steer.demo.session import ImageFile, decode_mark
from elude_steer.errors import ImageError
from tests.demo.helpers import DOG, box_mask, data_uri, decode_uri, encode_mark, make_request, png_with_false_size

# Image files


def test_an_image_file_keeps_its_bytes_and_its_name():
    file = ImageFile.from_path(DOG)
    assert file == ImageFile("toyland-dog.png", DOG.read_bytes()) == ImageFile.from_path(str(DOG))
    with Image.open(DOG) as image:
        assert np.array_equal(np.asarray(file.open()), np.asarray(image.convert("RGB")))


def test_errors_about_bad_files_name_the_file_without_its_folder(tmp_path):
    data = DOG.read_bytes()
    (tmp_path / "note.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "half.png").write_bytes(data[: len(data) // 2])
    for name, message in {
        "note.png": "^'note.png' cannot be read as an image: no image in a format that is read here",
        "empty.png": "^'empty.png' cannot be read",
        "half.png": "^'half.png' cannot be read.*truncated",
        "none.png": "^'none.png' cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(ImageError, match=message) as caught:
            ImageFile.from_path(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) not in str(caught.value)  # a public page must not reveal paths


def test_an_image_with_damaged_data_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    data = decode_uri(data_uri(Image.fromarray(noise)))
    first, second, *_ = (match.start() for match in re.finditer(b"IDAT", data))
    assert first < second
    (tmp_path / "broken.png").write_bytes(data[:second] + b"\xff\xff\xff\xff" + data[second + 4 :])
    with pytest.raises(ImageError, match=r"'broken\.png' cannot be read"):
        ImageFile.from_path(tmp_path / "broken.png")


# Marks

DAMAGED = {
    "no data URI": "nonsense",
    "no data": "data:image/png;base64,",
    "no base64": "data:image/png;base64,@@@",
    "other letters": "é,é",
    "no image": "data:image/png;base64," + base64.b64encode(b"hello").decode(),
    "half an image": encode_mark(box_mask(0, 0, 9, 9))[:90],
    "too large": encode_mark(box_mask(0, 0, 9, 9, (1921, 1))),
    "far too large": png_with_false_size(20_000),
    "too long": "data:image/png;base64," + "A" * 2_000_000,
    "no text": 5,
}


@pytest.mark.parametrize("mark", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_mark_is_refused(presenter, mark):
    for answer in (presenter.steer, presenter.export_code):
        with pytest.raises(ImageError, match=r"^the marked region did not arrive complete; mark it again\.$"):
            answer(make_request(plus=["biker"], mark=mark))


def test_the_soft_edge_of_a_brush_is_cut_at_half():
    mark = Image.fromarray(np.array([[0, 100, 127, 128, 255]], np.uint8))
    assert decode_mark(data_uri(mark)).tolist() == [[False, False, False, True, True]]


def test_a_mark_may_be_as_large_as_a_high_resolution_screen_makes_it():
    mask = box_mask(3, 1, 900, 40, (1920, 1080))
    assert np.array_equal(decode_mark(encode_mark(mask)), mask)
