"""Labels for any method's dictionary: the same dissection on the same images for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.calibration import Calibration, finish_calibration
from elude_steer.atlas.labels import Labels
from elude_steer.atlas.vocabulary import read_vocabulary
from elude_steer.errors import SpecError
from elude_steer.evaluation.baselines.dictionary import Dictionary, Levels, NamedDictionary
from elude_steer.evaluation.compare.image_activations import ImageActivations
from elude_steer.method.clip_dissect import Dissection, dissect
from elude_steer.method.concept_fit import StreamSums, fit_detectors, measure_presence, strongest_mean
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
    fit: float | None = 0.4,
) -> NamedDictionary:
    """Label the latents by dissection, and compute their reference activations; then calibrate the words.

    Args:
        dictionary: the latents.
        images: the images to label them with.
        vocabulary: the words to choose from.
        settings: settings of the dissection.
        keep: number of words to keep for each latent.
        instances: number of images whose mean activation is the reference.
        fit: see `calibrate_dictionary`; None leaves the calibration out.
    """
    read = [(active.max(0).values, active.mean(0)) for active in map(dictionary.read, images.layer_inputs())]
    pooled, means = (torch.stack(values) for values in zip(*read, strict=True))  # (images, S)
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
    calibration = None if fit is None else calibrate_dictionary(dictionary, images, vocabulary, fit, means)
    return with_key(NamedDictionary(dictionary, labels, Levels(reference), calibration))


def with_key(latents: NamedDictionary) -> NamedDictionary:
    """The latents with the keys by which stored results of sweeps are found again, and no settings of their own."""
    return replace(latents, about={"name": latents.name, "atoms": latents.fingerprint})


@torch.inference_mode()
def calibrate_dictionary(
    dictionary: Dictionary,
    images: ImageActivations,
    vocabulary: Vocabulary,
    fit: float,
    means: torch.Tensor | None = None,
) -> Calibration:
    """Find the detectors and directions of all words, as the build of an atlas does.

    Args:
        dictionary: the latents.
        images: the images to find them with.
        vocabulary: the words.
        fit: the share of the highest reading that the patches of a region have.
        means: `(images, S)` mean activations over the patches of each image, where they are known.
    """
    if not len(images.vectors):
        raise SpecError("there are no images to calibrate with.")
    presence = measure_presence(torch.from_numpy(np.array(images.vectors)).float() @ vocabulary.vectors.float().T)
    if means is None:
        means = torch.stack([dictionary.read(q).mean(0) for q in images.layer_inputs()])
    weights, bias = fit_detectors(means, presence)
    detectors, offset = weights.float(), bias.float()
    sums = StreamSums.empty(len(weights), dictionary.write.shape[1])
    strongest, mean = [], []
    for (q, stream), degree in zip(images.activations(), presence.degree, strict=True):
        readings = dictionary.read(q) @ detectors.T + offset
        sums.add(readings, stream, degree, fit)
        strongest.append(strongest_mean(readings))
        mean.append(readings.mean(0))
    pooled = torch.stack(strongest), torch.stack(mean)
    words = torch.arange(len(vocabulary.words))
    return finish_calibration(words, weights, bias, sums.directions(), pooled, presence, fit)
