"""A unit's clusters to its sub-units: who owns each input dimension, at which margin, and the layers that follow.

The weights of a unit's sub-units add up to the unit's own: every owner of a dimension gets an equal share of it. So
the memberships, one bit per sub-unit and dimension, determine all weights and biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from elude_steer.errors import SpecError

RHOS = tuple(i / 20 for i in range(1, 21))


@dataclass(frozen=True)
class UnitSplit:
    """One unit's sub-units.

    Attributes:
        members: `(K, d_in)` bool: does sub-unit c own dimension j?
        rho: the margin chosen; 0 where none was needed (one sub-unit, or a random split).
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
    """Splits one unit at the margin that sets its sub-units best apart.

    Args:
        representatives: `(K, d_in)` of its clusters; K of 0 or 1 leaves the unit whole.
        means: `(K, d_in)` mean input of each cluster.
        weight: `(d_in,)` the unit's weights.
        bias: the unit's bias.
        winner_rule: `unique` (the paper's), `gap`, `winner`, or `random` for the baseline that ignores the clusters.
        rho_score: `margin`, or `ratio` (the sum of own to others' activation).
        seed: of the random split.
    """
    k, d_in = representatives.shape
    if k < 2:
        return UnitSplit(torch.ones(1, d_in, dtype=torch.bool), 0.0)
    if winner_rule == "random":
        return UnitSplit(random_memberships(k, d_in, seed), 0.0)
    splits = [UnitSplit(memberships(representatives, rho, winner_rule), rho) for rho in RHOS]
    # max takes the first of equals: ties go to the smallest rho
    return max(splits, key=lambda it: rho_quality(activations_by_cluster(it.members, means, weight, bias), rho_score))


def memberships(representatives: torch.Tensor, rho: float, winner_rule: str = "unique") -> torch.Tensor:
    """Which sub-units own each dimension, `(K, d_in)` bool, at least one each.

    With a dimension's strengths |r| sorted, v1 >= v2 >= …, the s strongest win it if rho * v_s > v_(s+1):
    `unique` gives it to them if exactly one s < K does so, `gap` tries only the s with the largest v_s / v_(s+1),
    `winner` only s = 1. Where none wins, all K own it.
    """
    if winner_rule not in _RULES:
        raise SpecError(f"split.winner_rule is '{winner_rule}'; it is one of {', '.join(map(repr, _RULES))}.")
    k = len(representatives)
    if k < 2:
        return torch.ones_like(representatives, dtype=torch.bool)
    strength, order = representatives.double().abs().sort(dim=0, descending=True, stable=True)
    owners = _RULES[winner_rule](strength, rho)  # (d_in,) how many of the strongest own it
    places = torch.arange(k, device=order.device)[:, None].expand_as(order)
    return torch.empty_like(order).scatter_(0, order, places) < owners


def _unique(v: torch.Tensor, rho: float) -> torch.Tensor:
    wins = rho * v[:-1] > v[1:]
    return torch.where(wins.sum(0) == 1, wins.int().argmax(0) + 1, len(v))


def _gap(v: torch.Tensor, rho: float) -> torch.Tensor:
    ratio = (v[:-1] / v[1:]).nan_to_num(nan=1.0, posinf=torch.inf)  # 0 / 0 is no gap
    largest, at = ratio.max(0).values, ratio.argmax(0)  # argmax takes the first of equals
    return torch.where(rho * largest > 1, at + 1, len(v))


def _winner(v: torch.Tensor, rho: float) -> torch.Tensor:
    return torch.where(rho * v[0] > v[1], 1, len(v))


_RULES = {"unique": _unique, "gap": _gap, "winner": _winner}


def random_memberships(parts: int, d_in: int, seed: int) -> torch.Tensor:
    """A random partition of the dimensions into parts of equal size (to one): the baseline, `(parts, d_in)` bool."""
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
    """How well sub-units fire on their own cluster and not on the others, from A of `activations_by_cluster`."""
    k = len(activations)
    own = activations.diagonal()
    others = (activations.sum(1) - own) / (k - 1)
    if score == "margin":
        return float((own - others).mean())
    if score == "ratio":
        return float((own.clamp_min(0) / (others.clamp_min(0) + 1e-5)).sum())
    raise SpecError(f"split.rho_score is '{score}'; it is 'margin' or 'ratio'.")
