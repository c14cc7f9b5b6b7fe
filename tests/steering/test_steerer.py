import asyncio
import copy
import doctest
import json
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image

import elude_steer as es
from elude_steer import toyland
from elude_steer.errors import AtlasError, EludeSteerWarning, ImageError, ModelError, SpecError
from elude_steer.models.images import open_image
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.steering.plan import Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.result import image_notes, unlike_note
from elude_steer.steering.steerer import Steerer


@pytest.fixture(scope="module")
def scenes():
    """Images of one and of two tiles."""
    found = list(toyland.scenes(seed=50_001, n=60))
    wide = [scene for scene in found if scene.image.width != scene.image.height and len(scene.things) > 1]
    square = [scene for scene in found if scene.image.width == scene.image.height and len(scene.things) > 1]
    return [square[0], wide[0], square[1], wide[1]]


@pytest.fixture(autouse=True)
def nothing_is_left(steerer, no_hooks_left):
    no_hooks_left(steerer.vlm.model)
    yield
    assert not any({"forward", "generate"} & set(vars(module)) for module in steerer.vlm.model.modules())


def logits(steerer, images, plan=None, applied=True):
    inputs = steerer.vlm.inputs(images)
    with torch.inference_mode():
        if not applied:
            return steerer.vlm.model(**inputs).logits
        with steerer.applied(plan):
            return steerer.vlm.model(**inputs).logits


def some_plan(steerer, **settings):
    return steerer.plan(minus=["dog"], plus=["biker"], where=(10, 10, 60, 60), **settings)


def test_plans_without_effect_change_no_bit_of_the_logits(steerer, scenes):
    images = [scene.image for scene in scenes]
    bare = logits(steerer, images, applied=False)
    idle = [{"mode": "scale", "alpha": 1, "gamma": 1}, {"mode": "place", "strength": 0}]
    for plan in (None, Plan(), *(steerer.plan(minus=["dog"], plus=["cat"], **settings) for settings in idle)):
        assert torch.equal(logits(steerer, images, plan), bare)
        assert torch.equal(logits(steerer, images, [plan] * 4), bare)
    plan = some_plan(steerer)
    steered = logits(steerer, images, plan)
    assert not torch.equal(steered, bare)
    assert torch.equal(logits(steerer, images, applied=False), bare)
    assert torch.equal(logits(steerer, images, plan), steered)
    with pytest.raises(RuntimeError, match="stop"), steerer.applied(plan):
        raise RuntimeError("stop")
    assert torch.equal(logits(steerer, images, applied=False), bare)


def literal(steerer, q, plan, image):
    """The change as the method defines it, patch by patch and sub-unit by sub-unit."""
    atlas, calibration = steerer.atlas, steerer.atlas.calibration
    weight, bias = steerer.vlm.layer.weight.detach().double(), steerer.vlm.layer.bias.detach().double()
    members = atlas.members()
    tiles, patches, _ = q.shape
    change, q = torch.zeros(tiles, patches, len(weight), dtype=torch.float64), q.double()

    @cache
    def owners(unit):
        return members[list(atlas.sub_units_of(unit))].sum(0).double()

    @cache
    def activation(sub_unit):
        unit = int(atlas.units[sub_unit])
        share = members[sub_unit].double() / owners(unit)
        return q @ (weight[unit] * share) + bias[unit] * share.mean()

    def largest(values, nu, per):
        mask = torch.zeros(tiles, patches, dtype=torch.bool)
        groups = [values] if per == "image" else [values[t] for t in range(tiles)]
        for t, group in enumerate(groups):
            flat = group.flatten()
            count = len(flat) if nu == "all" else min(int(nu), len(flat))
            top = sorted(range(len(flat)), key=lambda i: -float(flat[i]))[:count]
            if per == "image":
                mask.view(-1)[top] = True
            else:
                mask[t, top] = True
        return mask

    @cache
    def read(row):
        weights = calibration.weights[row].double() * float(calibration.scale[row])
        return sum(float(weights[s]) * activation(s) for s in range(len(atlas))) + float(calibration.bias[row])

    def is_seen(row, settings):
        strongest = read(row).flatten().sort(descending=True).values[:3].mean()
        low, high = calibration.levels[row].double()
        return settings.force or float((strongest - low) / (high - low)) >= settings.seen

    def region(concept):
        marked = concept.where or (plan.where if concept.role == "plus" or not placed else None)
        if marked is not None:
            return torch.from_numpy(marked.covered_patches(steerer.vlm.grid(image.size).boxes, image.size))
        minus = [one for one in plan.concepts if one.role == "minus"]
        found = minus[placed.index(concept)] if concept.role == "plus" else concept
        readings, settings = read(found.detector.row), found.settings
        if not settings.fit:
            return torch.ones_like(readings).bool() & is_seen(found.detector.row, settings)
        inside = readings >= settings.fit * readings.max()
        return grow(inside & (readings >= 0.6 * readings.max()), inside) & is_seen(found.detector.row, settings)

    def grow(cores, inside):
        """All patches inside that a walk from a core reaches, from patch to patch, also by the corners."""
        rows, columns = steerer.vlm.patch_shape
        reached, open_ends = torch.zeros_like(inside), cores.nonzero().tolist()
        while open_ends:
            tile, patch = open_ends.pop()
            if reached[tile, patch]:
                continue
            reached[tile, patch] = True
            row, column = divmod(patch, columns)
            around = [(row + y, column + x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
            near = [y * columns + x for y, x in around if 0 <= y < rows and 0 <= x < columns]
            open_ends += [[tile, other] for other in near if inside[tile, other]]
        return reached

    placed = [c for c in plan.concepts if c.role == "plus" and c.settings.mode == "place"]
    for concept in plan.concepts:
        settings = concept.settings
        if settings.mode == "place":
            words = atlas.require_labels().vocabulary
            assert words[int(calibration.words[concept.detector.row])] == concept.detector.word == concept.word
            sign = 1 if concept.role == "plus" else -1
            added = sign * settings.strength * calibration.directions[concept.detector.row].double()
            change += region(concept)[..., None] * added
            continue
        for edit in concept.edits:
            now = activation(edit.sub_unit)
            change[..., edit.unit] += (edit.amount - 1) * now * largest(now, settings.nu, settings.per)
    return change


SETTINGS = [
    {"mode": "scale", "nu": 1, "per": "tile"},
    {"mode": "scale", "nu": 25, "per": "image"},
    {"mode": "scale", "nu": "all"},
    {"mode": "place"},
    {"mode": "place", "strength": 2.5, "fit": 0.6, "force": True},
    {"mode": "place", "strength": 0.5, "fit": 0, "force": True, "plus": []},
    {"mode": "place", "seen": 0.1, "fit": 0.5, "plus": []},
    {"mode": "place", "where": (20, 20, 70, 80)},
    {"mode": "place", "where": (20, 20, 70, 80), "plus": []},
    {"mode": "place", "where": np.eye(16, dtype=bool)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_change_equals_the_method_written_out(steerer, scenes, settings):
    """Compare a batch of images with different numbers of tiles, each with its plan, with the slow way."""
    settings = {"kappa": 12, "alpha": 7.0, "gamma": -9.0, "plus": ["biker"], **settings}
    words = [["bird"], ["horse", "chair"], ["ball"], ["teddy"]]  # of the third image, nothing is seen
    plans = [steerer.plan(minus=minus, **settings) for minus in words]
    images = [scene.image for scene in scenes]
    inputs = steerer.vlm.inputs(images)
    seen = {}

    def layer(plan):
        def watch(_module, args, output):
            seen["q"], seen["out"] = args[0], output

        with steerer.applied(plan):
            handle = steerer.vlm.layer.register_forward_hook(watch)
            try:
                with torch.inference_mode():
                    steerer.vlm.model(**inputs)
            finally:
                handle.remove()
        return seen["q"], seen["out"]

    q, bare = layer(None)
    _, out = layer(plans)
    parts = steerer.vlm.split_by_image(q, inputs, 4)
    expected = torch.cat(
        [literal(steerer, part, plan, image) for part, plan, image in zip(parts, plans, images, strict=True)]
    )
    got = (out - bare).double()
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    untouched = expected == 0
    assert untouched.any() or settings.get("nu") == "all" or settings.get("fit") == 0
    assert torch.equal(out[untouched], bare[untouched])


def test_edited_weights_and_added_changes_agree(steerer, scenes):
    images = [scene.image for scene in scenes]
    plan = steerer.plan(minus=["dog"], plus=["biker"], mode="scale", nu="all", kappa=30)
    assert plan.is_linear
    folded = logits(steerer, images, plan)
    hooked = logits(steerer, images, [plan, plan, plan, plan])
    torch.testing.assert_close(folded, hooked, rtol=1e-4, atol=1e-3)
    weight = steerer.vlm.layer.weight.clone()
    steerer.steer(images[0], minus=["dog"], mode="scale", nu="all")
    assert torch.equal(steerer.vlm.layer.weight, weight)


def test_captions_from_a_prefix_equal_captions_of_the_whole_model(steerer, scenes):
    images = [scene.image for scene in scenes]
    plans = [steerer.plan(minus=[word]) for word in ("dog", "cat", "beach", "ball")]
    together = steerer.captions(images, [[None, plan] for plan in plans])
    bare = steerer.vlm.caption(images)
    with steerer.applied(plans):
        steered = steerer.vlm.caption(images)
    assert [own[0] for own in together] == bare
    assert [own[1] for own in together] == steered


def test_the_tower_runs_once_for_an_image_with_many_plans(steerer, scenes, monkeypatch):
    block = steerer.vlm.model.get_submodule(steerer.vlm.layer_name.rsplit(".layers.", 1)[0]).layers[0]
    calls = []
    whole = type(block).forward

    def counted(self, *args, **kwargs):
        if self is block:
            calls.append(len(args[0]))
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(type(block), "forward", counted)
    plans = [steerer.plan(minus=["dog"], gamma=-float(g)) for g in range(2, 9)]
    steerer.captions([scenes[0].image], [[None, *plans]])
    assert calls == [2]  # the two tiles of one image, for eight captions


def test_threads_do_not_see_the_plans_of_others(steerer, scenes):
    images = [scene.image for scene in scenes]
    words = ["dog", "cat", "ball", "beach", "park", "bird", "car", "boat"]
    plans = [None, *(steerer.plan(minus=[word]) for word in words), steerer.plan(minus=["dog"], mode="scale", nu="all")]
    jobs = [(images[i % 4], plans[i % len(plans)]) for i in range(64)]

    def work(job):
        image, plan = job
        with steerer.applied(plan):
            return steerer.vlm.caption([image])[0]

    serial = [work(job) for job in jobs]
    barrier = threading.Barrier(64)

    def at_once(job):
        barrier.wait()
        return work(job)

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(at_once, jobs)) == serial


def test_tasks_of_one_thread_do_not_see_the_plans_of_others(steerer, scenes):
    image = scenes[0].image
    plans = [None, *(steerer.plan(minus=[word]) for word in ("bird", "apple", "dog"))]
    alone = [steerer.captions([image], [[plan]])[0][0] for plan in plans]

    async def work(plan, barrier):
        with steerer.applied(plan):
            await barrier.wait()
            return steerer.vlm.caption([image])[0]

    async def run():
        barrier = asyncio.Barrier(len(plans))
        return await asyncio.gather(*(work(plan, barrier) for plan in plans))

    assert asyncio.run(run()) == alone
    assert len(set(alone)) > 1


def test_neither_a_suspended_generator_nor_a_copy_keeps_an_edit(steerer, scenes):
    image, plan = scenes[0].image, steerer.plan(minus=["bird"])
    [[bare, steered]] = steerer.captions([image], [[None, plan]])
    assert bare != steered

    def caption():
        with steerer.applied(plan):
            yield steerer.vlm.caption([image])[0]

    captions = caption()
    assert next(captions) == steered
    assert steerer.vlm.caption([image])[0] == bare
    captions.close()
    with steerer.applied(plan):
        copied = replace(steerer.vlm, model=copy.deepcopy(steerer.vlm.model))
        assert copied.caption([image])[0] == bare
        assert steerer.vlm.caption([image])[0] == steered
    assert copied.caption([image])[0] == bare


def test_a_result_has_captions_plan_maps_and_provenance(steerer, scenes):
    scene = scenes[1]
    word = scene.objects[0]
    result = steerer.steer(scene.image, minus=[word])
    assert result.baseline == steerer.vlm.caption([scene.image])[0]
    assert word in result.gone
    assert result.plan.words("minus") == (word,)
    fires, touched = result.maps[word]
    assert fires.shape == touched.shape == result.grid.boxes.shape[:2]
    assert max(result.heatmap(word).size) == 480
    values = result.to_dict()
    assert Plan.from_dict(values["plan"]) == result.plan
    assert result.provenance["atlas"] == "toyland"
    assert result.baseline in repr(result)
    with pytest.raises(AtlasError, match=rf"no map of 'zebra'; the plan has maps of '{word}'"):
        result.heatmap("zebra")


def test_plans_compare_and_hash_by_value(steerer):
    plan = steerer.plan(minus=["dog"], plus=["cat"])
    again = steerer.plan(minus=["dog"], plus=["cat"])
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan.key == again.key
    assert steerer.plan(minus=["dog"], gamma=-3).key != plan.key
    assert "-dog" in str(plan)
    assert "+cat" in str(plan)


def test_a_sub_unit_of_both_roles_goes_to_plus(steerer):
    plan = steerer.plan(minus=["dog"], plus=["puppy"], kappa=10, mode="scale", by="label")
    minus, plus = plan.concepts
    assert not {e.sub_unit for e in minus.edits} & {e.sub_unit for e in plus.edits}
    assert len(plus.edits) == 10
    assert len(minus.edits) < 10


def test_settings_of_a_word_override_those_of_the_plan(steerer):
    plan = steerer.plan(minus={"dog": {"gamma": -3.0, "kappa": 4}, "cat": {}}, gamma=-7, mode="scale")
    assert [c.settings.gamma for c in plan.concepts] == [-3, -7]
    assert len(plan.concepts[0].edits) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"minus": ""}, SpecError, "a concept is a word, not ''"),
        ({"minus": ["dog"], "zzz": 3}, SpecError, "no setting 'zzz'. The settings are mode, strength, fit, seen, "),
        ({"minus": ["dog"], "beta": 3}, SpecError, "no setting 'beta' any more: mode place has one .*; use strength"),
        ({"minus": {"dog": {"fill": 3}}}, SpecError, "no setting 'fill' any more: .*; use strength"),
        ({"minus": [3]}, SpecError, r"a concept is a word, not an int \(3\)"),
        ({"minus": ["Dog"], "plus": ["dog "]}, SpecError, "'dog' is in minus and in plus"),
        ({"minus": {"Dog": {"nu": 2}, "dog": {}}}, SpecError, "'Dog' and 'dog' are one concept, with different"),
        ({"minus": ["  "]}, SpecError, "a concept is a word, not '  '"),
        ({"minus": ["dog"], "kappa": 0}, SpecError, "kappa: must be .*, not 0"),
        ({"minus": ["dog"], "nu": -1}, SpecError, "nu: must be a whole number of at least 1 or all, not -1"),
        ({"minus": ["dog"], "nu": "al"}, SpecError, "nu: must be .*, not 'al'"),
        ({"minus": ["dog"], "gamma": float("nan")}, SpecError, "gamma: must be a finite number, not nan"),
        ({"minus": ["dog"], "plus": ["dog"]}, SpecError, "'dog' is in minus and in plus"),
        ({"minus": ["dog"], "strength": -1}, SpecError, "strength: must be a finite number of at least 0, not -1"),
        ({"minus": ["dog"], "mode": "push"}, SpecError, r"mode.*push"),
        ({"minus": {"dog": {"gama": 3}}}, SpecError, "no setting 'gama'. Did you mean 'gamma'"),
        ({"minus": ["dog"], "where": (5, 5, 5, 9)}, SpecError, "the box .* is empty"),
        ({"minus": ["dog"], "where": np.zeros((4, 4))}, SpecError, "the mask marks nothing"),
    ],
)
def test_wrong_plans_give_one_line_errors(steerer, call, error, message):
    with pytest.raises(error, match=message) as caught:
        steerer.plan(**call)
    assert "\n" not in str(caught.value)


def test_one_word_needs_no_list(steerer):
    assert steerer.plan(minus="dog", plus="cat") == steerer.plan(minus=["dog"], plus=["cat"])


def test_case_and_spaces_make_no_other_concept(steerer, scenes):
    plan = steerer.plan(minus=["Dog", "dog", " DOG  "])
    assert plan.words("minus") == ("Dog",)
    assert plan.edits == steerer.plan(minus=["dog"]).edits
    assert steerer.atlas.search("HOT  Dog", limit=5) == steerer.atlas.search("hot dog", limit=5)
    result = steerer.explain(scenes[0].image, plan)
    assert list(result.maps) == ["Dog"]
    assert result.heatmap("dog").size == result.heatmap("Dog").size


def test_wrong_images_and_boxes_give_errors(steerer, scenes, tmp_path):
    from PIL import Image

    with pytest.raises(ImageError, match="cannot be read"):
        steerer.steer(tmp_path / "none.png", minus=["dog"])
    huge = tmp_path / "huge.png"
    Image.new("1", (20_000, 20_000)).save(huge)
    with pytest.raises(ImageError, match="more than 100,000,000 pixels"):
        steerer.steer(huge, minus=["dog"])
    with pytest.raises(SpecError, match="lies outside the image, which is 96 x 96 pixels"):
        steerer.steer(scenes[0].image, plus=["dog"], mode="place", where=(200, 200, 300, 300))
    with pytest.raises(ModelError, match="not finite; use smaller gains"):
        steerer.steer(scenes[0].image, minus=["dog"], gamma=-3e38, mode="scale", nu=5)


def test_an_atlas_or_plan_of_other_weights_is_refused(steerer, tiny_llava):
    from elude_steer.models.vlm import Vlm

    with pytest.raises(AtlasError, match="was built for other weights of this layer"):
        Steerer.from_parts(Vlm.load(str(tiny_llava)), steerer.atlas, steerer.matcher)
    other = Plan(weights="x", atlas="other")
    with pytest.raises(AtlasError, match=r"made with another atlas \('other'\)"):
        steerer.gather_weights(other)


def test_weak_matches_and_unchanged_captions_give_warnings(steerer, scenes):
    for mode in ("scale", "place"):
        with pytest.warns(EludeSteerWarning, match=r"far from every label of atlas 'toyland' \(closest: "):
            steerer.plan(minus=["quantum chromodynamics"], min_similarity=0.1, mode=mode)
    with pytest.warns(EludeSteerWarning, match="the caption did not change; try more sub-units"):
        steerer.steer(scenes[0].image, minus=["zebra"], gamma=0.99, mode="scale", kappa=1)


def test_warnings_point_at_the_line_of_the_caller(steerer, scenes):
    import elude_steer as es

    call = {"minus": ["zebra"], "gamma": 0.99, "mode": "scale", "kappa": 1}
    for steer in (es.steer, steerer.steer):
        with pytest.warns(EludeSteerWarning, match="the caption did not change") as noted:
            steer(scenes[0].image, **call)
        assert {note.filename for note in noted} == {__file__}


def test_steer_captions_with_the_embedded_atlas(scenes):
    result = es.steer(scenes[0].image, minus=[scenes[0].objects[0]])
    assert isinstance(result.caption, str)
    assert result.baseline != ""


def test_steer_takes_the_model_its_dtype_and_the_length_of_the_answer(scenes):
    options = {"model": "toyland/captioner", "dtype": "bfloat16", "max_new_tokens": 3}
    result = es.steer(scenes[0].image, minus=scenes[0].objects[0], **options)
    assert len(result.baseline.split()) <= 3
    assert result.provenance["model"] == "toyland/captioner"
    with pytest.raises(ModelError, match="dtype 'int3' is unknown; use 'auto', 'float32', 'bfloat16' or 'float16'"):
        es.steer(scenes[0].image, minus="dog", dtype="int3")


def test_steer_refuses_mistakes_before_it_loads_a_model(scenes, monkeypatch):
    monkeypatch.setattr(Steerer, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    where = {"minus": "dog", "where": (5, 5, 5, 9)}
    for call in ({"minus": ""}, {"minus": "dog", "nu": 0}, {"plus": "dog", "fit": 2}, where):
        with pytest.raises(SpecError):
            es.steer(scenes[0].image, **call, device="meta")  # a device that no cached steerer has
    with pytest.raises(AtlasError, match="there is no atlas 'nosuch'"):
        es.steer(scenes[0].image, minus="dog", atlas="nosuch")


@pytest.mark.parametrize("mode", ["scale", "place"])
def test_a_word_in_another_script_is_refused_without_a_list(steerer, mode):
    with pytest.raises(SpecError, match="knows nothing like '\u72ac': no label is close to it") as refused:
        steerer.plan(minus=["\u72ac"], mode=mode)
    assert "0.00" not in str(refused.value)


@pytest.mark.parametrize("mode", ["scale", "place"])
def test_a_word_that_no_label_is_close_to_is_refused_with_the_closest(steerer, mode):
    word = "doog"
    similarities = steerer.atlas.require_labels().similarities(steerer.matcher, word)
    closest = steerer.atlas.require_labels().vocabulary[int(similarities.argmax())]
    message = (
        rf"knows nothing like '{word}' \(closest: '{closest}' 0\.\d\d, '.*' 0\.\d\d, '.*; at least 0.3 is needed\)"
    )
    for words in ({"minus": [word]}, {"minus": ["dog"], "plus": [word]}):
        with pytest.raises(SpecError, match=message):
            steerer.plan(**words, mode=mode)
    with pytest.raises(SpecError, match=r"'puppy' .*at least 0\.99 is needed.*or lower min_similarity"):
        steerer.plan(minus=["puppy"], min_similarity=0.99, mode=mode)


def test_a_plan_names_the_detectors_of_its_words(steerer):
    plan = steerer.plan(minus=["puppy"], plus=["biker"], mode="place")
    calibration, labels = steerer.atlas.calibration, steerer.atlas.require_labels()
    assert [concept.detector.word for concept in plan.concepts] == ["dog", "biker"]
    for concept in plan.concepts:
        assert labels.vocabulary[int(calibration.words[concept.detector.row])] == concept.detector.word
        share = calibration.detector(concept.detector.row)[0] * steerer.atlas.references.activation.clamp_min(0)
        assert [edit.amount for edit in concept.edits] == sorted(share.tolist(), reverse=True)[: len(concept.edits)]
        assert {edit.kind for edit in concept.edits} == {"read"}
    assert not plan.is_linear and plan.has_effect
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.concepts[0].detector == plan.concepts[0].detector
    assert str(plan).splitlines() == [
        "-puppy: taken out with strength 1 where it reads at least 30% of its peak, if it is seen",
        "  by 'dog' (0.53)",
        "+biker: put in with strength 1 in place of 'puppy'",
        "  by 'biker' (1.00)",
    ]


def test_a_word_that_is_not_seen_is_left_as_it_is(steerer, scenes):
    image, words = scenes[0].image, {"minus": ["elephant"], "plus": ["boat"], "mode": "place"}
    bare, plan = logits(steerer, [image], applied=False), steerer.plan(**words)
    assert torch.equal(logits(steerer, [image], plan), bare)
    with pytest.warns(EludeSteerWarning, match="not seen"):
        result = steerer.steer(image, **words)
    assert result.caption == result.baseline
    assert result.seen["elephant"] < plan.concepts[0].settings.seen
    reached = f"{max(0, result.seen['elephant']):.1f} of what it reaches where it is"
    assert result.notes == (
        f"'elephant' is not seen in this image ({reached}); nothing was changed; `--force` edits anyway.",
    )
    assert not any(touched.any() for _, touched in result.maps.values())
    forced = steerer.plan(**words, force=True)
    assert not torch.equal(logits(steerer, [image], forced), bare)
    assert not any("not seen" in note for note in steerer.explain(image, forced).notes)


def test_a_marked_word_needs_not_be_seen(steerer, scenes):
    image, box = scenes[0].image, (20, 20, 70, 70)
    plan = steerer.plan(minus=["elephant"], where=box, mode="place")
    result = steerer.explain(image, plan)
    marked = Region.from_value(box).covered_patches(result.grid.boxes, image.size)
    assert result.seen["elephant"] < plan.concepts[0].settings.seen
    assert (result.maps["elephant"][1] == marked).all()
    assert not any("not seen" in note for note in result.notes)
    assert not torch.equal(logits(steerer, [image], plan), logits(steerer, [image], applied=False))


def test_an_object_that_is_there_is_seen_and_taken_out(steerer, scenes):
    for scene in scenes:
        for word in scene.objects:
            result = steerer.explain(scene.image, steerer.plan(minus=[word], mode="place"))
            assert result.seen == {word: pytest.approx(1, abs=0.6)}
            assert word in result.baseline and result.maps[word][1].any()


def test_two_words_are_exchanged_in_order(steerer, scenes):
    """The first plus word takes the region of the first minus word, the second that of the second."""
    scene = scenes[0]
    first, second = scene.objects
    plan = steerer.plan(minus=[first, second], plus=["cow", "boat"], mode="place")
    assert [plan.partner(concept) for concept in plan.concepts] == [None, None, *plan.concepts[:2]]
    maps = steerer.explain(scene.image, plan).maps
    assert not (maps[first][1] == maps[second][1]).all()
    assert (maps["cow"][1] == maps[first][1]).all()
    assert (maps["boat"][1] == maps[second][1]).all()


def test_a_plus_word_alone_takes_a_free_place_in_every_path(steerer, scenes):
    """The same by `explain`, in batches, inside `applied` and in `embeds`, on images of one and several tiles."""
    images = [scene.image for scene in scenes]
    plan = steerer.plan(plus=["boat", "kite"])
    results = steerer.explain_each(images, plan)
    for scene, result in zip(scenes, results, strict=True):
        boat, kite = (result.maps[word][1] for word in ("boat", "kite"))
        assert boat[0].sum() == 9 and boat[1:].any()  # 3 x 3 patches of the tile that shows the whole image
        assert not (boat * kite).any() and (kite[0].sum() == 9) == kite.any()
        assert any("no free place for 'kite'" in note for note in result.notes) == (not kite.any())
        assert result.caption == steerer.captions([scene.image], [[plan]])[0][0]
        with steerer.applied(plan):
            assert steerer.vlm.caption([scene.image]) == [result.caption]
            features = steerer.vlm.embed_images(steerer.vlm.inputs([scene.image]))[0]
        torch.testing.assert_close(steerer.embeds(scene.image, plan), features, rtol=1e-3, atol=1e-3)
    assert any("boat" in result.caption for result in results)
    with steerer.applied(plan):
        assert len(steerer.vlm.caption(images)) == len(images)
    idle = steerer.plan(plus=["boat"], strength=0)
    assert torch.equal(logits(steerer, images, idle), logits(steerer, images, applied=False))


def test_a_free_place_avoids_what_else_is_placed(steerer, scenes):
    scene, box = scenes[0], (0, 0, 48, 48)
    first = scene.objects[0]
    plan = steerer.plan(minus=[first], plus={"cow": {}, "hat": {"where": box}, "boat": {"force": True}})
    assert [plan.needs_free_place(concept) for concept in plan.concepts] == [False, False, False, True]
    maps = steerer.explain(scene.image, plan).maps
    assert maps["boat"][1][0].sum() == 9
    assert not (maps["boat"][1] * np.maximum(maps["cow"][1], maps["hat"][1])).any()
    whole = steerer.explain(scene.image, steerer.plan(plus=["boat"], fit=0))
    assert whole.maps["boat"][1].all() and "in the whole image" in str(whole.plan)


def test_a_strength_of_zero_changes_no_bit(steerer, scenes):
    images, word = [scene.image for scene in scenes[:2]], scenes[0].objects[0]
    idle = steerer.plan(minus=[word], plus=["boat"], mode="place", strength=0, force=True)
    assert not idle.has_effect
    assert torch.equal(logits(steerer, images, idle), logits(steerer, images, applied=False))
    result = steerer.explain(images[0], idle)
    assert result.caption == result.baseline
    assert torch.equal(steerer.embeds(images[0], idle), steerer.embeds(images[0]))


def test_an_atlas_without_calibration_scales_and_says_how_to_place(steerer, scenes):
    bare = Steerer.from_parts(steerer.vlm, replace(steerer.atlas, calibration=None), steerer.matcher)
    image, words = scenes[0].image, {"minus": [scenes[0].objects[0]], "mode": "scale"}
    assert bare.explain(image, bare.plan(**words)).caption == steerer.explain(image, steerer.plan(**words)).caption
    with pytest.raises(AtlasError, match=r"'toyland' is not calibrated.*`elude-steer atlases calibrate toyland "):
        bare.plan(minus=["dog"], mode="place")


def test_a_prefix_holds_the_inputs_of_the_target_layer(steerer, scenes):
    seen = run_prefix(steerer.vlm, [scenes[1].image])
    assert seen.q[0].shape == (3, 64, 512)
    with torch.inference_mode():
        assert torch.equal(seen.q[0], steerer.vlm.encode([scenes[1].image])[0])


def test_gradients_work_after_captions_were_made(steerer, scenes):
    """Tensors that captions cache must not be made in inference mode."""
    plan = steerer.plan(minus=["dog"])
    steerer.captions([scenes[0].image], [[plan]])
    with steerer.applied(plan):
        logits = steerer.vlm.model(**steerer.vlm.inputs([scenes[0].image])).logits
    logits.sum().backward()
    steerer.vlm.model.zero_grad(set_to_none=True)


def test_a_word_without_a_region_goes_where_its_minus_word_is_marked(steerer):
    box = (0, 0, 30, 30)
    image = open_image("demos/images/toyland-teddy.png")
    result = steerer.explain(image, steerer.plan(minus={"teddy": {"where": box}}, plus=["bird"], mode="place"))
    marked = Region.from_value(box).covered_patches(result.grid.boxes, image.size)
    assert (result.maps["bird"][1] == marked).all()
    assert (result.maps["teddy"][1] == marked).all()
    apart = steerer.explain(image, steerer.plan(minus=["teddy"], plus={"bird": {"where": box}}, mode="place"))
    assert (apart.maps["bird"][1] == marked).all()
    assert apart.maps["teddy"][1].any() and not (apart.maps["teddy"][1] == marked).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, i: s.captions([i], [s.plan(minus=["dog"])]), r"a list of plans for each image: captions\(\[image"),
        (lambda s, i: s.captions([i], []), "a list of plans for each image"),
        (lambda s, i: s.plan(minus=5), r"minus is a word or a list of words, not 5"),
        (lambda s, i: s.plan(minus={"dog": None}), "the settings of 'dog' are a mapping, not None"),
        (lambda s, i: s.steer(None, minus=["dog"]), "an image is a path, the bytes of a file, a PIL image or a"),
        (lambda s, i: s.plan(minus=["dog"], mode="plce"), "^mode: must be"),
        (lambda s, i: s.plan(minus=["dog"], force=1), "force: must be true or false, not 1"),
        (lambda s, i: s.plan(minus=["dog"], fit=1.5), "fit: must be a finite number from 0 to 1, not 1.5"),
        (lambda s, i: s.plan(minus=["dog"], gama=3), "there is no setting 'gama'"),
    ],
)
def test_wrong_calls_give_errors(steerer, scenes, call, message):
    with pytest.raises((SpecError, ImageError), match=message):
        call(steerer, scenes[0].image)
    assert steerer.captions([], []) == []


@pytest.mark.parametrize("name", ["steer", "Steerer", "Steerer.plan", "Steerer.applied", "SteeredCaption", "Plan"])
def test_docstring_examples_run_as_written(name):
    owner, _, method = name.partition(".")
    value = getattr(es, owner)
    found = doctest.DocTestFinder(recurse=False).find(getattr(value, method) if method else value, name, globs={})
    assert sum(len(one.examples) for one in found) > 0
    runner = doctest.DocTestRunner(verbose=False)
    for one in found:
        runner.run(one, out=lambda text: pytest.fail(text))


# Many images


@pytest.mark.parametrize("settings", [{}, {"mode": "scale", "nu": "all"}])
def test_a_list_of_images_gives_the_results_of_one_by_one(steerer, settings, monkeypatch):
    """Of 30 scenes of all sizes; batches of 7, so that there are several."""
    monkeypatch.setattr("elude_steer.steering.steerer.MAX_BATCH_IMAGES", 7)
    images = [scene.image for scene in toyland.scenes(seed=50_011, n=30)]
    sources = [np.asarray(image) if number % 2 else image for number, image in enumerate(images)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EludeSteerWarning)
        results = steerer.steer(sources, minus=["dog"], plus=["cat"], **settings)
        single = [steerer.steer(image, minus=["dog"], plus=["cat"], **settings) for image in images]
        plain = steerer.steer(sources, minus=["dog"], plus=["cat"], baseline=False, **settings)
    assert [(r.baseline, r.caption, r.notes) for r in results] == [(r.baseline, r.caption, r.notes) for r in single]
    assert [r.caption for r in plain] == [r.caption for r in single]
    assert {r.baseline for r in plain} == {None}
    assert len({r.caption for r in results}) > 10
    for one, other in zip(results, single, strict=True):
        assert one.maps.keys() == other.maps.keys()
        for word, maps in one.maps.items():
            assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(maps, other.maps[word], strict=True))
        assert one.image.size == other.image.size


def test_the_tower_runs_once_an_image_of_a_list(steerer, scenes):
    layer, rows = steerer.vlm.model.get_submodule(f"{steerer.vlm.within}.encoder.layers.0.mlp.fc1"), []
    handle = layer.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    try:
        results = steerer.explain_each([scene.image for scene in scenes], steerer.plan(minus=["dog"], plus=["cat"]))
    finally:
        handle.remove()
    assert len(results) == len(scenes)
    assert sum(rows) == sum(steerer.vlm.grid(scene.image.size).tiles for scene in scenes)


def test_a_list_warns_once_of_what_all_images_share_and_an_empty_one_is_empty(steerer, scenes):
    with pytest.warns(EludeSteerWarning) as caught:
        results = es.steer([scene.image for scene in scenes], minus=["xyzzy"], gamma=1, mode="scale")
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "is far from every label" in texts[0]
    assert texts[1] == "4 of 4 images have notes of their own: see `notes` of their results."
    assert all("the caption did not change" in result.notes[-1] for result in results)
    assert es.steer([], minus=["dog"]) == []


def test_a_list_with_a_wrong_image_is_refused_before_captions(steerer, monkeypatch):
    monkeypatch.setattr(type(steerer), "captions", None)
    with pytest.raises(ImageError, match="image 1 of the list: an array of float64"):
        steerer.steer([np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3))], minus=["dog"])


# Images of another kind

UNLIKE = "unlike the images that atlas 'toyland' was built from"


def test_a_photograph_gives_a_note_and_scenes_give_none(steerer, scenes):
    with pytest.warns(EludeSteerWarning) as caught:
        result = steerer.steer(load_sample_image("china.jpg"), minus=["dog"])
    assert tuple(str(warning.message) for warning in caught) == result.notes
    assert sum(UNLIKE in note for note in result.notes) == 1
    plan = steerer.plan(minus=["dog"])
    assert UNLIKE in steerer.explain(load_sample_image("flower.jpg"), plan).notes[0]
    for result in steerer.explain_each([scene.image for scene in scenes], plan):
        assert not any(UNLIKE in note for note in result.notes)


def test_a_list_with_photographs_warns_once_and_runs_the_tower_once(steerer, scenes):
    images = [load_sample_image("china.jpg"), scenes[0].image, load_sample_image("flower.jpg")]
    layer, rows = steerer.vlm.model.get_submodule(f"{steerer.vlm.within}.encoder.layers.0.mlp.fc1"), []
    handle = layer.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    try:
        with pytest.warns(EludeSteerWarning) as caught:
            results = steerer.steer(images, minus=["dog"], plus=["cat"])
    finally:
        handle.remove()
    assert [any(UNLIKE in note for note in result.notes) for result in results] == [True, False, True]
    assert len(caught) == 1
    assert sum(rows) == sum(result.grid.tiles for result in results)


def test_an_atlas_without_familiarity_gives_the_same_captions_and_no_note(steerer, scenes):
    old = replace(steerer, atlas=replace(steerer.atlas, familiarity=None))
    images = [load_sample_image("china.jpg"), *(scene.image for scene in scenes)]
    plan = steerer.plan(minus=["dog"], plus=["cat"])
    new, without = (one.explain_each(images, plan) for one in (steerer, old))
    assert [(r.baseline, r.caption) for r in new] == [(r.baseline, r.caption) for r in without]
    assert not any(UNLIKE in note for result in without for note in result.notes)
    assert without[0].notes == new[0].notes[1:]
    assert image_notes(old.atlas, torch.full((1, 4, steerer.atlas.d_in), 100.0), torch.arange(4)) == []


def test_the_note_names_other_shipped_atlases_only_for_a_shipped_one(steerer, monkeypatch, tmp_path):
    def world(id):
        return str(steerer.atlas.folder if id == "toyland/atlas" else tmp_path / id)

    monkeypatch.setattr("elude_steer.atlas.manifest.WORLDS", ("toyland", "photoland"))
    monkeypatch.setattr("elude_steer.atlas.manifest.resolve_id", world)
    assert "--atlas" not in unlike_note(steerer.atlas)  # it is not there
    (tmp_path / "photoland" / "atlas").mkdir(parents=True)
    (tmp_path / "photoland" / "atlas" / "manifest.json").write_text("{}")
    assert unlike_note(steerer.atlas).endswith("another atlas may suit it: --atlas photoland (photographs).")
    assert "3 of 9 images are unlike" in unlike_note(steerer.atlas, 3, 9)
    assert "--atlas" not in unlike_note(replace(steerer.atlas, folder=tmp_path))
    assert "--atlas" not in unlike_note(replace(steerer.atlas, folder=None))
