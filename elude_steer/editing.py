"""A plan as arithmetic on the target layer: which numbers are added to its output, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas import Atlas
from elude_steer.errors import ModelError
from elude_steer.plans import Concept, Plan
from elude_steer.splitting import layer_parameters


@dataclass(frozen=True, eq=False)
class Part:
    """The edited sub-units of one word as tensors.

    Attributes:
        concept: the word and its settings.
        weight: `(m, d_in)` float32.
        bias: `(m,)`.
        units: `(m,)` the unit each belongs to.
        amounts: `(m,)` gains or values.
        reference: `(m,)` what "fully on" is for each.
    """

    concept: Concept
    weight: torch.Tensor
    bias: torch.Tensor
    units: torch.Tensor
    amounts: torch.Tensor
    reference: torch.Tensor

    @property
    def sets(self) -> bool:
        """Whether its sub-units are set and not scaled."""
        return bool(self.concept.edits) and self.concept.edits[0].kind == "set"

    def activations(self, q: torch.Tensor) -> torch.Tensor:
        """Of its sub-units, `(tiles, patches, m)` float32."""
        return F.linear(q.float(), self.weight, self.bias)

    def chosen(self, activations: torch.Tensor) -> torch.Tensor:
        """On which patches each sub-unit is changed, `(tiles, patches, m)` bool."""
        return strongest_mask(activations, self.concept.settings.nu, self.concept.settings.per)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan ready for a layer."""

    plan: Plan
    parts: tuple[Part, ...]
    d_out: int

    @classmethod
    def of(cls, plan: Plan, atlas: Atlas, layer: nn.Module) -> Prepared:
        """The plan's sub-units with their weights, on the layer's device."""
        weight, bias = (tensor.float() for tensor in layer_parameters(layer))
        parts = []
        for concept in plan.concepts:
            numbers = [edit.sub_unit for edit in concept.edits]
            if not numbers:
                continue
            own_weight, own_bias = atlas.parameters(numbers, weight, bias)
            parts.append(
                Part(
                    concept,
                    own_weight,
                    own_bias,
                    torch.tensor([edit.unit for edit in concept.edits], device=weight.device),
                    torch.tensor([edit.amount for edit in concept.edits], device=weight.device),
                    atlas.references.activation[numbers].to(weight.device),
                )
            )
        return cls(plan, tuple(parts), len(weight))

    def region(self, q: torch.Tensor, covered: Callable[[], np.ndarray] | None) -> torch.Tensor | None:
        """Where plus words are placed, `(tiles, patches)` bool: what the user marked, or where the minus words fire."""
        placed = [part for part in self.parts if part.sets]
        if not placed:
            return None
        if self.plan.where is not None and covered is not None:
            return torch.from_numpy(covered()).to(q.device).reshape(q.shape[:2])
        minus = [part for part in self.parts if part.concept.role == "minus"]
        if not minus:
            raise ModelError("nothing says where to place the plus words: every minus sub-unit is a plus one too.")
        share = torch.cat([part.activations(q) / _on(part.reference) for part in minus], -1).mean(-1, keepdim=True)
        settings = placed[0].concept.settings
        return strongest_mask(share, settings.nu, settings.per)[..., 0]

    def change(self, q: torch.Tensor, covered: Callable[[], np.ndarray] | None = None) -> torch.Tensor:
        """What is added to the layer's output, `(tiles, patches, d_out)` float32.

        Args:
            q: `(tiles, patches, d_in)` the layer's inputs for one picture.
            covered: the patches of the region that the user marked, `(tiles, patches)` bool.
        """
        total = torch.zeros(*q.shape[:2], self.d_out, device=q.device)
        region = self.region(q, covered)
        for part in self.parts:
            now = part.activations(q)
            if part.sets and region is not None:
                moved = (part.amounts - now) * region[..., None]
            else:
                moved = (part.amounts - 1) * now
                if part.concept.settings.nu != "all":
                    moved = moved * part.chosen(now)
            total.index_add_(-1, part.units, moved)
        return _finite(total)

    @cached_property
    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the edit adds to the layer's weight and bias, where it is linear (`plan.folds`)."""
        d_in = self.parts[0].weight.shape[1] if self.parts else 0
        device = self.parts[0].weight.device if self.parts else None
        weight, bias = torch.zeros(self.d_out, d_in, device=device), torch.zeros(self.d_out, device=device)
        for part in self.parts:
            weight.index_add_(0, part.units, part.weight * (part.amounts - 1)[:, None])
            bias.index_add_(0, part.units, part.bias * (part.amounts - 1))
        return weight, bias

    def maps(self, q: torch.Tensor, covered: Callable[[], np.ndarray] | None = None) -> dict[str, tuple[Any, Any]]:
        """For every word how strongly it fires and which patches were touched, `(tiles, patches)` each."""
        region = self.region(q, covered)
        found: dict[str, tuple[Any, Any]] = {}
        for part in self.parts:
            now = part.activations(q)
            fires = (now / _on(part.reference)).clamp_min(0).mean(-1)
            touched = region if part.sets and region is not None else part.chosen(now).any(-1)
            found[part.concept.word] = (fires.cpu().numpy(), touched.cpu().numpy())
        return found


def strongest_mask(activations: torch.Tensor, nu: int | str, per: str) -> torch.Tensor:
    """Where each of m activations is among its nu largest, `(tiles, patches, m)` bool."""
    tiles, patches, m = activations.shape
    flat = activations if per == "tile" else activations.reshape(1, tiles * patches, m)
    if nu == "all" or int(nu) >= flat.shape[1]:
        return torch.ones_like(activations, dtype=torch.bool)
    # A stable sort: of equal patches the first counts, and the tile of a square picture may be the picture again.
    top = flat.sort(dim=1, descending=True, stable=True).indices[:, : int(nu)]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, top, True).reshape(tiles, patches, m)


def _on(reference: torch.Tensor) -> torch.Tensor:
    # A sub-unit that never fires has no share in where a word is.
    return torch.where(reference > 1e-6, reference, torch.inf)


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(values).all():
        raise ModelError("the edit gives numbers that are not finite; use smaller gains (alpha, gamma, beta).")
    return values


def edited(
    layer: nn.Module,
    prepared: Sequence[Prepared | None],
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    covered: Sequence[Callable[[], np.ndarray] | None],
    *,
    fold: bool = True,
) -> Callable[..., torch.Tensor]:
    """What stands for the layer's forward: its output as it is, plus the change of each picture's plan.

    Args:
        layer: the target.
        prepared: one for each picture of the batch, None for no plan; a single one is for all pictures.
        split: the layer's input by picture, `(tiles, patches, d_in)` each.
        covered: the region each picture's user marked.
        fold: whether a single plan that is linear may run as a weight; without, arithmetic never depends on the batch.
    """
    active = [one if one is not None and one.plan.changes else None for one in prepared]
    alone = active[0] if len(active) == 1 else None

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if not any(active):
            return original(x)
        if fold and alone is not None and alone.plan.folds:
            # The layer runs once, on a weight made for this plan: an edit of every patch costs nothing.
            weight, bias = layer_parameters(layer)
            more_weight, more_bias = alone.folded
            return _finite(F.linear(x, (weight + more_weight).to(x.dtype), (bias + more_bias).to(x.dtype)))
        out = original(x)
        pictures = split(x)
        plans = active * len(pictures) if len(active) == 1 else active
        regions = list(covered) * len(pictures) if len(covered) == 1 else covered
        changes = [
            one.change(q, region) if one is not None else torch.zeros(*q.shape[:2], out.shape[-1], device=q.device)
            for q, one, region in zip(pictures, plans, regions, strict=True)
        ]
        # Checked in the model's own type too: half precision ends where full precision is still far from its end.
        return _finite(out + torch.cat([change.reshape(-1, *out.shape[1:]) for change in changes]).to(out.dtype))

    return compute
