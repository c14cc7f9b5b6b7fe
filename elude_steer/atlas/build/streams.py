"""What a layer's units carry where a sub-unit fires: the residual stream behind the layer, seen from each sub-unit.

A layer adds to what is already in the stream, and often writes against it: a sub-unit may fire for a thing whose unit
is low behind the layer. Who wants the model to see that thing has to set what the model reads, which is the stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from elude_steer.atlas.atlas import Atlas
from elude_steer.atlas.build import tokens
from elude_steer.atlas.build.stages import Build
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.utils.files import read_tensors, write_tensors
from elude_steer.utils.fingerprint import make_key

FIRING_SHARE = 0.7  # of its reference activation: from there on a sub-unit counts as firing
_GROUPS = 16  # of pictures, each summed up in one file; fixed, because sums in another order round differently


def with_streams(run: Build, atlas: Atlas, key: str) -> Atlas:
    """The atlas with its streams, as far as its spec asks for them.

    Args:
        run: the build.
        atlas: whose sub-units.
        key: tells it from others.
    """
    wanted, length = run.spec.references.streams, run.images.length
    if not wanted or not length:
        return atlas
    every = -(-length // wanted)
    folder = run.stage_folder("streams", make_key("streams", key, every, run.spec.references.instances, FIRING_SHARE))

    def path(group: int) -> Path:
        return folder / f"group-{group:02d}.safetensors"

    weight, bias = sub_unit_parameters(run.weight.cpu(), run.bias.cpu(), atlas.members(), atlas.units)
    device = run.tower.device
    weight, bias = weight.to(device), bias.to(device)
    floor = (FIRING_SHARE * firing_reference(atlas.references.activation)).to(device)

    def work(group: int) -> None:
        sums = torch.zeros(len(atlas), atlas.d_out, dtype=torch.float64)
        counts = torch.zeros(len(atlas), dtype=torch.float64)
        for number, batches in tokens.iterate_shards(run.images, run.plan(), every):
            for batch in batches if number % _GROUPS == group else ():
                if run.workers.stopped.is_set():
                    return
                for _, (q, stream) in run.cache.activations(batch):
                    kept = run.tower.token_indices(q.shape[1]).to(device)
                    for tile, carried in zip(q, stream, strict=True):  # one by one: of one shape, rounded one way
                        now = torch.addmm(bias, tile[kept].float(), weight.T)  # (tokens, S)
                        more, seen = sum_where_firing(now, carried[kept], floor)
                        sums += more.cpu().double()
                        counts += seen.cpu().double()
        write_tensors(path(group), {"sums": sums, "counts": counts})

    run.each("streams", range(_GROUPS), path, work, "groups")
    run.workers.barrier()
    parts = [read_tensors(path(group)) for group in range(_GROUPS)]
    sums, counts = (sum(part[name] for part in parts) for name in ("sums", "counts"))
    return replace(atlas, streams=subtract_mean(torch.as_tensor(sums), torch.as_tensor(counts)))


def sum_where_firing(
    activations: torch.Tensor, stream: torch.Tensor, floor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the stream over the tokens where each sub-unit fires, `(S, d_out)`, and how many they are, `(S,)`.

    Args:
        activations: `(tokens, S)`.
        stream: `(tokens, d_out)`.
        floor: `(S,)` the activation from which on each fires.
    """
    fires = (activations >= floor).float()
    return fires.T @ stream.float(), fires.sum(0)


def subtract_mean(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean stream of each sub-unit less the mean of all, `(S, d_out)`; zero for one that never fires.

    In float16, or in float32 where that would overflow.
    """
    ever = counts > 0
    means = sums / counts.clamp_min(1)[:, None]
    middle = means[ever].mean(0) if ever.any() else 0.0
    found = (means - middle) * ever[:, None]
    return found.half() if found.abs().max() <= torch.finfo(torch.float16).max else found.float()


def firing_reference(reference: torch.Tensor) -> torch.Tensor:
    """Reference activations to compare with; a sub-unit that never fires is never on."""
    return torch.where(reference > 1e-6, reference, torch.inf)
