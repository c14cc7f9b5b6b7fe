import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from elude_steer.errors import ModelError
from elude_steer.models.hooks import replace_forward
from elude_steer.models.patch_layout import Tiles, find_layout
from elude_steer.models.vlm import Vlm
from tests.helpers.tiny import save_family
from tests.models.conftest import with_config


@pytest.mark.parametrize("size", [(180, 60), (60, 180), (120, 60), (60, 120), (30, 30)], ids=str)
def test_tile_counts_distinguish_wide_and_tall_images(uneven, size):
    inputs = uneven.processor.image_processor(images=[Image.new("RGB", size)], return_tensors="pt")
    assert uneven.tile_counts(inputs) == [inputs["pixel_values"].shape[1]]


def patch_brightness(vlm, image):
    """The brightness of each patch of each tile, computed from the output of the image processor, `(tiles, n)`."""
    processor, vision = vlm.processor.image_processor, vlm.model.config.vision_config
    pixels = processor(images=[image], return_tensors="pt")["pixel_values"].float()
    pixels = pixels.reshape(-1, 3, *pixels.shape[-2:])
    mean, deviation = (
        torch.tensor(list(value))[:, None, None] for value in (processor.image_mean, processor.image_std)
    )
    grey = (pixels * deviation + mean).mean(1)
    # Like the patch embedding, a convolution whose stride equals its kernel, without padding.
    return nn.functional.avg_pool2d(grey, vision.patch_size).flatten(1)


def paint_box(size, box):
    """A black image with a white box."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    left, top, right, bottom = box
    pixels[top:bottom, left:right] = 255
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def uneven(tiny_vlm):
    """A tower with tiles of 30 pixels, which four patches of 7 do not fill; its canvases are never tall."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    pinpoints = [[30, 30], [30, 60], [60, 60], [30, 90]]
    model = with_config(tiny_vlm, image_size=30)
    model.config.image_grid_pinpoints = pinpoints
    processor = LlavaOnevisionImageProcessorPil(size={"height": 30, "width": 30}, image_grid_pinpoints=pinpoints)
    return Vlm.from_model(model, SimpleNamespace(image_processor=processor, tokenizer=SimpleNamespace()))


@pytest.fixture(scope="module")
def cropped():
    """A model that takes the middle of an image as one tile."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return single_tile(processor)


@pytest.fixture(scope="module")
def stretched():
    """A model that takes the image, stretched to a square, as one tile."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return single_tile(SiglipImageProcessorPil(size={"height": 28, "width": 28}))


def single_tile(image_processor):
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=28, patch_size=7))
    processor = SimpleNamespace(image_processor=image_processor)
    return Vlm(SimpleNamespace(config=config), "fc2", nn.Linear(1, 1), prepare=list, processor=processor)


SIZES = [(112, 112), (160, 80), (80, 160), (120, 90), (90, 121), (200, 40), (37, 190), (61, 59)]


each_tower = pytest.mark.parametrize("name", ["tiny_vlm", "uneven", "cropped", "stretched"])


@each_tower
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_white_square_brightens_the_patch_at_its_position(name, size, request):
    vlm = request.getfixturevalue(name)
    grid, patch = vlm.grid(size), vlm.model.config.vision_config.patch_size
    half, lit_tiles = max(1, min(size) // 40), 0
    for across in np.linspace(half, size[0] - half, 6).astype(int):
        for down in np.linspace(half, size[1] - half, 6).astype(int):
            box = (across - half, down - half, across + half, down + half)
            bright = patch_brightness(vlm, paint_box(size, box))
            assert bright.shape == grid.boxes.shape[:2]
            x, y = across / size[0], down / size[1]
            for tile, boxes in zip(bright, grid.boxes, strict=True):
                left, top, right, bottom = boxes.T
                # Half the square and one pixel of the tile, as fractions of the image, because resampling blurs.
                dx, dy = half / size[0] + (right - left) / patch, half / size[1] + (bottom - top) / patch
                if tile.max() > 0.003:
                    lit_tiles += 1
                    i = int(tile.argmax())
                    assert left[i] - dx[i] <= x <= right[i] + dx[i]
                    assert top[i] - dy[i] <= y <= bottom[i] + dy[i]
                else:
                    well_inside = (left + dx < x) & (x < right - dx) & (top + dy < y) & (y < bottom - dy)
                    assert not well_inside.any()
    assert lit_tiles >= 4


@each_tower
@pytest.mark.parametrize("size", [(224, 224), (240, 180), (130, 260)], ids=str)
def test_painting_the_box_of_a_patch_brightens_this_patch(name, size, request):
    vlm = request.getfixturevalue(name)
    checked = 0
    for tile, boxes in enumerate(vlm.grid(size).boxes):
        for i, box in enumerate(boxes):
            if box.min() >= -1e-9 and box.max() <= 1 + 1e-9:
                pixels = np.round(box * [*size, *size]).astype(int)
                bright = patch_brightness(vlm, paint_box(size, pixels))[tile]
                assert int(bright.argmax()) == i
                assert bright[i] > 0.8
                others = torch.cat([bright[:i], bright[i + 1 :]])
                assert others.max() < 0.2
                checked += 1
    assert checked >= 16


def overlap(boxes):
    """The fraction of each box that lies inside the image."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.from_numpy(((high.clip(0, 1) - low.clip(0, 1)) / (high - low)).prod(-1)).float()


@pytest.mark.parametrize("name", ["tiny_vlm", "uneven"])
@pytest.mark.parametrize("size", [*SIZES, (56, 56), (20, 20), (101, 74), (300, 29)], ids=str)
def test_padding_lies_outside_the_image(name, size, request):
    vlm = request.getfixturevalue(name)
    white = patch_brightness(vlm, Image.new("RGB", size, "white"))
    assert torch.allclose(white, overlap(vlm.grid(size).boxes), atol=1e-3)


@pytest.mark.parametrize("size", [(100, 75), (75, 100), (100, 25)], ids=str)
def test_padding_where_the_processor_rounds_up_an_exact_size(tiny_vlm, size):
    white = patch_brightness(tiny_vlm, Image.new("RGB", size, "white"))
    assert torch.allclose(white, overlap(tiny_vlm.grid(size).boxes), atol=1e-3)


def test_the_grid_of_an_image_that_fits(tiny_vlm):
    grid = tiny_vlm.grid((56, 28))
    assert grid.tiles == 3
    assert grid.shape == (4, 4)
    assert grid.boxes.shape == (3, 16, 4)
    # Tile 0 is the complete image, row by row; tiles 1 and 2 are its left and right half.
    assert grid.boxes[0, 0] == pytest.approx([0, 0, 1 / 4, 1 / 4])
    assert grid.boxes[0, 6] == pytest.approx([2 / 4, 1 / 4, 3 / 4, 2 / 4])
    assert grid.boxes[1, 3] == pytest.approx([3 / 8, 0, 4 / 8, 1 / 4])
    assert grid.boxes[2, 12] == pytest.approx([4 / 8, 3 / 4, 5 / 8, 1])


def test_grids_are_kept_for_some_sizes_only(tiny_vlm):
    layout = tiny_vlm.layout
    first = layout.grid((40, 30))
    assert layout.grid((40, 30)) is first
    for width in range(50, 150):
        layout.grid((width, 30))
    assert len(layout._grids) <= 64
    assert layout.grid((40, 30)) is not first
    assert np.array_equal(layout.grid((40, 30)).boxes, first.boxes)


def test_the_grid_of_an_image_that_is_padded(tiny_vlm):
    # 100 x 50 fits into 56 x 28; 60 x 50 into 56 x 56 as 56 x 47, four rows above it and five below.
    assert tiny_vlm.grid((100, 50)).tiles == 3
    grid = tiny_vlm.grid((60, 50))
    assert grid.tiles == 5
    assert grid.boxes[1, 0] == pytest.approx([0, -4 / 47, 7 / 56, 3 / 47])
    assert grid.boxes[4, 15] == pytest.approx([49 / 56, 45 / 47, 1, 52 / 47])


def test_a_remainder_beside_the_patches_is_ignored(uneven):
    grid = uneven.grid((60, 60))
    assert grid.shape == (4, 4)
    assert grid.boxes[0, 15] == pytest.approx([21 / 30, 21 / 30, 28 / 30, 28 / 30])
    assert grid.boxes[4, 0] == pytest.approx([30 / 60, 30 / 60, 37 / 60, 37 / 60])


def test_a_cropped_image_shows_its_middle(cropped):
    # 120 x 60: the middle half across, all of it down
    boxes = cropped.grid((120, 60)).boxes
    assert boxes.shape == (1, 16, 4)
    assert boxes[0, 0] == pytest.approx([0.25, 0, 0.375, 0.25])
    assert boxes[0, 15] == pytest.approx([0.625, 0.75, 0.75, 1])


def test_the_grid_has_the_tiles_and_patches_of_encode(tiny_vlm, images):
    for image, q in zip(images, tiny_vlm.encode(images), strict=True):
        assert tiny_vlm.grid(image.size).boxes.shape[:2] == q.shape[:2]


# Layouts that are tested or refused


def test_windows_are_found_by_a_test(tmp_path):
    """In images larger than a window, a tower with windows orders patches differently."""
    plain, windows = (Vlm.load(str(save_family(name, tmp_path / name))) for name in ("qwen2_vl", "qwen2_5_vl"))
    assert (plain.layout.merge, plain.layout.window) == (2, 0)
    assert (windows.layout.merge, windows.layout.window) == (2, 4)
    path = tmp_path / "qwen2_5_vl" / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["window_size"] = 56  # larger than an image of a few patches, as in the real model
    path.write_text(json.dumps(config))
    assert Vlm.load(str(path.parent)).layout.window == 8


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Vlm.load(str(save_family("llava", tmp_path_factory.mktemp("plain"))))


def test_a_tower_that_shuffles_its_patches_is_refused(plain):
    embeddings = next(m for name, m in plain.model.named_modules() if name.endswith("vision_tower.embeddings"))
    with (
        replace_forward(embeddings, lambda original, *args, **kwargs: original(*args, **kwargs).flip(1)),
        pytest.raises(
            ModelError, match=r"^LlavaForConditionalGeneration cannot be steered: the tower mixes or reorders"
        ),
    ):
        Vlm.from_model(plain.model, plain.processor)


def test_pixels_of_an_unknown_shape_are_refused(plain):
    config = plain.model.config
    with pytest.raises(ModelError, match=r"^llava takes pixels of shape \(1, 64, 588\); how they become patches"):
        find_layout(config, lambda _image: {"pixel_values": torch.zeros(1, 64, 588)})


def test_tiles_of_unknown_images_are_refused():
    layout = Tiles((7, 7), lambda _image: {}, (4, 4), image_token=4)
    tokens = torch.tensor([[4, 4, 4, 0], [4, 4, 0, 0]])
    with pytest.raises(ModelError, match="which of 4 tiles belong to which of 2 images is unknown"):
        layout.counts({"pixel_values": torch.zeros(4, 3, 28, 28), "input_ids": tokens}, 2)
    assert layout.counts({"pixel_values": torch.zeros(5, 3, 28, 28), "input_ids": tokens}, 2) == [3, 2]


def test_a_layer_with_another_number_of_tokens_is_refused(plain):
    inputs = plain.inputs([Image.new("RGB", (30, 30))])
    with pytest.raises(ModelError, match=r"the layer has 1 x 16 tokens for 1 tiles of \(4, 4\) patches"):
        plain.split_by_image(torch.zeros(1, 16, 40), inputs, 1)
