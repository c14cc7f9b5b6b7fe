"""What a method's latents mean, and how faithful they are: the same measures for every dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from elude_steer import toyland
from elude_steer.evaluation.baselines.dictionary import NamedDictionary, group_by_unit
from elude_steer.evaluation.compare.scene_activations import SceneActivations, class_numbers
from elude_steer.evaluation.measures.faithfulness import R2, accuracy
from elude_steer.evaluation.measures.geometry import collinearity, effective_rank
from elude_steer.evaluation.measures.monosemanticity import gather_peaks, mean_percent
from elude_steer.evaluation.measures.purity import CLEAN, dominant_concepts
from elude_steer.evaluation.measures.stability import stability
from elude_steer.models.vlm import Vlm
from elude_steer.toyland.scenes import CLUTTER
from elude_steer.utils.files import read_tensors


@torch.inference_mode()
def measure_dictionary(
    latents: NamedDictionary, vlm: Vlm, scenes: SceneActivations, head: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """Measures on scenes that labelled nothing: MS-Score, clean share, labels, faithfulness, geometry.

    Args:
        latents: the latents and their labels.
        vlm: the model.
        scenes: the held-out scenes.
        head: a classifier from the layer's output to what a token shows.
    """
    dictionary, layer = latents.dictionary, vlm.layer
    peaks = gather_peaks(scenes.layer_inputs(), dictionary.read, layer)
    r2 = R2()
    for q in scenes.layer_inputs():
        r2.add(layer(q), dictionary.reconstruct(q))
    classes = map(class_numbers, scenes.shown_by_image())
    head_accuracy = accuracy(
        lambda q: head(dictionary.reconstruct(q)), zip(scenes.layer_inputs(), classes, strict=True)
    )
    fires = peaks.highest > 0
    dominant = dominant_concepts(map(dictionary.read, scenes.layer_inputs()), scenes.shown)
    clean = {
        number: name
        for number, (name, share) in enumerate(dominant)
        if fires[number] and share >= CLEAN and name != CLUTTER
    }
    correct = sum(latents.labels[number] == name for number, name in clean.items())
    alive = int(fires.sum())
    return {
        "latents": len(dictionary),
        "never fire": 1 - alive / len(dictionary),
        "MS-Score": mean_percent(peaks.scores()),
        "clean": len(clean) / max(1, alive),
        "objects": len(set(clean.values()) & set(toyland.OBJECTS)),
        "named rightly": correct / max(1, len(clean)),
        "R2": r2.value,
        "accuracy": head_accuracy,
        "effective rank": effective_rank(dictionary.atoms),
        "collinearity": collinearity(dictionary.atoms),
    }


def mean_stability(paths: Sequence[Path]) -> float:
    """The mean similarity of the dictionaries in all pairs of the files that exist."""
    runs = [group_by_unit(**read_tensors(path)) for path in paths if path.exists()]
    pairs = list(combinations(runs, 2))
    return float(np.mean([stability(a, b) for a, b in pairs])) if pairs else float("nan")
