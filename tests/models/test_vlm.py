import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from elude_steer.errors import EludeSteerWarning, LayerError, ModelError, SpecError
from elude_steer.models.vlm import PROMPT, Vlm, report_tokens
from tests.helpers.tiny import WORDS

FC2 = "vision_tower.encoder.layers.1.mlp.fc2"


@pytest.fixture(scope="module")
def images(image_folder):
    """Eight pictures, two of each shape: 2, 3, 3 and 5 tiles."""
    found = []
    for path in sorted(image_folder.rglob("*.png"))[:8]:
        with Image.open(path) as image:
            found.append(image.convert("RGB"))
    assert len({image.size for image in found}) == 4
    return found


@pytest.fixture(scope="module")
def lively(tiny_llava):
    """The same model with louder attention in its language half: its captions depend on the picture."""
    vlm = Vlm.load(str(tiny_llava))
    louder = ("q_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")
    with torch.no_grad():
        for name, parameter in vlm.model.named_parameters():
            if "language_model.layers" in name and name.endswith(louder):
                parameter.mul_(20)
    return vlm


def tiles_by_hand(size):
    """1 for the whole picture, plus those of the smallest canvas that loses least, among 28 or 56 by 28 or 56."""
    return {(28, 28): 2, (56, 28): 3, (28, 56): 3, (40, 30): 5}[size]


# Loading


def test_a_folder_loads_without_torchvision(tiny_vlm, tiny_llava):
    from transformers.utils import is_torchvision_available

    assert type(tiny_vlm.model).__name__ == "LlavaOnevisionForConditionalGeneration"
    assert tiny_vlm.id == str(tiny_llava)
    assert not tiny_vlm.model.training
    if not is_torchvision_available():
        assert type(tiny_vlm.processor.image_processor).__name__.endswith("Pil")
        assert getattr(tiny_vlm.processor, "video_processor", None) is None


def test_the_layer_by_the_end_of_its_name(tiny_vlm, tiny_llava):
    assert tiny_vlm.layer_name.endswith(FC2)
    assert tiny_vlm.model.get_submodule(tiny_vlm.layer_name) is tiny_vlm.layer
    assert (tiny_vlm.layer.in_features, tiny_vlm.layer.out_features) == (40, 16)
    first = Vlm.load(str(tiny_llava), layer="layers.0.mlp.fc2")
    assert first.layer_name == tiny_vlm.layer_name.replace("layers.1", "layers.0")


def test_without_a_name_the_last_fc2(tiny_vlm, tiny_llava):
    assert Vlm.load(str(tiny_llava)).layer_name == tiny_vlm.layer_name


def test_the_layer_is_looked_for_in_the_vision_tower_only(tiny_vlm):
    text = r'its vision tower has layers 0 to 1\. The paper\'s "layer 2" is index 1\.$'
    with pytest.raises(LayerError, match=text):
        Vlm.from_model(tiny_vlm.model, tiny_vlm.processor, layer="layers.2.mlp.fc2")
    with pytest.raises(LayerError, match=r"layer 'layers\.1\.mlp\.down_proj' is not in LlavaOnevision"):
        Vlm.from_model(tiny_vlm.model, tiny_vlm.processor, layer="layers.1.mlp.down_proj")


def with_config(vlm, **vision):
    """A fresh model of the same kind whose vision tower has other settings."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    config = vlm.model.config.to_dict()
    config["vision_config"] |= vision
    torch.manual_seed(0)
    return LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig(**config)).eval()


def test_without_a_name_the_last_blocks_fc2_and_not_the_heads(tiny_vlm):
    model = with_config(tiny_vlm, vision_use_head=True)
    assert Vlm.from_model(model, tiny_vlm.processor).layer_name.endswith(FC2)


def edited(folder, to, edit):
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


@pytest.mark.parametrize("end", ["layers.1.mlp.fc2.weight", "norm.weight", "image_newline"])  # one of each part
def test_a_checkpoint_with_a_tensor_missing(tiny_llava, tmp_path, end):
    def remove(tensors):
        [key] = [name for name in tensors if name.endswith("." + end) or name == end]
        del tensors[key]

    with pytest.raises(ModelError, match=rf"copy' does not load completely: 1 missing keys \(first: '.*{end}'\)"):
        Vlm.load(edited(tiny_llava, tmp_path / "copy", remove))


def test_a_checkpoint_with_a_tensor_too_many(tiny_llava, tmp_path):
    folder = edited(tiny_llava, tmp_path / "copy", lambda tensors: tensors.update({"stray.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"does not load completely: 1 unexpected keys \(first: 'stray\.weight'\)"):
        Vlm.load(folder)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"there is no folder '.*nowhere' to load a model from"):
        Vlm.load(str(tmp_path / "nowhere"))


def test_a_folder_of_another_kind_of_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2"}))
    with pytest.raises(ModelError, match=r"could not be loaded: "):
        Vlm.load(str(tmp_path))


def test_an_unknown_dtype(tiny_llava):
    with pytest.raises(ModelError, match=r"dtype 'float99' is unknown; use 'auto', 'float32'"):
        Vlm.load(str(tiny_llava), dtype="float99")


def test_bfloat16_casts_the_pixels_and_not_the_words(tiny_llava, images):
    vlm = Vlm.load(str(tiny_llava), dtype="bfloat16")
    inputs = vlm.inputs(images[:2])
    assert inputs["pixel_values"].dtype == vlm.layer.weight.dtype == torch.bfloat16
    assert inputs["input_ids"].dtype == torch.long
    assert [q.dtype for q in vlm.encode(images[:2])] == [torch.bfloat16] * 2


def test_a_missing_chat_template(tiny_llava, tmp_path, images):
    shutil.copytree(tiny_llava, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    said = (
        "LlavaOnevisionForConditionalGeneration has no chat template, so its prompt is only the image and the question"
    )
    with pytest.warns(EludeSteerWarning, match=said):
        vlm = Vlm.load(str(tmp_path / "copy"))
    words = vlm.processor.tokenizer.decode(vlm.inputs(images[:1], "Describe this")["input_ids"][0])
    assert words.replace("<image>", "").split() == ["<unk>", "this"]  # its tokenizer knows one of the two
    assert vlm.caption(images[:1], max_new_tokens=2)


def test_two_loads_have_one_fingerprint_and_the_language_half_is_not_in_it(tiny_vlm, tiny_llava):
    again = Vlm.load(str(tiny_llava), layer="layers.1.mlp.fc2")
    assert again.fingerprint() == tiny_vlm.fingerprint()
    with torch.no_grad():
        again.model.get_submodule("model.language_model").norm.weight.add_(1)
    assert again.fingerprint() == tiny_vlm.fingerprint()
    with torch.no_grad():
        again.layer.bias.add_(1)
    assert again.fingerprint() != tiny_vlm.fingerprint()


# What fc2 is given


def really_given(vlm, images):
    """What fc2 gets when the whole model runs, kept by a hook of our own."""
    kept = []
    handle = vlm.layer.register_forward_hook(lambda _module, args, _output: kept.append(args[0]))
    with torch.inference_mode():
        vlm.model(**vlm.inputs(images))
    handle.remove()
    [q] = kept
    return q


def test_encode_gives_each_picture_its_tiles(tiny_vlm, images):
    encoded = tiny_vlm.encode(images)
    assert [q.shape for q in encoded] == [(tiles_by_hand(image.size), 16, 40) for image in images]
    assert len({q.shape for q in encoded}) > 1


def test_encode_gives_what_fc2_gets_when_the_whole_model_runs(tiny_vlm, images):
    q = really_given(tiny_vlm, images)
    assert len(q) == sum(tiles_by_hand(image.size) for image in images)
    assert torch.equal(torch.cat(tiny_vlm.encode(images)), q)


def test_a_batch_is_cut_at_the_right_places(tiny_vlm, images):
    together = tiny_vlm.encode(images)
    for q, image in zip(together, images, strict=True):
        assert torch.allclose(q, tiny_vlm.encode([image])[0], atol=1e-5)
    other_order = tiny_vlm.encode(images[::-1])[::-1]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(together, other_order, strict=True))


def test_tile_counts(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images)
    assert tiny_vlm.tile_counts(inputs) == [tiles_by_hand(image.size) for image in images]


@pytest.mark.parametrize("size", [(180, 60), (60, 180), (120, 60), (60, 120), (30, 30)], ids=str)
def test_tile_counts_tell_wide_from_tall(uneven, size):
    inputs = uneven.processor.image_processor(images=[Image.new("RGB", size)], return_tensors="pt")
    assert uneven.tile_counts(inputs) == [inputs["pixel_values"].shape[1]]


def test_encode_leaves_the_model_as_it_was(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images[:2])
    with torch.inference_mode():
        before = tiny_vlm.model(**inputs, output_hidden_states=True)
        tiny_vlm.encode(images)
        after = tiny_vlm.model(**inputs, output_hidden_states=True)
    assert torch.equal(after.logits, before.logits)
    assert len(after.hidden_states) == len(before.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(after.hidden_states, before.hidden_states, strict=True))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_pictures_of_other_modes(tiny_vlm, images, mode):
    picture = images[0].convert(mode)
    assert torch.equal(tiny_vlm.encode([picture])[0], tiny_vlm.encode([picture.convert("RGB")])[0])


# Captions


def test_captions_of_a_batch_are_the_captions_one_by_one(lively, images):
    together = lively.caption(images, max_new_tokens=8)
    assert together == [lively.caption([image], max_new_tokens=8)[0] for image in images]
    assert len(set(together)) > 2  # or it would show little
    assert {word for caption in together for word in caption.split()} <= set(WORDS)


def test_captions_in_another_batch_and_order(lively, images):
    together = lively.caption(images, max_new_tokens=8)
    assert lively.caption(images[::-1][:5], max_new_tokens=8) == together[::-1][:5]


def test_captions_are_greedy(lively, images):
    """The word of largest logit, fed back by hand."""
    for image in images[:4]:
        inputs, words = lively.inputs([image]), []
        with torch.inference_mode():
            out = lively.model(**inputs, use_cache=True)
            for _ in range(4):
                words.append(out.logits[:, -1].argmax(-1, keepdim=True))
                if int(words[-1]) == lively.processor.tokenizer.eos_token_id:
                    break
                out = lively.model(input_ids=words[-1], past_key_values=out.past_key_values)
        expected = lively.processor.tokenizer.decode(torch.cat(words, 1)[0], skip_special_tokens=True)
        assert lively.caption([image], max_new_tokens=4) == [expected.strip()]


def test_a_checkpoint_that_asks_for_sampling_is_decoded_greedily(tiny_llava, tmp_path, tiny_vlm, images):
    shutil.copytree(tiny_llava, tmp_path / "copy")
    path = tmp_path / "copy" / "generation_config.json"
    sampling = {"do_sample": True, "temperature": 5.0, "top_p": 0.9, "top_k": 20, "num_beams": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
    vlm = Vlm.load(str(tmp_path / "copy"))
    assert vlm.model.generation_config.do_sample
    assert vlm.caption(images[:3], max_new_tokens=6) == tiny_vlm.caption(images[:3], max_new_tokens=6)


def test_a_checkpoint_that_brings_penalties_is_decoded_greedily(lively, images, monkeypatch):
    said = lively.caption(images[:3], max_new_tokens=8)
    for name, value in {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "min_new_tokens": 7}.items():
        monkeypatch.setattr(lively.model.generation_config, name, value)
    assert lively.model.generate(
        **lively.inputs(images[:3]), max_new_tokens=8
    ).shape  # they are valid, and heeded there
    assert lively.caption(images[:3], max_new_tokens=8) == said


def test_the_prompt_is_asked_and_the_caption_is_not_part_of_it(tiny_vlm, images):
    text = tiny_vlm.processor.tokenizer.decode(tiny_vlm.inputs(images[:1])["input_ids"][0])
    assert PROMPT == "Describe this image in one sentence."
    assert "image in one sentence" not in tiny_vlm.caption(images[:1], max_new_tokens=4)[0]
    assert "this image in one sentence" in text
    assert "ball" in tiny_vlm.processor.tokenizer.decode(tiny_vlm.inputs(images[:1], "the ball")["input_ids"][0])


def test_rows_are_padded_on_the_left(tiny_vlm, images):
    inputs = tiny_vlm.inputs(images[:4])
    mask = inputs["attention_mask"]
    assert (mask[:, -1] == 1).all()
    assert (mask == 0).any()
    assert (mask.diff(dim=1) >= 0).all()


# Where the patches lie


def patch_brightness(vlm, image):
    """How white each patch of each tile is, from what the image processor really makes of a picture, `(tiles, n)`."""
    processor, vision = vlm.processor.image_processor, vlm.model.config.vision_config
    pixels = processor(images=[image], return_tensors="pt")["pixel_values"].float()
    pixels = pixels.reshape(-1, 3, *pixels.shape[-2:])
    mean, deviation = (torch.tensor(list(it))[:, None, None] for it in (processor.image_mean, processor.image_std))
    grey = (pixels * deviation + mean).mean(1)
    # The patch embedding is a convolution whose stride is its kernel, without padding: so is this.
    return nn.functional.avg_pool2d(grey, vision.patch_size).flatten(1)


def painted(size, box):
    """A black picture, white in a box of pixels."""
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    left, top, right, bottom = box
    picture[top:bottom, left:right] = 255
    return Image.fromarray(picture)


@pytest.fixture(scope="module")
def uneven(tiny_vlm):
    """A tower whose tiles of 30 pixels leave a rest of two beside four patches of 7; its canvases are never tall."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    pinpoints = [[30, 30], [30, 60], [60, 60], [30, 90]]
    model = with_config(tiny_vlm, image_size=30)
    model.config.image_grid_pinpoints = pinpoints
    processor = LlavaOnevisionImageProcessorPil(size={"height": 30, "width": 30}, image_grid_pinpoints=pinpoints)
    return Vlm.from_model(model, SimpleNamespace(image_processor=processor, tokenizer=SimpleNamespace()))


@pytest.fixture(scope="module")
def cropped():
    """A model that does not cut pictures and sees the middle of them."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return single_tile(processor)


@pytest.fixture(scope="module")
def stretched():
    """A model that does not cut pictures and sees them stretched to a square."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return single_tile(SiglipImageProcessorPil(size={"height": 28, "width": 28}))


def single_tile(image_processor):
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=28, patch_size=7))
    processor = SimpleNamespace(image_processor=image_processor)
    return Vlm(SimpleNamespace(config=config), "fc2", nn.Linear(1, 1), prepare=list, processor=processor)


SIZES = [(112, 112), (160, 80), (80, 160), (120, 90), (90, 121), (200, 40), (37, 190), (61, 59)]
towers = pytest.mark.parametrize("which", ["tiny_vlm", "uneven", "cropped", "stretched"])


@towers
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_brightest_patch_of_a_tile_is_where_the_white_square_is(which, size, request):
    vlm = request.getfixturevalue(which)
    grid, patch = vlm.grid(size), vlm.model.config.vision_config.patch_size
    half, lit_tiles = max(1, min(size) // 40), 0
    for across in np.linspace(half, size[0] - half, 6).astype(int):
        for down in np.linspace(half, size[1] - half, 6).astype(int):
            box = (across - half, down - half, across + half, down + half)
            bright = patch_brightness(vlm, painted(size, box))
            assert bright.shape == grid.boxes.shape[:2]
            x, y = across / size[0], down / size[1]
            for tile, boxes in zip(bright, grid.boxes, strict=True):
                left, top, right, bottom = boxes.T
                # The square's half and one pixel of the tile, as fractions of the picture: resampling smears.
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


@towers
@pytest.mark.parametrize("size", [(224, 224), (240, 180), (130, 260)], ids=str)
def test_painting_the_box_of_a_patch_lights_this_patch(which, size, request):
    vlm = request.getfixturevalue(which)
    tried = 0
    for tile, boxes in enumerate(vlm.grid(size).boxes):
        for i, box in enumerate(boxes):
            if box.min() >= -1e-9 and box.max() <= 1 + 1e-9:
                pixels = np.round(box * [*size, *size]).astype(int)
                bright = patch_brightness(vlm, painted(size, pixels))[tile]
                assert int(bright.argmax()) == i
                assert bright[i] > 0.8
                others = torch.cat([bright[:i], bright[i + 1 :]])
                assert others.max() < 0.2
                tried += 1
    assert tried >= 16


def overlap(boxes):
    """The part of each box that lies over the picture."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.from_numpy(((high.clip(0, 1) - low.clip(0, 1)) / (high - low)).prod(-1)).float()


@pytest.mark.parametrize("which", ["tiny_vlm", "uneven"])
@pytest.mark.parametrize("size", [*SIZES, (56, 56), (20, 20), (101, 74), (300, 29)], ids=str)
def test_what_is_padding_lies_outside_the_picture(which, size, request):
    vlm = request.getfixturevalue(which)
    white = patch_brightness(vlm, Image.new("RGB", size, "white"))
    assert torch.allclose(white, overlap(vlm.grid(size).boxes), atol=1e-3)


@pytest.mark.parametrize("size", [(100, 75), (75, 100), (100, 25)], ids=str)
def test_what_is_padding_where_the_processor_rounds_up_an_exact_size(tiny_vlm, size):
    white = patch_brightness(tiny_vlm, Image.new("RGB", size, "white"))
    assert torch.allclose(white, overlap(tiny_vlm.grid(size).boxes), atol=1e-3)


def test_the_grid_of_a_picture_that_fits(tiny_vlm):
    grid = tiny_vlm.grid((56, 28))
    assert grid.tiles == 3
    assert grid.shape == (4, 4)
    assert grid.boxes.shape == (3, 16, 4)
    # Tile 0 is the whole picture, row by row; tiles 1 and 2 are its left and right half.
    assert grid.boxes[0, 0] == pytest.approx([0, 0, 1 / 4, 1 / 4])
    assert grid.boxes[0, 6] == pytest.approx([2 / 4, 1 / 4, 3 / 4, 2 / 4])
    assert grid.boxes[1, 3] == pytest.approx([3 / 8, 0, 4 / 8, 1 / 4])
    assert grid.boxes[2, 12] == pytest.approx([4 / 8, 3 / 4, 5 / 8, 1])


def test_the_grid_of_a_picture_that_is_padded(tiny_vlm):
    # 100 x 50 fits into 56 x 28; 60 x 50 into 56 x 56 as 56 x 47, four rows above it and five below.
    assert tiny_vlm.grid((100, 50)).tiles == 3
    grid = tiny_vlm.grid((60, 50))
    assert grid.tiles == 5
    assert grid.boxes[1, 0] == pytest.approx([0, -4 / 47, 7 / 56, 3 / 47])
    assert grid.boxes[4, 15] == pytest.approx([49 / 56, 45 / 47, 1, 52 / 47])


def test_a_rest_beside_the_patches_is_never_seen(uneven):
    grid = uneven.grid((60, 60))
    assert grid.shape == (4, 4)
    assert grid.boxes[0, 15] == pytest.approx([21 / 30, 21 / 30, 28 / 30, 28 / 30])
    assert grid.boxes[4, 0] == pytest.approx([30 / 60, 30 / 60, 37 / 60, 37 / 60])


def test_a_cropped_picture_shows_its_middle(cropped):
    # 120 x 60: the middle half across, all of it down
    boxes = cropped.grid((120, 60)).boxes
    assert boxes.shape == (1, 16, 4)
    assert boxes[0, 0] == pytest.approx([0.25, 0, 0.375, 0.25])
    assert boxes[0, 15] == pytest.approx([0.625, 0.75, 0.75, 1])


def test_the_grid_has_as_many_tiles_and_patches_as_encode_gives(tiny_vlm, images):
    for image, q in zip(images, tiny_vlm.encode(images), strict=True):
        assert tiny_vlm.grid(image.size).boxes.shape[:2] == q.shape[:2]


# Being told of tokens


def told_of(vlm, images, **more):
    """What somebody who listens hears, and the captions."""
    told = []
    with report_tokens(told.append):
        captions = vlm.caption(images, **more)
    return told, captions


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("longest", [1, 2, 7])
def test_every_token_is_told_once_and_in_order(lively, images, count, longest):
    bare = lively.caption(images[:count], max_new_tokens=longest)
    told, captions = told_of(lively, images[:count], max_new_tokens=longest)
    assert captions == bare
    assert told == list(range(1, len(told) + 1))
    assert max(len(caption.split()) for caption in captions) <= len(told) <= longest


def test_an_answer_that_ends_early_is_told_to_its_end(steerer, scene):
    told, (caption,) = told_of(steerer.vlm, [scene.image], max_new_tokens=64)
    words = steerer.vlm.processor.tokenizer(caption, add_special_tokens=False)["input_ids"]
    assert told == list(range(1, len(words) + 2))  # and the one that ends it


def test_a_batch_is_told_as_long_as_its_longest(steerer, scene):
    plan = steerer.plan(minus=[scene.objects[0]])
    told = []
    with report_tokens(told.append):
        result = steerer.explain(scene.image, plan)
    longest = max(len(told_of(steerer.vlm, [scene.image])[0]), len(result.caption.split()) + 1)
    assert told == list(range(1, longest + 1))  # both captions together, and not one behind the other


def test_nobody_is_told_before_or_after(lively, images):
    told, _ = told_of(lively, images[:1], max_new_tokens=3)
    heard = list(told)
    lively.caption(images[:1], max_new_tokens=3)
    assert told == heard
    with report_tokens(told.append):
        pass
    assert told == heard


def test_the_innermost_is_told_and_the_outer_again_behind_it(lively, images):
    outer, inner = [], []
    with report_tokens(outer.append):
        lively.caption(images[:1], max_new_tokens=2)
        with report_tokens(inner.append):
            lively.caption(images[:1], max_new_tokens=3)
        with pytest.raises(RuntimeError, match="enough"), report_tokens(inner.append):
            raise RuntimeError("enough")
        lively.caption(images[:1], max_new_tokens=2)
    assert inner == [1, 2, 3]
    assert outer == [1, 2, 1, 2]
    lively.caption(images[:1], max_new_tokens=2)
    assert (len(inner), len(outer)) == (3, 4)


def test_only_the_thread_that_listens_is_told(lively, images):
    """Four at once on one model, one of them not listening, inside the block of somebody else."""
    heard = [[] for _ in range(4)]
    ready = threading.Barrier(4)

    def caption(number):
        ready.wait()
        with report_tokens(heard[number].append) if number else nullcontext():
            return lively.caption(images[:1], max_new_tokens=1 + number)[0]

    alone = [lively.caption(images[:1], max_new_tokens=1 + number)[0] for number in range(4)]
    mine = []
    with report_tokens(mine.append), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(caption, range(4))) == alone
    assert heard == [[], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert mine == []


def test_who_raises_ends_the_answer_and_leaves_nothing_behind(lively, images, no_hooks_left):
    no_hooks_left(lively.model)
    bare = lively.caption(images[:2], max_new_tokens=6)
    told = []

    def step(tokens):
        told.append(tokens)
        if tokens == 3:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"), report_tokens(step):
        lively.caption(images[:2], max_new_tokens=6)
    assert told == [1, 2, 3]
    assert lively.caption(images[:2], max_new_tokens=6) == bare
    assert told == [1, 2, 3]


def test_who_raises_ends_a_steered_answer_too(steerer, scene):
    plan = steerer.plan(minus=[scene.objects[0]])
    before = steerer.explain(scene.image, plan)
    with pytest.raises(ZeroDivisionError), report_tokens(lambda tokens: 1 / (2 - tokens)):
        steerer.explain(scene.image, plan)
    with pytest.raises(ZeroDivisionError), report_tokens(lambda tokens: 1 / (2 - tokens)), steerer.applied(plan):
        steerer.vlm.caption([scene.image])
    after = steerer.explain(scene.image, plan)
    assert (after.baseline, after.caption) == (before.baseline, before.caption)
    assert steerer.vlm.caption([scene.image])[0] == before.baseline


def test_a_question_has_no_picture_in_it(tiny_vlm):
    with pytest.raises(SpecError, match=r"^the question contains '<image>', which stands"):
        tiny_vlm.inputs([Image.new("RGB", (40, 40))], "What is in <image>?")
