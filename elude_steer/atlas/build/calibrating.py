"""The last stage: what tells each word of the vocabulary in an image, where, and what it adds to the stream.

See `method/concept_fit.py` for how. The mean activations of an image come from the stage `pooled`; one more pass over
the images gives the readings of the detectors on patches, and the stream there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.labelling import Labelling
from elude_steer.atlas.build.pooling import read_image_rows
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.atlas.calibration import Calibration, finish_calibration
from elude_steer.method.concept_fit import PEAKS, Presence, StreamSums, fit_detectors, measure_presence, strongest_mean
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.utils.files import read_tensors, write_tensors
from elude_steer.utils.threads import use_threads

MAX_WORDS = 4096  # calibrated words; of a larger vocabulary those that label sub-units come first
MIN_IMAGES = 100  # with fewer images nothing is calibrated
_GROUPS = 16  # groups of shards, each summed up in one file; fixed, because sums in another order round differently


@dataclass(frozen=True, eq=False)
class _Fit:
    """What is known before the pass over the images.

    Attributes:
        words: `(W,)` numbers in the vocabulary.
        weights: `(W, S)` of the detectors.
        bias: `(W,)` of the detectors.
        presence: of the words in the images.
        images: `(N,)` the indices of the images.
        step: every how many images are used.
        folded: `(W, d_in)` and `(W,)` the detectors as functions of the layer's input.
    """

    words: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    presence: Presence
    images: torch.Tensor
    step: int
    folded: tuple[torch.Tensor, torch.Tensor]


def add_calibration(
    build: Build, atlas: Atlas, labelling: Labelling, pooled: StageFolder, vectors: StageFolder
) -> Atlas:
    """The atlas with its calibration; unchanged if the spec asks for none, or if there are too few images."""
    spec = build.spec.calibration
    if not spec.images:
        return atlas
    fit = _fit_words(build, atlas, labelling, pooled, vectors)
    if fit is None:
        return atlas
    texts = [labelling.vocabulary[word] for word in fit.words.tolist()]
    causes = (texts, build.spec.labels.template, fit.step, spec.fit, PEAKS)
    folder = build.open_stage("calibration", pooled.key, vectors.key, *causes)
    numbers = {int(index): row for row, index in enumerate(fit.images.tolist())}
    d_out = atlas.d_out

    def work(group: int) -> None:
        # The detectors are linear in the layer's input, so the sub-units need not be computed one by one.
        detectors, offset = (tensor.to(build.tower.device) for tensor in fit.folded)
        sums = StreamSums.empty(len(fit.words), d_out)
        rows: dict[str, list[torch.Tensor]] = {"images": [], "strongest": [], "mean": []}
        for shard in islice(build.shards(fit.step), group, None, _GROUPS):
            _, batches = build.open_shard(shard, fit.step)
            for batch in batches:
                if build.workers.stopped.is_set():
                    return
                for item, (q, stream) in build.cache.activations(batch):
                    if item.index not in numbers:
                        continue
                    positions = build.tower.token_indices(q.shape[1]).to(q.device)
                    # Tile by tile, because products of one shape round in one way.
                    tiles = [torch.addmm(offset, tile[positions].float(), detectors.T).cpu() for tile in q]
                    readings, there = torch.cat(tiles), stream[:, positions].flatten(0, 1).cpu()
                    if not (readings.isfinite().all() and there.isfinite().all()):
                        continue  # a model in float16 may overflow
                    sums.add(readings, there, fit.presence.degree[numbers[item.index]], spec.fit)
                    rows["images"].append(torch.tensor(numbers[item.index]))
                    rows["strongest"].append(strongest_mean(readings))
                    rows["mean"].append(readings.mean(0))
        stacked = {name: torch.stack(values) for name, values in rows.items() if values}
        write_tensors(_group_path(folder, group), {**vars(sums), **stacked})

    build.run_pieces("calibrating", folder, range(_GROUPS), lambda group: (_group_path(folder, group),), work, "groups")
    build.workers.barrier()
    return replace(atlas, calibration=_assemble(folder, fit, spec.fit))


def _fit_words(
    build: Build, atlas: Atlas, labelling: Labelling, pooled: StageFolder, vectors: StageFolder
) -> _Fit | None:
    """Fit the detectors to the dual encoder; None with too few images."""
    shards = list(read_image_rows(pooled))
    images = torch.cat([shard["images"] for shard in shards])
    inputs = torch.cat([shard["vectors"] for shard in shards]).double()  # (N, d_in)
    embedded = torch.cat([shard["vectors"] for shard in read_image_rows(vectors)])
    finite = inputs.isfinite().all(1)
    if finite.sum() < MIN_IMAGES:
        return None
    part = -(-len(images) // max(MIN_IMAGES, build.spec.calibration.images))
    step = part * build.image_step(build.spec.labels.images)
    chosen = finite & (images % step == 0)
    images, inputs, embedded = images[chosen], inputs[chosen], embedded[chosen]
    words = choose_words(atlas, len(labelling.vocabulary))
    template = build.spec.labels.template
    texts = labelling.encoder.embed_texts([template.replace("{}", labelling.vocabulary[word]) for word in words])
    weight, bias = sub_unit_parameters(build.weight.cpu(), build.bias.cpu(), atlas.members(), atlas.units)
    with use_threads(1):  # a factorization on several threads rounds differently
        presence = measure_presence(embedded.float() @ texts.float().T)
        means = inputs @ weight.double().T + bias.double()
        weights, offset = fit_detectors(means, presence)
        folded = (weights @ weight.double()).float(), (weights @ bias.double() + offset).float()
    return _Fit(torch.tensor(words), weights, offset, presence, images, step, folded)


def choose_words(atlas: Atlas, count: int) -> list[int]:
    """The words to calibrate, by their numbers in the vocabulary of `count` words."""
    if count <= MAX_WORDS or atlas.labels is None:
        return list(range(count))[:MAX_WORDS]
    words, counts = np.unique(atlas.labels.words[:, 0], return_counts=True)
    order = np.lexsort((words, -counts))
    named = [int(word) for word in words[order] if word >= 0]
    chosen = set(named[:MAX_WORDS])
    rest = (word for word in range(count) if word not in chosen)
    while len(chosen) < MAX_WORDS:
        chosen.add(next(rest))
    return sorted(chosen)


def _assemble(folder: StageFolder, fit: _Fit, share: float) -> Calibration | None:
    parts = [read_tensors(_group_path(folder, group)) for group in range(_GROUPS)]
    sums = StreamSums(*(torch.stack([part[name] for part in parts]).sum(0) for name in StreamSums.__dataclass_fields__))
    read = [part for part in parts if "images" in part]
    if not read:
        return None  # the stream of every image overflowed
    rows = torch.cat([part["images"] for part in read])
    order = rows.argsort()
    strongest, mean = (torch.cat([part[name] for part in read])[order] for name in ("strongest", "mean"))
    presence = Presence(*(getattr(fit.presence, name)[rows[order]] for name in ("shows", "lacks", "degree")))
    known = presence.shows.any(0) & presence.lacks.any(0)  # of a part of the images, none may show a word
    with use_threads(1):
        directions = sums.directions()
    presence = Presence(presence.shows[:, known], presence.lacks[:, known], presence.degree[:, known])
    pooled = strongest[:, known], mean[:, known]
    return finish_calibration(
        fit.words[known], fit.weights[known], fit.bias[known], directions[known], pooled, presence, share
    )


def _group_path(folder: StageFolder, group: int) -> Path:
    return folder.path / f"group-{group:02d}.safetensors"
