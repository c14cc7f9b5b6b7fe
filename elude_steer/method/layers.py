"""Weights of sub-units, and the split layer that computes every sub-unit and adds them up by unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import LayerError

_ROWS = 1024  # sub-units whose shares are computed at a time; each on its own, so it changes no bits


def is_linear(module: nn.Module) -> bool:
    """Whether the method applies to a module: `nn.Linear`, or `nn.Conv2d` with a 1x1 kernel."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)


def layer_parameters(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `(d_out, d_in)` and bias `(d_out,)` of a layer, at least float32; zeros for a missing bias.

    Args:
        layer: a linear layer or 1x1 convolution; anything else raises `LayerError`.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d) or not is_linear(layer):
        raise LayerError(f"{layer} cannot be split; only nn.Linear and 1x1 nn.Conv2d can.")
    return as_parameters(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())


def as_parameters(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `(d_out, d_in)` and bias `(d_out,)`, at least float32, of the tensors of a layer or its checkpoint."""
    weight = weight.flatten(1)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight, torch.zeros_like(weight[:, 0]) if bias is None else bias.to(weight)


def sub_unit_parameters(
    weight: torch.Tensor, bias: torch.Tensor, members: torch.Tensor, units: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `(S, d_in)` and biases `(S,)` of sub-units.

    Args:
        weight: `(d_out, d_in)` of the layer.
        bias: `(d_out,)` of the layer.
        members: `(S, d_in)` bool; has all sub-units of every unit in `units`.
        units: `(S,)` the unit of each sub-unit.
    """
    present, local = units.unique(return_inverse=True)
    owners = torch.zeros(len(present), members.shape[1], dtype=torch.int32, device=members.device)
    owners.index_add_(0, local, members.int())
    return divide_among_owners(weight[units], bias[units], members, owners[local])


def divide_among_owners(
    weight: torch.Tensor, bias: torch.Tensor, members: torch.Tensor, owners: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide the weights and biases of units among their sub-units; row i belongs to sub-unit i.

    Args:
        weight: `(n, d_in)` weights of each sub-unit's unit.
        bias: `(n,)` bias of each sub-unit's unit.
        members: `(n, d_in)` bool, the dimensions that each sub-unit owns.
        owners: `(n, d_in)` how many sub-units of the unit own each dimension.
    """
    weights, biases = torch.empty_like(weight), torch.empty_like(bias)
    for start in range(0, len(members), _ROWS):  # in pieces, because shares in double precision are large
        rows = slice(start, start + _ROWS)
        share = members[rows] / owners[rows]
        weights[rows] = weight[rows] * share.to(weight)
        biases[rows] = bias[rows] * share.double().mean(1).to(bias)
    return weights, biases


@dataclass(frozen=True, eq=False)
class SubUnits:
    """Weights of some sub-units of a layer, and the units that their activations add to.

    Attributes:
        weight: `(m, d_in)` float32.
        bias: `(m,)`.
        units: `(m,)` the unit of each sub-unit.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    units: torch.Tensor

    def activations(self, q: torch.Tensor) -> torch.Tensor:
        """Activations `(…, m)` float32 for inputs `(…, d_in)`."""
        return F.linear(q.float(), self.weight, self.bias)

    def add_change(self, total: torch.Tensor, change: torch.Tensor) -> None:
        """Add a change of activations, `(…, m)`, to the layer's output or its change, `(…, d_out)`, in place."""
        total.index_add_(-1, self.units, change)


class SplitLinear(nn.Module):
    """A linear layer as explicit sub-units: products compute all sub-units, and each unit sums its own.

    The original layer stays available as `base_layer`.

    Args:
        base_layer: the layer to split.
        members: `(S, d_in)` bool.
        units: `(S,)` the unit of each sub-unit.

    Example:
        >>> split = SplitLinear(layer, atlas.members(), atlas.units)
        >>> with swap_module(model, name, split):
        ...     model(pixels)
    """

    channels = -1  # the output dimension that holds the units

    def __init__(self, base_layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        layer_weight, layer_bias = layer_parameters(base_layer)
        weight, bias = sub_unit_parameters(layer_weight, layer_bias, members, units)
        dtype, self.d_out = next(base_layer.parameters()).dtype, len(layer_weight)
        self.register_buffer("weight", weight.to(dtype))
        self.register_buffer("bias", bias.to(dtype))
        self.register_buffer("units", units)
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self.units: torch.Tensor

    def sub_units(self, x: torch.Tensor) -> torch.Tensor:
        """The activations of all sub-units, bias included."""
        return self._activations(x, slice(None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, as the sum of its sub-units, as many at a time as the layer has units.

        So their activations never take more memory than another output.
        """
        first = self._activations(x, slice(self.d_out))
        shape, dtype = list(first.shape), first.dtype
        shape[self.channels] = self.d_out
        wide = torch.promote_types(dtype, torch.float32)  # sums in half precision accumulate rounding
        total = torch.zeros(shape, dtype=wide, device=first.device)
        total.index_add_(self.channels, self.units[: self.d_out], first.to(wide))
        del first  # before the next ones are computed
        for start in range(self.d_out, len(self.units), self.d_out):
            rows = slice(start, start + self.d_out)
            total.index_add_(self.channels, self.units[rows], self._activations(x, rows).to(wide))
        return total.to(dtype)

    def _activations(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        base, weight, bias = self.base_layer, self.weight[rows], self.bias[rows]
        if isinstance(base, nn.Conv2d):
            return F.conv2d(x, weight[:, :, None, None], bias, base.stride, base.padding)
        return F.linear(x, weight, bias)


class SplitConv1x1(SplitLinear):
    """`SplitLinear` for a convolution with a 1x1 kernel."""

    channels = 1


def split_layer(base_layer: nn.Module, members: torch.Tensor, units: torch.Tensor) -> SplitLinear:
    """Create the split layer that fits the type of `base_layer`."""
    kind = SplitConv1x1 if isinstance(base_layer, nn.Conv2d) else SplitLinear
    return kind(base_layer, members, units)
