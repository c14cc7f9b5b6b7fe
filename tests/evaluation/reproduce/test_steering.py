import os
from types import SimpleNamespace

import pytest

from elude_steer.errors import AtlasError, ImageError
from elude_steer.evaluation.reproduce.steering import _row_path
from elude_steer.specs import StepSpec
from elude_steer.utils.files import resolve_id

RECIPE = SimpleNamespace(prompt="x", max_new_tokens=3)
EDIT = SimpleNamespace(row="dog-1", step=StepSpec(minus=("dog",)), recipe=RECIPE)


def test_a_row_belongs_to_an_atlas_and_an_image_that_can_be_read(tmp_path):
    """Both may be those of a recipe that somebody else wrote."""
    options = SimpleNamespace(backbones={}, work=tmp_path)
    image, pipe, empty = tmp_path / "x.png", tmp_path / "pipe.png", tmp_path / "empty"
    image.write_bytes(b"image")
    os.mkfifo(pipe)
    empty.mkdir()
    first = _row_path(EDIT, resolve_id("toyland/atlas"), image, options)
    image.write_bytes(b"other")
    assert _row_path(EDIT, resolve_id("toyland/atlas"), image, options) != first
    with pytest.raises(AtlasError, match=r"empty' is not an atlas: it has no manifest\.json"):
        _row_path(EDIT, str(empty), image, options)
    for path, problem in ((pipe, "it is a pipe or a device, not a file"), (tmp_path / "no.png", "No such file")):
        with pytest.raises(ImageError, match=f"{path.name}' cannot be read as an image: {problem}"):
            _row_path(EDIT, "toyland", path, options)
