import numpy as np
import pytest
from PIL import Image, ImageOps

from elude_steer.errors import ModelError
from elude_steer.models.processor_probe import locate_tiles


def processor(change):
    """A processor whose tiles are the images that `change` returns."""
    return lambda image: np.stack([np.asarray(tile, float).transpose(2, 0, 1) / 255 for tile in change(image)])


PROCESSORS = {
    "stretched": (lambda i: [i.resize((224, 224))], [(0, 0, 1, 1)]),
    "padded": (lambda i: [ImageOps.pad(i.resize((200, 100)), (200, 200), color=(9, 99, 200))], [(0, -0.5, 1, 1.5)]),
    "cropped": (lambda i: [i.resize((300, 150)).crop((75, 0, 225, 150))], [(0.25, 0, 0.75, 1)]),
    "cut": (
        lambda i: [i.resize((1456, 728)).crop((x, y, x + 364, y + 364)) for y in (0, 364) for x in (0, 364, 728, 1092)],
        [(x / 4, y / 2, (x + 1) / 4, (y + 1) / 2) for y in (0, 1) for x in range(4)],
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(120, 60), (1000, 500), (40, 20), (333, 170)], ids=str)
def test_tiles_are_located(name, size):
    change, expected = PROCESSORS[name]
    areas, _ = locate_tiles(processor(change), size)
    assert np.allclose(areas, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: [ImageOps.mirror(i.resize((56, 56)))], "bends, turns or shuffles"),
        (lambda i: [i.resize((56, 56)).rotate(90)], "bends, turns or shuffles"),
        (lambda i: [i.resize((56, 56)), Image.new("RGB", (56, 56))], "a tile that shows nothing of the image"),
        (lambda i: [i.resize((56, 56))] * (1 + i.getpixel((0, 0))[0] // 100), "cuts images depending on their content"),
    ],
)
def test_unknown_processors_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        locate_tiles(processor(change), (60, 50))


def test_an_image_that_is_too_small_is_refused():
    with pytest.raises(
        ModelError, match=r"an image of 2 x 9 pixels is too small to find the positions of its patches\."
    ):
        locate_tiles(processor(lambda i: [i]), (2, 9))
