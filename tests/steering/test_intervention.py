import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.calibration import Calibration
from elude_steer.errors import ModelError
from elude_steer.steering.intervention import ImageMemo, PreparedPlan, divide_by_scale, make_edited_forward
from elude_steer.steering.plan import Concept, Detector, Edit, Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings
from tests.helpers.atlases import make_atlas

TILES, PATCHES, D_IN, UNITS = 3, 10, 21, 6
WORDS = ("dog", "cat", "cow", "hen")  # the calibrated ones, by their rows


@pytest.fixture
def layer():
    torch.manual_seed(3)
    return nn.Linear(D_IN, UNITS)


@pytest.fixture
def atlas(layer):
    """13 sub-units of 6 units, the second owns 1 to 3, the fifth 8 to 11; four calibrated words, all of them seen."""
    atlas, g = make_atlas(layer=layer), torch.Generator().manual_seed(7)
    count = len(WORDS)
    calibration = Calibration(
        torch.arange(count, dtype=torch.int32),
        (2 * torch.rand(count, len(atlas), generator=g) - 1).half(),
        torch.rand(count, generator=g) + 0.5,
        torch.randn(count, generator=g),
        torch.tensor([[0.0, 0.01]]).repeat(count, 1),
        torch.randn(count, UNITS, generator=g).half(),
        torch.tensor(0.4),
    )
    return replace(atlas, calibration=calibration)


@pytest.fixture
def q():
    return torch.randn(TILES, PATCHES, D_IN, generator=torch.Generator().manual_seed(5))


def concept(atlas, sub_units, role="minus", word="dog", amounts=None, **settings):
    settings = merge_settings(settings)
    amounts = amounts or [settings.gamma if role == "minus" else settings.alpha] * len(sub_units)
    edits = tuple(
        Edit(s, int(atlas.units[s]), "scale", float(a), word, word, 1.0, 1.0)
        for s, a in zip(sub_units, amounts, strict=True)
    )
    return Concept(word, role, settings, edits)


def placed(word, role="minus", where=None, **settings):
    """A concept in mode place, by the detector of its word."""
    detector = Detector(WORDS.index(word), word, 1.0)
    return Concept(word, role, merge_settings({"mode": "place", **settings}), (), where, detector)


def prepare(atlas, layer, *concepts, where=None, **options):
    return PreparedPlan.from_plan(Plan(concepts, where), atlas, layer, **options)


def never_seen(atlas):
    """The atlas, but images with a word reach far more than any image here."""
    high = torch.tensor([[0.0, 1e6]]).repeat(len(WORDS), 1)
    return replace(atlas, calibration=replace(atlas.calibration, levels=high))


def literal(plan, atlas, layer, q):
    """The change of scaled concepts as the method defines it, one sub-unit and patch after another, in float64."""
    weight, bias, members = layer.weight.detach().double(), layer.bias.detach().double(), atlas.members()
    tiles, patches, _ = q.shape
    total = torch.zeros(tiles, patches, len(weight), dtype=torch.float64)

    def activation(s):
        unit = int(atlas.units[s])
        owners = sum(members[other].double() for other in atlas.sub_units_of(unit))
        share = members[s].double() / owners
        return q.double() @ (weight[unit] * share) + bias[unit] * share.mean()

    def largest(values, nu, per):
        found = set()
        places = [(t, p) for t in range(tiles) for p in range(patches)]
        for tile in range(tiles) if per == "tile" else [None]:
            group = [place for place in places if tile is None or place[0] == tile]
            group.sort(key=lambda place: -float(values[place]))
            found |= set(group if nu == "all" else group[:nu])
        return found

    for one in plan.concepts:
        for e in one.edits:
            now = activation(e.sub_unit)
            for place in largest(now, one.settings.nu, one.settings.per):
                total[place][e.unit] += (e.amount - 1) * now[place]
    return total


def read(word, atlas, layer, q):
    """What the detector of a word reads on each patch, sub-unit by sub-unit, in double precision."""
    calibration, row, members = atlas.calibration, WORDS.index(word), atlas.members()
    total = torch.full(q.shape[:2], float(calibration.bias[row]), dtype=torch.float64)
    for s in range(len(atlas)):
        unit = int(atlas.units[s])
        share = members[s].double() / sum(members[other].double() for other in atlas.sub_units_of(unit))
        activation = q.double() @ (layer.weight[unit].detach().double() * share)
        activation += float(layer.bias[unit].detach()) * share.mean()
        total += float(calibration.weights[row, s]) * float(calibration.scale[row]) * activation
    return total


def region_of(word, atlas, layer, q, fit):
    """The patches of a tile stand in one row here: a part of a region is a run of patches."""
    readings = read(word, atlas, layer, q)
    if not fit:
        return torch.ones_like(readings, dtype=torch.bool)
    region = readings >= fit * readings.max()
    for tile, values in zip(region, readings, strict=True):
        for there, run in itertools.groupby(range(len(tile)), key=tile.tolist().__getitem__):
            patches = list(run)
            if there and values[patches].max() < 0.6 * readings.max():
                tile[patches] = False
    return region


def direction(word, atlas):
    return atlas.calibration.directions[WORDS.index(word)].double()


def agrees(got, expected):
    assert got.dtype == torch.float32
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(got[expected == 0], torch.zeros_like(got[expected == 0]))


@pytest.mark.parametrize("per", ["tile", "image"])
@pytest.mark.parametrize("nu", [1, 3, 10, 29, "all"])
def test_scaling_equals_the_method_written_out(atlas, layer, q, nu, per):
    plan = Plan(
        (
            concept(atlas, [1, 3, 9], gamma=-9, nu=nu, per=per),
            concept(atlas, [0], word="cat", gamma=0.5, nu=2, per="tile"),
            concept(atlas, [2, 12], "plus", "cow", alpha=7, nu=nu, per=per),
        )
    )
    before = q.clone()
    got = PreparedPlan.from_plan(plan, atlas, layer).output_change(q)
    agrees(got, literal(plan, atlas, layer, q))
    assert torch.equal(q, before)
    untouched = [2, 3]  # units without an edited sub-unit
    assert torch.equal(got[..., untouched], torch.zeros(TILES, PATCHES, 2))


def test_gains_may_differ_within_a_concept(atlas, layer, q):
    plan = Plan((concept(atlas, [8, 9, 11], amounts=[-50.0, 1.0, 0.0], nu=4),))
    agrees(PreparedPlan.from_plan(plan, atlas, layer).output_change(q), literal(plan, atlas, layer, q))


def test_a_layer_without_bias_equals_one_with_zeros(atlas, q):
    torch.manual_seed(3)
    layer = nn.Linear(D_IN, UNITS, bias=False)
    atlas = make_atlas(layer=layer)
    plan = Plan((concept(atlas, [1, 9], nu=3),))
    with_zeros = nn.Linear(D_IN, UNITS)
    with torch.no_grad():
        with_zeros.weight.copy_(layer.weight)
        with_zeros.bias.zero_()
    agrees(PreparedPlan.from_plan(plan, atlas, layer).output_change(q), literal(plan, atlas, with_zeros, q))


# Placing


@pytest.mark.parametrize("fit", [0, 0.2, 0.6, 1])
def test_placing_adds_directions_on_the_region_and_nothing_elsewhere(atlas, layer, q, fit):
    """Written out: strength x direction where the detector of the minus word reads its share of the peak."""
    region = region_of("dog", atlas, layer, q, fit)
    assert bool(region.all()) == (fit == 0)
    assert (int(region.sum()) == 1) == (fit == 1)
    before = q.clone()
    minus = prepare(atlas, layer, placed("dog", fit=fit, strength=1.5)).output_change(q)
    expected = -1.5 * region[..., None] * direction("dog", atlas)
    agrees(minus, expected)
    both = prepare(atlas, layer, placed("dog", fit=fit, strength=1.5), placed("cow", "plus", fit=0.9, strength=0.5))
    agrees(both.output_change(q), expected + 0.5 * region[..., None] * direction("cow", atlas))
    assert torch.equal(q, before)


def test_a_word_that_is_not_seen_changes_nothing_unless_forced(atlas, layer, q):
    hidden = never_seen(atlas)
    words = (placed("dog"), placed("cow", "plus"))
    unseen = prepare(hidden, layer, *words)
    assert 0 < unseen.presences(q)["dog"] < 0.5
    assert not unseen.output_change(q).any()
    assert not any(touched.any() for _, touched in unseen.maps(q).values())
    with torch.no_grad():
        assert torch.equal(make_edited_forward(layer, [unseen], by_count(TILES), [None])(layer, q), layer(q))
    expected = prepare(atlas, layer, *words).output_change(q)
    assert expected.any()
    for settings in ({"force": True}, {"seen": 0.0}):
        forced = prepare(hidden, layer, placed("dog", **settings), placed("cow", "plus"))
        assert torch.equal(forced.output_change(q), expected)
    # Only the settings of the minus word count: a plus word asks for nothing in the image.
    assert not prepare(hidden, layer, words[0], placed("cow", "plus", force=True)).output_change(q).any()


def test_presence_is_the_reading_of_the_strongest_patches_between_both_levels(atlas, layer, q):
    levels = torch.tensor([[0.5, 2.5]]).repeat(len(WORDS), 1)
    for fit in (0.4, 0.0):
        calibration = replace(atlas.calibration, levels=levels, fit=torch.tensor(fit))
        found = prepare(replace(atlas, calibration=calibration), layer, placed("dog"), placed("cow", "plus"))
        readings = read("dog", atlas, layer, q).flatten()
        pooled = readings.sort(descending=True).values[:3].mean() if fit else readings.mean()
        assert found.presences(q) == {"dog": pytest.approx((float(pooled) - 0.5) / 2, abs=1e-4)}


def test_plus_words_take_the_regions_of_minus_words_in_order(atlas, layer, q):
    dog, cat = (region_of(word, atlas, layer, q, 0.5) for word in ("dog", "cat"))
    assert not torch.equal(dog, cat)
    words = (placed("dog", fit=0.5), placed("cat", fit=0.5), placed("cow", "plus"), placed("hen", "plus"))
    expected = dog[..., None] * (direction("cow", atlas) - direction("dog", atlas))
    expected = expected + cat[..., None] * (direction("hen", atlas) - direction("cat", atlas))
    agrees(prepare(atlas, layer, *words).output_change(q), expected)
    maps = prepare(atlas, layer, *words).maps(q)
    assert list(maps) == ["dog", "cat", "cow", "hen"]
    for word, region in (("dog", dog), ("cat", cat), ("cow", dog), ("hen", cat)):
        assert (maps[word][1] == region.numpy()).all()
        np.testing.assert_allclose(maps[word][0], read(word, atlas, layer, q).clamp_min(0).numpy(), atol=1e-4)
    # One is not seen: its pair is left out, the other is edited.
    levels = atlas.calibration.levels.clone()
    levels[0, 1] = 1e6
    half = replace(atlas, calibration=replace(atlas.calibration, levels=levels))
    agrees(
        prepare(half, layer, *words).output_change(q),
        cat[..., None] * (direction("hen", atlas) - direction("cat", atlas)),
    )


def test_a_marked_region_needs_no_presence(atlas, layer, q):
    marked = np.zeros((TILES, PATCHES), bool)
    marked[0, 3:5] = marked[2, 7] = True
    box, there = Region.from_value((1, 1, 9, 9)), torch.from_numpy(marked)[..., None]
    hidden = never_seen(atlas)
    for one, sign in ((placed("cow", "plus", strength=2), 2), (placed("cow", strength=2), -2)):
        change = prepare(hidden, layer, one, where=box).output_change(q, lambda _region: marked)
        agrees(change, sign * there * direction("cow", atlas))
        own = replace(one, where=box)
        assert torch.equal(prepare(hidden, layer, own).output_change(q, lambda _region: marked), change)
    # A plus word without a region goes where its minus word is marked.
    pair = prepare(hidden, layer, placed("dog", where=box), placed("cow", "plus"))
    expected = there * (direction("cow", atlas) - direction("dog", atlas))
    agrees(pair.output_change(q, lambda _region: marked), expected)
    with pytest.raises(ModelError, match="a box or mask needs to know the image it lies on"):
        pair.output_change(q)


def test_the_region_of_a_plan_is_for_what_is_placed(atlas, layer, q):
    """The minus word goes where it is; a word with a region of its own ignores that of the plan."""
    first, second = Region.from_value((0, 0, 1, 1)), Region.from_value((5, 5, 6, 6))
    marked = {first: np.zeros((TILES, PATCHES), bool), second: np.zeros((TILES, PATCHES), bool)}
    marked[first][0, :2] = marked[second][1, 4] = True
    words = placed("dog", fit=0.5), placed("cow", "plus", where=first), placed("hen", "plus")
    maps = prepare(atlas, layer, *words, where=second).maps(q, marked.__getitem__)
    assert (maps["cow"][1] == marked[first]).all()
    assert (maps["hen"][1] == marked[second]).all()
    assert (maps["dog"][1] == region_of("dog", atlas, layer, q, 0.5).numpy()).all()
    maps = prepare(atlas, layer, *words).maps(q, marked.__getitem__)
    assert (maps["hen"][1] == maps["dog"][1]).all()  # the only one that needs the region of a minus word


def test_tokens_before_the_patches_are_in_no_region(atlas, layer, q):
    q = q.clone()
    q[:, 0] *= 1000
    prepared = prepare(atlas, layer, placed("dog", fit=0), shape=(3, 3))
    assert prepared.output_change(q).any(-1).tolist() == [[False] + [True] * 9] * TILES
    fitted = prepare(atlas, layer, placed("dog", fit=0.5), shape=(1, 9))
    assert torch.equal(fitted.output_change(q)[:, 1:].any(-1), region_of("dog", atlas, layer, q[:, 1:], 0.5))
    assert fitted.presences(q)["dog"] == pytest.approx(prepare(atlas, layer, placed("dog")).presences(q[:, 1:])["dog"])


def test_a_plus_word_alone_goes_where_the_words_claim_least(atlas, layer, q):
    """A row of ten patches: the four neighbours on which the readings of all words exceed their means least."""
    one = q[:1]
    readings = torch.stack([atlas.detector(row, layer)(one[0]) for row in range(len(WORDS))], 1)
    torch.testing.assert_close(atlas.read_all_words(one[0], layer), readings)
    claims = (readings - readings.mean(0)).clamp_min(0).sum(1)
    start = min(range(7), key=lambda i: claims[i : i + 4].sum().item())
    there = torch.zeros(1, PATCHES, dtype=torch.bool)
    there[0, start : start + 4] = True
    for words in ((placed("cow", "plus", strength=2),), (concept(atlas, [1], amounts=[1]), placed("cow", "plus"))):
        expected = there[..., None] * words[-1].settings.strength * direction("cow", atlas)
        agrees(prepare(atlas, layer, *words).output_change(one), expected)
    maps = prepare(atlas, layer, placed("cow", "plus", force=True), placed("hen", "plus", force=True)).maps(one)
    assert (maps["cow"][1] == there.numpy()).all()
    assert maps["hen"][1].sum() in (0, 4) and not (maps["cow"][1] * maps["hen"][1]).any()
    whole = prepare(atlas, layer, placed("cow", "plus", fit=0)).maps(q)
    assert whole["cow"][1].all()


def test_a_free_place_is_the_same_part_of_every_tile(atlas, layer, q):
    """The second tile shows the whole image, the others its halves."""
    row = np.arange(PATCHES) / PATCHES
    whole = np.stack([row, 0 * row, row + 1 / PATCHES, 0 * row + 1], 1)
    half = whole * [0.5, 1, 0.5, 1]
    boxes = np.stack([half, whole, half + np.array([0.5, 0, 0.5, 0])])
    cow = prepare(atlas, layer, placed("cow", "plus", force=True))
    with pytest.raises(ModelError, match="several tiles needs to know which part each of them shows"):
        cow.output_change(q)
    finder = SimpleNamespace(boxes=boxes, shape=(1, PATCHES))
    alone = cow.maps(q[1:2])["cow"][1][0]
    touched = cow.maps(q, finder)["cow"][1]
    assert (touched[1] == alone).all()
    assert (np.concatenate([touched[0], touched[2]]) == alone.repeat(2)).all()
    finder.boxes = (boxes - [0.3, 0, 0.3, 0]) / [0.4, 1, 0.4, 1]  # only patches 3 to 6 show the image
    assert cow.maps(q, finder)["cow"][1][1].nonzero()[0].tolist() == [3, 4, 5, 6]


def test_a_strength_of_zero_has_no_effect(atlas, layer, q):
    idle = prepare(atlas, layer, placed("dog", strength=0), placed("cow", "plus", strength=0))
    assert not idle.plan.has_effect
    assert not idle.output_change(q).any()
    with torch.no_grad():
        assert torch.equal(make_edited_forward(layer, [idle], by_count(TILES), [None])(layer, q), layer(q))


def test_scaled_and_placed_concepts_add_up(atlas, layer, q):
    scaled, dog = concept(atlas, [1, 9], word="cat", nu=2), placed("dog", fit=0.5)
    alone = [prepare(atlas, layer, one).output_change(q) for one in (scaled, dog)]
    torch.testing.assert_close(prepare(atlas, layer, scaled, dog).output_change(q), alone[0] + alone[1])


def test_the_change_is_divided_by_what_the_stream_multiplies_it_with(atlas, layer, q):
    scale = torch.tensor([0.1, 2.0, -0.5, 0.0, 1.0, 1e-3])
    words = placed("dog", fit=0.5), placed("cow", "plus")
    plain, divided = (prepare(atlas, layer, *words, stream_scale=own).output_change(q) for own in (None, scale))
    expected = plain.clone()
    expected[..., 3] = 0  # a channel that never reaches the stream
    torch.testing.assert_close(divided * scale, expected)
    assert not divided[..., 3].any()
    assert (
        divide_by_scale(torch.ones(2, dtype=torch.float32), torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    )


def test_an_empty_plan_and_gains_of_one_add_nothing(atlas, layer, q):
    for plan in (Plan(), Plan((concept(atlas, []),)), Plan((concept(atlas, [1, 8], gamma=1, nu=3),))):
        assert torch.equal(
            PreparedPlan.from_plan(plan, atlas, layer).output_change(q), torch.zeros(TILES, PATCHES, UNITS)
        )


def test_changes_that_are_not_finite_are_an_error(atlas, layer, q):
    plan = Plan((concept(atlas, [1, 2], gamma=-3e38, nu=3),))
    with pytest.raises(ModelError, match=r"not finite; use smaller gains \(alpha, gamma, strength\)"):
        PreparedPlan.from_plan(plan, atlas, layer).output_change(q * 100)
    with pytest.raises(ModelError, match="not finite; use smaller gains"):
        prepare(atlas, layer, placed("dog", strength=3e38)).output_change(q)


# As a change of weights


def test_the_weight_change_equals_the_output_change(atlas, layer, q):
    plan = Plan((concept(atlas, [1, 3, 9], nu="all"), concept(atlas, [2, 12], "plus", "cow", nu="all")))
    prepared = PreparedPlan.from_plan(plan, atlas, layer)
    assert plan.is_linear
    weight, bias = prepared.weight_change
    change = prepared.output_change(q)
    torch.testing.assert_close(F.linear(q, weight, bias), change, rtol=1e-5, atol=1e-5 * float(change.abs().max()))
    assert prepared.weight_change[0] is weight  # made once
    agrees(change, literal(plan, atlas, layer, q))


def test_all_sub_units_times_zero_remove_the_unit(atlas, layer):
    plan = Plan((concept(atlas, list(atlas.sub_units_of(4)), gamma=0, nu="all"),))
    weight, bias = PreparedPlan.from_plan(plan, atlas, layer).weight_change
    torch.testing.assert_close(weight[4], -layer.weight[4].detach())
    assert torch.equal(weight[[0, 1, 2, 3, 5]], torch.zeros(5, D_IN))
    # The paper shares a bias out by the mean share, which adds up to the bias.
    torch.testing.assert_close(bias[4], -layer.bias[4].detach())


# Maps


def test_maps_show_where_each_concept_fires_and_changes(atlas, layer, q):
    prepared = prepare(atlas, layer, placed("cat", fit=0.5), concept(atlas, [1, 9], nu=2))
    maps = prepared.maps(q)
    assert list(maps) == ["cat", "dog"]  # in the order of the plan
    for fires, touched in maps.values():
        assert fires.shape == touched.shape == (TILES, PATCHES)
        assert (fires >= 0).all()
        assert ((touched >= 0) & (touched <= 1)).all()
    change = prepared.output_change(q).numpy()
    assert (((maps["dog"][1] > 0) | (maps["cat"][1] > 0)) == change.any(-1)).all()
    assert set(np.unique(maps["dog"][1])) <= {0.0, 0.5, 1.0}  # of its two sub-units
    np.testing.assert_allclose(maps["dog"][1].sum(1), 2)  # each on two patches of a tile
    part = prepared.scaled[0]
    expected = (part.activations(q) / part.reference).clamp_min(0).mean(-1)
    np.testing.assert_allclose(maps["dog"][0], expected.numpy(), rtol=1e-5)


def test_a_sub_unit_that_never_fires_is_not_in_the_map(atlas, layer, q):
    """Its reference is not positive, and dividing by a value near 0 would let it decide alone."""
    for never in (0.0, -2.0):
        references = replace(atlas.references, activation=atlas.references.activation.clone())
        references.activation[9] = never
        cut = replace(atlas, references=references)
        both, one = (prepare(cut, layer, concept(cut, own)).maps(q)["dog"][0] for own in ([1, 9], [1]))
        np.testing.assert_allclose(both, one / 2, rtol=1e-5)


def test_maps_show_a_marked_region(atlas, layer, q):
    marked = np.eye(TILES, PATCHES, dtype=bool)
    prepared = prepare(atlas, layer, placed("cow", "plus"), where=Region.from_value((1, 1, 9, 9)))
    assert (prepared.maps(q, lambda _region: marked)["cow"][1] == marked).all()


# Replacing the layer's forward


def by_count(*counts):
    return lambda x: list(x.split(counts))


def test_each_image_of_a_batch_can_have_its_plan(atlas, layer, q):
    plans = [Plan((concept(atlas, [1, 9], nu=2),)), None, Plan((concept(atlas, [3], "plus", alpha=4, nu="all"),))]
    prepared = [plan and PreparedPlan.from_plan(plan, atlas, layer) for plan in plans]
    x = torch.cat([q, -q])  # images of 3, 1 and 2 tiles
    with torch.no_grad():
        out = make_edited_forward(layer, prepared, by_count(3, 1, 2), [None] * 3)(layer, x)
        bare = layer(x)
    assert torch.equal(out[3], bare[3])
    torch.testing.assert_close(out[:3] - bare[:3], prepared[0].output_change(x[:3]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[4:] - bare[4:], prepared[2].output_change(x[4:]), rtol=1e-4, atol=1e-4)


def test_a_single_plan_is_for_all_images(atlas, layer, q):
    one = PreparedPlan.from_plan(Plan((concept(atlas, [1, 9], nu=2),)), atlas, layer)
    x = torch.cat([q, -q])
    with torch.no_grad():
        alone = make_edited_forward(layer, [one], by_count(3, 3), [None, None])(layer, x)
        assert torch.equal(alone, make_edited_forward(layer, [one, one], by_count(3, 3), [None, None])(layer, x))
        assert not torch.equal(alone, layer(x))


def test_a_marked_region_is_found_in_each_image(atlas, layer, q):
    marked = [np.zeros((TILES, PATCHES), bool) for _ in range(2)]
    marked[0][0, 0] = marked[1][2, 9] = True
    one = prepare(atlas, layer, placed("cow", "plus"), where=Region.from_value((1, 1, 9, 9)))
    with torch.no_grad():
        x = torch.cat([q, q])
        out = make_edited_forward(layer, [one], by_count(3, 3), [lambda _region: marked[0], lambda _region: marked[1]])(
            layer, x
        )
        changed = (out != layer(x)).any(-1)
    assert torch.equal(changed, torch.from_numpy(np.concatenate(marked)))


def test_plans_without_effect_return_the_output_unchanged(atlas, layer, q):
    idle = [
        None,
        PreparedPlan.from_plan(Plan(), atlas, layer),
        PreparedPlan.from_plan(Plan((concept(atlas, [1], gamma=1),)), atlas, layer),
    ]

    def split(x):
        pytest.fail("the input was split")

    with torch.no_grad():
        for one in idle:
            assert torch.equal(make_edited_forward(layer, [one], split, [None])(layer, q), layer(q))
        assert torch.equal(make_edited_forward(layer, idle, split, [None] * 3)(layer, q), layer(q))


def test_a_linear_plan_runs_the_layer_once_and_keeps_its_weight(atlas, layer, q):
    one = PreparedPlan.from_plan(Plan((concept(atlas, [1, 9], nu="all"),)), atlas, layer)
    weight = layer.weight.clone()

    def original(x):
        pytest.fail("the layer computed as well")

    with torch.no_grad():
        folded = make_edited_forward(layer, [one], by_count(3), [None])(original, q)
        hooked = make_edited_forward(layer, [one, None], by_count(3, 3), [None] * 2)(layer, torch.cat([q, q]))[:3]
    torch.testing.assert_close(folded, hooked, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.weight, weight)


def test_a_linear_plan_of_another_dictionary_is_added_to_the_output(atlas, layer, q):
    """Only parts of units fold into the layer's weight; latents of a dictionary have none."""
    prepared = PreparedPlan.from_plan(Plan((concept(atlas, [1, 9], nu="all"),)), atlas, layer)
    (edit,) = prepared.scaled
    sub_units = SimpleNamespace(activations=edit.sub_units.activations, add_change=edit.sub_units.add_change)
    other = replace(prepared, scaled=(replace(edit, sub_units=sub_units),))
    assert prepared.can_fold and not other.can_fold
    with torch.no_grad():
        folded, added = (make_edited_forward(layer, [one], by_count(3), [None])(layer, q) for one in (prepared, other))
    torch.testing.assert_close(folded, added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nu", [2, "all"])
def test_half_precision_output_has_a_change_computed_in_float32(atlas, layer, q, dtype, nu):
    half = layer.to(dtype)
    one = PreparedPlan.from_plan(Plan((concept(atlas, [1, 9], nu=nu),)), atlas, half)
    with torch.no_grad():
        out = make_edited_forward(half, [one], by_count(3), [None])(half, q.to(dtype))
        expected = half(q.to(dtype)).float() + one.output_change(q.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("nu", [2, "all"])
@pytest.mark.parametrize(("dtype", "gamma"), [(torch.float32, -3e38), (torch.float16, -1e6)], ids=str)
def test_outputs_that_are_not_finite_are_an_error(atlas, layer, q, dtype, gamma, nu):
    layer = layer.to(dtype)
    one = PreparedPlan.from_plan(Plan((concept(atlas, [1, 2, 3, 9], gamma=gamma, nu=nu),)), atlas, layer)
    with pytest.raises(ModelError, match="not finite; use smaller gains"), torch.no_grad():
        make_edited_forward(layer, [one], by_count(3), [None])(layer, (q * 100).to(dtype))


def test_a_memo_changes_no_bits_and_nothing_is_computed_twice(atlas, layer, q):
    """Two plans of one image: each finds its own regions, and they share readings and claims."""
    one, calls = q[:1], []
    cow, hen = placed("cow", "plus", force=True), placed("hen", "plus", force=True)
    plans = [prepare(atlas, layer, *words) for words in ((cow, hen), (cow, hen), (hen,))]
    expected = [plan.output_change(one) for plan in plans]
    read = atlas.read_all_words
    object.__setattr__(atlas, "read_all_words", lambda *args: calls.append(args) or read(*args))
    try:
        memo = ImageMemo()
        for _ in range(2):
            for plan, change in zip(plans, expected, strict=True):
                assert torch.equal(plan.output_change(one, memo=memo), change)
    finally:
        del atlas.__dict__["read_all_words"]
    assert len(calls) == 1
    assert len(memo.regions) == 5
