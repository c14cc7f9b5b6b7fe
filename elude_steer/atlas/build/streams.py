"""A stage: the residual stream behind the layer, averaged over the tokens where each sub-unit fires.

A layer adds to what is already in the stream, and often writes against it: a sub-unit may fire for a concept whose unit
is low behind the layer. To make the model see that concept, set what the model reads, which is the stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.utils.files import read_tensors, write_tensors

FIRING_SHARE = 0.7  # a sub-unit counts as firing from this share of its reference activation
_GROUPS = 16  # groups of shards, each summed up in one file; fixed, because sums in another order round differently


def measure_streams(build: Build, split: StageFolder, atlas: Atlas) -> StageFolder | None:
    """Write sums of the stream where each sub-unit fires; None if the spec asks for no streams."""
    max_images = build.spec.references.streams
    if not max_images or not build.images.length:
        return None
    step = build.image_step(max_images)
    folder = build.open_stage("streams", split.key, step, build.spec.references.instances, FIRING_SHARE)
    weight, bias = sub_unit_parameters(build.weight.cpu(), build.bias.cpu(), atlas.members(), atlas.units)
    device = build.tower.device
    weight, bias = weight.to(device), bias.to(device)
    threshold = (FIRING_SHARE * firing_reference(atlas.references.activation)).to(device)

    def work(group: int) -> None:
        sums = torch.zeros(len(atlas), atlas.d_out, dtype=torch.float64)
        counts = torch.zeros(len(atlas), dtype=torch.float64)
        for number, batches in build.shards(step):
            for batch in batches if number % _GROUPS == group else ():
                if build.workers.stopped.is_set():
                    return
                for _, (q, stream) in build.cache.activations(batch):
                    positions = build.tower.token_indices(q.shape[1]).to(device)
                    # Tile by tile, because products of one shape round in one way.
                    for tile_inputs, tile_stream in zip(q, stream, strict=True):
                        activations = torch.addmm(bias, tile_inputs[positions].float(), weight.T)  # (tokens, S)
                        tile_sums, tile_counts = sum_where_firing(activations, tile_stream[positions], threshold)
                        sums += tile_sums.cpu().double()
                        counts += tile_counts.cpu().double()
        write_tensors(_group_path(folder, group), {"sums": sums, "counts": counts})

    build.run_pieces("streams", range(_GROUPS), lambda group: _group_path(folder, group), work, "groups")
    build.workers.barrier()
    return folder


def add_streams(atlas: Atlas, streams: StageFolder | None) -> Atlas:
    """The atlas with the streams that were measured."""
    if streams is None:
        return atlas
    parts = [read_tensors(_group_path(streams, group)) for group in range(_GROUPS)]
    sums, counts = (sum(part[name] for part in parts) for name in ("sums", "counts"))
    return replace(atlas, streams=subtract_mean(torch.as_tensor(sums), torch.as_tensor(counts)))


def _group_path(folder: StageFolder, group: int) -> Path:
    return folder.path / f"group-{group:02d}.safetensors"


def sum_where_firing(
    activations: torch.Tensor, stream: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the stream over the tokens where each sub-unit fires, `(S, d_out)`, and count those tokens, `(S,)`.

    Args:
        activations: `(tokens, S)`.
        stream: `(tokens, d_out)`.
        threshold: `(S,)` the activation from which each sub-unit fires.
    """
    fires = (activations >= threshold).float()
    return fires.T @ stream.float(), fires.sum(0)


def subtract_mean(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean stream of each sub-unit minus the mean over all, `(S, d_out)`; zero for one that never fires.

    In float16, or in float32 where that would overflow.
    """
    fires = counts > 0
    means = sums / counts.clamp_min(1)[:, None]
    overall = means[fires].mean(0) if fires.any() else 0.0
    streams = (means - overall) * fires[:, None]
    return streams.half() if streams.abs().max() <= torch.finfo(torch.float16).max else streams.float()


def firing_reference(activation: torch.Tensor) -> torch.Tensor:
    """Reference activations to compare with; infinite for a sub-unit that never fires."""
    return torch.where(activation > 1e-6, activation, torch.inf)
