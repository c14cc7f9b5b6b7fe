"""Other vision-language models through the same door: tiny ones with random weights, loaded from folders."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import elude_steer as es
from elude_steer import toyland
from elude_steer.atlas.reference_images import ReferenceImages
from elude_steer.errors import ModelError
from elude_steer.models.hooks import record, replace_forward
from elude_steer.models.patch_layout import Canvases, Packed, Tiles, find_layout
from elude_steer.models.prefix_cache import Prefix, blocks_before, resume_from, run_prefix
from elude_steer.models.processor_probe import locate_tiles
from elude_steer.models.vlm import Vlm
from elude_steer.specs import (
    AtlasSpec,
    ClustersSpec,
    LabelsSpec,
    MatcherSpec,
    ModelSpec,
    ReferencesSpec,
    SplitSpec,
    TokensSpec,
)
from elude_steer.steering.export import export
from elude_steer.steering.intervention import make_resumed_forward
from elude_steer.steering.plan import Plan
from elude_steer.steering.regions import ImagePatches
from elude_steer.steering.steerer import Steerer
from tests.helpers.tiny import FAMILIES, save_family

# PaliGemma's processor makes an array of a tensor in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# The layer that is taken if nobody says which; tokens before the patches; sizes that the processor leaves as they are.
EXPECTED = {
    "llava": ("vision_tower.encoder.layers.1.mlp.fc2", 1, [(28, 28), (70, 28), (28, 42)]),
    "llava_next": ("vision_tower.encoder.layers.1.mlp.fc2", 1, [(56, 28), (56, 56), (28, 56)]),
    "idefics3": ("vision_model.encoder.layers.2.mlp.fc2", 0, [(84, 56), (84, 84), (28, 84)]),
    "smolvlm": ("vision_model.encoder.layers.2.mlp.fc2", 0, [(84, 56), (56, 84)]),
    "qwen2_vl": ("visual.blocks.2.mlp.fc2", 0, [(84, 56), (42, 98), (28, 28)]),
    "qwen2_5_vl": ("visual.blocks.2.mlp.down_proj", 0, [(84, 56), (42, 98), (70, 70)]),
    "paligemma": ("vision_tower.encoder.layers.2.mlp.fc2", 0, [(28, 28)]),
    "gemma3": ("vision_tower.encoder.layers.2.mlp.fc2", 0, [(28, 28)]),
    "internvl": ("vision_tower.encoder.layer.2.mlp.fc2", 1, [(56, 56), (84, 28), (28, 56), (28, 28)]),
}
TILES = {  # of a picture twice as wide as high; 1 if not told
    "llava_next": 3, "idefics3": 7, "smolvlm": 7, "internvl": 3,
}  # fmt: skip
BIASES = {"scale": {"mode": "scale", "gamma": -8.0, "nu": "all"}, "few": {"mode": "scale", "gamma": -20.0, "nu": 3}}


@pytest.fixture(scope="module", autouse=True)
def words_for_numbers():
    """SmolVLM's processor wants a package that only its videos need."""
    module = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    with pytest.MonkeyPatch.context() as patch:
        if not module.num2words:
            patch.setattr(module, "num2words", str)
        yield


@dataclass
class Family:
    name: str
    vlm: Vlm
    folder: object
    root: object


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    folder = save_family(request.param, root / "model")
    return Family(request.param, Vlm.load(str(folder)), folder, root)


@pytest.fixture(scope="module")
def scenes():
    return [scene.image for scene in toyland.scenes(seed=70_001, n=24)]


@pytest.fixture(scope="module")
def steerer(family, scenes):
    """The atlas of a family's layer, built from drawn scenes, and everything that steering needs."""
    (family.root / "pictures").mkdir()
    for number, image in enumerate(scenes):
        image.save(family.root / "pictures" / f"{number:02d}.png")
    spec = AtlasSpec(
        family.name.replace("_", "-"),
        ModelSpec(str(family.folder), family.vlm.layer_name),
        tokens=TokensSpec(per_image=8, batch_size=4),
        clusters=ClustersSpec(top_k=100, backend="exact", min_cluster_size=8, min_samples=3),
        split=SplitSpec(winner_rule="gap"),
        references=ReferencesSpec(instances=10, keep=4, streams=8),
        labels=LabelsSpec(scorer="toyland/labeller", vocabulary="toyland", top_k=12),
        matcher=MatcherSpec("toyland/matcher"),
    )
    root = family.root
    atlas = es.build(spec, images=root / "pictures", out=root / "atlas", work=root / "work", threads=1, quiet=True)
    return Steerer.from_parts(family.vlm, atlas, atlas.matcher())


def logits(vlm, images):
    with torch.inference_mode():
        return vlm.model(**vlm.inputs(images)).logits


# What is found


def test_what_is_found_in_it(family):
    vlm, (end, before, _) = family.vlm, EXPECTED[family.name]
    assert vlm.layer_name.endswith(end)
    assert vlm.skip_tokens == tuple(range(before))
    assert vlm.grid((112, 56)).tiles == TILES.get(family.name, 1)
    kinds = {"llava_next": Canvases, "qwen2_vl": Packed, "qwen2_5_vl": Packed}
    assert isinstance(vlm.layout, kinds.get(family.name, Tiles))


def test_the_layer_is_the_last_that_reaches_the_words(family, scenes):
    """Turning it up changes what the model says; the same in a block behind it would not."""
    vlm, bare = family.vlm, logits(family.vlm, scenes[:1])
    layers = {name: m for name, m in vlm.model.named_modules() if name.endswith(vlm.layer_name[-7:])}
    layers = {name: m for name, m in layers.items() if name.startswith(vlm.within) and type(m) is type(vlm.layer)}
    numbered = sorted(name for name in layers if m_shape(layers[name]) == m_shape(vlm.layer))
    assert vlm.layer_name in numbered
    for name in numbered:
        with replace_forward(layers[name], lambda original, x: original(x) * 3 + 1):
            reaches = not torch.equal(logits(vlm, scenes[:1]), bare)
        assert reaches == (name <= vlm.layer_name)
    assert torch.equal(logits(vlm, scenes[:1]), bare)


def m_shape(layer):
    return tuple(layer.weight.shape)


def test_what_encode_gives_fits_the_grid(family, scenes):
    vlm, before = family.vlm, EXPECTED[family.name][1]
    shapes = [
        image.resize(size) for image, size in zip(scenes, [(112, 56), (40, 90), (64, 64), (75, 31)], strict=False)
    ]
    together = vlm.encode(shapes)
    for image, q in zip(shapes, together, strict=True):
        grid = vlm.grid(image.size)
        assert grid.boxes.shape[:2] == (q.shape[0], q.shape[1] - before)
        assert math.prod(grid.shape) == grid.boxes.shape[1]
        torch.testing.assert_close(vlm.encode([image])[0], q, rtol=1e-4, atol=1e-4)
    assert vlm.token_indices(together[0].shape[1])[0] == before


# Where the patches lie


def first_block(vlm):
    return blocks_before(vlm)[0]


def given_first(vlm, images):
    """What the first block is given, `(tiles, patches, d)` a picture."""
    inputs = vlm.inputs(images)
    with torch.inference_mode(), record(first_block(vlm)) as seen:
        vlm.model(**inputs)
    return [q[:, vlm.layout.before :] for q in vlm.split_by_image(seen.input, inputs, len(images))]


def noise(size, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(60, 180, (size[1], size[0], 3), dtype=np.uint8))


def painted(image, box):
    """The picture with other colours in a box of pixels."""
    pixels = np.array(image)
    left, top, right, bottom = box
    pixels[top:bottom, left:right] += 70
    return Image.fromarray(pixels)


def overlaps(boxes, box, size, margin=0.0):
    """Which patches lie over a box of pixels; grown or, if negative, shrunk by so many of the patch's own pixels."""
    scaled = boxes * [*size, *size]
    pixel = (scaled[..., 2:] - scaled[..., :2]) / 7
    low, high = scaled[..., :2] - margin * pixel, scaled[..., 2:] + margin * pixel
    inside = np.minimum(high, box[2:]) - np.maximum(low, box[:2])
    return (inside > 1e-6).all(-1)


def changed_by(vlm, picture, box, other):
    """How much patches of a picture change when a box of it is painted; another picture in the batch must not."""
    before, after = (given_first(vlm, [other, one]) for one in (picture, painted(picture, box)))
    assert torch.equal(before[0], after[0])
    return (before[1] - after[1]).norm(dim=-1).numpy()


def test_painting_a_patch_changes_its_token_and_no_other(family):
    """Exactly, where the processor leaves the pixels of a tile as they are; the picture as a whole may be resized."""
    vlm, other = family.vlm, noise((40, 66), 1)
    for size in EXPECTED[family.name][2]:
        picture, grid = noise(size), vlm.grid(size)
        sides = grid.boxes[:, 0, 2:] - grid.boxes[:, 0, :2]
        exact = np.isclose(sides, [7 / size[0], 7 / size[1]], atol=1e-9).all(-1)
        assert exact.any()
        tile = int(np.flatnonzero(exact)[-1])
        for patch in range(0, grid.boxes.shape[1], 3):
            scaled = grid.boxes[tile, patch] * [*size, *size]
            box = np.round(scaled).astype(int)
            assert np.allclose(box, scaled, atol=1e-9)
            changed = changed_by(vlm, picture, box, other) > 0
            assert changed.shape == grid.boxes.shape[:2]
            assert changed[tile, patch]
            assert (changed[exact] == overlaps(grid.boxes, box, size)[exact]).all()
            assert (changed[~exact] <= overlaps(grid.boxes, box, size, margin=4)[~exact]).all()


@pytest.mark.parametrize("size", [(61, 45), (33, 80), (150, 100)], ids=str)
def test_painting_anywhere_in_a_picture_of_any_size(family, size):
    """Resampling smears: what lies well inside changes, and what changes much does not lie far away."""
    vlm, picture, other, grid = family.vlm, noise(size), noise((40, 66), 1), family.vlm.grid(size)
    lit = 0
    for x, y in [(0.1, 0.1), (0.5, 0.4), (0.85, 0.9), (0.3, 0.8)]:
        left, top = int(x * size[0]), int(y * size[1])
        box = (left, top, left + max(3, size[0] // 9), top + max(3, size[1] // 9))
        change = changed_by(vlm, picture, box, other)
        mostly = change > 0.15 * change.max()
        assert ((change > 0) >= overlaps(grid.boxes, box, size, margin=-1.5)).all()
        assert (mostly <= overlaps(grid.boxes, box, size, margin=2)).all()
        lit += mostly.sum()
    assert lit


def test_tiles_stand_in_the_order_of_the_processor(family):
    boxes = family.vlm.grid((84, 56)).boxes
    areas = [tuple(np.round([*tile[0, :2], *tile[-1, 2:]], 3)) for tile in boxes]
    whole = (0.0, 0.0, 1.0, 1.0)
    if family.name in ("idefics3", "smolvlm"):  # two rows of three, the whole at the end
        thirds = [0, 0.333, 0.667, 1]
        assert areas[:6] == [(thirds[c], r / 2, thirds[c + 1], (r + 1) / 2) for r in range(2) for c in range(3)]
        assert areas[6:] == [whole]
    elif family.name == "llava_next":  # the whole, then a canvas of 56 x 56 with bars above and below
        assert areas[0] == whole
        assert areas[1] == (0.0, pytest.approx(-9 / 38, abs=0.03), 0.5, pytest.approx(0.5, abs=0.03))
        assert len(areas) == 5
    elif family.name == "internvl":  # two rows of two, and the whole at the end
        assert areas == [(c / 2, r / 2, (c + 1) / 2, (r + 1) / 2) for r in range(2) for c in range(2)] + [whole]
    elif family.name == "llava":  # the middle
        assert areas == [(pytest.approx(1 / 6, abs=0.02), 0.0, pytest.approx(5 / 6, abs=0.02), 1.0)]
    else:
        assert areas == [whole]


def test_windows_are_found_by_trying(tmp_path):
    """A tower that goes through windows, in a picture larger than one, has another order than one that does not."""
    plain, windows = (Vlm.load(str(save_family(name, tmp_path / name))) for name in ("qwen2_vl", "qwen2_5_vl"))
    assert (plain.layout.merge, plain.layout.window) == (2, 0)
    assert (windows.layout.merge, windows.layout.window) == (2, 4)
    path = tmp_path / "qwen2_5_vl" / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["window_size"] = 56  # as in the real one larger than a picture of a few patches
    path.write_text(json.dumps(config))
    assert Vlm.load(str(path.parent)).layout.window == 8


def test_the_marked_patch_of_a_reference_is_the_one_that_fired(family, scenes):
    vlm, picture = family.vlm, Image.new("RGB", (140, 140), "black")
    before, boxes = vlm.layout.before, vlm.grid(picture.size).boxes
    tile = int(np.abs(boxes[:, 0, :2]).sum(1).argmin())  # one that begins where the picture does
    marked = [np.asarray(ReferenceImages(None, vlm)._draw_frame(picture, tile, at, 140)) for at in range(before + 1)]
    assert not any(own.any() for own in marked[:before])  # tokens that are no patch
    down, across = np.nonzero(marked[before].any(-1))
    assert 0 < down.max() <= boxes[tile, 0, 3] * 140
    assert 0 < across.max() <= boxes[tile, 0, 2] * 140


def test_a_picture_counts_for_as_many_tiles_as_it_has_patches_for():
    q = torch.zeros(1, 5300, 1), torch.zeros(3, 729, 1), torch.zeros(2, 16, 1)
    assert Prefix({}, q, {}, (), (), ()).tiles == [8, 3, 2]


def test_who_reads_several_blocks_is_never_resumed(family, monkeypatch):
    vlm = family.vlm
    assert blocks_before(vlm)
    monkeypatch.setattr(vlm.model.config.vision_config, "deepstack_visual_indexes", [0], raising=False)
    assert blocks_before(vlm) == []


def test_a_template_that_begins_a_text_is_not_begun_again(tmp_path, scenes):
    from tokenizers.processors import TemplateProcessing

    vlm = Vlm.load(str(save_family("gemma3", tmp_path / "gemma3")))
    tokenizer = vlm.processor.tokenizer
    start, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, number)])
    template = vlm.processor.chat_template  # begins with it, and has another one for the answer
    for chat, count in ((template, 2), (f"user {template}", 3)):
        vlm.processor.chat_template = chat
        ids = vlm.inputs(scenes[:1])["input_ids"][0]
        assert ids[0] == number
        assert (ids == number).sum() == count


def test_a_model_without_a_template_is_asked_plainly(tmp_path, scenes):
    vlm = Vlm.load(str(save_family("paligemma", tmp_path / "paligemma")))
    vlm.processor.chat_template = vlm.processor.tokenizer.chat_template = None
    inputs = vlm.inputs(scenes[:1], "Describe this")
    assert (inputs["input_ids"] == vlm.model.config.image_token_id).sum() == 16
    assert vlm.caption(scenes[:1], max_new_tokens=3)


# Steering


def test_an_empty_plan_changes_nothing(steerer, scenes):
    vlm, images = steerer.vlm, scenes[:3]
    bare, said = logits(vlm, images), vlm.caption(images, max_new_tokens=6)
    for plan in (None, Plan(), [None, Plan(), None]):
        with steerer.applied(plan):
            assert torch.equal(logits(vlm, images), bare)
            assert vlm.caption(images, max_new_tokens=6) == said
    together = steerer.captions(images, [[None], [None, Plan()], [Plan()]], max_new_tokens=6)
    assert together == [[said[0]], [said[1], said[1]], [said[2]]]


@pytest.mark.parametrize("how", [*BIASES, "place"])
def test_an_edit_changes_the_logits_and_leaves_nothing_behind(steerer, scenes, how, no_hooks_left):
    vlm, images = steerer.vlm, scenes[:2]
    no_hooks_left(vlm.model)
    plan = plan_of(steerer, how)
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


def plan_of(steerer, how):
    settings = BIASES.get(how, {"mode": "place", "nu": 4, "fill": 0, "smooth": True, "beta": 30.0})
    minus, plus = words_of(steerer)
    return steerer.plan(minus=[minus], plus=[plus] if how == "place" else [], kappa=6, **settings)


def words_of(steerer):
    """Two words that the atlas of a model with random weights happens to have."""
    labels = steerer.atlas.require_labels()
    return [word for word in dict.fromkeys(labels[i] for i in range(len(labels))) if word][:2]


@pytest.mark.parametrize("how", [*BIASES, "place"])
def test_resuming_gives_what_running_gives(steerer, scenes, how):
    """From the target on, for pictures of several shapes, one of them twice."""
    vlm, images = steerer.vlm, [scenes[0], scenes[1].resize((60, 90)), scenes[2].resize((90, 40))]
    plan, order = plan_of(steerer, how), [2, 0, 2, 1]
    plans = [plan, None, None, plan]
    seen = run_prefix(vlm, images)
    inputs = seen.select(order)
    rows = [
        (i, steerer.gather_weights(one), ImagePatches(vlm, lambda i=i: seen.sizes[i]))
        for i, one in zip(order, plans, strict=True)
    ]
    once = make_resumed_forward(seen.q, rows, lambda parts: vlm.join_images(parts, inputs))
    with torch.inference_mode(), resume_from(vlm, seen, order), replace_forward(vlm.layer, once):
        got = vlm.model(**inputs).logits
    ordered = [images[i] for i in order]
    with steerer.applied(plans):
        torch.testing.assert_close(got, logits(vlm, ordered), rtol=1e-3, atol=1e-3)
    assert blocks_before(vlm)[-1] in seen.outputs


def test_only_the_marked_patches_are_changed(steerer, scenes):
    """Something placed in a box changes the layer's output there, in the tower's order, and nowhere else."""
    vlm, image = steerer.vlm, scenes[0].resize((84, 56))
    box = (42, 0, 84, 28)
    word = words_of(steerer)[0]
    plan = steerer.plan(plus=[word], mode="place", where=box, kappa=6, beta=30.0)
    seen, prepared = run_prefix(vlm, [image]), steerer.gather_weights(plan)
    change = prepared.output_change(seen.q[0], ImagePatches(vlm, lambda: image.size))
    before = vlm.layout.before
    assert not change[:, :before].any()
    marked = overlaps(vlm.grid(image.size).boxes, box, image.size)
    touched = change[:, before:].abs().amax(-1).numpy() > 0
    assert touched.any()
    assert (touched <= marked).all()
    result = steerer.explain(image, plan, max_new_tokens=4)
    assert (result.maps[word][1].astype(bool) == touched).all()
    assert max(result.heatmap(word).size) == 480


def test_what_is_no_patch_is_never_among_the_strongest(steerer, scenes):
    (q,) = run_prefix(steerer.vlm, scenes[:1]).q
    prepared = steerer.gather_weights(plan_of(steerer, "few"))
    before = steerer.vlm.layout.before
    loud = q.clone()
    loud[:, :before] *= 1000
    change = prepared.output_change(loud, ImagePatches(steerer.vlm, lambda: scenes[0].size))
    assert not change[:, :before].any()
    assert (change != 0).any()


def test_an_exported_checkpoint_says_the_same(steerer, family, scenes):
    plan, images = plan_of(steerer, "scale"), scenes[:4]
    with steerer.applied(plan):
        hooked, said = logits(steerer.vlm, images), steerer.vlm.caption(images, max_new_tokens=6)
    loaded = Vlm.load(str(export(steerer, plan, family.root / "exported")))
    torch.testing.assert_close(logits(loaded, images), hooked, rtol=1e-3, atol=1e-3)
    assert loaded.caption(images, max_new_tokens=6) == said
    assert not torch.equal(logits(loaded, images), logits(steerer.vlm, images))


# What is not understood


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


def test_tiles_that_cannot_be_shared_out_are_refused():
    layout = Tiles((7, 7), lambda _image: {}, (4, 4), image_token=4)
    words = torch.tensor([[4, 4, 4, 0], [4, 4, 0, 0]])
    with pytest.raises(ModelError, match="which of 4 tiles belong to which of 2 images is unknown"):
        layout.counts({"pixel_values": torch.zeros(4, 3, 28, 28), "input_ids": words}, 2)
    assert layout.counts({"pixel_values": torch.zeros(5, 3, 28, 28), "input_ids": words}, 2) == [3, 2]


def test_a_layer_with_other_tokens_is_refused(plain):
    inputs = plain.inputs([noise((30, 30))])
    with pytest.raises(ModelError, match=r"the layer has 1 x 16 tokens for 1 tiles of \(4, 4\) patches"):
        plain.split_by_image(torch.zeros(1, 16, 40), inputs, 1)


# Surveying


def shown(change):
    """A processor that does something with a picture, as what the locate_tiles asks."""
    return lambda image: np.stack([np.asarray(one, float).transpose(2, 0, 1) / 255 for one in change(image)])


SURVEYED = {
    "stretched": (lambda i: [i.resize((224, 224))], [(0, 0, 1, 1)]),
    "padded": (lambda i: [ImageOps.pad(i.resize((200, 100)), (200, 200), color=(9, 99, 200))], [(0, -0.5, 1, 1.5)]),
    "cropped": (lambda i: [i.resize((300, 150)).crop((75, 0, 225, 150))], [(0.25, 0, 0.75, 1)]),
    "cut": (
        lambda i: [i.resize((1456, 728)).crop((x, y, x + 364, y + 364)) for y in (0, 364) for x in (0, 364, 728, 1092)],
        [(x / 4, y / 2, (x + 1) / 4, (y + 1) / 2) for y in (0, 1) for x in range(4)],
    ),
}


@pytest.mark.parametrize("which", SURVEYED)
@pytest.mark.parametrize("size", [(120, 60), (1000, 500), (40, 20), (333, 170)], ids=str)
def test_a_survey_finds_what_the_processor_does(which, size):
    change, expected = SURVEYED[which]
    areas, _ = locate_tiles(shown(change), size)
    assert np.allclose(areas, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i: [ImageOps.mirror(i.resize((56, 56)))], "bends, turns or shuffles"),
        (lambda i: [i.resize((56, 56)).rotate(90)], "bends, turns or shuffles"),
        (lambda i: [i.resize((56, 56)), Image.new("RGB", (56, 56))], "a tile that shows nothing of the image"),
        (lambda i: [i.resize((56, 56))] * (1 + i.getpixel((0, 0))[0] // 100), "cuts images depending on their content"),
    ],
)
def test_a_survey_that_cannot_tell_says_so(change, said):
    with pytest.raises(ModelError, match=said):
        locate_tiles(shown(change), (60, 50))


def test_a_picture_that_is_too_small_to_survey():
    with pytest.raises(
        ModelError, match=r"an image of 2 x 9 pixels is too small to find the positions of its patches\."
    ):
        locate_tiles(shown(lambda i: [i]), (2, 9))
