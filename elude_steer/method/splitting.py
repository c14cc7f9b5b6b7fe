"""Rules of ownership: which sub-units of a unit own each input dimension, and at which margin rho.

The weights of a unit's sub-units add up to the unit's weights, because every owner of a dimension gets an equal share
of it. So the memberships, one bit per sub-unit and dimension, determine all weights and biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from elude_steer.errors import SpecError

RHOS = tuple(i / 20 for i in range(1, 21))


@dataclass(frozen=True)
class UnitSplit:
    """The sub-units of one unit.

    Attributes:
        members: `(K, d_in)` bool: whether sub-unit c owns dimension j.
        rho: the chosen margin; 0 where none is needed (one sub-unit, or a random split).
    """

    members: torch.Tensor
    rho: float


def split_unit(
    representatives: torch.Tensor,
    means: torch.Tensor,
    weight: torch.Tensor,
    bias: float,
    *,
    winner_rule: str = "unique",
    rho_score: str = "margin",
    seed: int = 0,
) -> UnitSplit:
    """Split one unit at the margin rho that separates its sub-units best; ties go to the smallest rho.

    Args:
        representatives: `(K, d_in)` of its clusters; with K below 2 the unit stays whole.
        means: `(K, d_in)` mean input of each cluster.
        weight: `(d_in,)` the unit's weights.
        bias: the unit's bias.
        winner_rule: `unique` (the paper's), `gap`, `winner`, or `random`, the baseline that ignores the clusters.
        rho_score: `margin` or `ratio`; see `rho_quality`.
        seed: seed of the random split.
    """
    k, d_in = representatives.shape
    if k < 2:
        return UnitSplit(torch.ones(1, d_in, dtype=torch.bool), 0.0)
    if winner_rule == "random":
        return UnitSplit(random_memberships(k, d_in, seed), 0.0)

    def quality(split: UnitSplit) -> float:
        return rho_quality(activations_by_cluster(split.members, means, weight, bias), rho_score)

    splits = [UnitSplit(memberships(representatives, rho, winner_rule), rho) for rho in RHOS]
    return max(splits, key=quality)  # max returns the first of equals


def memberships(representatives: torch.Tensor, rho: float, winner_rule: str = "unique") -> torch.Tensor:
    """Which sub-units own each dimension, `(K, d_in)` bool; every dimension has at least one owner.

    Sort the strengths |r| of a dimension, v1 >= v2 >= …. The s strongest sub-units can win the dimension if
    rho * v_s > v_(s+1). The rules differ in which s they try:

    - `unique`: every s < K; the dimension is won if exactly one s qualifies,
    - `gap`: only the s with the largest v_s / v_(s+1),
    - `winner`: only s = 1.

    All K sub-units own a dimension that is not won.
    """
    if winner_rule not in _RULES:
        raise SpecError(f"split.winner_rule is '{winner_rule}'; it is one of {', '.join(map(repr, _RULES))}.")
    k = len(representatives)
    if k < 2:
        return torch.ones_like(representatives, dtype=torch.bool)
    strength, order = representatives.double().abs().sort(dim=0, descending=True, stable=True)
    owners = _RULES[winner_rule](strength, rho)  # (d_in,) how many of the strongest sub-units own each dimension
    ranks = torch.arange(k, device=order.device)[:, None].expand_as(order)
    return torch.empty_like(order).scatter_(0, order, ranks) < owners


def _unique(v: torch.Tensor, rho: float) -> torch.Tensor:
    wins = rho * v[:-1] > v[1:]
    return torch.where(wins.sum(0) == 1, wins.int().argmax(0) + 1, len(v))


def _gap(v: torch.Tensor, rho: float) -> torch.Tensor:
    ratio = (v[:-1] / v[1:]).nan_to_num(nan=1.0, posinf=torch.inf)  # 0 / 0 is no gap
    largest, first = ratio.max(0).values, ratio.argmax(0)  # argmax returns the first of equals
    return torch.where(rho * largest > 1, first + 1, len(v))


def _winner(v: torch.Tensor, rho: float) -> torch.Tensor:
    return torch.where(rho * v[0] > v[1], 1, len(v))


_RULES = {"unique": _unique, "gap": _gap, "winner": _winner}


def random_memberships(parts: int, d_in: int, seed: int) -> torch.Tensor:
    """The baseline: a random partition of the dimensions, `(parts, d_in)` bool; sizes differ by at most one."""
    order = torch.randperm(d_in, generator=torch.Generator().manual_seed(seed))
    owner = torch.empty(d_in, dtype=torch.long)
    owner[order] = torch.arange(d_in) % parts
    return F.one_hot(owner, parts).T.bool()


def shares(members: torch.Tensor) -> torch.Tensor:
    """The fraction of each weight that each sub-unit of one unit gets, `(K, d_in)` float64; columns add to one."""
    return members.double() / members.sum(0)


def activations_by_cluster(
    members: torch.Tensor, means: torch.Tensor, weight: torch.Tensor, bias: float
) -> torch.Tensor:
    """A[c, c'], the mean activation of sub-unit c over the instances of cluster c', `(K, K)` float64."""
    share = shares(members)
    return (share * weight.double()) @ means.double().T + (share.mean(1) * bias)[:, None]


def rho_quality(activations: torch.Tensor, score: str = "margin") -> float:
    """How well sub-units separate their own cluster from the others.

    Args:
        activations: `(K, K)`, A of `activations_by_cluster`.
        score: `margin`, the mean difference between the activation on a sub-unit's own cluster and its mean on the
            others; or `ratio`, the sum over sub-units of the ratio of the two, negative activations counted as zero.
    """
    k = len(activations)
    own = activations.diagonal()
    others = (activations.sum(1) - own) / (k - 1)
    if score == "margin":
        return float((own - others).mean())
    if score == "ratio":
        return float((own.clamp_min(0) / (others.clamp_min(0) + 1e-5)).sum())
    raise SpecError(f"split.rho_score is '{score}'; it is 'margin' or 'ratio'.")
