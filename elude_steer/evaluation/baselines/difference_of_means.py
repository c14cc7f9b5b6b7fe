"""Difference of means: one supervised direction for each concept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary, linear_outputs


def difference_of_means(
    name: str, layer: nn.Module, images: Sequence[tuple[torch.Tensor, Any]], concepts: Sequence[str]
) -> Dictionary:
    """For each concept, the mean output of the tokens that show it minus the mean output of all others.

    Args:
        name: the method's name.
        layer: the layer whose output is used.
        images: for each image the layer's inputs, `(tokens, d_in)`, and the concept that every token shows.
        concepts: the concepts that get a latent each; those that no token shows are left out.
    """
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    total, count, outputs_for = torch.zeros(0), 0, linear_outputs(layer)
    for q, shown in images:
        out, names = outputs_for(q).double(), np.asarray(shown)
        total = out.sum(0) if not count else total + out.sum(0)
        count += len(out)
        for concept in set(names) & set(concepts):
            here = torch.from_numpy(names == concept)
            sums[concept] = sums.get(concept, torch.zeros_like(total)) + out[here].sum(0)
            counts[concept] = counts.get(concept, 0) + int(here.sum())
    present = [concept for concept in dict.fromkeys(concepts) if counts.get(concept)]
    if not present:
        raise SpecError("no token shows any of the concepts; there are no means to compare.")
    atoms = torch.stack([sums[c] / counts[c] - (total - sums[c]) / max(1, count - counts[c]) for c in present]).float()
    atoms, base = F.normalize(atoms, dim=1), (total / count).float()

    def read(q: torch.Tensor) -> torch.Tensor:
        return (outputs_for(q) - base) @ atoms.T

    units = torch.zeros(len(atoms), dtype=torch.long)
    return Dictionary(name, read, atoms, base, atoms, units, tuple(present))
