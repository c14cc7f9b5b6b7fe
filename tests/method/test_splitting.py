from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elude_steer.errors import SpecError
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.method.splitting import (
    RHOS,
    activations_by_cluster,
    memberships,
    random_memberships,
    rho_quality,
    shares,
    split_unit,
)

RULES = ("unique", "gap", "winner")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_columns(*columns):
    """Representatives, one row per cluster, from the values of each dimension."""
    return torch.tensor(columns).T


def owners_by_dimension(members):
    return [set(column.nonzero().flatten().tolist()) for column in members.T]


# Owners of a dimension, by hand, at rho = 0.5. The comment gives rho * v_s against v_(s+1) for s = 1, 2.
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
def test_dimensions_are_independent(rule):
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


def test_rho_of_one_accepts_any_difference():
    # v = 3, 2, 2: 3 > 2 yes, 2 > 2 no
    assert owners_by_dimension(memberships(from_columns((2.0, 3.0, 2.0)), 1.0)) == [{1}]


@pytest.mark.parametrize("rule", RULES)
def test_one_cluster_owns_everything(rule):
    assert memberships(torch.tensor([[0.0, -1.0, 2.0]]), 0.5, rule).tolist() == [[True, True, True]]


def test_an_unknown_rule_is_refused_with_the_known_ones():
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
def test_unique_equals_its_definition_in_plain_python(columns, rho):
    got = owners_by_dimension(memberships(torch.tensor(columns).T.float(), rho))
    for column, owners in zip(columns, got, strict=True):
        order = sorted(range(len(column)), key=lambda c: -abs(column[c]))
        v = [abs(column[c]) for c in order]
        winning = [s for s in range(1, len(v)) if rho * v[s - 1] > v[s]]
        assert owners == set(order[: winning[0]] if len(winning) == 1 else order)


@settings(deadline=None)
@given(strengths, st.sampled_from([0.25, 0.5, 1.0]))  # exact in binary, so that both forms of the rule agree
def test_gap_equals_its_definition_in_plain_python(columns, rho):
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
    # Dimensions 0 and 1 separate the clusters once rho * 4 > 1: at 0.30, the next after 0.25. The weight of
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


def test_a_rho_that_weakens_sub_units_on_their_own_cluster_is_not_chosen():
    # Owning its strongest dimension makes each sub-unit weaker on its own cluster (the weights are negative there):
    # from 0.30 own is -2 and other 0, score -2; before, 0. The tie of 0.05 to 0.25 goes to the smallest.
    split = split_unit(
        torch.tensor([[4.0, 1.0], [1.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 2.0]]), -torch.ones(2), 0.0
    )
    assert split.rho == 0.05
    assert split.members.all()


@pytest.mark.parametrize("score", ["margin", "ratio"])
@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_if_rho_changes_nothing_the_smallest_is_chosen(score, bias):
    r = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # v2 is zero: every rho gives the same members
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
def test_the_ratio_score_equals_a_double_loop(k, seed):
    r, means, weight, bias = planted_unit(k, seed)
    scores = []
    for rho in RHOS:
        A = activations_by_cluster(memberships(r, rho), means, weight, bias)
        total = 0.0
        for c in range(k):
            other = 0.0
            for cluster in range(k):
                if cluster != c:
                    other += float(A[c, cluster]) / (k - 1)
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


def test_activations_by_cluster_are_means_over_the_instances_of_each_cluster():
    members, q = memberships(randn(3, 6, seed=4), 0.7), randn(30, 6)
    weight, bias, labels = randn(6, seed=1), 0.8, torch.arange(30) % 3
    means = torch.stack([q[labels == c].mean(0) for c in range(3)])
    A = activations_by_cluster(members, means, weight, bias)
    weights, biases = sub_unit_parameters(weight[None], torch.tensor([bias]), members, torch.zeros(3).long())
    activations = q @ weights.T + biases  # (instances, sub-units)
    for c in range(3):
        for cluster in range(3):
            assert float(A[c, cluster]) == pytest.approx(float(activations[labels == cluster, c].mean()), abs=1e-5)


def test_rhos_are_those_of_the_paper():
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


def test_the_random_split_depends_on_its_seed_only():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    once = random_memberships(3, 50, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(random_memberships(3, 50, seed=7), once)
    assert not torch.equal(random_memberships(3, 50, seed=8), once)
