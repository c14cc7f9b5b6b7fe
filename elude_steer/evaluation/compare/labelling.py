"""Labels for any method's dictionary: the same dissection on the same images for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.build.streams import FIRING_SHARE, firing_reference, subtract_mean, sum_where_firing
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.evaluation.baselines.dictionary import Dictionary, Levels, NamedDictionary
from elude_steer.evaluation.compare.image_activations import ImageActivations
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.models.dual_encoder import load_dual_encoder


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The words that label latents.

    Attributes:
        encoder: the dual encoder of an atlas's spec.
        words: the vocabulary.
        vectors: `(words, d)` embeddings of the words in the spec's template.
    """

    encoder: Any
    words: list[str]
    vectors: torch.Tensor

    @classmethod
    def load(cls, spec: Mapping[str, Any]) -> Vocabulary:
        """The dual encoder and the vocabulary of an atlas's spec."""
        labels = spec["labels"]
        encoder = load_dual_encoder(labels["scorer"], library=labels["library"], pretrained=labels["pretrained"])
        words = list(read_vocabulary(labels["vocabulary"], stop_words=labels["stop_words"]))
        return cls(encoder, words, encoder.embed_texts([labels["template"].replace("{}", word) for word in words]))


@torch.inference_mode()
def label_dictionary(
    dictionary: Dictionary,
    images: ImageActivations,
    vocabulary: Vocabulary,
    settings: Dissection,
    *,
    keep: int = 32,
    instances: int = 16,
) -> NamedDictionary:
    """Label the latents by dissection, and compute their reference activations and streams.

    Args:
        dictionary: the latents.
        images: the images to label them with.
        vocabulary: the words to choose from.
        settings: settings of the dissection.
        keep: number of words to keep for each latent.
        instances: number of images whose mean activation is the reference.
    """
    pooled = torch.stack([dictionary.read(q).max(0).values for q in images.layer_inputs()])  # (images, S)
    reference = pooled.sort(dim=0, descending=True).values[:instances].mean(0)
    count, width = len(dictionary), min(keep, len(vocabulary.words))
    words, scores = np.full((count, width), -1, np.int32), np.full((count, width), -np.inf, np.float32)
    if dictionary.names:
        words[:, 0] = [vocabulary.words.index(name) for name in dictionary.names]
        scores[:, 0] = 0
    else:
        alive = (pooled.amax(0) > 0) & (pooled.amax(0) > pooled.amin(0))
        similarities = torch.from_numpy(np.array(images.vectors)).float() @ vocabulary.vectors.float().T
        found = dissect(pooled[:, alive], similarities, settings, keep=width)
        words[alive.numpy()], scores[alive.numpy()] = found.words.int().numpy(), found.scores.numpy()
    groups = np.arange(count, dtype=np.int32)
    labels = Labels(tuple(vocabulary.words), words, scores, groups, {"pictures": len(images), **asdict(settings)})
    labelled = NamedDictionary(dictionary, labels, Levels(reference), _mean_streams(dictionary, images, reference))
    # Stored results of sweeps are found again by these.
    return replace(labelled, about={"name": labelled.name, "atoms": labelled.fingerprint})


def _mean_streams(dictionary: Dictionary, images: ImageActivations, reference: torch.Tensor) -> torch.Tensor:
    """The mean stream where each latent fires, minus the mean over all latents, `(S, d_out)`."""
    floor = FIRING_SHARE * firing_reference(reference)
    sums = torch.zeros(len(dictionary), dictionary.write.shape[1], dtype=torch.float64)
    counts = torch.zeros(len(dictionary), dtype=torch.float64)
    for q, stream in images.activations():
        more, firing = sum_where_firing(dictionary.read(q), stream, floor)
        sums += more.double()
        counts += firing.double()
    return subtract_mean(sums, counts)
