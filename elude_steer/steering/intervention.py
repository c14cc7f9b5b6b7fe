"""A plan as arithmetic on the target layer: what is added to its output, and on which patches.

`PreparedPlan` is a plan with the weights of its sub-units; `ConceptEdit` is one concept of it. In shapes, m counts the
sub-units of a concept. Tokens that stand before the patches (CLS) are in no region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.build.streams import firing_reference
from elude_steer.errors import ModelError
from elude_steer.method.layers import SubUnits, layer_parameters
from elude_steer.steering.plan import Concept, Plan
from elude_steer.steering.regions import Region, concept_region, strongest_mask
from elude_steer.steering.sub_unit_source import EditableSubUnits, SubUnitSource

# Gives the patches of one image that a region covers, `(tiles, patches)` bool. If it has an attribute `shape`, as
# `ImagePatches` has, that gives rows and columns of the patches.
FindPatches = Callable[[Region], np.ndarray]
# Values that the plans of one image share: activations by sub-units, and where they are strongest.
ImageMemo = dict[tuple[Any, ...], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ConceptEdit:
    """The edited sub-units of one concept as tensors.

    Attributes:
        concept: the concept and its settings.
        sub_units: as arithmetic.
        amounts: `(m,)` gains or values.
        reference: `(m,)` activation at which each counts as fully on.
        stream_offset: `(d_out,)` added besides in the concept's region, or None.
    """

    concept: Concept
    sub_units: EditableSubUnits
    amounts: torch.Tensor
    reference: torch.Tensor
    stream_offset: torch.Tensor | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its sub-units."""
        return tuple(edit.sub_unit for edit in self.concept.edits)

    @property
    def is_regional(self) -> bool:
        """Whether all its sub-units change on one region, and not each on the patches where it fires most."""
        return self.concept.is_placed or self.concept.settings.fits_region

    def activations(self, q: torch.Tensor, memo: ImageMemo | None = None) -> torch.Tensor:
        """Activations of its sub-units, `(tiles, tokens, m)` float32; computed once for each memo."""
        if memo is None:
            return self.sub_units.activations(q)
        if self.numbers not in memo:
            memo[self.numbers] = self.sub_units.activations(q)
        return memo[self.numbers]

    def strongest_tokens(
        self, activations: torch.Tensor, skipped: int = 0, memo: ImageMemo | None = None
    ) -> torch.Tensor:
        """The nu tokens where each sub-unit fires most, `(tiles, tokens, m)` bool; the first `skipped` are never."""
        nu, per = self.concept.settings.nu, self.concept.settings.per
        key = (nu, per, *self.numbers)
        if memo is not None and key in memo:
            return memo[key]
        mask = F.pad(strongest_mask(activations[:, skipped:], nu, per), (0, 0, skipped, 0))
        return mask if memo is None else memo.setdefault(key, mask)


@dataclass(frozen=True, eq=False)
class AllSubUnits:
    """All sub-units of a layer, to find those that fire in the surroundings of a region.

    Attributes:
        source: the atlas, or the dictionary in its place.
        sub_units: as arithmetic.
        reference: `(S,)` activation at which each counts as fully on.
    """

    source: SubUnitSource
    sub_units: EditableSubUnits
    reference: torch.Tensor

    @classmethod
    def from_source(cls, source: SubUnitSource, layer: nn.Module) -> AllSubUnits:
        """Take all sub-units of an atlas, on the layer's device."""
        reference = firing_reference(source.references.activation).to(next(layer.parameters()).device)
        return cls(source, source.sub_units(range(len(source)), layer), reference)

    def strongest(self, q: torch.Tensor, count: int, without: torch.Tensor) -> torch.Tensor:
        """The sub-units that fire most in the mean over some tokens, `(count,)` or fewer.

        Args:
            q: `(tokens, d_in)`.
            count: how many at most.
            without: sub-units that do not count.
        """
        share = self.sub_units.mean_activations(q) / self.reference
        share[without] = -torch.inf
        # Sub-units that do not fire there are no part of the surroundings, even if that leaves fewer than `count`.
        return share.sort(descending=True, stable=True).indices[: min(count, int((share > 0).sum()))]


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan ready for a layer: with the weights of its sub-units, on the layer's device.

    Attributes:
        plan: the plan.
        concept_edits: its concepts that have sub-units.
        d_out: units of the layer.
        shape: rows and columns of a tile's patches. None: those of the image's `FindPatches`, else a single row.
        all_sub_units: gives all sub-units of the layer; called only if a region is filled.
    """

    plan: Plan
    concept_edits: tuple[ConceptEdit, ...]
    d_out: int
    shape: tuple[int, int] | None
    all_sub_units: Callable[[], AllSubUnits]

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        source: SubUnitSource,
        layer: nn.Module,
        shape: tuple[int, int] | None = None,
        all_sub_units: Callable[[], AllSubUnits] | None = None,
        weights: dict[tuple[int, ...], EditableSubUnits] | None = None,
    ) -> PreparedPlan:
        """Gather the weights of a plan's sub-units; plans with the same sub-units share them through `weights`."""
        weights = {} if weights is None else weights
        device, concept_edits = next(layer.parameters()).device, []
        for concept in plan.concepts:
            numbers = tuple(edit.sub_unit for edit in concept.edits)
            if numbers:
                if numbers not in weights:
                    weights[numbers] = source.sub_units(numbers, layer)
                amounts = torch.tensor([edit.amount for edit in concept.edits], device=device)
                reference = source.references.activation[list(numbers)].to(device)
                reach = plan.stream_reach(concept)
                offset = reach * source.stream_outside(numbers).to(device) if reach else None
                concept_edits.append(ConceptEdit(concept, weights[numbers], amounts, reference, offset))
        gather_all = all_sub_units or (lambda: AllSubUnits.from_source(source, layer))
        return cls(plan, tuple(concept_edits), source.d_out, shape, gather_all)

    def region(
        self,
        edit: ConceptEdit,
        q: torch.Tensor,
        find_patches: FindPatches | None = None,
        memo: ImageMemo | None = None,
    ) -> torch.Tensor:
        """Where a concept is placed or removed, `(tiles, tokens)` bool.

        That is what the user marked; else where the minus concepts fire, or for a minus concept where it fires itself.
        """
        rows, columns, skipped = self._token_layout(q, find_patches)
        marked = self._marked_regions(edit.concept)
        if marked:
            if find_patches is None:
                raise ModelError("a box or mask needs to know the image it lies on.")
            mask = np.any([find_patches(one) for one in marked], axis=0)
            region = torch.from_numpy(mask).to(q.device).reshape(len(q), -1)
        else:
            firing = [edit]
            if edit.concept.is_placed:
                firing = [one for one in self.concept_edits if one.concept.role == "minus"]
            if not firing:
                raise ModelError("nothing says where to place the plus words: every minus sub-unit is a plus one too.")
            shares = [one.activations(q, memo)[:, skipped:] / firing_reference(one.reference) for one in firing]
            region = concept_region(torch.cat(shares, -1).mean(-1), edit.concept.settings, (rows, columns))
        return F.pad(region, (skipped, 0))

    def _marked_regions(self, concept: Concept) -> list[Region]:
        """The regions that the user marked for a concept; a placed one without any goes where minus ones are marked."""
        marked = self.plan.marked_region(concept)
        if marked is not None or not concept.is_placed:
            return [marked] if marked is not None else []
        return [c.where for c in self.plan.concepts if c.role == "minus" and c.where is not None]

    def _token_layout(self, q: torch.Tensor, find_patches: FindPatches | None) -> tuple[int, int, int]:
        """Rows and columns of the patches, and how many tokens stand before them."""
        rows, columns = self.shape or getattr(find_patches, "shape", None) or (1, q.shape[1])
        if rows * columns > q.shape[1]:
            raise ModelError(f"the layer saw {q.shape[1]} tokens a tile, fewer than its {rows} x {columns} patches.")
        return rows, columns, q.shape[1] - rows * columns

    def output_change(
        self, q: torch.Tensor, find_patches: FindPatches | None = None, memo: ImageMemo | None = None
    ) -> torch.Tensor:
        """What the plan adds to the layer's output, `(tiles, tokens, d_out)` float32.

        On a GPU, sub-units of one unit are added in no fixed order: the last bits may differ from run to run.

        Args:
            q: `(tiles, tokens, d_in)` the layer's inputs for one image.
            find_patches: gives the patches of this image that a region covers.
            memo: shared by the plans of one image.
        """
        total = torch.zeros(*q.shape[:2], self.d_out, device=q.device)
        memo = {} if memo is None else memo
        for edit in self.concept_edits:
            now = edit.activations(q, memo)
            change = (edit.amounts - now) if edit.concept.is_placed else (edit.amounts - 1) * now
            if edit.is_regional or edit.stream_offset is not None:
                region = self.region(edit, q, find_patches, memo)[..., None]
                if edit.stream_offset is not None:
                    total += region * edit.stream_offset
            if edit.is_regional:
                change = change * region
            elif edit.concept.settings.nu != "all":
                skipped = self._token_layout(q, find_patches)[2]
                change = change * edit.strongest_tokens(now, skipped, memo)
            edit.sub_units.add_change(total, change)
        self._add_fill(total, q, find_patches, memo)
        return _check_finite(total)

    def _add_fill(
        self, total: torch.Tensor, q: torch.Tensor, find_patches: FindPatches | None, memo: ImageMemo
    ) -> None:
        """Add what makes the regions of removed concepts look like their surroundings, on every patch once."""
        filled = [
            (edit, self.region(edit, q, find_patches, memo))
            for edit in self.concept_edits
            if self.plan.is_filled(edit.concept)
        ]
        if not filled:
            return
        taken = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
        for edit in self.concept_edits:
            if edit.concept.is_placed:
                taken |= self.region(edit, q, find_patches, memo)
        outside = ~torch.stack([taken, *(region for _, region in filled)]).any(0)
        outside[:, : self._token_layout(q, find_patches)[2]] = False
        for edit, region in filled:
            self._fill_region(total, edit, q, region & ~taken, outside)
            taken |= region

    def _fill_region(
        self, total: torch.Tensor, edit: ConceptEdit, q: torch.Tensor, region: torch.Tensor, outside: torch.Tensor
    ) -> None:
        if not region.any() or not outside.any():
            return
        everything, settings = self.all_sub_units(), edit.concept.settings
        edited = torch.tensor([one.sub_unit for one in self.plan.edits], device=q.device)
        strongest = everything.strongest(q[outside], settings.fill, edited)
        amounts = settings.beta * everything.source.target_levels(strongest.cpu(), settings.level).to(q.device)
        sub_units = everything.sub_units.select(strongest)
        sub_units.add_change(total, (amounts - sub_units.activations(q)) * region[..., None])

    @property
    def can_fold(self) -> bool:
        """Whether the edit is a change of the layer's weight and bias: it is linear, in parts of the layer's units."""
        return self.plan.is_linear and all(isinstance(edit.sub_units, SubUnits) for edit in self.concept_edits)

    @cached_property
    def weight_change(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the edit adds to the layer's weight and bias, where it can be folded into them (`can_fold`)."""
        parts = [(edit.sub_units, edit.amounts) for edit in self.concept_edits if isinstance(edit.sub_units, SubUnits)]
        d_in = parts[0][0].weight.shape[1] if parts else 0
        device = parts[0][1].device if parts else None
        weight, bias = torch.zeros(self.d_out, d_in, device=device), torch.zeros(self.d_out, device=device)
        for sub_units, amounts in parts:
            weight.index_add_(0, sub_units.units, sub_units.weight * (amounts - 1)[:, None])
            bias.index_add_(0, sub_units.units, sub_units.bias * (amounts - 1))
        return weight, bias

    def maps(self, q: torch.Tensor, find_patches: FindPatches | None = None) -> dict[str, tuple[Any, Any]]:
        """For each word how strongly its concept fires, and which share of its sub-units changes.

        Both are `(tiles, patches)` arrays.
        """
        skipped = self._token_layout(q, find_patches)[2]
        maps: dict[str, tuple[Any, Any]] = {}
        for edit in self.concept_edits:
            now = edit.activations(q)
            fires = (now / firing_reference(edit.reference)).clamp_min(0).mean(-1)
            if edit.is_regional:
                touched = self.region(edit, q, find_patches).float()
            else:
                touched = edit.strongest_tokens(now, skipped).float().mean(-1)
                if self.plan.is_filled(edit.concept) or edit.stream_offset is not None:
                    touched = touched.maximum(self.region(edit, q, find_patches).float())
            maps[edit.concept.word] = (fires[:, skipped:].cpu().numpy(), touched[:, skipped:].cpu().numpy())
        return maps


def _check_finite(values: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(values).all():
        raise ModelError("the edit gives numbers that are not finite; use smaller gains (alpha, gamma, beta).")
    return values


def make_edited_forward(
    layer: nn.Module,
    prepared: Sequence[PreparedPlan | None],
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    find_patches: Sequence[FindPatches | None],
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> Callable[..., torch.Tensor]:
    """Make a replacement for the layer's forward: its output, plus the change that the plan of each image makes.

    Args:
        layer: the target.
        prepared: a plan for each image of the batch, None for no plan; a single one is for all images.
        split: gives the layer's input by image, `(tiles, patches, d_in)` each.
        find_patches: for each image, gives the patches that a region covers.
        join: the inverse of `split`.
    """
    active = [one if one is not None and one.plan.has_effect else None for one in prepared]
    single = active[0] if len(active) == 1 else None

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if not any(active):
            return original(x)
        if single is not None and single.can_fold:
            # The layer runs once, with the edited weight: an edit of every patch costs nothing.
            weight, bias = layer_parameters(layer)
            more_weight, more_bias = single.weight_change
            return _check_finite(F.linear(x, (weight + more_weight).to(x.dtype), (bias + more_bias).to(x.dtype)))
        out = original(x)
        images = split(x)
        plans = active * len(images) if len(active) == 1 else active
        finders = list(find_patches) * len(images) if len(find_patches) == 1 else find_patches
        changes = [
            torch.zeros(*q.shape[:2], out.shape[-1], device=q.device) if one is None else one.output_change(q, finder)
            for q, one, finder in zip(images, plans, finders, strict=True)
        ]
        # Checked in the model's dtype too: half precision overflows long before full precision does.
        return _check_finite(out + join(changes).reshape(out.shape).to(out.dtype))

    return compute


def make_resumed_forward(
    images: Sequence[torch.Tensor],
    rows: Sequence[tuple[int, PreparedPlan | None, FindPatches | None]],
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> Callable[..., torch.Tensor]:
    """Make the same replacement where the layer's inputs are known: work on one image is shared by its plans.

    Args:
        images: the layer's inputs, `(tiles, patches, d_in)` each.
        rows: for each row of the batch the number of its image, its plan, and the image's `FindPatches`.
        join: puts the images together as the layer has them.
    """

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        shared: dict[int, tuple[torch.Tensor, ImageMemo]] = {}
        outputs = []
        for image, prepared, find_patches in rows:
            q = images[image]
            if image not in shared:
                shared[image] = (original(q), {})
            out, memo = shared[image]
            if prepared is not None and prepared.plan.has_effect:
                out = _check_finite(out + prepared.output_change(q, find_patches, memo).to(out.dtype))
            outputs.append(out)
        return join(outputs).reshape(*x.shape[:-1], -1)

    return compute
