"""Two stages: split each unit into sub-units (paper 3.3), then assemble the atlas from all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.build.stages import Build, StageFolder, block_path
from elude_steer.atlas.build.token_store import TokenStore, strongest_instances
from elude_steer.atlas.build.unit_clusters import clusters_path
from elude_steer.atlas.weights import describe_weights
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.method.splitting import split_unit
from elude_steer.utils.files import read_tensors, write_tensors
from elude_steer.utils.fingerprint import versions


def split_units(build: Build, tokens: StageFolder, clusters: StageFolder) -> StageFolder:
    """Write each unit's sub-units and the strongest instances of both, one file for each block of units."""
    references = build.spec.references
    folder = build.open_stage("split", clusters.key, asdict(build.spec.split), [references.instances, references.keep])
    store = TokenStore(tokens.path)

    def work(block: range) -> None:
        write_tensors(block_path(folder, block), _split_block(build, store, clusters, block))

    files = lambda block: (block_path(folder, block),)  # noqa: E731
    build.run_pieces("splitting", folder, build.unit_blocks(), files, work, "blocks", needs=[tokens, clusters])
    return folder


def _split_block(build: Build, store: TokenStore, folder: StageFolder, block: range) -> dict[str, torch.Tensor]:
    spec, weight, bias = build.spec.split, build.weight.cpu(), build.bias.cpu()
    clusters = [read_tensors(clusters_path(folder, unit)) for unit in block]
    splits = [
        split_unit(
            found["representatives"],
            found["means"],
            weight[unit],
            float(bias[unit]),
            winner_rule=spec.winner_rule,
            rho_score=spec.rho_score,
            seed=spec.seed * 1_000_003 + unit,
        )
        for unit, found in zip(block, clusters, strict=True)
    ]
    members = torch.cat([split.members for split in splits])
    units = torch.tensor([unit for unit, split in zip(block, splits, strict=True) for _ in split.members])
    sizes = [found["sizes"] if len(found["sizes"]) > 1 else torch.zeros(1, dtype=torch.int32) for found in clusters]
    return {
        "members": torch.from_numpy(np.packbits(members.numpy(), axis=1)),
        "units": units.int(),
        "rho": torch.tensor([split.rho for split in splits]),
        "sizes": torch.cat(sizes),
        **_find_references(build, "sub_units", store, *sub_unit_parameters(weight, bias, members, units)),
        **_find_references(build, "units", store, weight[block.start : block.stop], bias[block.start : block.stop]),
    }


def _find_references(
    build: Build, kind: str, store: TokenStore, weight: torch.Tensor, bias: torch.Tensor
) -> dict[str, torch.Tensor]:
    spec, device = build.spec.references, build.tower.device
    count = max(spec.instances, spec.keep)
    values, rows = (t.cpu() for t in strongest_instances(store, weight.to(device), bias.to(device), count))
    return {
        f"{kind}.activation": values[:, : spec.instances].double().mean(1).float(),
        f"{kind}.values": values[:, : spec.keep].contiguous(),
        f"{kind}.rows": rows[:, : spec.keep].contiguous(),
    }


def assemble_atlas(build: Build, tokens: StageFolder, split: StageFolder, model: Mapping[str, Any]) -> Atlas:
    """Join all blocks into an atlas without labels and streams.

    Args:
        build: the build.
        tokens: the token store.
        split: the sub-units of all blocks.
        model: what the manifest says of the model: its id and what else identifies it.
    """
    store = TokenStore(tokens.path)
    blocks = [read_tensors(block_path(split, block)) for block in build.unit_blocks()]
    joined = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    images = np.unique(
        np.concatenate([store.places["image"][joined[f"{kind}.rows"]].ravel() for kind in ("sub_units", "units")])
    )
    about = {
        "name": build.spec.name,
        "model": dict(model),
        "class": type(build.tower.model).__name__,
        "layer": build.tower.layer_name,
        **describe_weights(build.tower.layer),
        "d_in": build.weight.shape[1],
        "d_out": len(build.weight),
        "units": len(build.weight),
        "sub_units": len(joined["units"]),
        "images": len(store.image_ids),
        "instances": len(store),
        "backend": build.backend,
        "spec": asdict(build.spec),
        "versions": versions(),
    }
    return Atlas(
        packed=joined["members"],
        units=joined["units"].long(),
        rho=joined["rho"],
        sizes=joined["sizes"],
        references=_references(joined, "sub_units", store.places, images),
        unit_references=_references(joined, "units", store.places, images),
        image_ids=tuple(store.image_ids[int(index)] for index in images),
        about=about,
    )


def _references(joined: Mapping[str, torch.Tensor], kind: str, places: np.ndarray, images: np.ndarray) -> References:
    """References by place in the image set; `images` are the indices of the images that the atlas refers to."""
    place = places[joined[f"{kind}.rows"].numpy()]
    columns = (np.searchsorted(images, place["image"]), place["tile"], place["token"])
    numbers = [torch.from_numpy(column.astype(np.int32)) for column in columns]
    return References(joined[f"{kind}.activation"], joined[f"{kind}.values"], *numbers)
