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

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.streams import firing_reference
from elude_steer.errors import ModelError
from elude_steer.method.layers import SubUnits, layer_parameters
from elude_steer.steering.patches import concept_region, strongest_mask
from elude_steer.steering.plan import Concept, Plan
from elude_steer.steering.regions import Region

Covers = Callable[[Region], np.ndarray]  # one with a `shape` tells rows and columns of the picture's patches too
Known = dict[tuple[Any, ...], torch.Tensor]  # of one picture: activations by sub-units, and where they are strongest


@dataclass(frozen=True, eq=False)
class Part:
    """The edited sub-units of one word as tensors.

    Attributes:
        concept: the word and its settings.
        rows: the sub-units.
        amounts: `(m,)` gains or values.
        reference: `(m,)` what "fully on" is for each.
        rest: `(d_out,)` what is added beside them where the word is placed or was, if anything is.
    """

    concept: Concept
    rows: SubUnits
    amounts: torch.Tensor
    reference: torch.Tensor
    rest: torch.Tensor | None = None

    def activations(self, q: torch.Tensor, known: Known | None = None) -> torch.Tensor:
        """Of its sub-units, `(tiles, patches, m)` float32; those that are known for this picture are not computed."""
        key = tuple(edit.sub_unit for edit in self.concept.edits)
        if known is None or key not in known:
            now = self.rows.activations(q)
            return now if known is None else known.setdefault(key, now)
        return known[key]

    def chosen(self, activations: torch.Tensor, known: Known | None = None, before: int = 0) -> torch.Tensor:
        """On which tokens each sub-unit is changed, `(tiles, tokens, m)` bool; what stands before patches is none."""
        nu, per = self.concept.settings.nu, self.concept.settings.per
        key = (nu, per, *(edit.sub_unit for edit in self.concept.edits))
        if known is None or key not in known:
            mask = F.pad(strongest_mask(activations[:, before:], nu, per), (0, 0, before, 0))
            return mask if known is None else known.setdefault(key, mask)
        return known[key]


@dataclass(frozen=True, eq=False)
class AllSubUnits:
    """All sub-units of a layer, to find those that a picture's surroundings consist of.

    Attributes:
        atlas: whose sub-units.
        rows: all of them.
        reference: `(S,)` what "fully on" is for each.
    """

    atlas: Atlas
    rows: SubUnits
    reference: torch.Tensor

    @classmethod
    def from_source(cls, atlas: Atlas, layer: nn.Module) -> AllSubUnits:
        """Those of an atlas, on the layer's device."""
        device = next(layer.parameters()).device
        return cls(
            atlas, atlas.sub_units(range(len(atlas)), layer), firing_reference(atlas.references.activation).to(device)
        )

    def strongest(self, q: torch.Tensor, count: int, without: torch.Tensor) -> torch.Tensor:
        """The sub-units that fire most on the mean over some tokens, `(count,)`.

        Args:
            q: `(tokens, d_in)`.
            count: how many.
            without: sub-units that do not count.
        """
        share = self.rows.mean_activations(q) / self.reference
        share[without] = -torch.inf
        # What does not fire there is no part of the surroundings, however many are asked for.
        return share.sort(descending=True, stable=True).indices[: min(count, int((share > 0).sum()))]


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """A plan ready for a layer.

    Attributes:
        plan: what should happen.
        parts: the words' sub-units.
        d_out: units of the layer.
        shape: rows and columns of a tile's patches; tokens before them (CLS) are in no region. None: as what covers
            a picture's patches says, or a single row.
        surroundings: gives all sub-units, where the plan needs them.
    """

    plan: Plan
    parts: tuple[Part, ...]
    d_out: int
    shape: tuple[int, int] | None
    surroundings: Callable[[], AllSubUnits]

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        atlas: Atlas,
        layer: nn.Module,
        shape: tuple[int, int] | None = None,
        surroundings: Callable[[], AllSubUnits] | None = None,
        rows: dict[tuple[int, ...], SubUnits] | None = None,
    ) -> PreparedPlan:
        """The plan's sub-units with their weights, on the layer's device; `rows` are shared by plans with the same."""
        rows = {} if rows is None else rows
        device, parts = next(layer.parameters()).device, []
        for concept in plan.concepts:
            numbers = tuple(edit.sub_unit for edit in concept.edits)
            if numbers:
                own = rows[numbers] if numbers in rows else rows.setdefault(numbers, atlas.sub_units(numbers, layer))
                amounts = torch.tensor([edit.amount for edit in concept.edits], device=device)
                reference = atlas.references.activation[list(numbers)].to(device)
                reach = plan.stream_reach(concept)
                rest = reach * atlas.stream_outside(numbers).to(device) if reach else None
                parts.append(Part(concept, own, amounts, reference, rest))
        every = surroundings or (lambda: AllSubUnits.from_source(atlas, layer))
        return cls(plan, tuple(parts), atlas.d_out, shape, every)

    def region(
        self, part: Part, q: torch.Tensor, covers: Covers | None = None, known: Known | None = None
    ) -> torch.Tensor:
        """Where a word is placed, or taken away, `(tiles, tokens)` bool.

        What the user marked; else where the minus words fire, or for a minus word where it fires itself.
        """
        rows, columns, before = self._shape(q, covers)
        marked = self._marked(part.concept)
        if marked:
            if covers is None:
                raise ModelError("a box or mask needs to know the picture it lies on.")
            mask = np.any([covers(one) for one in marked], axis=0)
            region = torch.from_numpy(mask).to(q.device).reshape(len(q), -1)
        else:
            minus = [one for one in self.parts if one.concept.role == "minus"] if part.concept.is_placed else [part]
            if not minus:
                raise ModelError("nothing says where to place the plus words: every minus sub-unit is a plus one too.")
            shares = [one.activations(q, known)[:, before:] / firing_reference(one.reference) for one in minus]
            region = concept_region(torch.cat(shares, -1).mean(-1), part.concept.settings, (rows, columns))
        return F.pad(region, (before, 0))

    def _marked(self, concept: Concept) -> list[Region]:
        """What the user marked for a word; what replaces a marked thing goes where that mark is."""
        own = self.plan.marked_region(concept)
        if own is not None or not concept.is_placed:
            return [own] if own is not None else []
        return [c.where for c in self.plan.concepts if c.role == "minus" and c.where is not None]

    def _shape(self, q: torch.Tensor, covers: Covers | None) -> tuple[int, int, int]:
        """Rows and columns of the patches, and how many tokens stand before them."""
        rows, columns = self.shape or getattr(covers, "shape", None) or (1, q.shape[1])
        if rows * columns > q.shape[1]:
            raise ModelError(f"the layer saw {q.shape[1]} tokens a tile, fewer than its {rows} x {columns} patches.")
        return rows, columns, q.shape[1] - rows * columns

    def output_change(self, q: torch.Tensor, covers: Covers | None = None, known: Known | None = None) -> torch.Tensor:
        """What is added to the layer's output, `(tiles, tokens, d_out)` float32.

        On a GPU, sub-units of one unit are added in no fixed order: the last bits may differ from run to run.

        Args:
            q: `(tiles, tokens, d_in)` the layer's inputs for one picture.
            covers: which patches of this picture a region covers, `(tiles, patches)` bool.
            known: shared by the plans of one picture.
        """
        total = torch.zeros(*q.shape[:2], self.d_out, device=q.device)
        known = {} if known is None else known
        for part in self.parts:
            now, how = part.activations(q, known), part.concept.settings
            moved = (part.amounts - now) if part.concept.is_placed else (part.amounts - 1) * now
            inside = part.concept.is_placed or how.fits
            if inside or part.rest is not None:
                region = self.region(part, q, covers, known)[..., None]
                if part.rest is not None:
                    total += region * part.rest
            if inside:
                moved = moved * region
            elif how.nu != "all":
                moved = moved * part.chosen(now, known, self._shape(q, covers)[2])
            part.rows.add_change(total, moved)
        self._fill(total, q, covers, known)
        return _finite(total)

    def _fill(self, total: torch.Tensor, q: torch.Tensor, covers: Covers | None, known: Known) -> None:
        """Adds what makes the regions of removed words look like their surroundings, every patch once."""
        filling = [
            (part, self.region(part, q, covers, known)) for part in self.parts if self.plan.is_filled(part.concept)
        ]
        if not filling:
            return
        taken = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
        for part in self.parts:
            if part.concept.is_placed:
                taken |= self.region(part, q, covers, known)
        outside = ~torch.stack([taken, *(region for _, region in filling)]).any(0)
        outside[:, : self._shape(q, covers)[2]] = False
        for part, region in filling:
            self._fill_one(total, part, q, region & ~taken, outside)
            taken |= region

    def _fill_one(
        self, total: torch.Tensor, part: Part, q: torch.Tensor, region: torch.Tensor, outside: torch.Tensor
    ) -> None:
        if not region.any() or not outside.any():
            return
        every, how = self.surroundings(), part.concept.settings
        edited = torch.tensor([edit.sub_unit for edit in self.plan.edits], device=q.device)
        chosen = every.strongest(q[outside], how.fill, edited)
        amounts = how.beta * every.atlas.target_levels(chosen.cpu(), how.level).to(q.device)
        rows = every.rows.select(chosen)
        rows.add_change(total, (amounts - rows.activations(q)) * region[..., None])

    @cached_property
    def linear_change(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the edit adds to the layer's weight and bias, where it is linear (`plan.is_linear`)."""
        d_in = self.parts[0].rows.weight.shape[1] if self.parts else 0
        device = self.parts[0].amounts.device if self.parts else None
        weight, bias = torch.zeros(self.d_out, d_in, device=device), torch.zeros(self.d_out, device=device)
        for part in self.parts:
            weight.index_add_(0, part.rows.units, part.rows.weight * (part.amounts - 1)[:, None])
            bias.index_add_(0, part.rows.units, part.rows.bias * (part.amounts - 1))
        return weight, bias

    def maps(self, q: torch.Tensor, covers: Covers | None = None) -> dict[str, tuple[Any, Any]]:
        """For every word how strongly it fires, and which share of its sub-units changes, `(tiles, patches)` each."""
        before = self._shape(q, covers)[2]
        found: dict[str, tuple[Any, Any]] = {}
        for part in self.parts:
            now = part.activations(q)
            fires = (now / firing_reference(part.reference)).clamp_min(0).mean(-1)
            if part.concept.is_placed or part.concept.settings.fits:
                touched = self.region(part, q, covers).float()
            else:
                touched = part.chosen(now, None, before).float().mean(-1)
                if self.plan.is_filled(part.concept) or part.rest is not None:
                    touched = touched.maximum(self.region(part, q, covers).float())
            found[part.concept.word] = (fires[:, before:].cpu().numpy(), touched[:, before:].cpu().numpy())
        return found


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(values).all():
        raise ModelError("the edit gives numbers that are not finite; use smaller gains (alpha, gamma, beta).")
    return values


def make_edited_forward(
    layer: nn.Module,
    prepared: Sequence[PreparedPlan | None],
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    covers: Sequence[Covers | None],
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> Callable[..., torch.Tensor]:
    """What stands for the layer's forward: its output as it is, plus the change of each picture's plan.

    Args:
        layer: the target.
        prepared: one for each picture of the batch, None for no plan; a single one is for all pictures.
        split: the layer's input by picture, `(tiles, patches, d_in)` each.
        covers: for each picture, which of its patches a region covers.
        join: pictures again as the layer has them, the other way round from `split`.
    """
    active = [one if one is not None and one.plan.has_effect else None for one in prepared]
    alone = active[0] if len(active) == 1 else None

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if not any(active):
            return original(x)
        if alone is not None and alone.plan.is_linear:
            # The layer runs once, on a weight made for this plan: an edit of every patch costs nothing.
            weight, bias = layer_parameters(layer)
            more_weight, more_bias = alone.linear_change
            return _finite(F.linear(x, (weight + more_weight).to(x.dtype), (bias + more_bias).to(x.dtype)))
        out = original(x)
        pictures = split(x)
        plans = active * len(pictures) if len(active) == 1 else active
        where = list(covers) * len(pictures) if len(covers) == 1 else covers
        changes = [
            one.output_change(q, covering)
            if one is not None
            else torch.zeros(*q.shape[:2], out.shape[-1], device=q.device)
            for q, one, covering in zip(pictures, plans, where, strict=True)
        ]
        # Checked in the model's own type too: half precision ends where full precision is still far from its end.
        return _finite(out + join(changes).reshape(out.shape).to(out.dtype))

    return compute


def make_resumed_forward(
    pictures: Sequence[torch.Tensor],
    rows: Sequence[tuple[int, PreparedPlan | None, Covers | None]],
    join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
) -> Callable[..., torch.Tensor]:
    """The same where the layer's inputs are known before: pictures that come again, under other plans, are shared.

    Args:
        pictures: the target's inputs, `(tiles, patches, d_in)` each.
        rows: for each row of the batch which picture it is, its plan, and what covers its patches.
        join: pictures one after the other as the layer has them.
    """

    def compute(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        shared: dict[int, tuple[torch.Tensor, Known]] = {}
        found = []
        for picture, prepared, covers in rows:
            q = pictures[picture]
            out, known = shared[picture] if picture in shared else shared.setdefault(picture, (original(q), {}))
            if prepared is not None and prepared.plan.has_effect:
                out = _finite(out + prepared.output_change(q, covers, known).to(out.dtype))
            found.append(out)
        return join(found).reshape(*x.shape[:-1], -1)

    return compute
