"""A plan as arithmetic on the target layer: what is added to its output, and on which patches.

`PreparedPlan` is a plan with the weights of its sub-units and detectors; `ScaledConcept` and `PlacedConcept` are one
concept of it each. In shapes, m counts the
sub-units of a concept. Tokens that stand before the patches (CLS) are in no region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.atlas.calibration import Calibration
from elude_steer.errors import ModelError
from elude_steer.method.layers import SubUnits, layer_parameters
from elude_steer.steering.plan import Concept, Plan
from elude_steer.steering.regions import (
    FREE_CLAIM,
    Region,
    cover_block,
    find_connected_region,
    find_free_blocks,
    measure_claims,
    overview_tile,
    patches_inside,
    strongest_mask,
)
from elude_steer.steering.sub_unit_source import EditableSubUnits, SubUnitSource

# Gives the patches of one image that a region covers, `(tiles, patches)` bool. If it has attributes `shape` and
# `boxes`, as `ImagePatches` has, those give rows and columns of the patches, and where they lie.
FindPatches = Callable[[Region], np.ndarray]
Key = TypeVar("Key")
Value = TypeVar("Value")
Claims = tuple[int, np.ndarray, np.ndarray]  # a tile, which of its patches lie inside the image, what words claim there


@dataclass(eq=False)
class ImageMemo:
    """What is known of one image, which its plans share."""

    activations: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # by the numbers of sub-units
    strongest: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)  # by nu, per and these numbers
    readings: dict[int, torch.Tensor] = field(default_factory=dict)  # of detectors, by row of the calibration
    presences: dict[int, float] = field(default_factory=dict)  # of concepts, by row
    regions: dict[tuple[PreparedPlan, PlacedConcept], torch.Tensor] = field(default_factory=dict)
    claims: Claims | None = None


@dataclass(frozen=True, eq=False)
class ScaledConcept:
    """The scaled sub-units of one concept as tensors.

    Attributes:
        concept: the concept and its settings.
        sub_units: as arithmetic.
        gains: `(m,)`.
        reference: `(m,)` activation at which each counts as fully on.
    """

    concept: Concept
    sub_units: EditableSubUnits
    gains: torch.Tensor
    reference: torch.Tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its sub-units."""
        return tuple(edit.sub_unit for edit in self.concept.edits)

    def activations(self, q: torch.Tensor, memo: ImageMemo | None = None) -> torch.Tensor:
        """Activations of its sub-units, `(tiles, tokens, m)` float32; computed once for each memo."""
        return _look_up((memo or ImageMemo()).activations, self.numbers, lambda: self.sub_units.activations(q))

    def strongest_tokens(
        self, activations: torch.Tensor, skipped: int = 0, memo: ImageMemo | None = None
    ) -> torch.Tensor:
        """The nu tokens where each sub-unit fires most, `(tiles, tokens, m)` bool; the first `skipped` are never."""
        nu, per = self.concept.settings.nu, self.concept.settings.per
        return _look_up(
            (memo or ImageMemo()).strongest,
            (nu, per, *self.numbers),
            lambda: F.pad(strongest_mask(activations[:, skipped:], nu, per), (0, 0, skipped, 0)),
        )

    def output_change(self, q: torch.Tensor, skipped: int, memo: ImageMemo) -> torch.Tensor:
        """The change of its activations, `(tiles, tokens, m)`."""
        now = self.activations(q, memo)
        change = (self.gains - 1) * now
        return change if self.concept.settings.nu == "all" else change * self.strongest_tokens(now, skipped, memo)


@dataclass(frozen=True, eq=False)
class PlacedConcept:
    """A concept that is taken out of the stream on a region, or put in there.

    Attributes:
        concept: the concept and its settings.
        detector: reads it from the layer's inputs.
        calibration: says what its readings mean.
        change: `(d_out,)` added to the layer's output on the region.
    """

    concept: Concept
    detector: Callable[[torch.Tensor], torch.Tensor]
    calibration: Calibration
    change: torch.Tensor

    @property
    def row(self) -> int:
        """Its row in the calibration."""
        return self.concept.detector.row if self.concept.detector else 0

    def readings(self, q: torch.Tensor, skipped: int, memo: ImageMemo | None = None) -> torch.Tensor:
        """Readings of its detector on patches, `(tiles, patches)`; computed once for each memo."""
        return _look_up((memo or ImageMemo()).readings, self.row, lambda: self.detector(q[:, skipped:]))

    def presence(self, q: torch.Tensor, skipped: int, memo: ImageMemo | None = None) -> float:
        """How much of what images with the concept reach this one reaches."""
        return _look_up(
            (memo or ImageMemo()).presences,
            self.row,
            lambda: self.calibration.presence(self.row, self.readings(q, skipped, memo).detach()),
        )


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan ready for a layer: with the weights of its sub-units and detectors, on the layer's device.

    Attributes:
        plan: the plan.
        scaled: its concepts in mode scale that have sub-units.
        placed: its concepts in mode place.
        d_out: units of the layer.
        shape: rows and columns of a tile's patches. None: those of the image's `FindPatches`, else a single row.
        read_all_words: gives the readings `(patches, W)` of all calibrated words for inputs `(patches, d_in)`.
    """

    plan: Plan
    scaled: tuple[ScaledConcept, ...]
    placed: tuple[PlacedConcept, ...]
    d_out: int
    shape: tuple[int, int] | None
    read_all_words: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        source: SubUnitSource,
        layer: nn.Module,
        shape: tuple[int, int] | None = None,
        weights: dict[tuple[int, ...], EditableSubUnits] | None = None,
        find_detector: Callable[[int], Callable[[torch.Tensor], torch.Tensor]] | None = None,
        stream_scale: torch.Tensor | None = None,
    ) -> PreparedPlan:
        """Gather the weights of a plan.

        Args:
            plan: the plan.
            source: the atlas, or a dictionary in its place.
            layer: the target.
            shape: rows and columns of a tile's patches.
            weights: shared by plans with the same sub-units.
            find_detector: gives the detector of a row of the calibration; by default that of `source`.
            stream_scale: `(d_out,)` by which the model multiplies the layer's output before it enters the stream.
        """
        weights = {} if weights is None else weights
        device, scaled, placed = next(layer.parameters()).device, [], []
        for concept in plan.concepts:
            if concept.detector is not None:
                row, calibration = concept.detector.row, source.require_calibration()
                detector = find_detector(row) if find_detector else source.detector(row, layer)
                sign = 1 if concept.role == "plus" else -1
                change = sign * concept.settings.strength * calibration.direction(row).to(device)
                change = change if stream_scale is None else divide_by_scale(change, stream_scale)
                placed.append(PlacedConcept(concept, detector, calibration, change))
                continue
            numbers = tuple(edit.sub_unit for edit in concept.edits)
            if numbers:
                if numbers not in weights:
                    weights[numbers] = source.sub_units(numbers, layer)
                gains = torch.tensor([edit.amount for edit in concept.edits], device=device)
                reference = source.references.activation[list(numbers)].to(device)
                scaled.append(ScaledConcept(concept, weights[numbers], gains, reference))
        return cls(plan, tuple(scaled), tuple(placed), source.d_out, shape, lambda q: source.read_all_words(q, layer))

    def presences(
        self, q: torch.Tensor, find_patches: FindPatches | None = None, memo: ImageMemo | None = None
    ) -> dict[str, float]:
        """For each minus word in mode place, how much of what images with it reach this image reaches."""
        skipped = self._token_layout(q, find_patches)[2]
        return {one.concept.word: one.presence(q, skipped, memo) for one in self.placed if one.concept.role == "minus"}

    def region(
        self,
        placed: PlacedConcept,
        q: torch.Tensor,
        find_patches: FindPatches | None = None,
        memo: ImageMemo | None = None,
    ) -> torch.Tensor:
        """Where a concept is taken out or put in, `(tiles, tokens)` bool.

        That is what the user marked; else where the detector of the minus concept reads it, and nowhere if it is not
        seen. A plus concept takes the region of its minus concept, or else a free place, and none if no place is free.
        """
        known = memo or ImageMemo()
        return _look_up(known.regions, (self, placed), lambda: self._find_region(placed, q, find_patches, known))

    def _find_region(
        self, placed: PlacedConcept, q: torch.Tensor, find_patches: FindPatches | None, memo: ImageMemo
    ) -> torch.Tensor:
        rows, columns, skipped = self._token_layout(q, find_patches)
        if self.plan.needs_free_place(placed.concept):
            return F.pad(self._free_place(placed, q, find_patches, memo), (skipped, 0))
        marked = self._marked_region(placed.concept)
        if marked is not None:
            if find_patches is None:
                raise ModelError("a box or mask needs to know the image it lies on.")
            region = torch.from_numpy(find_patches(marked)).to(q.device).reshape(len(q), -1)
            return F.pad(region, (skipped, 0))
        minus = self.plan.partner(placed.concept) if placed.concept.is_placed else placed.concept
        found = next(one for one in self.placed if one.concept is minus)
        settings, readings = found.concept.settings, found.readings(q, skipped, memo)
        if not settings.force and found.presence(q, skipped, memo) < settings.seen:
            return torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
        return F.pad(find_connected_region(readings, settings.fit, (rows, columns)), (skipped, 0))

    def _free_place(
        self, placed: PlacedConcept, q: torch.Tensor, find_patches: FindPatches | None, memo: ImageMemo
    ) -> torch.Tensor:
        """A place that is claimed by no word and holds no other plus concept, `(tiles, patches)` bool."""
        rows, columns, skipped = self._token_layout(q, find_patches)
        if not placed.concept.settings.fit:
            return torch.ones(len(q), rows * columns, dtype=torch.bool, device=q.device)
        boxes = getattr(find_patches, "boxes", None)  # (tiles, patches, 4)
        if boxes is None and len(q) > 1:
            raise ModelError("a free place in an image of several tiles needs to know which part each of them shows.")

        def read_claims() -> Claims:
            tile = 0 if boxes is None else overview_tile(boxes)
            inside = np.ones(rows * columns, bool) if boxes is None else patches_inside(boxes[tile])
            return tile, inside, measure_claims(self.read_all_words(q[tile, skipped:]).detach()).cpu().numpy()

        if memo.claims is None:
            memo.claims = read_claims()
        tile, inside, claims = memo.claims
        usable, free = inside.copy(), []
        for one in (one for one in self.placed if one.concept.is_placed):
            if not self.plan.needs_free_place(one.concept):
                usable &= ~self.region(one, q, find_patches, memo)[tile, skipped:].cpu().numpy()
            elif one.concept.settings.fit:
                free.append(one)
        limits = [np.inf if one.concept.settings.force else FREE_CLAIM for one in free]
        blocks = find_free_blocks(claims.reshape(rows, columns), usable.reshape(rows, columns), limits)
        block = blocks[free.index(placed)].ravel()
        region = block[None] if boxes is None else cover_block(block, boxes[tile], boxes)
        return torch.from_numpy(region).to(q.device)

    def _marked_region(self, concept: Concept) -> Region | None:
        """The region that the user marked for a concept; a plus concept without one goes where its minus one is."""
        marked, partner = self.plan.marked_region(concept), self.plan.partner(concept)
        return marked if marked is not None or partner is None else self.plan.marked_region(partner)

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
        return _check_finite(self._sum_changes(q, find_patches, memo))

    def _sum_changes(self, q: torch.Tensor, find_patches: FindPatches | None, memo: ImageMemo | None) -> torch.Tensor:
        total = torch.zeros(*q.shape[:2], self.d_out, device=q.device)
        memo = memo or ImageMemo()
        for scaled in self.scaled:
            skipped = 0 if scaled.concept.settings.nu == "all" else self._token_layout(q, find_patches)[2]
            scaled.sub_units.add_change(total, scaled.output_change(q, skipped, memo))
        for placed in self.placed:
            total += self.region(placed, q, find_patches, memo)[..., None] * placed.change
        return total

    def change_output(
        self, out: torch.Tensor, q: torch.Tensor, find_patches: FindPatches | None, memo: ImageMemo | None = None
    ) -> torch.Tensor:
        """The layer's output `(tiles, tokens, d_out)` of one image under the plan, in its data type.

        It is checked in that type: half precision overflows long before full precision does.
        """
        return _check_finite(out + self._sum_changes(q, find_patches, memo).to(out.dtype))

    @property
    def can_fold(self) -> bool:
        """Whether the edit is a change of the layer's weight and bias: it is linear, in parts of the layer's units."""
        return self.plan.is_linear and all(isinstance(one.sub_units, SubUnits) for one in self.scaled)

    @cached_property
    def weight_change(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the edit adds to the layer's weight and bias, where it can be folded into them (`can_fold`)."""
        parts = [(one.sub_units, one.gains) for one in self.scaled if isinstance(one.sub_units, SubUnits)]
        d_in = parts[0][0].weight.shape[1] if parts else 0
        device = parts[0][1].device if parts else None
        weight, bias = torch.zeros(self.d_out, d_in, device=device), torch.zeros(self.d_out, device=device)
        for sub_units, amounts in parts:
            weight.index_add_(0, sub_units.units, sub_units.weight * (amounts - 1)[:, None])
            bias.index_add_(0, sub_units.units, sub_units.bias * (amounts - 1))
        return weight, bias

    def maps(
        self, q: torch.Tensor, find_patches: FindPatches | None = None, memo: ImageMemo | None = None
    ) -> dict[str, tuple[Any, Any]]:
        """For each word how strongly its concept fires, and which share of its sub-units changes.

        Both are `(tiles, patches)` arrays.
        """
        skipped, memo = self._token_layout(q, find_patches)[2], memo or ImageMemo()
        maps: dict[str, tuple[Any, Any]] = {}
        for scaled in self.scaled:
            now = scaled.activations(q, memo)
            fires = (now / _firing_reference(scaled.reference)).clamp_min(0).mean(-1)[:, skipped:]
            touched = scaled.strongest_tokens(now, skipped, memo).float().mean(-1)[:, skipped:]
            maps[scaled.concept.word] = (fires.cpu().numpy(), touched.cpu().numpy())
        for placed in self.placed:
            region = self.region(placed, q, find_patches, memo)[:, skipped:].float()
            maps[placed.concept.word] = (
                placed.readings(q, skipped, memo).clamp_min(0).cpu().numpy(),
                region.cpu().numpy(),
            )
        order = [concept.word for concept in self.plan.concepts]
        return {word: maps[word] for word in order if word in maps}


def _look_up(known: dict[Key, Value], key: Key, find: Callable[[], Value]) -> Value:
    """A value of an image that a part of its memo may know; what is found is kept there."""
    if key not in known:
        known[key] = find()
    return known[key]


def divide_by_scale(change: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The change of a layer's output that makes this change of the stream; none in channels that are scaled to 0."""
    scale = scale.to(change)
    return torch.where(scale.abs() > 1e-6, change / torch.where(scale.abs() > 1e-6, scale, 1.0), 0.0)


def _firing_reference(activation: torch.Tensor) -> torch.Tensor:
    """Reference activations to compare with; infinite for a sub-unit that never fires."""
    return torch.where(activation > 1e-6, activation, torch.inf)


def _check_finite(values: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(values).all():
        raise ModelError("the edit gives numbers that are not finite; use smaller gains (alpha, gamma, strength).")
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
    memos: Sequence[ImageMemo] | None = None,
) -> Callable[..., torch.Tensor]:
    """Make the same replacement where the layer's inputs are known: work on one image is shared by its plans.

    Args:
        images: the layer's inputs, `(tiles, patches, d_in)` each.
        rows: for each row of the batch the number of its image, its plan, and the image's `FindPatches`.
        join: puts the images together as the layer has them.
        memos: what is known of each image already; more is added.
    """

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        shared: dict[int, tuple[torch.Tensor, ImageMemo]] = {}
        outputs = []
        for image, prepared, find_patches in rows:
            q = images[image]
            if image not in shared:
                shared[image] = (original(q), ImageMemo() if memos is None else memos[image])
            out, memo = shared[image]
            if prepared is not None and prepared.plan.has_effect:
                out = prepared.change_output(out, q, find_patches, memo)
            outputs.append(out)
        return join(outputs).reshape(*x.shape[:-1], -1)

    return compute
