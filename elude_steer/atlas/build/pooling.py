"""Stages over whole images: what each does to every sub-unit, where each sub-unit is strongest, and what is common.

Images go through in fixed batches, one file for each shard, so that memory does not grow with their number.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elude_steer.atlas.atlas import Atlas, References
from elude_steer.atlas.build.stages import Build, StageFolder
from elude_steer.atlas.build.token_store import strongest_patches
from elude_steer.atlas.familiarity import MAX_IMAGES, describe_image, measure_familiarity
from elude_steer.method.clip_dissect import Dissection
from elude_steer.method.layers import sub_unit_parameters
from elude_steer.models.images import Item
from elude_steer.utils.files import read_tensors, write_tensors


def pool_activations(build: Build, split: StageFolder, atlas: Atlas) -> StageFolder:
    """Write the strongest patch of every sub-unit, then of every unit, in each image, and the image's vector."""
    step = build.image_step(build.spec.labels.images)
    folder = build.open_stage("pooled", split.key, step, "vectors")
    device = build.tower.device
    unit_weight, unit_bias = build.weight.cpu(), build.bias.cpu()
    weight, bias = sub_unit_parameters(unit_weight, unit_bias, atlas.members(), atlas.units)
    weight, bias = torch.cat([weight, unit_weight]).to(device), torch.cat([bias, unit_bias]).to(device)

    def process(build: Build, batch: Sequence[Item]) -> list[dict[str, torch.Tensor]]:
        rows = []
        for item, q in build.cache.layer_inputs(batch):
            positions = build.tower.token_indices(q.shape[1])
            values, places = strongest_patches(q, positions, weight, bias)
            index, tokens = torch.tensor(item.index, dtype=torch.int32), torch.tensor(q.shape[1])
            vector = describe_image(q, positions)
            rows.append({"values": values, "places": places, "images": index, "tokens": tokens, "vectors": vector})
        return rows

    write_image_rows(build, "pooling", folder, step, process)
    return folder


def rank_images(build: Build, pooled: StageFolder) -> StageFolder:
    """Write the images where each sub-unit and each unit is strongest, strongest first; see `read_ranking`."""
    k = max(read_dissection(build).top_k, build.spec.references.keep)
    folder = build.open_stage("strongest", pooled.key, k)
    path = _ranking_path(folder)

    def work() -> None:
        best: dict[str, torch.Tensor] = {}
        images, tokens = [], []
        start = 0
        for shard in read_image_rows(pooled):
            rows = torch.arange(start, start + len(shard["values"]), dtype=torch.int32)
            new = {"values": shard["values"].T, "places": shard["places"].T}
            new["rows"] = rows.expand(len(new["values"]), -1)
            best = {name: torch.cat([best[name], new[name]], 1) if best else new[name] for name in new}
            order = best["values"].sort(dim=1, descending=True, stable=True).indices[:, :k]
            best = {name: tensor.gather(1, order) for name, tensor in best.items()}
            images.append(shard["images"].int())
            tokens.append(shard["tokens"].int())
            start += len(rows)
        best |= {"images": torch.cat(images), "tokens": torch.cat(tokens)}
        write_tensors(path, {name: tensor.contiguous() for name, tensor in best.items()})

    build.settle(folder, work, path)
    return folder


def read_dissection(build: Build) -> Dissection:
    """The settings of the labelling method, as the spec has them."""
    spec = build.spec.labels
    return Dissection.for_method(spec.method, top_k=spec.top_k, a=spec.a, lam=spec.lam, min_prob=spec.min_prob)


def read_ranking(folder: StageFolder) -> dict[str, torch.Tensor]:
    """The ranking of images for R sub-units and units.

    Returns:
        `values`, `places` and `rows`, `(R, k)`: the activation and place of the strongest patch, and the image's row
        among the images that were pooled; `images` and `tokens`, `(N,)`: the index in the image set and the tokens of a
        tile, for each of those rows.
    """
    return read_tensors(_ranking_path(folder))


def _ranking_path(folder: StageFolder) -> Path:
    return folder.path / "strongest.safetensors"


def add_references(build: Build, atlas: Atlas, ranking: StageFolder) -> Atlas:
    """The atlas with references to the strongest whole images instead of the strongest stored tokens."""
    best, keep, count = read_ranking(ranking), build.spec.references.keep, len(atlas)
    rows = best["rows"][:, :keep].long()  # (R, keep)
    tokens, images = best["tokens"][rows], best["images"][rows]
    ids = {item.index: item.id for item in build.images.items()}
    used = images.unique()
    images = torch.searchsorted(used, images).int()
    values, places = best["values"][:, :keep], best["places"][:, :keep]

    def make_references(part: slice, old: References) -> References:
        columns = (values[part], images[part], places[part] // tokens[part], places[part] % tokens[part])
        return References(old.activation, *(column.contiguous() for column in columns))

    return replace(
        atlas,
        references=make_references(slice(0, count), atlas.references),
        unit_references=make_references(slice(count, None), atlas.unit_references),
        image_ids=tuple(ids[int(index)] for index in used),
    )


def add_familiarity(build: Build, atlas: Atlas, pooled: StageFolder) -> Atlas:
    """The atlas with what the pooled images have in common, from at most `MAX_IMAGES` of them, evenly spread."""
    images = -(-(build.images.length or 0) // build.image_step(build.spec.labels.images))
    step, start, vectors = -(-images // MAX_IMAGES), 0, []
    for shard in read_image_rows(pooled):
        vectors.append(shard["vectors"][-start % step :: step])
        start += len(shard["vectors"])
    return replace(atlas, familiarity=measure_familiarity(torch.cat(vectors))) if vectors else atlas


def make_thumbnails(build: Build, atlas: Atlas) -> dict[str, bytes] | None:
    """JPEG files of the images that the atlas refers to, by file name; None if the spec asks for none."""
    side = build.spec.references.thumbnails
    if side is None or not build.is_main:
        return None
    numbers = {id: number for number, id in enumerate(atlas.image_ids)}
    thumbnails = {}
    for item in build.images.items():
        if item.id in numbers:
            image = item.read()[0].convert("RGB")
            image.thumbnail((side, side))
            data = io.BytesIO()
            image.save(data, "JPEG", quality=85)
            thumbnails[f"{numbers[item.id]:06d}.jpg"] = data.getvalue()
    return thumbnails


def write_image_rows(
    build: Build,
    label: str,
    folder: StageFolder,
    step: int,
    process: Callable[[Build, Sequence[Item]], list[dict[str, torch.Tensor]]],
) -> None:
    """Process every `step`-th image and write one file for each shard.

    Args:
        build: the build.
        label: what the progress bar is called.
        folder: where shards are written.
        step: which images are used.
        process: a batch of images to a row of named tensors for each image that can be read; it is given the build of
            the process that it runs in.
    """

    def work(shard: Any) -> None:
        number, batches = build.open_shard(shard, step)
        rows: list[dict[str, torch.Tensor]] = []
        for batch in batches:
            if build.workers.stopped.is_set():
                return
            rows += process(build, batch)
            build.advance(len(batch))
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
        write_tensors(_image_shard_path(folder, number), stacked)

    build.run_pieces(
        label,
        folder,
        build.shards(step),
        lambda shard: (_image_shard_path(folder, shard),),
        work,
        "images",
        size=lambda shard: build.shard_size(shard, step),
        total=-(-(build.images.length or 0) // step),
        groups=build.shard_groups(step),
    )


def _image_shard_path(folder: StageFolder, number: int) -> Path:
    return folder.path / f"shard-{number:06d}.safetensors"


def image_shard_paths(folder: StageFolder) -> list[Path]:
    """The files of all shards in order."""
    return sorted(folder.path.glob("shard-*.safetensors"))


def read_image_rows(folder: StageFolder) -> Iterator[dict[str, torch.Tensor]]:
    """The named tensors of each shard in order, one row for each image; empty shards are left out."""
    for path in image_shard_paths(folder):
        shard = read_tensors(path)
        if shard:
            yield shard
