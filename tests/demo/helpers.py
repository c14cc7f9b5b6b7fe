"""Requests, marks and readers of HTML that several test modules of the demo use."""

import base64
import html
import io
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from elude_steer.demo.session import EditRequest, ImageFile
from tests.helpers.markup import Reader

DOG, TEDDY, TRAIN, CATS = (
    Path(f"demos/images/toyland-{name}.png").resolve() for name in ("dog", "teddy", "train", "cats")
)
EVIL = "<script>alert('1')</script> ${x} {{x}} `x` \"dog\""


def make_request(path=DOG, minus=("dog",), plus=(), mark=None, prompt="", **settings):
    image = path if path is None or isinstance(path, ImageFile) else ImageFile.from_path(path)
    return EditRequest(image, mark, tuple(minus), tuple(plus), prompt, settings)


def box_mask(left, top, right, bottom, size=(96, 96)):
    mask = np.zeros((size[1], size[0]), bool)
    mask[top:bottom, left:right] = True
    return mask


def encode_mark(mask):
    """A mask as the page sends it: a data URI of an opaque PNG, white on black."""
    return data_uri(Image.fromarray(np.repeat(mask.astype(np.uint8)[..., None] * 255, 3, -1)).convert("RGBA"))


def data_uri(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def decode_uri(uri):
    return base64.b64decode(uri.partition(",")[2], validate=True)


def png_with_false_size(side):
    """The data URI of a small PNG whose header claims `side` x `side` pixels."""
    data = decode_uri(data_uri(Image.new("1", (8, 8))))
    head = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return (
        "data:image/png;base64,"
        + base64.b64encode(data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]).decode()
    )


def assert_same(result, other):
    assert result.maps.keys() == other.maps.keys()
    assert (result.baseline, result.caption) == (other.baseline, other.caption)
    assert result.plan == other.plan
    assert result.notes == other.notes
    assert all(
        np.array_equal(a, b) for word in result.maps for a, b in zip(result.maps[word], other.maps[word], strict=True)
    )


def row_data(markup):
    """The data that a click on each row or button sends to the page."""
    return [json.loads(value) for _, name, value in Reader(markup).attributes if name == "data-row"]


def other_cells(markup):
    """For each row of a table its cells after the first."""
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", markup)]
    return [[html.unescape(cell) for cell in line[1:]] for line in lines if line]


def code_texts(markup):
    """The recipe and the Python call as a visitor copies them."""
    return [html.unescape(text) for text in re.findall(r"<code>(.*?)</code>", markup, re.DOTALL)]
