"""The layers that follow from a split: weights of sub-units, and the explicit layer that sums them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import LayerError


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
    return divide_among_owners(weight[units], bias[units], members, owners[local])


def divide_among_owners(
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

    def add_change(self, total: torch.Tensor, change: torch.Tensor) -> None:
        """Adds what the change of their activations, `(…, m)`, changes in the layer's output, `(…, d_out)`."""
        total.index_add_(-1, self.units, change)

    def select(self, rows: torch.Tensor) -> SubUnits:
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


def is_linear(module: nn.Module) -> bool:
    """Whether the method applies to this module."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)
