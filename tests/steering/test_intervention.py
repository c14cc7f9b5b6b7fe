from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import ModelError
from elude_steer.steering.intervention import PreparedPlan, make_edited_forward
from elude_steer.steering.plan import Concept, Edit, Plan
from elude_steer.steering.regions import Region
from elude_steer.steering.settings import merge_settings
from tests.helpers.atlases import make_atlas

TILES, PATCHES, D_IN, UNITS = 3, 10, 21, 6


@pytest.fixture
def layer():
    torch.manual_seed(3)
    return nn.Linear(D_IN, UNITS)


@pytest.fixture
def atlas(layer):
    """13 sub-units of 6 units; the second owns 1 to 3, the fifth 8 to 11."""
    return make_atlas(layer=layer)


@pytest.fixture
def q():
    return torch.randn(TILES, PATCHES, D_IN, generator=torch.Generator().manual_seed(5))


def concept(atlas, sub_units, role="minus", word="dog", amounts=None, **settings):
    settings = merge_settings(settings)
    kind = "set" if settings.mode == "place" and role == "plus" else "scale"
    amounts = amounts or [settings.gamma if role == "minus" else settings.alpha] * len(sub_units)
    edits = tuple(
        Edit(s, int(atlas.units[s]), kind, float(a), word, word, 1.0, 1.0)
        for s, a in zip(sub_units, amounts, strict=True)
    )
    return Concept(word, role, settings, edits)


def literal(plan, atlas, layer, q, region=None):
    """The change as the method defines it, sub-unit by sub-unit and patch by patch, in double precision."""
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

    placed = [c for c in plan.concepts if c.edits and c.edits[0].kind == "set"]
    if placed and region is None:
        reference = atlas.references.activation.double()
        minus = [e.sub_unit for c in plan.concepts if c.role == "minus" for e in c.edits]
        fires = torch.stack([activation(s) / reference[s] for s in minus]).mean(0)
        region = largest(fires, placed[0].settings.nu, placed[0].settings.per)
    for one in plan.concepts:
        for e in one.edits:
            now = activation(e.sub_unit)
            where = region if e.kind == "set" else largest(now, one.settings.nu, one.settings.per)
            for place in where:
                changed = e.amount if e.kind == "set" else e.amount * now[place]
                total[place][e.unit] += changed - now[place]
    return total


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


@pytest.mark.parametrize("per", ["tile", "image"])
@pytest.mark.parametrize("nu", [1, 4, "all"])
def test_placing_sets_the_region_where_the_minus_concepts_fire(atlas, layer, q, nu, per):
    plan = Plan(
        (
            concept(atlas, [1, 9], gamma=-9, nu=2),
            concept(atlas, [12], word="cat", nu=2),
            concept(atlas, [4, 8], "plus", "cow", [8.0, 3.5], mode="place", nu=nu, per=per),
        )
    )
    agrees(PreparedPlan.from_plan(plan, atlas, layer).output_change(q), literal(plan, atlas, layer, q))


def test_placing_sets_the_region_that_the_user_marks(atlas, layer, q):
    marked = np.zeros((TILES, PATCHES), bool)
    marked[0, 3:5] = marked[2, 7] = True
    plan = Plan((concept(atlas, [4, 8], "plus", amounts=[8.0, 3.5], mode="place"),), Region.from_value((1, 1, 9, 9)))
    prepared = PreparedPlan.from_plan(plan, atlas, layer)
    got = prepared.output_change(q, lambda _region: marked)
    agrees(got, literal(plan, atlas, layer, q, {(0, 3), (0, 4), (2, 7)}))
    assert torch.equal(got.any(-1), torch.from_numpy(marked))
    # Afterwards the sub-units have exactly these values there.
    now, units = prepared.concept_edits[0].activations(q), prepared.concept_edits[0].sub_units.units
    others = layer(q) - torch.zeros(TILES, PATCHES, UNITS).index_add_(-1, units, now)
    expected = others.clone().index_add_(-1, units, torch.tensor([8.0, 3.5]).expand_as(now))
    torch.testing.assert_close((layer(q) + got)[torch.from_numpy(marked)], expected[torch.from_numpy(marked)])


def test_a_sub_unit_that_never_fires_does_not_move_the_region(atlas, layer, q):
    """Its reference is not positive, and dividing by a value near 0 would let it decide alone."""
    for never in (0.0, -2.0):
        references = replace(atlas.references, activation=atlas.references.activation.clone())
        references.activation[9] = never
        cut = replace(atlas, references=references)
        plans = [Plan((concept(cut, minus), concept(cut, [4], "plus", mode="place", nu=3))) for minus in ([1, 9], [1])]
        ready = [PreparedPlan.from_plan(plan, cut, layer) for plan in plans]
        with_it, without = (one.region(one.concept_edits[-1], q) for one in ready)
        assert torch.equal(with_it, without)


def test_placing_without_a_region_is_an_error(atlas, layer, q):
    plan = Plan((concept(atlas, []), concept(atlas, [4], "plus", mode="place")))
    with pytest.raises(ModelError, match="nothing says where to place the plus words: every minus sub-unit is a plus"):
        PreparedPlan.from_plan(plan, atlas, layer).output_change(q)


def test_an_empty_plan_and_gains_of_one_add_nothing(atlas, layer, q):
    for plan in (Plan(), Plan((concept(atlas, []),)), Plan((concept(atlas, [1, 8], gamma=1, nu=3),))):
        assert torch.equal(
            PreparedPlan.from_plan(plan, atlas, layer).output_change(q), torch.zeros(TILES, PATCHES, UNITS)
        )


def test_changes_that_are_not_finite_are_an_error(atlas, layer, q):
    plan = Plan((concept(atlas, [1, 2], gamma=-3e38, nu=3),))
    with pytest.raises(ModelError, match=r"not finite; use smaller gains \(alpha, gamma, beta\)"):
        PreparedPlan.from_plan(plan, atlas, layer).output_change(q * 100)


def test_each_concept_has_a_region(atlas, layer, q):
    """A region comes from the concept's box, or from its nu where the minus concepts fire."""
    first, second = Region.from_value((0, 0, 1, 1)), Region.from_value((5, 5, 6, 6))
    marked = {first: np.zeros((TILES, PATCHES), bool), second: np.zeros((TILES, PATCHES), bool)}
    marked[first][0, :2] = marked[second][1, 4] = True
    cow = concept(atlas, [4], "plus", "cow", [8.0], mode="place", nu=2)
    hen = concept(atlas, [8], "plus", "hen", [3.0], mode="place", nu=5)
    plan = Plan((replace(cow, where=first), replace(hen, where=second)))
    maps = PreparedPlan.from_plan(plan, atlas, layer).maps(q, marked.__getitem__)
    assert (maps["cow"][1] == marked[first]).all()
    assert (maps["hen"][1] == marked[second]).all()
    plan = Plan((concept(atlas, [1, 9], nu=1), replace(cow, where=first), hen), second)
    maps = PreparedPlan.from_plan(plan, atlas, layer).maps(q, marked.__getitem__)
    assert (maps["cow"][1] == marked[first]).all()  # the concept's region overrides the plan's
    assert (maps["hen"][1] == marked[second]).all()
    maps = PreparedPlan.from_plan(Plan((concept(atlas, [1, 9], nu=1), cow, hen)), atlas, layer).maps(q)
    assert (maps["cow"][1].sum(1) == 2).all()
    assert (maps["hen"][1].sum(1) == 5).all()
    with pytest.raises(ModelError, match="a box or mask needs to know the image it lies on"):
        PreparedPlan.from_plan(plan, atlas, layer).output_change(q)


def filled(atlas, sub_units, **settings):
    return concept(atlas, sub_units, mode="place", **{"nu": 3, "fill": 4, "beta": 2.0, **settings})


@pytest.mark.parametrize("before", [0, 1])
def test_a_removed_concept_is_filled_with_its_surroundings(atlas, layer, q, before):
    """The sub-units that fire most outside the region are set inside; edited ones and CLS do not count."""
    plan = Plan((filled(atlas, [1, 9]),))
    prepared = PreparedPlan.from_plan(plan, atlas, layer, (1, PATCHES - before))
    bare = PreparedPlan.from_plan(
        Plan((concept(atlas, [1, 9], nu=3, mode="place"),)), atlas, layer, (1, PATCHES - before)
    )
    region = prepared.region(prepared.concept_edits[0], q)
    assert not region[:, :before].any()
    outside = ~region
    outside[:, :before] = False
    every = list(range(len(atlas)))
    weight, bias = atlas.parameters(every, layer.weight.detach(), layer.bias.detach())
    reference = atlas.references.activation
    now = q @ weight.T + bias  # (tiles, patches, S)
    share = {s: float(now[..., s][outside].mean() / reference[s]) for s in every if reference[s] > 1e-6}
    best = sorted((s for s in share if s not in (1, 9) and share[s] > 0), key=lambda s: -share[s])[:4]
    expected = torch.zeros(TILES, PATCHES, UNITS)
    for s in best:
        expected[..., atlas.units[s]] += (2.0 * reference[s] - now[..., s]) * region
    torch.testing.assert_close(prepared.output_change(q) - bare.output_change(q), expected, rtol=1e-4, atol=1e-4)
    touched = prepared.maps(q)["dog"][1]
    assert (touched >= region[:, before:].numpy()).all()


def test_nothing_is_filled_if_something_is_placed_or_no_patches_are_left(atlas, layer, q):
    bare = concept(atlas, [1, 9], mode="place", nu="all")
    everything = PreparedPlan.from_plan(Plan((filled(atlas, [1, 9], nu="all"),)), atlas, layer).output_change(q)
    torch.testing.assert_close(everything, PreparedPlan.from_plan(Plan((bare,)), atlas, layer).output_change(q))
    cow = concept(atlas, [4], "plus", "cow", [8.0], mode="place", nu=3)
    plan = Plan((filled(atlas, [1, 9]), cow))
    assert not any(map(plan.is_filled, plan.concepts))
    assert Plan((filled(atlas, [1], nu="all"),)).is_linear  # no patches are left around it
    assert not Plan((filled(atlas, [1]),)).is_linear
    assert not Plan((filled(atlas, []),)).has_effect
    assert Plan((filled(atlas, [1], gamma=1.0),)).has_effect


def test_overlapping_regions_are_filled_once(atlas, layer, q):
    """Where both concepts were, the surroundings are set once and not added twice."""
    one, two = filled(atlas, [1, 9], gamma=1.0), filled(atlas, [1, 9], word="cat", gamma=1.0)
    single, double = (
        PreparedPlan.from_plan(Plan(words), atlas, layer).output_change(q) for words in ((one,), (one, two))
    )
    torch.testing.assert_close(single, double)
    many = PreparedPlan.from_plan(Plan((filled(atlas, [1, 9], fill=500),)), atlas, layer).output_change(q)
    assert torch.isfinite(many).all()


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
    plan = Plan((concept(atlas, [1, 9], nu=2), concept(atlas, [4], "plus", "cow", mode="place", nu=3)))
    prepared = PreparedPlan.from_plan(plan, atlas, layer)
    maps = prepared.maps(q)
    assert list(maps) == ["dog", "cow"]
    for fires, touched in maps.values():
        assert fires.shape == touched.shape == (TILES, PATCHES)
        assert (fires >= 0).all()
        assert ((touched >= 0) & (touched <= 1)).all()
    change = prepared.output_change(q).numpy()
    assert (((maps["dog"][1] > 0) | (maps["cow"][1] > 0)) == change.any(-1)).all()
    assert set(np.unique(maps["dog"][1])) <= {0.0, 0.5, 1.0}  # of its two sub-units
    np.testing.assert_allclose(maps["dog"][1].sum(1), 2)  # each on two patches of a tile
    assert (maps["cow"][1].sum(1) == 3).all()
    part = prepared.concept_edits[0]
    expected = (part.activations(q) / part.reference).clamp_min(0).mean(-1)
    np.testing.assert_allclose(maps["dog"][0], expected.numpy(), rtol=1e-5)


def test_maps_show_a_marked_region(atlas, layer, q):
    marked = np.eye(TILES, PATCHES, dtype=bool)
    plan = Plan((concept(atlas, [4], "plus", "cow", mode="place"),), Region.from_value((1, 1, 9, 9)))
    assert (PreparedPlan.from_plan(plan, atlas, layer).maps(q, lambda _region: marked)["cow"][1] == marked).all()


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
    plan = Plan((concept(atlas, [4], "plus", mode="place"),), Region.from_value((1, 1, 9, 9)))
    one = PreparedPlan.from_plan(plan, atlas, layer)
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
    (edit,) = prepared.concept_edits
    sub_units = SimpleNamespace(activations=edit.sub_units.activations, add_change=edit.sub_units.add_change)
    other = replace(prepared, concept_edits=(replace(edit, sub_units=sub_units),))
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
