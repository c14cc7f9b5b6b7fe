from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from elude_steer.errors import LayerError, SpecError
from elude_steer.method.layers import (
    ScaledLinear,
    SplitConv1x1,
    SplitLinear,
    layer_parameters,
    split_layer,
    sub_unit_parameters,
)
from elude_steer.method.splitting import (
    RHOS,
    activations_by_cluster,
    memberships,
    random_memberships,
    rho_quality,
    shares,
    split_unit,
)
from elude_steer.models.hooks import find_layer, swap_module

RULES = ("unique", "gap", "winner")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_split(d_out, d_in, seed=0):
    """Members and units of a layer whose units have 1, 2, 3, 4, 1, 2, … sub-units."""
    members, units = [], []
    for unit in range(d_out):
        found = memberships(randn(unit % 4 + 1, d_in, seed=seed + unit), 0.6)
        members.append(found)
        units += [unit] * len(found)
    return torch.cat(members), torch.tensor(units)


def scaled(layer, members, units, gains):
    weight, bias = sub_unit_parameters(*layer_parameters(layer), members, units)
    return ScaledLinear(layer, weight, bias, units, gains)


def some_gains(count):
    gains = torch.ones(count)
    gains[::3] = torch.tensor([5.0, -2.0, 0.0, 50.0]).repeat(count)[: len(gains[::3])]
    return gains


def r_squared(expected, got):
    expected, got = expected.double(), got.double()
    return float(1 - (got - expected).square().sum() / (expected - expected.mean()).square().sum())


def literal_sub_unit(x, weight, bias, members, units, which):
    """The activation of one sub-unit for one input vector, by the book and in plain floats."""
    unit = int(units[which])
    siblings = [s for s in range(len(units)) if int(units[s]) == unit]
    total, share_sum = 0.0, 0.0
    for j in range(len(x)):
        if members[which, j]:
            share = 1 / sum(bool(members[s, j]) for s in siblings)
            total += float(weight[unit, j]) * share * float(x[j])
            share_sum += share
    return total + float(bias[unit]) * share_sum / len(x)


def literal_change(x, layer, members, units, gains):
    """What scaling adds to the layer's output, `(rows, d_out)` float64, one sub-unit and row at a time."""
    weight, bias = layer_parameters(layer)
    change = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for row in range(len(x)):
        for s in range(len(units)):
            if gains[s] != 1:
                activation = literal_sub_unit(x[row], weight, bias, members, units, s)
                change[row, units[s]] += (float(gains[s]) - 1) * activation
    return change


def change_by_sub_unit(split, x, gains):
    """What scaling adds, from all sub-units of the explicit layer."""
    activations = split.sub_units(x).movedim(split.channels, 0)  # (S, …)
    change = torch.zeros(split.d_out, *activations.shape[1:], dtype=x.dtype)
    for unit, gain, activation in zip(split.units.tolist(), gains.tolist(), activations, strict=True):
        change[unit] += (gain - 1) * activation
    return change.movedim(0, split.channels)


def from_columns(*columns):
    """Representatives, one row a cluster, from what each dimension holds."""
    return torch.tensor(columns).T


def owners_by_dimension(members):
    return [set(column.nonzero().flatten().tolist()) for column in members.T]


# Who owns a dimension: numbers by hand, at rho = 0.5. The comment gives rho * v_s against v_(s+1) for s = 1, 2.
ALL = {0, 1, 2}
THREE = [
    # strengths        unique  gap     winner
    ((8.0, 2.0, 1.5), {0}, {0}, {0}),  # 4 > 2 yes, 1 > 1.5 no; ratios 4, 1.33
    ((8.0, 6.0, 1.0), {0, 1}, {0, 1}, ALL),  # 4 > 6 no, 3 > 1 yes; ratios 1.33, 6
    ((8.0, 2.0, 0.5), ALL, {0}, {0}),  # 4 > 2 yes, 1 > 0.5 yes: two winners; ratios 4, 4: a tie, the smallest s
    ((8.0, 2.0, 0.25), ALL, {0, 1}, {0}),  # 4 > 2 yes, 1 > 0.25 yes: two winners; ratios 4, 8
    ((3.0, 2.0, 2.0), ALL, ALL, ALL),  # 1.5 > 2 no, 1 > 2 no; ratios 1.5, 1, and 0.5 * 1.5 < 1
    ((4.0, 2.0, 2.0), ALL, ALL, ALL),  # 2 > 2 no (it must be more), 1 > 2 no; 0.5 * 2 is not more than 1
    ((5.0, 5.0, 5.0), ALL, ALL, ALL),  # 2.5 > 5 no, twice; ratios 1, 1
    ((5.0, 5.0, 1.0), {0, 1}, {0, 1}, ALL),  # 2.5 > 5 no, 2.5 > 1 yes; ratios 1, 5
    ((0.0, 0.0, 0.0), ALL, ALL, ALL),  # 0 > 0 no, twice; 0 / 0 counts as 1
    ((0.0, 7.0, 0.0), {1}, {1}, {1}),  # 3.5 > 0 yes, 0 > 0 no; ratios infinite, 0 / 0 = 1
    ((4.0, 0.0, 4.0), {0, 2}, {0, 2}, ALL),  # 2 > 4 no, 2 > 0 yes; ratios 1, infinite
    ((8.0, 2.0, 0.0), ALL, {0, 1}, {0}),  # 4 > 2 yes, 1 > 0 yes: two winners; ratios 4, infinite
    ((-8.0, 2.0, -1.5), {0}, {0}, {0}),  # as the first: signs do not count
    ((1.0, 2.0, -8.0), {2}, {2}, {2}),  # sorted 8, 2, 1: 4 > 2 yes, 1 > 1 no; ratios 4, 2
    ((1.0, 6.0, 8.0), {1, 2}, {1, 2}, ALL),  # sorted 8, 6, 1, as the second
]
TWO = [
    ((4.0, 1.0), {0}),  # 2 > 1
    ((1.0, -4.0), {1}),  # 2 > 1
    ((4.0, 2.0), {0, 1}),  # 2 > 2 no
    ((3.0, 2.0), {0, 1}),  # 1.5 > 2 no
    ((3.0, 3.0), {0, 1}),  # 1.5 > 3 no
    ((0.0, 0.0), {0, 1}),  # 0 > 0 no
    ((0.0, 1e-3), {1}),  # 0.0005 > 0
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", range(len(THREE)))
def test_three_clusters_by_hand(rule, case):
    strengths, *expected = THREE[case]
    assert owners_by_dimension(memberships(from_columns(strengths), 0.5, rule)) == [expected[RULES.index(rule)]]


@pytest.mark.parametrize("rule", RULES)
def test_the_dimensions_do_not_mix(rule):
    members = memberships(from_columns(*[strengths for strengths, *_ in THREE]), 0.5, rule)
    assert owners_by_dimension(members) == [case[1 + RULES.index(rule)] for case in THREE]


@pytest.mark.parametrize("rule", RULES)
def test_two_clusters_by_hand_where_all_rules_agree(rule):
    members = memberships(from_columns(*[strengths for strengths, _ in TWO]), 0.5, rule)
    assert owners_by_dimension(members) == [owners for _, owners in TWO]


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        (0.05, {0, 1, 2, 3}),  # v = 16, 8, 4, 1: nothing wins, as 0.05 * 16 = 0.8 < 8
        (0.30, {0, 1, 2}),  # 4.8 > 8 no, 2.4 > 4 no, 1.2 > 1 yes
        (0.50, {0, 1, 2}),  # 8 > 8 no, 4 > 4 no, 2 > 1 yes
        (0.55, {0, 1, 2, 3}),  # 8.8 > 8, 4.4 > 4, 2.2 > 1: three winners
    ],
)
def test_four_clusters_by_hand(rho, expected):
    assert owners_by_dimension(memberships(from_columns((16.0, 8.0, 4.0, 1.0)), rho)) == [expected]


def test_the_margin_of_one_takes_any_difference():
    # v = 3, 2, 2: 3 > 2 yes, 2 > 2 no
    assert owners_by_dimension(memberships(from_columns((2.0, 3.0, 2.0)), 1.0)) == [{1}]


@pytest.mark.parametrize("rule", RULES)
def test_one_cluster_owns_everything(rule):
    assert memberships(torch.tensor([[0.0, -1.0, 2.0]]), 0.5, rule).tolist() == [[True, True, True]]


def test_an_unknown_rule_is_named_with_those_there_are():
    with pytest.raises(SpecError, match=r"split\.winner_rule is 'best'; it is one of 'unique', 'gap', 'winner'"):
        memberships(randn(3, 4), 0.5, "best")


# Few different values make ties and zeros frequent.
strengths = st.integers(1, 6).flatmap(
    lambda k: st.lists(st.lists(st.integers(-4, 4), min_size=k, max_size=k), min_size=1, max_size=8)
)


@settings(deadline=None)
@given(strengths, st.sampled_from(RHOS), st.sampled_from(RULES))
def test_every_dimension_has_an_owner_and_shares_add_to_exactly_one(columns, rho, rule):
    members = memberships(torch.tensor(columns).T.float(), rho, rule)
    assert members.any(0).all()
    for column in shares(members).T:
        exact = [Fraction(value).limit_denominator(len(members)) for value in column.tolist()]
        assert sum(exact) == 1
        assert all(float(fraction) == value for fraction, value in zip(exact, column.tolist(), strict=True))


@settings(deadline=None)
@given(strengths, st.sampled_from(RHOS), st.sampled_from(RULES), st.randoms(use_true_random=False))
def test_permuting_the_clusters_permutes_the_members(columns, rho, rule, random):
    r = torch.tensor(columns).T.float()
    order = list(range(len(r)))
    random.shuffle(order)
    assert torch.equal(memberships(r[order], rho, rule), memberships(r, rho, rule)[order])


@settings(deadline=None)
@given(strengths, st.sampled_from(RHOS))
def test_unique_against_the_definition_in_plain_python(columns, rho):
    got = owners_by_dimension(memberships(torch.tensor(columns).T.float(), rho))
    for column, owners in zip(columns, got, strict=True):
        order = sorted(range(len(column)), key=lambda c: -abs(column[c]))
        v = [abs(column[c]) for c in order]
        winning = [s for s in range(1, len(v)) if rho * v[s - 1] > v[s]]
        assert owners == set(order[: winning[0]] if len(winning) == 1 else order)


@settings(deadline=None)
@given(strengths, st.sampled_from([0.25, 0.5, 1.0]))  # exact in binary, so that both ways of writing the rule agree
def test_gap_against_the_definition_in_plain_python(columns, rho):
    got = owners_by_dimension(memberships(torch.tensor(columns).T.float(), rho, "gap"))
    for column, owners in zip(columns, got, strict=True):
        order = sorted(range(len(column)), key=lambda c: -abs(column[c]))
        v = [Fraction(abs(column[c])) for c in order]
        ratios = [(a / b if b else float("inf") if a else 1) for a, b in pairwise(v)]
        wins = bool(ratios) and rho * max(ratios) > 1
        assert owners == set(order[: ratios.index(max(ratios)) + 1] if wins else order)


def test_shares_by_hand():
    members = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    third = 1 / 3
    expected = [[1, 0.5, third, 0], [0, 0.5, third, 0.5], [0, 0, third, 0.5]]
    assert torch.equal(shares(members), torch.tensor(expected, dtype=torch.float64))


# The margin rho


def test_split_unit_by_hand():
    # Dimensions 0 and 1 tell the clusters apart from rho * 4 > 1 on: 0.30, the next after 0.25. The weight of
    # dimension 2 is zero, dimension 3 is common. Up to 0.25 all own all: A is half of the unit everywhere, score 0.
    # From 0.30: sub-unit 0 has weights (1, 0, 0, 1), hence 2 + 1 on its own cluster and 0 + 1 on the other: score 2.
    split = split_unit(
        torch.tensor([[4.0, 1.0, 0.0, 3.0], [1.0, 4.0, 0.0, 3.0]]),
        torch.tensor([[2.0, 0.0, 5.0, 1.0], [0.0, 2.0, 5.0, 1.0]]),
        torch.tensor([1.0, 1.0, 0.0, 2.0]),
        0.0,
    )
    assert split.rho == 0.30
    assert split.members.tolist() == [[True, False, True, True], [False, True, True, True]]


def test_rho_that_sets_apart_the_wrong_way_round_is_not_taken():
    # Owning its strongest dimension makes each sub-unit weaker on its own cluster (the weights are negative there):
    # from 0.30 own is -2 and other 0, score -2; before, 0. The tie of 0.05 to 0.25 goes to the smallest.
    split = split_unit(
        torch.tensor([[4.0, 1.0], [1.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0]]), -torch.ones(2), 0.0
    )
    assert split.rho == 0.05
    assert split.members.all()


@pytest.mark.parametrize("score", ["margin", "ratio"])
@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_where_rho_changes_nothing_the_smallest_is_taken(score, bias):
    r = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # v2 is zero: every margin says the same
    assert split_unit(r, r, torch.ones(3), bias, rho_score=score).rho == 0.05


@pytest.mark.parametrize("clusters", [0, 1])
@pytest.mark.parametrize("rule", [*RULES, "random"])
def test_without_two_clusters_the_unit_stays_whole(clusters, rule):
    split = split_unit(randn(clusters, 5), randn(clusters, 5), randn(5), 1.0, winner_rule=rule)
    assert split.members.tolist() == [[True] * 5]
    assert split.rho == 0


def test_the_random_split_of_a_unit_ignores_the_clusters():
    one, other = (
        split_unit(r, r, torch.ones(7), 0.0, winner_rule="random", seed=3) for r in (randn(3, 7), -randn(3, 7))
    )
    assert torch.equal(one.members, other.members)
    assert torch.equal(one.members, random_memberships(3, 7, 3))
    assert one.rho == 0


def test_split_unit_refuses_an_unknown_rule_and_score():
    r = randn(2, 3)
    with pytest.raises(SpecError, match=r"split\.winner_rule is 'x'"):
        split_unit(r, r, torch.ones(3), 0.0, winner_rule="x")
    with pytest.raises(SpecError, match=r"split\.rho_score is 'x'; it is 'margin' or 'ratio'"):
        split_unit(r, r, torch.ones(3), 0.0, rho_score="x")


def planted_unit(k, seed, d_in=40):
    """Representatives, cluster means, weights and bias of a random unit."""
    means = randn(k, d_in, seed=seed).abs()
    weight = randn(d_in, seed=seed + 1000)
    r = means * weight + 0.3 * randn(k, d_in, seed=seed + 2000)
    return r / r.norm(dim=1, keepdim=True), means, weight, float(randn(1, seed=seed + 3000))


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_the_margin_score_is_the_mean_own_activation_up_to_a_constant(k, rule, seed):
    r, means, weight, bias = planted_unit(k, seed)
    unit = means.double() @ weight.double() + bias  # the whole unit on each cluster
    mean_own = []
    for rho in RHOS:
        A = activations_by_cluster(memberships(r, rho, rule), means, weight, bias)
        assert torch.allclose(A.sum(0), unit, atol=1e-10)
        mean_own.append(float(A.diagonal().mean()))
        expected = mean_own[-1] * (1 + 1 / (k - 1)) - float(unit.mean()) / (k - 1)
        assert rho_quality(A, "margin") == pytest.approx(expected, abs=1e-10)
    best = next(rho for rho, own in zip(RHOS, mean_own, strict=True) if own >= max(mean_own) - 1e-12)
    assert split_unit(r, means, weight, bias, winner_rule=rule).rho == best


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_ratio_score_against_a_double_loop(k, seed):
    r, means, weight, bias = planted_unit(k, seed)
    scores = []
    for rho in RHOS:
        A = activations_by_cluster(memberships(r, rho), means, weight, bias)
        total = 0.0
        for c in range(k):
            other = 0.0
            for of in range(k):
                if of != c:
                    other += float(A[c, of]) / (k - 1)
            total += max(float(A[c, c]), 0.0) / (max(other, 0.0) + 1e-5)
        assert rho_quality(A, "ratio") == pytest.approx(total, rel=1e-9)
        scores.append(total)
    chosen = split_unit(r, means, weight, bias, rho_score="ratio").rho
    assert chosen == RHOS[scores.index(max(scores))]


def test_the_ratio_score_by_hand():
    A = torch.tensor([[3.0, 1.0], [-2.0, 4.0]], dtype=torch.float64)
    # 3 / (1 + 1e-5) + 4 / (relu(-2) + 1e-5)
    assert rho_quality(A, "ratio") == pytest.approx(3 / 1.00001 + 4 / 1e-5)
    assert rho_quality(-torch.eye(2, dtype=torch.float64), "ratio") == 0


def test_the_margin_score_by_hand():
    A = torch.tensor([[5.0, 1.0, 2.0], [0.0, 3.0, 1.0], [4.0, 2.0, 6.0]], dtype=torch.float64)
    # (5 - 1.5) + (3 - 0.5) + (6 - 3), over three
    assert rho_quality(A) == pytest.approx(9 / 3)


def test_activations_on_a_cluster_are_the_mean_over_its_instances():
    members, q = memberships(randn(3, 6, seed=4), 0.7), randn(30, 6)
    weight, bias, labels = randn(6, seed=1), 0.8, torch.arange(30) % 3
    means = torch.stack([q[labels == c].mean(0) for c in range(3)])
    A = activations_by_cluster(members, means, weight, bias)
    for c in range(3):
        for of in range(3):
            values = [
                literal_sub_unit(x, weight[None], torch.tensor([bias]), members, torch.zeros(3), c)
                for x in q[labels == of]
            ]
            assert float(A[c, of]) == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_rhos_are_the_papers():
    assert RHOS[0] == 0.05
    assert RHOS[-1] == 1.0
    assert [round(rho * 100) for rho in RHOS] == list(range(5, 101, 5))


# The random split


@pytest.mark.parametrize(("parts", "d_in"), [(1, 5), (2, 5), (3, 9), (4, 4), (7, 4304 // 16)])
def test_the_random_split_is_a_partition_into_equal_parts(parts, d_in):
    members = random_memberships(parts, d_in, seed=1)
    sizes = members.sum(1)
    assert members.shape == (parts, d_in)
    assert members.dtype == torch.bool
    assert (members.sum(0) == 1).all()
    assert sizes.max() - sizes.min() <= 1


def test_the_random_split_follows_its_seed_and_nothing_else():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    once = random_memberships(3, 50, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(random_memberships(3, 50, seed=7), once)
    assert not torch.equal(random_memberships(3, 50, seed=8), once)


# Weights and biases of sub-units


def test_sub_unit_parameters_by_hand():
    weight = torch.tensor([[1.0, 1.0, 0.0, 2.0], [3.0, -6.0, 0.0, 9.0]])
    bias = torch.tensor([8.0, 0.0])
    members = torch.tensor(
        [
            [1, 0, 1, 1],  # unit 0: shares 1, 0, 1/2, 1/2, mean 1/2
            [0, 1, 1, 1],  #         shares 0, 1, 1/2, 1/2, mean 1/2
            [1, 1, 1, 1],  # unit 1: shares 1/3 each but for dimension 1, where 1/2
            [1, 0, 1, 1],  #
            [1, 1, 1, 1],
        ],
        dtype=torch.bool,
    )
    got, biases = sub_unit_parameters(weight, bias, members, torch.tensor([0, 0, 1, 1, 1]))
    expected = [[1, 0, 0, 1], [0, 1, 0, 1], [1, -3, 0, 3], [1, 0, 0, 3], [1, -3, 0, 3]]
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float32))
    assert biases.tolist() == [4, 4, 0, 0, 0]


def test_the_bias_is_shared_by_the_mean_share_also_where_weights_are_zero():
    # One of three owns dimension 0 alone, all own dimension 1: shares (1 + 1/3) / 2 = 2/3, 1/6, 1/6
    members = torch.tensor([[1, 1], [0, 1], [0, 1]], dtype=torch.bool)
    _, bias = sub_unit_parameters(torch.zeros(1, 2), torch.tensor([6.0]), members, torch.tensor([0, 0, 0]))
    assert torch.allclose(bias, torch.tensor([4.0, 1.0, 1.0]))


def test_a_dead_sub_unit_has_neither_weights_nor_bias():
    members = torch.tensor([[1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    weight, bias = sub_unit_parameters(randn(1, 3), torch.tensor([2.0]), members, torch.tensor([0, 0]))
    assert weight[1].tolist() == [0, 0, 0]
    assert bias.tolist() == [2, 0]


def test_some_units_in_any_order_get_what_they_get_among_all():
    weight, bias = randn(6, 9), randn(6, seed=1)
    members, units = random_split(6, 9)
    all_weights, all_biases = sub_unit_parameters(weight, bias, members, units)
    chosen = torch.tensor([s for s in reversed(range(len(units))) if units[s] in (1, 3, 4)])
    some_weights, some_biases = sub_unit_parameters(weight, bias, members[chosen], units[chosen])
    assert torch.equal(some_weights, all_weights[chosen])
    assert torch.equal(some_biases, all_biases[chosen])


@settings(deadline=None)
@given(strengths, st.sampled_from(RULES))
def test_sub_units_add_up_to_the_unit_in_exact_terms(columns, rule):
    members = memberships(torch.tensor(columns).T.float(), 0.5, rule)
    k, d_in = members.shape
    # A weight of one makes the shares visible, rounded to float32.
    weight, bias = sub_unit_parameters(torch.ones(1, d_in), torch.tensor([1.0]), members, torch.zeros(k).long())
    exact = [[Fraction(value).limit_denominator(k) for value in row] for row in weight.tolist()]
    assert all(sum(row[j] for row in exact) == 1 for j in range(d_in))
    for row, got in zip(exact, bias.tolist(), strict=True):
        assert got == pytest.approx(float(sum(row) / d_in), rel=1e-6)


def test_layer_parameters():
    conv = nn.Conv2d(4, 3, 1, bias=False, dtype=torch.bfloat16)
    weight, bias = layer_parameters(conv)
    assert weight.shape == (3, 4)
    assert weight.dtype == bias.dtype == torch.float32
    assert bias.tolist() == [0, 0, 0]
    assert not weight.requires_grad
    with pytest.raises(LayerError, match=r"LayerNorm.* cannot be split; only nn\.Linear and 1x1 nn\.Conv2d can"):
        layer_parameters(nn.LayerNorm(4))


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1, groups=2)], ids=["3x3", "grouped"])
def test_a_convolution_that_is_not_linear_per_position_cannot_be_split(conv):
    with pytest.raises(LayerError, match=r"only nn\.Linear and 1x1 nn\.Conv2d can"):
        layer_parameters(conv)


# Losslessness, and what scaling changes


def linear(bias, dtype):
    torch.manual_seed(0)
    return nn.Linear(12, 6, bias=bias, dtype=dtype)


def conv(bias, dtype, **options):
    torch.manual_seed(0)
    return nn.Conv2d(12, 6, 1, bias=bias, dtype=dtype, **options)


CASES = {
    "2-D": (linear, (5, 12)),
    "3-D": (linear, (2, 5, 12)),
    "4-D": (linear, (2, 3, 4, 12)),
    "conv": (conv, (2, 12, 5, 4)),
    "strided conv": (lambda bias, dtype: conv(bias, dtype, stride=2), (2, 12, 5, 4)),
    "padded conv": (lambda bias, dtype: conv(bias, dtype, stride=(1, 2), padding=1), (2, 12, 5, 4)),
}
every_case = pytest.mark.parametrize("case", CASES)
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@every_case
@with_and_without_bias
@dtypes
@torch.inference_mode()
def test_nothing_scaled_is_the_layer_to_the_bit(case, bias, dtype):
    make, shape = CASES[case]
    layer, x = make(bias, dtype), randn(*shape, dtype=dtype)
    members, units = random_split(6, 12)
    assert torch.equal(scaled(layer, members, units, torch.ones(len(units)))(x), layer(x))
    none = ScaledLinear(layer, torch.empty(0, 12), torch.empty(0), torch.empty(0, dtype=torch.long), torch.empty(0))
    assert torch.equal(none(x), layer(x))


@every_case
@with_and_without_bias
@dtypes
@torch.inference_mode()
def test_the_explicit_layer_gives_what_the_layer_gives(case, bias, dtype):
    make, shape = CASES[case]
    layer, x = make(bias, dtype), randn(*shape, dtype=dtype)
    split = split_layer(layer, *random_split(6, 12))
    out = split(x)
    assert type(split) is (SplitConv1x1 if isinstance(layer, nn.Conv2d) else SplitLinear)
    assert out.dtype == dtype
    assert out.shape == layer(x).shape
    # bfloat16 keeps 8 bits of each share: a relative error near 2^-9, squared
    least = {torch.float32: 1e-10, torch.float16: 1e-5, torch.bfloat16: 1e-4}[dtype]
    assert r_squared(layer(x), out) >= 1 - least


@torch.inference_mode()
def test_sub_units_of_the_explicit_layer_against_the_literal_ones():
    layer, x = linear(True, torch.float32), randn(3, 12)
    members, units = random_split(6, 12)
    got = split_layer(layer, members, units).sub_units(x)
    assert got.shape == (3, len(units))
    for row in range(3):
        for s in range(len(units)):
            expected = literal_sub_unit(x[row], layer.weight, layer.bias, members, units, s)
            assert float(got[row, s]) == pytest.approx(expected, abs=1e-5)


@with_and_without_bias
@torch.inference_mode()
def test_the_change_is_the_sum_over_the_scaled_sub_units(bias):
    layer, x = linear(bias, torch.float32), randn(4, 12)
    members, units = random_split(6, 12)
    gains = some_gains(len(units))
    expected = layer(x).double() + literal_change(x, layer, members, units, gains)
    assert torch.allclose(scaled(layer, members, units, gains)(x).double(), expected, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": (1, 2), "padding": 1}], ids=str)
@torch.inference_mode()
def test_the_change_of_a_convolution_is_the_same_at_every_position(options):
    layer, x = conv(True, torch.float32, **options), randn(2, 12, 5, 4)
    members, units = random_split(6, 12)
    gains = some_gains(len(units))
    change = scaled(layer, members, units, gains)(x).double() - layer(x).double()
    stride, padding = layer.stride, layer.padding
    seen = nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))[:, :, :: stride[0], :: stride[1]]
    expected = literal_change(seen.movedim(1, -1).reshape(-1, 12), layer, members, units, gains)
    assert torch.allclose(change.movedim(1, -1).reshape(-1, 6), expected, atol=1e-4)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_in_half_precision_the_change_is_computed_in_float32(case, dtype):
    make, shape = CASES[case]
    layer, x = make(True, dtype), randn(*shape, dtype=dtype)
    members, units = random_split(6, 12)
    gains = some_gains(len(units))
    out = scaled(layer, members, units, gains)(x)
    assert out.dtype == dtype
    got = out.double()
    wide = make(True, torch.float64)
    wide.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    change = change_by_sub_unit(split_layer(wide, members, units), x.double(), gains)
    # Rounded twice and no more: the change, and the sum.
    once = torch.finfo(dtype).eps / 2
    allowed = 1.01 * once * (change.abs() + got.abs()) + 1e-4
    assert ((got - layer(x).double() - change).abs() <= allowed).all()


@torch.inference_mode()
def test_where_nothing_is_scaled_nothing_is_added_not_even_zero():
    layer, x = linear(True, torch.float32), torch.zeros(2, 12)
    x[0, 0] = torch.inf  # zero times this is not a number
    layer.weight[0], layer.bias[0] = -0.0, -0.0  # and -0.0 plus zero is 0.0
    members, units = random_split(6, 12)
    out = scaled(layer, members, units, torch.ones(len(units)))(x)
    assert torch.equal(out.view(torch.int32), layer(x).view(torch.int32))


@torch.inference_mode()
def test_gain_zero_of_all_sub_units_silences_the_unit_and_leaves_the_others():
    layer, x = linear(True, torch.float32), randn(4, 12)
    members, units = random_split(6, 12)
    gains = torch.where(units == 3, 0.0, 1.0)
    out = scaled(layer, members, units, gains)(x)
    others = [0, 1, 2, 4, 5]
    assert torch.allclose(out[:, 3], torch.zeros(4), atol=1e-5)
    assert torch.equal(out[:, others], layer(x)[:, others])


def test_the_layer_inside_is_the_one_given_and_keeps_its_weights():
    layer = linear(True, torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    members, units = random_split(6, 12)
    for wrapped in (split_layer(layer, members, units), scaled(layer, members, units, some_gains(len(units)))):
        x = randn(2, 12)
        kept = x.clone()
        wrapped(x)
        assert wrapped.base_layer is layer
        assert torch.equal(x, kept)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing scaled", "scaled", "explicit"])
@torch.inference_mode()
def test_compiled_layers_give_the_same(kind):
    torch.compiler.reset()
    layer, x = linear(True, torch.float32), randn(7, 12)
    members, units = random_split(6, 12)
    gains = some_gains(len(units)) if kind == "scaled" else torch.ones(len(units))
    module = split_layer(layer, members, units) if kind == "explicit" else scaled(layer, members, units, gains)
    compiled = torch.compile(module, fullgraph=True)
    if kind == "nothing scaled":
        assert torch.equal(compiled(x), torch.compile(layer)(x))
    assert torch.allclose(compiled(x), module(x), atol=1e-4)


# In whole models


def few_pictures(folder, count=4):
    found = []
    for path in sorted(folder.rglob("*.png"))[:count]:
        with Image.open(path) as image:
            found.append(image.convert("RGB"))
    return found


@pytest.fixture(scope="module")
def llava(tiny_vlm, image_folder):
    """The tiny LLaVA-OneVision's model, the name of its target, inputs of four pictures, and how to read the logits."""
    inputs = tiny_vlm.inputs(few_pictures(image_folder))
    return tiny_vlm.model, tiny_vlm.layer_name, lambda: tiny_vlm.model(**inputs).logits


@pytest.fixture(scope="module")
def vit():
    """A ViT with a CLS token."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7)
    model = Dinov2Model(config).eval()
    nn.init.normal_(model.get_submodule("encoder.layer.1.mlp.fc2").bias)
    pixels = randn(3, 3, 28, 28)
    return model, "encoder.layer.1.mlp.fc2", lambda: model(pixels).last_hidden_state  # (3, 17, 16)


@pytest.fixture(scope="module")
def cnn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.GELU(), nn.Conv2d(10, 8, 1, stride=2), nn.BatchNorm2d(8)).eval()
    pixels = randn(3, 3, 12, 12)
    return model, "2", lambda: model(pixels)


@pytest.fixture(params=["llava", "vit", "cnn"])
def whole(request, no_hooks_left):
    model, name, run = request.getfixturevalue(request.param)
    no_hooks_left(model)
    layer = model.get_submodule(name)
    members, units = random_split(*layer_parameters(layer)[0].shape)
    return model, name, run, layer, members, units


@torch.inference_mode()
def test_a_model_with_nothing_scaled_gives_the_same_bits(whole):
    model, name, run, layer, members, units = whole
    original = run()
    with swap_module(model, name, scaled(layer, members, units, torch.ones(len(units)))):
        assert find_layer(model, f"{name}.base_layer")[1] is layer
        assert torch.equal(run(), original)
    assert torch.equal(run(), original)


@torch.inference_mode()
def test_a_model_with_the_explicit_layer_gives_the_same_up_to_rounding(whole):
    model, name, run, layer, members, units = whole
    original = run()
    with swap_module(model, name, split_layer(layer, members, units)):
        assert r_squared(original, run()) >= 1 - 1e-10
    assert torch.equal(run(), original)


@torch.inference_mode()
def test_scaling_changes_the_model_off_restores_it_on_again_changes_it_the_same_way(whole):
    model, name, run, layer, members, units = whole
    original = run()
    change = scaled(layer, members, units, some_gains(len(units)))
    with swap_module(model, name, change):
        first = run()
    off = run()
    with swap_module(model, name, change):
        again = run()
    assert not torch.allclose(first, original, atol=1e-3)
    assert torch.equal(off, original)
    assert torch.equal(again, first)


@torch.inference_mode()
def test_every_dimension_of_every_unit_is_owned_and_its_shares_add_to_one(whole):
    *_, layer, members, units = whole
    weight, _ = layer_parameters(layer)
    fractions, _ = sub_unit_parameters(torch.ones_like(weight), torch.zeros(len(weight)), members, units)
    for unit in range(len(weight)):
        for column in fractions[units == unit].T.tolist():
            exact = [Fraction(value).limit_denominator(len(column)) for value in column]
            assert any(exact)
            assert sum(exact) == 1
