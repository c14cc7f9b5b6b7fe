import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import elude_steer as es
from elude_steer import toyland
from elude_steer.errors import AtlasError, EludeSteerWarning, ImageError, ModelError, SpecError
from elude_steer.evaluation.edits.benchmark import toyland_world
from elude_steer.evaluation.edits.tune import save_settings, tune
from elude_steer.models.prefix_cache import run_prefix
from elude_steer.steering.plan import Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings
from elude_steer.steering.steerer import Steerer


@pytest.fixture(scope="module")
def scenes():
    """Pictures of one and of two tiles."""
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


def test_without_an_edit_not_a_bit_changes(steerer, scenes):
    images = [scene.image for scene in scenes]
    bare = logits(steerer, images, applied=False)
    for plan in (None, Plan(), steerer.plan(minus=["dog"], plus=["cat"], mode="scale", alpha=1, gamma=1)):
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
    """The change, patch by patch and sub-unit by sub-unit, as the method says it."""
    weight, bias = steerer.vlm.layer.weight.detach().double(), steerer.vlm.layer.bias.detach().double()
    members = steerer.atlas.members()
    tiles, patches, _ = q.shape
    change = torch.zeros(tiles, patches, len(weight), dtype=torch.float64)

    def activation(sub_unit):
        unit = int(steerer.atlas.units[sub_unit])
        owners = members[list(steerer.atlas.sub_units_of(unit))].sum(0).double()
        share = members[sub_unit].double() / owners
        return q.double() @ (weight[unit] * share) + bias[unit] * share.mean()

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

    reference = steerer.atlas.references.activation.double()

    def share(sub_units):
        on = [float(reference[s]) for s in sub_units]
        found = [activation(s) / (r if r > 1e-6 else np.inf) for s, r in zip(sub_units, on, strict=True)]
        return torch.stack(found).mean(0)

    def neighbours(values):
        side, mean = int(patches**0.5), torch.zeros_like(values)
        for t, y, x in itertools.product(range(tiles), range(side), range(side)):
            for dy, dx in itertools.product((-1, 0, 1), (-1, 0, 1)):
                if 0 <= y + dy < side and 0 <= x + dx < side:
                    near = values[t, (y + dy) * side + x + dx]
                    mean[t, y * side + x] += (0.5 if dy and dx else 1.0) * near / 7
        return mean

    def region(concept):
        how, marked = concept.settings, concept.where or plan.where
        if marked is not None and (concept.role == "plus" or not placed):
            return torch.from_numpy(marked.covered_patches(steerer.vlm.grid(image.size).boxes, image.size))
        minus = [e.sub_unit for c in plan.concepts if c.role == "minus" for e in c.edits]
        values = share(minus if concept.role == "plus" else [e.sub_unit for e in concept.edits])
        values = neighbours(values) if how.smooth else values
        found = largest(values, how.nu, how.per)
        return found & (values >= how.fit * values.max()) if how.fit and values.max() > 0 else found

    def level(sub_units, kind, at):
        if kind == "reference":
            return reference[sub_units[at]]
        unit = steerer.atlas.units[sub_units[at]]
        same = sum(int(steerer.atlas.units[s] == unit) for s in sub_units)
        return sum(float(steerer.atlas.streams[s, unit]) for s in sub_units) / len(sub_units) / same

    placed = any(e.kind == "set" for c in plan.concepts for e in c.edits)
    sets = [c for c in plan.concepts if c.edits and c.edits[0].kind == "set"]
    homeless = any((c.where or plan.where) is None for c in sets)
    wanted = [c for c in plan.concepts if c.role == "minus" and c.settings.mode == "place" and c.settings.fill]
    filling = [c for c in wanted if not homeless and c.edits]
    taken = torch.zeros(tiles, patches, dtype=torch.bool)
    for concept in sets:
        taken |= region(concept)
    regions = [taken.clone(), *map(region, filling)]
    for concept, own in zip(filling, regions[1:], strict=True):  # every patch once, from what no removed word was on
        how, inside = concept.settings, own & ~taken
        edited = {e.sub_unit for e in plan.edits}
        free = [s for s in range(len(steerer.atlas)) if s not in edited and reference[s] > 1e-6]
        outside = ~torch.stack(regions).any(0)
        mean = {s: float(activation(s)[outside].mean() / reference[s]) for s in free}
        chosen = sorted((s for s in free if mean[s] > 0), key=lambda s: -mean[s])[: how.fill]
        for at, s in enumerate(chosen):
            amount = how.beta * level(chosen, how.level, at)
            change[..., steerer.atlas.units[s]] += (amount - activation(s)) * inside
        taken |= own
    for concept in plan.concepts:
        how = concept.settings
        for at, edit in enumerate(concept.edits):
            now = activation(edit.sub_unit)
            if edit.kind == "set":
                if len({e.sub_unit for e in concept.edits}) == how.kappa:  # none was lost to another word
                    own = how.beta * level([e.sub_unit for e in concept.edits], how.level, at)
                    assert edit.amount == pytest.approx(float(own), rel=1e-4, abs=1e-4)
                change[..., edit.unit] += (edit.amount - now) * region(concept)
            else:
                fits = how.mode == "place" and how.fit
                mask = region(concept) if fits else largest(now, how.nu, how.per)
                change[..., edit.unit] += (edit.amount - 1) * now * mask
        if how.mode == "place" and how.reach and (concept in sets or not placed):
            own = [e.sub_unit for e in concept.edits]
            for unit in set(range(steerer.atlas.d_out)) - {int(steerer.atlas.units[s]) for s in own}:
                carried = sum(float(steerer.atlas.streams[s, unit]) for s in own) / len(own)
                change[..., unit] += (1 if concept in sets else -1) * how.reach * carried * region(concept)
    return change


SETTINGS = [
    {"mode": "scale", "nu": 1, "per": "tile"},
    {"mode": "scale", "nu": 25, "per": "image"},
    {"mode": "scale", "nu": "all"},
    {"mode": "place", "nu": 10, "per": "tile", "level": "reference", "smooth": False},
    {"mode": "place", "nu": 10, "per": "image", "level": "stream", "smooth": True},
    {"mode": "place", "nu": 10, "fill": 6, "level": "stream", "smooth": True, "plus": []},
    {"mode": "place", "nu": 7, "per": "image", "fill": 6, "level": "reference", "smooth": False, "plus": []},
    {"mode": "place", "nu": 10, "level": "stream", "reach": 1.5, "smooth": True},
    {"mode": "place", "nu": 10, "reach": 2.0, "fill": 0, "plus": []},
    {"mode": "place", "nu": 16, "fit": 0.35, "level": "stream", "reach": 2.0, "smooth": True},
    {"mode": "place", "nu": 30, "per": "image", "fit": 0.5, "fill": 6, "plus": []},
    {"mode": "place", "nu": "all", "fit": 0.6, "fill": 6, "level": "stream", "plus": []},
    {"mode": "place", "nu": 5, "where": (20, 20, 70, 80)},
    {"mode": "place", "nu": 5, "where": (20, 20, 70, 80), "plus": [], "fill": 3, "reach": 1.0},
    {"mode": "place", "nu": 5, "where": np.eye(16, dtype=bool)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_change_is_the_methods(steerer, scenes, settings):
    """On a batch of pictures with different numbers of tiles, each with a plan of its own, against the slow way."""
    settings = {"kappa": 12, "alpha": 7.0, "gamma": -9.0, "beta": 4.0, "plus": ["biker"], **settings}
    words = [["dog"], ["cat", "tree"], ["ball"], ["bird"]]
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
    wanted = torch.cat(
        [literal(steerer, part, plan, image) for part, plan, image in zip(parts, plans, images, strict=True)]
    )
    got = (out - bare).double()
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    untouched = wanted == 0
    assert untouched.any() or settings["nu"] == "all"
    assert torch.equal(out[untouched], bare[untouched])


def test_folded_and_hooked_forms_agree(steerer, scenes):
    images = [scene.image for scene in scenes]
    plan = steerer.plan(minus=["dog"], plus=["biker"], mode="scale", nu="all", kappa=30)
    assert plan.is_linear
    folded = logits(steerer, images, plan)
    hooked = logits(steerer, images, [plan, plan, plan, plan])
    torch.testing.assert_close(folded, hooked, rtol=1e-4, atol=1e-3)
    weight = steerer.vlm.layer.weight.clone()
    steerer.steer(images[0], minus=["dog"], mode="scale", nu="all")
    assert torch.equal(steerer.vlm.layer.weight, weight)


def test_resuming_gives_what_running_gives(steerer, scenes):
    images = [scene.image for scene in scenes]
    plans = [steerer.plan(minus=[word]) for word in ("dog", "cat", "beach", "ball")]
    together = steerer.captions(images, [[None, plan] for plan in plans])
    bare = steerer.vlm.caption(images)
    with steerer.applied(plans):
        steered = steerer.vlm.caption(images)
    assert [own[0] for own in together] == bare
    assert [own[1] for own in together] == steered


def test_the_tower_runs_once_a_picture(steerer, scenes, monkeypatch):
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
    assert calls == [2]  # the two tiles of one picture, for eight captions


def test_threads_never_see_each_others_plans(steerer, scenes):
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


def test_a_result_tells_what_happened(steerer, scenes):
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


def test_plans_are_values(steerer):
    plan = steerer.plan(minus=["dog"], plus=["cat"])
    again = steerer.plan(minus=["dog"], plus=["cat"])
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan.key == again.key
    assert steerer.plan(minus=["dog"], gamma=-3).key != plan.key
    assert "-dog" in str(plan)
    assert "+cat" in str(plan)


def test_a_sub_unit_wanted_by_both_goes_to_plus(steerer):
    plan = steerer.plan(minus=["dog"], plus=["puppy"], kappa=10)
    minus, plus = plan.concepts
    assert not {e.sub_unit for e in minus.edits} & {e.sub_unit for e in plus.edits}
    assert len(plus.edits) == 10
    assert len(minus.edits) < 10


def test_settings_of_a_word_come_before_those_of_the_plan(steerer):
    plan = steerer.plan(minus={"dog": {"gamma": -3.0, "kappa": 4}, "cat": {}}, gamma=-7, mode="scale")
    assert [c.settings.gamma for c in plan.concepts] == [-3, -7]
    assert len(plan.concepts[0].edits) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"minus": "dog"}, SpecError, r"minus is a list of words: minus=\['dog'\]"),
        ({"minus": ["  "]}, SpecError, "a concept is a word, not '  '"),
        ({"minus": ["dog"], "kappa": 0}, SpecError, "kappa: must be .*, not 0"),
        ({"minus": ["dog"], "nu": -1}, SpecError, "nu: must be a whole number of at least 1 or all, not -1"),
        ({"minus": ["dog"], "nu": "al"}, SpecError, "nu: must be .*, not 'al'"),
        ({"minus": ["dog"], "gamma": float("nan")}, SpecError, "gamma: must be a finite number, not nan"),
        ({"minus": ["dog"], "plus": ["dog"]}, SpecError, "'dog' is in minus and in plus"),
        ({"plus": ["dog"], "mode": "place"}, SpecError, r"'dog' can only be placed somewhere"),
        ({"minus": ["dog"], "mode": "push"}, SpecError, r"mode.*push"),
        ({"minus": {"dog": {"gama": 3}}}, SpecError, "no setting 'gama'. Did you mean 'gamma'"),
        ({"minus": ["dog"], "where": (5, 5, 5, 9)}, SpecError, "the box .* is empty"),
        ({"minus": ["dog"], "where": np.zeros((4, 4))}, SpecError, "the mask marks nothing"),
    ],
)
def test_bad_plans_are_one_line(steerer, call, error, message):
    with pytest.raises(error, match=message) as caught:
        steerer.plan(**call)
    assert "\n" not in str(caught.value)


def test_bad_pictures_and_boxes_are_one_line(steerer, scenes, tmp_path):
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


def test_an_atlas_of_other_weights_is_refused(steerer, tiny_llava):
    from elude_steer.models.vlm import Vlm

    with pytest.raises(AtlasError, match="was built for other weights of this layer"):
        Steerer.from_parts(Vlm.load(str(tiny_llava)), steerer.atlas, steerer.matcher)
    other = Plan(weights="x", atlas="other")
    with pytest.raises(AtlasError, match=r"made with another atlas \('other'\)"):
        steerer.gather_weights(other)


def test_what_matches_nothing_or_changes_nothing_is_said(steerer, scenes):
    with pytest.warns(EludeSteerWarning, match=r"far from every label of atlas 'toyland' \(closest: "):
        steerer.plan(minus=["quantum chromodynamics"])
    with pytest.warns(EludeSteerWarning, match="reaches min_similarity 0.99"):
        steerer.plan(minus=["puppy"], min_similarity=0.99)
    with pytest.warns(EludeSteerWarning, match="the caption did not change; try more sub-units"):
        steerer.steer(scenes[0].image, minus=["zebra"], gamma=0.99, mode="scale", kappa=1)


def test_a_note_points_at_the_line_that_asked_for_it(steerer, scenes):
    import elude_steer as es

    given = {"minus": ["zebra"], "gamma": 0.99, "mode": "scale", "kappa": 1}
    for steer in (es.steer, steerer.steer):
        with pytest.warns(EludeSteerWarning, match="the caption did not change") as noted:
            steer(scenes[0].image, **given)
        assert {note.filename for note in noted} == {__file__}


def test_regions_cover_what_they_mark():
    boxes = np.array([[[0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]]])
    assert Region.from_value((0, 0, 50, 50)).covered_patches(boxes, (100, 100)).tolist() == [
        [True, False, False, False]
    ]
    assert Region.from_value((60, 10, 70, 20)).covered_patches(boxes, (100, 100)).tolist() == [
        [False, True, False, False]
    ]
    mask = np.array([[0, 0], [1, 1]])
    assert Region.from_value(mask).covered_patches(boxes, (100, 100)).tolist() == [[False, False, True, True]]


def test_settings_take_the_first_that_is_given():
    how = merge_settings({"gamma": None}, {"gamma": -2}, {"gamma": -3, "nu": 4})
    assert (how.gamma, how.nu, how.kappa) == (-2.0, 4, 100)


def test_public_face(scenes):
    result = es.steer(scenes[0].image, minus=[scenes[0].objects[0]])
    assert isinstance(result.caption, str)
    assert result.baseline != ""


@pytest.mark.filterwarnings("ignore:the caption did not change")
def test_an_atlas_that_changed_is_loaded_again(steerer, scenes, tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(steerer.atlas.folder, folder)
    monkeypatch.chdir(tmp_path)
    before = es.steer(scenes[0].image, minus=["dog"], atlas="own").plan
    assert es.steer(scenes[0].image, minus=["dog"], atlas=str(folder)).plan == before
    save_settings(Steerer.load(folder), {"gamma": -1.0})
    after = es.steer(scenes[0].image, minus=["dog"], atlas="own").plan
    assert [plan.concepts[0].settings.gamma for plan in (before, after)] == [-15.0, -1.0]


def test_words_that_share_sub_units_are_placed_at_the_level_of_those_they_keep(steerer):
    plan = steerer.plan(minus=["dog"], plus={"cat": {"kappa": 12}, "kitten": {"kappa": 60}}, mode="place")
    kitten = plan.concepts[2]
    assert 0 < len(kitten.edits) < 60
    expected = kitten.settings.beta * steerer.atlas.target_levels([edit.sub_unit for edit in kitten.edits], "stream")
    assert [edit.amount for edit in kitten.edits] == pytest.approx(expected.tolist())


def test_a_minus_word_without_sub_units_of_its_own_still_says_where(steerer):
    given = {"minus": {"dog": {"kappa": 3, "where": (0, 0, 40, 40)}}, "plus": {"puppy": {"kappa": 200}}}
    plan = steerer.plan(**given, mode="place")
    assert [len(concept.edits) for concept in plan.concepts] == [0, 200]
    with pytest.raises(SpecError, match="nothing says where to place"):
        steerer.plan(minus={"dog": {"kappa": 3}}, plus=given["plus"], mode="place")


def test_looking_stops_at_the_target(steerer, scenes):
    seen = run_prefix(steerer.vlm, [scenes[1].image])
    assert seen.q[0].shape == (3, 64, 512)
    with torch.inference_mode():
        assert torch.equal(seen.q[0], steerer.vlm.encode([scenes[1].image])[0])


def test_tuning_finds_settings_that_steer(steerer, scenes):
    """On a picture and on a world; what wins fits `steer`."""
    scene = next(scene for scene in toyland.scenes(seed=50_002, n=40) if len(scene.things) == 2)
    word = scene.objects[0]
    found = tune(steerer, scene.image, minus=word, grid={"fill": [0, 80], "gamma": [1.0, -15.0]})
    assert len(found.rows) == 4
    assert set(found.best) == {"fill", "gamma"}
    assert word not in steerer.steer(scene.image, minus=[word], **found.best).caption
    world = toyland_world(50_003, 6)
    found = tune(steerer, world, kind="remove", grid={"fill": [0, 80]}, by="clean")
    assert found.best == {"fill": 80}
    with pytest.raises(ImageError):
        tune(steerer, "nowhere.png", minus="dog")


def test_steering_by_hand_works_after_captions_were_made(steerer, scenes):
    """What captions leave behind must not stand in the way of gradients."""
    plan = steerer.plan(minus=["dog"])
    steerer.captions([scenes[0].image], [[plan]])
    with steerer.applied(plan):
        logits = steerer.vlm.model(**steerer.vlm.inputs([scenes[0].image])).logits
    logits.sum().backward()
    steerer.vlm.model.zero_grad(set_to_none=True)


def test_a_word_placed_elsewhere_leaves_the_other_to_its_surroundings(steerer):
    box = (0, 0, 30, 30)
    plan = steerer.plan(minus=["teddy"], plus={"bird": {"where": box}})
    assert plan.is_filled(plan.concepts[0])
    both = steerer.plan(minus=["teddy"], plus=["bird"])
    assert not both.is_filled(both.concepts[0])
    everywhere = steerer.plan(minus=["teddy"], nu="all", fit=0)
    assert not everywhere.is_filled(everywhere.concepts[0])
    fitted = steerer.plan(minus=["teddy"], nu="all", fit=0.3)
    assert fitted.is_filled(fitted.concepts[0]) and not fitted.is_linear
    assert "on the region with 30% of its peak\n" in str(fitted)
    result = steerer.steer("demos/images/toyland-teddy.png", minus={"teddy": {"where": box}}, plus=["bird"])
    marked = Region.from_value(box).covered_patches(result.grid.boxes, result.image.size)
    assert (result.maps["bird"][1] == marked).all()  # what replaces a marked thing goes where the mark is


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s, i: s.captions([i], [s.plan(minus=["dog"])]), r"a list of plans for each image: captions\(\[image"),
        (lambda s, i: s.captions([i], []), "a list of plans for each image"),
        (lambda s, i: s.plan(minus=5), r"minus is a list of words, not 5"),
        (lambda s, i: s.plan(minus={"dog": None}), "the settings of 'dog' are a mapping, not None"),
        (lambda s, i: s.steer(None, minus=["dog"]), "a picture is a path, the bytes of a file or a PIL image"),
        (lambda s, i: s.plan(minus=["dog"], mode="plce"), "^mode: must be"),
        (lambda s, i: s.plan(minus=["dog"], fill=-1), "fill: must be a whole number of at least 0, not -1"),
        (lambda s, i: s.plan(minus=["dog"], fit=1.5), "fit: must be a finite number from 0 to 1, not 1.5"),
        (lambda s, i: s.plan(minus=["dog"], gama=3), "there is no setting 'gama'"),
    ],
)
def test_a_wrong_call_is_one_line(steerer, scenes, call, said):
    with pytest.raises((SpecError, ImageError), match=said):
        call(steerer, scenes[0].image)
    assert steerer.captions([], []) == []


def test_a_word_that_reaches_other_units_is_told_and_needs_streams(steerer):
    far = steerer.plan(minus=["dog"], plus=["biker"], reach=2)
    assert "the units without one moved by 2 x stream" in str(far)
    assert "moved by" not in str(steerer.plan(minus=["dog"], plus=["biker"], reach=0))
    gone = steerer.plan(minus=["dog"], reach=2, gamma=1, fill=0)
    assert "the units without one moved by -2 x stream" in str(gone)
    assert gone.has_effect
    assert not gone.is_linear
    assert Plan.from_dict(gone.to_dict()) == gone
    bare = Steerer.from_parts(steerer.vlm, replace(steerer.atlas, streams=None), steerer.matcher)
    with pytest.raises(AtlasError, match="has no streams; build it again"):
        bare.plan(minus=["dog"], level="reference", fill=0, reach=1)
