"""Steering that is told what every patch shows: the baseline of the stream that needs no labels of latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elude_steer.atlas.calibration import Calibration, finish_calibration
from elude_steer.evaluation.baselines.dictionary import Dictionary
from elude_steer.evaluation.compare.scene_activations import SceneActivations
from elude_steer.method.concept_fit import Presence, strongest_mean

_RIDGE = 1e-3  # of the mean variance of a latent


@torch.inference_mode()
def true_directions(scenes: SceneActivations, words: Sequence[str]) -> torch.Tensor:
    """For each word, the mean stream of the patches that show it minus that of all others, `(W, d_out)`.

    Words that no patch shows have a direction of zero.
    """
    rows = {word: row for row, word in enumerate(words)}
    sums, counts = torch.zeros(0), torch.zeros(len(words), dtype=torch.float64)
    total, patches = torch.zeros(0), 0
    for (_, stream), shown in zip(scenes.activations(), scenes.shown_by_image(), strict=True):
        if not patches:
            sums = torch.zeros(len(words), stream.shape[1], dtype=torch.float64)
            total = torch.zeros(stream.shape[1], dtype=torch.float64)
        total, patches = total + stream.double().sum(0), patches + len(stream)
        for word in set(shown.tolist()) & set(rows):
            there = torch.from_numpy(shown == word)
            sums[rows[word]] += stream[there].double().sum(0)
            counts[rows[word]] += int(there.sum())
    others = (total - sums) / (patches - counts).clamp_min(1)[:, None]
    return ((sums / counts.clamp_min(1)[:, None] - others) * (counts > 0)[:, None]).float()


@torch.inference_mode()
def calibrate_with_truth(
    dictionary: Dictionary, scenes: SceneActivations, vocabulary: Sequence[str], fit: float
) -> Calibration:
    """Detectors that are fitted to what every patch shows, and true directions, for the words of the dictionary.

    Args:
        dictionary: latents with names, of which detectors are linear combinations.
        scenes: the scenes to find them with.
        vocabulary: all words; its numbers identify those of the dictionary.
        fit: the share of the highest reading that the patches of a region have.
    """
    words = list(dictionary.names)
    weights, bias = _fit_to_patches(dictionary, scenes, words)
    strongest, mean, shows = [], [], []
    for q, shown in zip(scenes.layer_inputs(), scenes.shown_by_image(), strict=True):
        readings = dictionary.read(q) @ weights.float().T + bias.float()
        strongest.append(strongest_mean(readings))
        mean.append(readings.mean(0))
        names = set(shown.tolist())
        shows.append(torch.tensor([word in names for word in words]))
    there = torch.stack(shows)
    presence = Presence(there, ~there, there.float())
    numbers = torch.tensor([vocabulary.index(word) for word in words])
    pooled = torch.stack(strongest), torch.stack(mean)
    return finish_calibration(numbers, weights, bias, true_directions(scenes, words), pooled, presence, fit)


def _fit_to_patches(
    dictionary: Dictionary, scenes: SceneActivations, words: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares from the latents of a patch to whether it shows each word: weights `(W, S)`, biases `(W,)`."""
    size, names = len(dictionary), np.array(words)
    gram, shared = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, len(words), dtype=torch.float64)
    total, shares, patches = torch.zeros(size, dtype=torch.float64), torch.zeros(len(words), dtype=torch.float64), 0
    for q, shown in zip(scenes.layer_inputs(), scenes.shown_by_image(), strict=True):
        x, y = dictionary.read(q).double(), torch.from_numpy(shown[:, None] == names).double()
        gram, shared = gram + x.T @ x, shared + x.T @ y
        total, shares, patches = total + x.sum(0), shares + y.sum(0), patches + len(x)
    centre, share = total / patches, shares / patches
    spread = gram / patches - torch.outer(centre, centre)
    ridge = _RIDGE * spread.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    weights = torch.linalg.solve(spread + ridge, shared / patches - torch.outer(centre, share)).T
    return weights, -(weights @ centre)  # 0 on an average patch, which does not show the word
