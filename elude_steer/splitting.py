"""A unit's clusters to its sub-units: who owns each input dimension, at which margin, and the layers that follow.

The weights of a unit's sub-units add up to the unit's own: every owner of a dimension gets an equal share of it. So
the memberships, one bit per sub-unit and dimension, determine all weights and biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import LayerError, SpecError
from elude_steer.hooks import is_linear

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
    return max(splits, key=lambda it: rho_quality(own_activations(it.members, means, weight, bias), rho_score))


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


def own_activations(members: torch.Tensor, means: torch.Tensor, weight: torch.Tensor, bias: float) -> torch.Tensor:
    """A[c, c'], the mean activation of sub-unit c over the instances of cluster c', `(K, K)` float64."""
    share = shares(members)
    return (share * weight.double()) @ means.double().T + (share.mean(1) * bias)[:, None]


def rho_quality(activations: torch.Tensor, score: str = "margin") -> float:
    """How well sub-units fire on their own cluster and not on the others, from A of `own_activations`."""
    k = len(activations)
    own = activations.diagonal()
    others = (activations.sum(1) - own) / (k - 1)
    if score == "margin":
        return float((own - others).mean())
    if score == "ratio":
        return float((own.clamp_min(0) / (others.clamp_min(0) + 1e-5)).sum())
    raise SpecError(f"split.rho_score is '{score}'; it is 'margin' or 'ratio'.")


def layer_parameters(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `(d_out, d_in)` and bias `(d_out,)` of a Linear or 1x1 convolution, at least float32; no bias is zeros."""
    if not isinstance(layer, nn.Linear | nn.Conv2d) or not is_linear(layer):
        raise LayerError(f"{layer} cannot be split; only nn.Linear and 1x1 nn.Conv2d can.")
    weight = layer.weight.detach().flatten(1)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight, torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.detach().to(weight)


def sub_unit_parameters(
    weight: torch.Tensor, bias: torch.Tensor, members: torch.Tensor, units: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `(S, d_in)` and biases `(S,)` of all sub-units of the units that occur.

    Args:
        weight: `(d_out, d_in)` of the layer.
        bias: `(d_out,)` of the layer.
        members: `(S, d_in)` bool; every unit that occurs comes with all its sub-units.
        units: `(S,)` the unit each sub-unit belongs to.
    """
    present, local = units.unique(return_inverse=True)
    owners = torch.zeros(len(present), members.shape[1], dtype=torch.int32, device=members.device)
    owners.index_add_(0, local, members.int())
    return share_out(weight[units], bias[units], members, owners[local])


def share_out(
    weight: torch.Tensor, bias: torch.Tensor, members: torch.Tensor, owners: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, given for each sub-unit its unit's weight and how many own each dimension, all `(n, d_in)`."""
    share = members / owners
    return weight * share.to(weight), bias * share.double().mean(1).to(bias)


@dataclass(frozen=True, eq=False)
class SubUnits:
    """Some sub-units of a layer as arithmetic: what they read, and where they write.

    Attributes:
        weight: `(m, d_in)` float32.
        bias: `(m,)`.
        units: `(m,)` the unit each belongs to.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    units: torch.Tensor

    def activations(self, q: torch.Tensor) -> torch.Tensor:
        """`(…, m)` float32 of inputs `(…, d_in)`."""
        return F.linear(q.float(), self.weight, self.bias)

    def mean_activations(self, q: torch.Tensor) -> torch.Tensor:
        """`(m,)` over tokens `(tokens, d_in)`: the activation of the mean, so that one product is enough."""
        return self.weight @ q.float().mean(0) + self.bias

    def add(self, total: torch.Tensor, moved: torch.Tensor) -> None:
        """Adds what the change of their activations, `(…, m)`, changes in the layer's output, `(…, d_out)`."""
        total.index_add_(-1, self.units, moved)

    def some(self, rows: torch.Tensor) -> SubUnits:
        """A few of them."""
        return SubUnits(self.weight[rows], self.bias[rows], self.units[rows])


class SplitLinear(nn.Module):
    """The explicit layer: one product to all sub-units, then each unit's sum. It keeps the layer it stands for.

    Args:
        base_layer: the layer that is split.
        members: `(S, d_in)` bool.
        units: `(S,)` the unit of each sub-unit.

    Example:
        >>> split = SplitLinear(layer, atlas.members(), atlas.units)
        >>> with swap_module(model, name, split):
        ...     model(pixels)
    """

    channels = -1  # where the units are in the output

    def __init__(self, base_layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        whole, whole_bias = layer_parameters(base_layer)
        weight, bias = sub_unit_parameters(whole, whole_bias, members, units)
        dtype, self.d_out = next(base_layer.parameters()).dtype, len(whole)
        self.register_buffer("weight", weight.to(dtype))
        self.register_buffer("bias", bias.to(dtype))
        self.register_buffer("units", units)
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self.units: torch.Tensor

    def sub_units(self, x: torch.Tensor) -> torch.Tensor:
        """The activations of all sub-units, their bias included."""
        return _project(self.base_layer, x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, as the sum of its sub-units."""
        return _sum_by_unit(self.sub_units(x), self.units, self.d_out, self.channels)


class SplitConv1x1(SplitLinear):
    """`SplitLinear` for a convolution with a 1x1 kernel."""

    channels = 1


class ScaledLinear(nn.Module):
    """The layer as it is, plus the change that scaling some of its sub-units makes.

    With nothing scaled the output is the layer's own, to the bit. Works on both kinds of layers.

    Args:
        base_layer: the layer, which computes as before.
        weight: `(m, d_in)` of the scaled sub-units.
        bias: `(m,)` of the scaled sub-units.
        units: `(m,)` the unit of each.
        gains: `(m,)` what each one's activation is multiplied by.
    """

    def __init__(
        self, base_layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor, units: torch.Tensor, gains: torch.Tensor
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        changed = gains != 1
        for name, tensor in (("weight", weight), ("bias", bias), ("gains", gains)):
            self.register_buffer(name, tensor[changed].float())
        self.register_buffer("units", units[changed])
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self.gains: torch.Tensor
        self.units: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output plus (gain - 1) times each scaled sub-unit, computed in float32."""
        out = self.base_layer(x)
        if len(self.gains) == 0:
            return out
        by = self.gains.float() - 1
        change = _project(self.base_layer, x.float(), self.weight.float() * by[:, None], self.bias.float() * by)
        channels = 1 if isinstance(self.base_layer, nn.Conv2d) else -1
        return out + _sum_by_unit(change, self.units, out.shape[channels], channels).to(out.dtype)


def split_layer(base_layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> SplitLinear:
    """The explicit layer of the right kind."""
    kind = SplitConv1x1 if isinstance(base_layer, nn.Conv2d) else SplitLinear
    return kind(base_layer, members, units)


def _project(base: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if isinstance(base, nn.Conv2d):
        return F.conv2d(x, weight[:, :, None, None], bias, base.stride, base.padding)
    return F.linear(x, weight, bias)


def _sum_by_unit(activations: torch.Tensor, units: torch.Tensor, d_out: int, channels: int) -> torch.Tensor:
    shape = list(activations.shape)
    shape[channels] = d_out
    wide = torch.promote_types(activations.dtype, torch.float32)  # half precision would add up rounding
    total = torch.zeros(shape, dtype=wide, device=activations.device)
    return total.index_add(channels, units, activations.to(wide)).to(activations.dtype)
