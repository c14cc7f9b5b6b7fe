"""The families of vision-language models: tiny ones with random weights, loaded from folders."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.models.hooks import record, replace_forward
from elude_steer.models.patch_layout import Canvases, Packed, Tiles
from elude_steer.models.prefix_cache import blocks_before, run_prefix
from elude_steer.models.vlm import PROMPT, Vlm
from elude_steer.server.batches import Batches, Conversation, join_inputs, takes_several
from elude_steer.server.edits import Edits
from elude_steer.server.image_cache import ImageCache, image_key
from elude_steer.server.requests import EditRequest
from elude_steer.steering.export import export
from elude_steer.steering.plan import Plan
from elude_steer.steering.regions import ImagePatches
from tests.helpers.tiny import save_family
from tests.models.conftest import SCALE_SETTINGS, logits, make_plan, two_words

# PaliGemma's processor converts tensors to arrays in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# The default layer; the number of tokens before the patches; sizes that the processor does not change.
EXPECTED = {
    "llava": ("vision_tower.encoder.layers.1.mlp.fc2", 1, [(28, 28), (70, 28), (28, 42)]),
    "llava_dinov2": ("vision_tower.encoder.layer.2.mlp.fc2", 1, [(28, 28)]),
    "llava_registers": ("vision_tower.encoder.layer.2.mlp.fc2", 3, [(28, 28)]),
    "llava_vit": ("vision_tower.layers.2.mlp.fc2", 1, [(28, 28)]),
    "llava_siglip": ("vision_tower.encoder.layers.2.mlp.fc2", 0, [(28, 28)]),
    "llava_next": ("vision_tower.encoder.layers.1.mlp.fc2", 1, [(56, 28), (56, 56), (28, 56)]),
    "idefics3": ("vision_model.encoder.layers.2.mlp.fc2", 0, [(84, 56), (84, 84), (28, 84)]),
    "smolvlm": ("vision_model.encoder.layers.2.mlp.fc2", 0, [(84, 56), (56, 84)]),
    "qwen2_vl": ("visual.blocks.2.mlp.fc2", 0, [(84, 56), (42, 98), (28, 28)]),
    "qwen2_5_vl": ("visual.blocks.2.mlp.down_proj", 0, [(84, 56), (42, 98), (70, 70)]),
    "paligemma": ("vision_tower.encoder.layers.2.mlp.fc2", 0, [(28, 28)]),
    "gemma3": ("vision_tower.encoder.layers.2.mlp.fc2", 0, [(28, 28)]),
    "internvl": ("vision_tower.encoder.layer.2.mlp.fc2", 1, [(56, 56), (84, 28), (28, 56), (28, 28)]),
}
TILES = {  # of an image twice as wide as high; 1 in other families
    "llava_next": 3, "idefics3": 7, "smolvlm": 7, "internvl": 3,
}  # fmt: skip


@pytest.fixture
def steerer(family_steerer):
    return family_steerer


# Structure


def test_layer_tokens_and_layout_are_found(family):
    vlm, (end, before, _) = family.vlm, EXPECTED[family.name]
    assert vlm.layer_name.endswith(end)
    assert vlm.skip_tokens == tuple(range(before))
    assert vlm.grid((112, 56)).tiles == TILES.get(family.name, 1)
    kinds = {"llava_next": Canvases, "qwen2_vl": Packed, "qwen2_5_vl": Packed}
    assert isinstance(vlm.layout, kinds.get(family.name, Tiles))


def test_the_default_layer_is_the_last_that_reaches_the_language_model(family, scenes):
    """Changing its output changes the logits; changing a later block does not."""
    vlm, bare = family.vlm, logits(family.vlm, scenes[:1])
    layers = {name: m for name, m in vlm.model.named_modules() if name.endswith(vlm.layer_name[-7:])}
    layers = {name: m for name, m in layers.items() if name.startswith(vlm.within) and type(m) is type(vlm.layer)}
    numbered = sorted(name for name in layers if weight_shape(layers[name]) == weight_shape(vlm.layer))
    assert vlm.layer_name in numbered
    for name in numbered:
        with replace_forward(layers[name], lambda original, x: original(x) * 3 + 1):
            reaches = not torch.equal(logits(vlm, scenes[:1]), bare)
        assert reaches == (name <= vlm.layer_name)
    assert torch.equal(logits(vlm, scenes[:1]), bare)


def weight_shape(layer):
    return tuple(layer.weight.shape)


def test_encode_matches_the_grid(family, scenes):
    vlm, before = family.vlm, EXPECTED[family.name][1]
    images = [
        image.resize(size) for image, size in zip(scenes, [(112, 56), (40, 90), (64, 64), (75, 31)], strict=False)
    ]
    together = vlm.encode(images)
    for image, q in zip(images, together, strict=True):
        grid = vlm.grid(image.size)
        assert grid.boxes.shape[:2] == (q.shape[0], q.shape[1] - before)
        assert math.prod(grid.shape) == grid.boxes.shape[1]
        torch.testing.assert_close(vlm.encode([image])[0], q, rtol=1e-4, atol=1e-4)
    assert vlm.token_indices(together[0].shape[1])[0] == before


# Positions of patches


def first_block(vlm):
    return blocks_before(vlm)[0]


def first_block_inputs(vlm, images):
    """The inputs of the first block, `(tiles, patches, d)` per image."""
    inputs = vlm.inputs(images)
    with torch.inference_mode(), record(first_block(vlm)) as recorded:
        vlm.model(**inputs)
    return [q[:, vlm.layout.before :] for q in vlm.split_by_image(recorded.input, inputs, len(images))]


def noise(size, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(60, 180, (size[1], size[0], 3), dtype=np.uint8))


def paint_box(image, box):
    """The image with other colours in a box of pixels."""
    pixels = np.array(image)
    left, top, right, bottom = box
    pixels[top:bottom, left:right] += 70
    return Image.fromarray(pixels)


def overlaps(boxes, box, size, margin=0.0):
    """Which patches overlap a box of pixels, after growing the patches by `margin` of their own pixels."""
    scaled = boxes * [*size, *size]
    pixel = (scaled[..., 2:] - scaled[..., :2]) / 7
    low, high = scaled[..., :2] - margin * pixel, scaled[..., 2:] + margin * pixel
    inside = np.minimum(high, box[2:]) - np.maximum(low, box[:2])
    return (inside > 1e-6).all(-1)


def change_by_painting(vlm, image, box, other):
    """How much the patches of an image change when a box is painted; another image in the batch must not change."""
    before, after = (first_block_inputs(vlm, [other, one]) for one in (image, paint_box(image, box)))
    assert torch.equal(before[0], after[0])
    return (before[1] - after[1]).norm(dim=-1).numpy()


def test_painting_a_patch_changes_its_token_only(family):
    """Exact for tiles whose pixels the processor does not resample; the tile of the complete image may be resized."""
    vlm, other = family.vlm, noise((40, 66), 1)
    for size in EXPECTED[family.name][2]:
        image, grid = noise(size), vlm.grid(size)
        sides = grid.boxes[:, 0, 2:] - grid.boxes[:, 0, :2]
        exact = np.isclose(sides, [7 / size[0], 7 / size[1]], atol=1e-9).all(-1)
        assert exact.any()
        tile = int(np.flatnonzero(exact)[-1])
        for patch in range(0, grid.boxes.shape[1], 3):
            scaled = grid.boxes[tile, patch] * [*size, *size]
            box = np.round(scaled).astype(int)
            assert np.allclose(box, scaled, atol=1e-9)
            changed = change_by_painting(vlm, image, box, other) > 0
            assert changed.shape == grid.boxes.shape[:2]
            assert changed[tile, patch]
            assert (changed[exact] == overlaps(grid.boxes, box, size)[exact]).all()
            assert (changed[~exact] <= overlaps(grid.boxes, box, size, margin=4)[~exact]).all()


@pytest.mark.parametrize("size", [(61, 45), (33, 80), (150, 100)], ids=str)
def test_painting_a_box_changes_the_tokens_around_it(family, size):
    """Resampling blurs: patches well inside the box change, and patches that change much are not far away."""
    vlm, image, other, grid = family.vlm, noise(size), noise((40, 66), 1), family.vlm.grid(size)
    changed = 0
    for x, y in [(0.1, 0.1), (0.5, 0.4), (0.85, 0.9), (0.3, 0.8)]:
        left, top = int(x * size[0]), int(y * size[1])
        box = (left, top, left + max(3, size[0] // 9), top + max(3, size[1] // 9))
        change = change_by_painting(vlm, image, box, other)
        strongly = change > 0.15 * change.max()
        assert ((change > 0) >= overlaps(grid.boxes, box, size, margin=-1.5)).all()
        assert (strongly <= overlaps(grid.boxes, box, size, margin=2)).all()
        changed += strongly.sum()
    assert changed


def test_tiles_are_in_the_order_of_the_processor(family):
    boxes = family.vlm.grid((84, 56)).boxes
    areas = [tuple(np.round([*tile[0, :2], *tile[-1, 2:]], 3)) for tile in boxes]
    complete = (0.0, 0.0, 1.0, 1.0)
    if family.name in ("idefics3", "smolvlm"):  # two rows of three, then the complete image
        thirds = [0, 0.333, 0.667, 1]
        assert areas[:6] == [(thirds[c], r / 2, thirds[c + 1], (r + 1) / 2) for r in range(2) for c in range(3)]
        assert areas[6:] == [complete]
    elif family.name == "llava_next":  # the complete image, then a canvas of 56 x 56 with bars above and below
        assert areas[0] == complete
        assert areas[1] == (0.0, pytest.approx(-9 / 38, abs=0.03), 0.5, pytest.approx(0.5, abs=0.03))
        assert len(areas) == 5
    elif family.name == "internvl":  # two rows of two, then the complete image
        assert areas == [(c / 2, r / 2, (c + 1) / 2, (r + 1) / 2) for r in range(2) for c in range(2)] + [complete]
    elif family.name == "llava":  # the middle
        assert areas == [(pytest.approx(1 / 6, abs=0.02), 0.0, pytest.approx(5 / 6, abs=0.02), 1.0)]
    else:
        assert areas == [complete]


def test_the_frame_of_a_reference_image_marks_the_patch(family, scenes):
    vlm, image = family.vlm, Image.new("RGB", (140, 140), "black")
    before, boxes = vlm.layout.before, vlm.grid(image.size).boxes
    tile = int(np.abs(boxes[:, 0, :2]).sum(1).argmin())  # a tile that begins at the corner of the image
    frames = [
        np.asarray(ReferenceImages(None, vlm)._draw_frame(image, tile, token, 140)) for token in range(before + 1)
    ]
    assert not any(frame.any() for frame in frames[:before])  # these tokens are not patches
    down, across = np.nonzero(frames[before].any(-1))
    assert 0 < down.max() <= boxes[tile, 0, 3] * 140
    assert 0 < across.max() <= boxes[tile, 0, 2] * 140


def test_a_start_token_in_the_template_is_not_repeated(tmp_path, scenes):
    from tokenizers.processors import TemplateProcessing

    vlm = Vlm.load(str(save_family("gemma3", tmp_path / "gemma3")))
    tokenizer = vlm.processor.tokenizer
    start, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, number)])
    template = vlm.processor.chat_template  # begins with the token, and has another one for the answer
    for chat, count in ((template, 2), (f"user {template}", 3)):
        vlm.processor.chat_template = chat
        ids = vlm.inputs(scenes[:1])["input_ids"][0]
        assert ids[0] == number
        assert (ids == number).sum() == count


def test_a_model_without_a_template_gets_a_plain_prompt(tmp_path, scenes):
    vlm = Vlm.load(str(save_family("paligemma", tmp_path / "paligemma")))
    vlm.processor.chat_template = vlm.processor.tokenizer.chat_template = None
    inputs = vlm.inputs(scenes[:1], "Describe this")
    assert (inputs["input_ids"] == vlm.model.config.image_token_id).sum() == 16
    assert vlm.caption(scenes[:1], max_new_tokens=3)


# Steering


def test_an_empty_plan_changes_nothing(steerer, scenes):
    vlm, images = steerer.vlm, scenes[:3]
    bare, captions = logits(vlm, images), vlm.caption(images, max_new_tokens=6)
    for plan in (None, Plan(), [None, Plan(), None]):
        with steerer.applied(plan):
            assert torch.equal(logits(vlm, images), bare)
            assert vlm.caption(images, max_new_tokens=6) == captions
    together = steerer.captions(images, [[None], [None, Plan()], [Plan()]], max_new_tokens=6)
    assert together == [[captions[0]], [captions[1], captions[1]], [captions[2]]]


@pytest.mark.parametrize("kind", [*SCALE_SETTINGS, "place"])
def test_an_edit_changes_the_logits_and_leaves_no_hooks(steerer, scenes, kind, no_hooks_left):
    vlm, images = steerer.vlm, scenes[:2]
    no_hooks_left(vlm.model)
    plan = make_plan(steerer, kind)
    bare = logits(vlm, images)
    with steerer.applied(plan):
        steered = logits(vlm, images)
    assert not torch.equal(steered, bare)
    assert torch.equal(logits(vlm, images), bare)
    with steerer.applied(plan):
        assert torch.equal(logits(vlm, images), steered)
    with steerer.applied([None, plan]):
        mixed = logits(vlm, images)
    torch.testing.assert_close(mixed[0], bare[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1], steered[1], rtol=1e-3, atol=1e-3)


def test_only_patches_of_the_region_are_changed(steerer, scenes):
    """A concept placed in a box changes the layer's output there, in the order of the tower, and nowhere else."""
    vlm, image = steerer.vlm, scenes[0].resize((84, 56))
    box = (42, 0, 84, 28)
    word = two_words(steerer)[0]
    plan = steerer.plan(plus=[word], mode="place", where=box, strength=20.0)
    prefix, prepared = run_prefix(vlm, [image]), steerer.gather_weights(plan)
    change = prepared.output_change(prefix.q[0], ImagePatches(vlm, lambda: image.size))
    before = vlm.layout.before
    assert not change[:, :before].any()
    inside = overlaps(vlm.grid(image.size).boxes, box, image.size)
    touched = change[:, before:].abs().amax(-1).numpy() > 0
    assert touched.any()
    assert (touched <= inside).all()
    result = steerer.explain(image, plan, max_new_tokens=4)
    assert (result.maps[word][1].astype(bool) == touched).all()
    assert max(result.heatmap(word).size) == 480


def test_tokens_before_the_patches_are_never_changed(steerer, scenes):
    (q,) = run_prefix(steerer.vlm, scenes[:1]).q
    prepared = steerer.gather_weights(make_plan(steerer, "few"))
    before = steerer.vlm.layout.before
    loud = q.clone()
    loud[:, :before] *= 1000
    change = prepared.output_change(loud, ImagePatches(steerer.vlm, lambda: scenes[0].size))
    assert not change[:, :before].any()
    assert (change != 0).any()


def test_an_exported_checkpoint_gives_the_same_captions(steerer, family, scenes):
    plan, images = make_plan(steerer, "scale"), scenes[:4]
    with steerer.applied(plan):
        hooked, captions = logits(steerer.vlm, images), steerer.vlm.caption(images, max_new_tokens=6)
    loaded = Vlm.load(str(export(steerer, plan, family.root / "exported")))
    torch.testing.assert_close(logits(loaded, images), hooked, rtol=1e-3, atol=1e-3)
    assert loaded.caption(images, max_new_tokens=6) == captions
    assert not torch.equal(logits(loaded, images), logits(steerer.vlm, images))


# The server


def test_rows_of_several_clients_are_what_the_processor_makes_of_a_batch(family, images):
    """`join_inputs` joins what was made one by one; for every family that must be the processor's own batch."""
    vlm, questions = family.vlm, ["describe this image", "a dog", "the park next to the train ."]
    some = [images[0], images[1], images[3]]
    rows = [
        vlm.chat_inputs([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}], [image])
        for image, text in zip(some, questions, strict=True)
    ]
    joined, batch = join_inputs(rows, vlm.processor.tokenizer.pad_token_id), vlm.inputs(some, questions)
    assert set(joined) == set(batch)
    for name, value in batch.items():
        assert torch.equal(joined[name], value), name


def test_the_server_answers_as_the_library_does(steerer, images):
    """Different images and plans in one batch, the second time from what is kept of the images."""
    vlm, minus = steerer.vlm, two_words(steerer)[0]
    edits = Edits(steerer, {})
    asked = [
        None,
        {"mode": "scale", "gamma": -8.0, "nu": "all", "kappa": 6},
        {"mode": "scale", "gamma": -20.0, "nu": 3},
    ]
    some = [images[0], images[1], images[0]]
    made = [None if one is None else edits.plan(EditRequest({minus: {}}, settings=one)) for one in asked]
    expected = steerer.captions(some, [[one and one.plan] for one in made], max_new_tokens=6)
    run_prefix(vlm, some[:1])
    batches = Batches(steerer, edits, ImageCache(10**9), lambda new, known: counts.append((new, known)))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}]
    rows = []
    for image, edit in zip(some, made, strict=True):
        own = (image_key(image, alone=True),), (image.size,), (vlm.grid(image.size),)
        rows.append(Conversation(vlm.chat_inputs(messages, [image], torch.device("cpu")), *own, edit))
    counts = []
    for _ in range(2):
        tokens = []

        def remember(new, tokens=tokens):
            tokens.append(new)

        batches.run(rows, 6, lambda number, report: None, remember)
        assert [[text] for text in vlm.decode(tokens[-1])] == expected
    assert counts == [(2, 0), (0, 2)]


def test_several_images_in_one_prompt(steerer, family, images):
    """Where it is known which part belongs to which image, the server's way gives the bare model's tokens."""
    vlm, edits = steerer.vlm, Edits(steerer, {})
    # Qwen2-VL tells images by what stands between them; its own template puts marks around each.
    between = {"type": "text", "text": "next to"}
    parts = [{"type": "image"}, between, {"type": "image"}, {"type": "text", "text": PROMPT}]
    inputs = vlm.chat_inputs([{"role": "user", "content": parts}], images[:2])
    assert takes_several(vlm, inputs, 2) == (family.name not in ("idefics3", "smolvlm", "internvl"))
    if not takes_several(vlm, inputs, 2):
        return
    run_prefix(vlm, images[:1])
    batches, tokens = Batches(steerer, edits, ImageCache(10**9), lambda new, known: None), {}
    edit = edits.plan(EditRequest({two_words(steerer)[0]: {}}, settings={"mode": "scale", "gamma": -8.0, "nu": "all"}))
    keys, sizes = tuple(image_key(image, alone=False) for image in images[:2]), tuple(i.size for i in images[:2])
    for name, one in (("bare", None), ("edited", edit)):
        rows = [Conversation(inputs, keys, sizes, tuple(map(vlm.grid, sizes)), one)]
        batches.run(rows, 6, lambda *_: None, lambda new, name=name: tokens.__setitem__(name, new))
    assert torch.equal(tokens["bare"], vlm.generate(inputs, 6, lambda _: None))
    with replace_forward(vlm.layer, _folded(steerer, edit.plan)):
        assert torch.equal(tokens["edited"], vlm.generate(inputs, 6, lambda _: None))


def _folded(steerer, plan):
    """The layer with a linear plan in its weights, as an exported checkpoint has it."""
    weight, bias = steerer.gather_weights(plan).weight_change
    own = steerer.vlm.layer.weight + weight, steerer.vlm.layer.bias + bias
    return lambda _original, x: torch.nn.functional.linear(x, *own)
