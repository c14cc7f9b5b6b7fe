"""Purity: whether the tokens that activate a latent most all show the same thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

STRONGEST = 100  # tokens that a latent is judged by
CLEAN = 0.6  # share of them that must show one thing for the latent to be clean


def dominant_concepts(activations: Iterable[torch.Tensor], shown: np.ndarray) -> list[tuple[str, float]]:
    """For each latent, what most of its strongest tokens show, and the share of them that do.

    Args:
        activations: `(tokens, latents)` of one image after the other; each is read once.
        shown: what every token shows, in the same order.
    """
    best, tokens, start = torch.empty(0), torch.empty(0, dtype=torch.long), 0
    for values in activations:
        rows = torch.arange(start, start + len(values))[:, None].expand_as(values)
        start += len(values)
        best, tokens = (torch.cat([best, values]), torch.cat([tokens, rows])) if len(best) else (values, rows)
        order = best.topk(min(STRONGEST, len(best)), dim=0).indices
        best, tokens = best.gather(0, order), tokens.gather(0, order)
    counted = (Counter(shown[column]).most_common(1)[0] for column in tokens.T.numpy())
    return [(str(name), count / len(tokens)) for name, count in counted]
