"""Pictures to stored instances, and from the store each unit's strongest (paper 3.1).

Every image is dealt with in a fixed batch and its tokens are drawn from its content and the seed, so the stored
numbers do not depend on how many threads or processes worked, or where a run was interrupted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.errors import ImageError, ModelError, StorageError
from elude_steer.models.images import ImageSet, Item
from elude_steer.models.vision import Tower
from elude_steer.utils.files import explain_write_errors, write_array, write_file

# Which image, tile of it and token of the tile an instance was.
PLACE = np.dtype([("image", np.int32), ("tile", np.uint16), ("token", np.uint16)])
# Rows of one product with the weights: fixed, because another shape may round differently.
_BLOCK = 1024


@dataclass(frozen=True)
class TokenPlan:
    """How instances are drawn: see `recipe.TokensSpec` for the first four; `shard` is images a file, for resuming."""

    per_image: int | str = 2
    seed: int = 42
    dtype: str = "float16"
    batch_size: int = 8
    shard: int = 64

    @property
    def batches_per_shard(self) -> int:
        """Whole batches only, so that the shard size cannot change a batch."""
        return max(1, self.shard // self.batch_size)


def iterate_shards(images: ImageSet, plan: TokenPlan, every: int = 1) -> Iterator[tuple[int, list[list[Item]]]]:
    """The work of collecting: numbered lists of batches, cut the same way every time; `every` thins the images out."""
    items, number = islice(images.items(), 0, None, every), 0
    while batches := [b for _ in range(plan.batches_per_shard) if (b := list(islice(items, plan.batch_size)))]:
        yield number, batches
        number += 1


class Counted:
    """An iterable that remembers how many pieces it gave."""

    def __init__(self, pieces: Iterable[Any]) -> None:
        self.pieces, self.seen = pieces, 0

    def __iter__(self) -> Iterator[Any]:
        for piece in self.pieces:
            self.seen += 1
            yield piece


def shard_path(folder: Path, number: int) -> Path:
    """Where a finished shard's summary lies; its arrays lie beside it and are written before."""
    return folder / f"shard-{number:06d}.json"


def collect_shard(
    tower: Tower,
    batches: Sequence[Sequence[Item]],
    plan: TokenPlan,
    folder: Path,
    number: int,
    *,
    look: Callable[[Sequence[Item], Sequence[Any]], list[torch.Tensor]] | None = None,
    stopped: threading.Event | None = None,
    step: Callable[[int], None] | None = None,
) -> None:
    """Runs one shard's images through the tower, or through `look`, and writes their drawn tokens."""
    tokens: list[np.ndarray] = []
    places: list[np.ndarray] = []
    ids: dict[int, str] = {}
    skipped: dict[str, str] = {}
    for batch in batches:
        if stopped is not None and stopped.is_set():
            return
        read = [(item, *loaded) for item in batch if (loaded := read_item(item, skipped)) is not None]
        items, images = [item for item, _, _ in read], [image for _, image, _ in read]
        encoded = (look(items, images) if look else tower.encode(images)) if read else []
        for (item, _, digest), q in zip(read, encoded, strict=True):
            drawn, place = _draw(tower, q, digest, item.index, plan)
            tokens.append(drawn)
            places.append(place)
            ids[item.index] = item.id
        if step:
            step(len(batch))
    summary = {"rows": sum(map(len, tokens)), "images": ids, "skipped": skipped}
    if tokens:
        path = shard_path(folder, number)
        write_array(path.with_suffix(".tokens.npy"), np.concatenate(tokens))
        write_array(path.with_suffix(".places.npy"), np.concatenate(places))
    write_file(shard_path(folder, number), lambda file: file.write(json.dumps(summary).encode()))


def _draw(tower: Tower, q: torch.Tensor, digest: bytes, image: int, plan: TokenPlan) -> tuple[np.ndarray, np.ndarray]:
    kept = tower.token_indices(q.shape[1]).to(q.device)
    if not len(kept):
        raise ModelError(f"skip_tokens leaves none of the {q.shape[1]} tokens of layer '{tower.layer_name}'.")
    q = q[:, kept]  # (tiles, tokens, d_in)
    total = q.shape[0] * q.shape[1]
    if plan.per_image == "all" or int(plan.per_image) >= total:
        chosen = np.arange(total)
    else:
        entropy = [plan.seed, *np.frombuffer(digest, np.uint32).tolist()]
        chosen = np.sort(np.random.default_rng(entropy).choice(total, int(plan.per_image), replace=False))
    picked = q.flatten(0, 1)[torch.from_numpy(chosen).to(q.device)]
    rows = picked.to(getattr(torch, plan.dtype)).cpu().numpy()
    if not np.isfinite(rows).all():
        if not torch.isfinite(picked).all():
            raise ModelError(f"the inputs of layer '{tower.layer_name}' are not finite numbers; is the model sound?")
        raise ModelError(
            f"the inputs of layer '{tower.layer_name}' do not fit {plan.dtype}; set tokens.dtype: float32."
        )
    place = np.zeros(len(chosen), PLACE)
    place["image"], place["tile"] = image, chosen // len(kept)
    place["token"] = kept.cpu().numpy()[chosen % len(kept)]
    return rows, place


def merge_shards(folder: Path, count: int, source: str, length: int | None = None) -> list[str]:
    """Joins the shards into one store; returns a note for each skipped image.

    Each shard is deleted once it is copied, so the disk holds the tokens once. Where it was interrupted it goes on:
    a shard's rows always land in the same place.
    """
    progress = folder / "merged.json"
    merged: dict[str, Any] = (
        json.loads(progress.read_text()) if progress.exists() else {"shards": 0, "rows": 0, "images": {}, "skipped": {}}
    )
    for number in range(merged["shards"], count):
        summary = json.loads(shard_path(folder, number).read_text())
        _append(folder, shard_path(folder, number), merged["rows"], summary["rows"])
        merged["shards"] += 1
        merged["rows"] += summary["rows"]
        merged["images"].update(summary["images"])
        merged["skipped"].update(summary["skipped"])
        if merged["shards"] % 1024 == 0 or merged["shards"] == count:
            state = json.dumps(merged).encode()
            write_file(progress, lambda file, state=state: file.write(state))  # type: ignore[misc]
            _delete_shards(folder, range(count)[: merged["shards"]])
    notes = [f"{id} ({why})" for id, why in merged["skipped"].items()]
    told = len(merged["images"]) + len(merged["skipped"])
    size = (folder / "places.bin").stat().st_size if merged["rows"] else 0
    if size != merged["rows"] * PLACE.itemsize or (length is not None and told != length):
        raise StorageError(f"the stored tokens in '{folder}' are damaged; delete that folder and run again.")
    if not merged["rows"]:
        raise ImageError(
            f"none of the {len(notes)} images of {source} can be read; the first: {notes[0] if notes else '-'}"
        )
    return notes


def _append(folder: Path, shard: Path, at: int, rows: int) -> None:
    if rows == 0:
        return
    for kind in ("tokens", "places"):
        array = np.load(shard.with_suffix(f".{kind}.npy"))
        target = folder / f"{kind}.bin"
        with explain_write_errors(target), target.open("r+b" if target.exists() else "w+b") as file:
            file.seek(at * array[:1].nbytes)
            file.write(array.tobytes())
            file.truncate()
    shape = folder / "shape.json"
    if not shape.exists():
        tokens = np.load(shard.with_suffix(".tokens.npy"), mmap_mode="r")
        described = json.dumps({"d_in": tokens.shape[1], "dtype": str(tokens.dtype)}).encode()
        write_file(shape, lambda file: file.write(described))


def _delete_shards(folder: Path, numbers: Sequence[int]) -> None:
    for number in numbers:
        path = shard_path(folder, number)
        for file in (path, path.with_suffix(".tokens.npy"), path.with_suffix(".places.npy")):
            file.unlink(missing_ok=True)


class TokenStore:
    """The stored instances, mapped into memory: reading costs no more than what is read."""

    def __init__(self, folder: Path) -> None:
        shape = json.loads((folder / "shape.json").read_text())
        self.folder = folder
        self.d_in: int = shape["d_in"]
        self.places = np.memmap(folder / "places.bin", PLACE, mode="r")
        self._tokens = np.memmap(folder / "tokens.bin", shape["dtype"], mode="r").reshape(-1, self.d_in)

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def image_ids(self) -> dict[int, str]:
        """The names of the images, by their number in the set."""
        merged = json.loads((self.folder / "merged.json").read_text())
        return {int(number): id for number, id in merged["images"].items()}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Instances `start` to `stop`, `(rows, d_in)` float32."""
        return torch.from_numpy(self._tokens[start:stop].astype(np.float32))

    def gather(self, rows: np.ndarray) -> torch.Tensor:
        """The instances of these numbers, in this order, `(rows, d_in)` float32."""
        order = np.argsort(rows, kind="stable")  # the disk is read from front to back
        out = np.empty((len(rows), self.d_in), np.float32)
        out[order] = self._tokens[rows[order]]
        return torch.from_numpy(out)


def strongest_instances(
    store: TokenStore,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    *,
    chunk_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k instances with the largest activation of each unit, strongest first; equal ones in the store's order.

    Args:
        store: the instances.
        weight: `(units, d_in)`; its device does the work.
        bias: `(units,)`.
        k: how many; fewer if the store has fewer.
        chunk_blocks: how much is read at a time; by default what there is room for. Never changes the result.

    Returns:
        Values `(units, k)` float32 and row numbers `(units, k)` int64.
    """
    values = torch.empty(len(weight), 0, device=weight.device)
    rows = torch.empty(len(weight), 0, dtype=torch.long, device=weight.device)
    chunk_blocks = chunk_blocks or _fitting(weight)
    # Sorting is worth it once as many new rows have come as are kept.
    step = _BLOCK * max(chunk_blocks, -(-k // _BLOCK))
    for start in range(0, len(store), step):
        stop = min(start + step, len(store))
        new = activations(store, weight, bias, start, stop)
        numbers = torch.arange(start, stop, device=weight.device).expand(len(weight), -1)
        values, order = torch.cat([values, new], 1).sort(dim=1, descending=True, stable=True)
        rows = torch.cat([rows, numbers], 1).gather(1, order)[:, :k]
        values = values[:, :k]
    return values, rows


def _fitting(weight: torch.Tensor) -> int:
    """How many blocks of instances go onto the device of some weights at a time: a quarter of a GPU's free memory."""
    if weight.device.type != "cuda":
        return 8
    free, _ = torch.cuda.mem_get_info(weight.device)
    block = _BLOCK * 4 * (weight.shape[1] + 6 * len(weight))  # inputs; activations, numbers, and their sorted copies
    return int(max(1, min(256, free // 4 // block)))


def activations(store: TokenStore, weight: torch.Tensor, bias: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Activations of the rows of `weight` for stored instances, `(units, stop - start)`."""
    blocks = []
    for at in range(start, stop, _BLOCK):
        q = store.read(at, min(at + _BLOCK, stop)).to(weight.device)
        blocks.append(torch.addmm(bias, q, weight.T).T)
    return torch.cat(blocks, 1)


def strongest_patches(
    q: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest activation of each row of `weight` over all patches of a picture, and its place.

    Args:
        q: `(tiles, tokens, d_in)` the layer's inputs.
        kept: the tokens of a tile that count.
        weight: `(R, d_in)`.
        bias: `(R,)`.

    Returns:
        Values `(R,)` and places `(R,)` int32, counted through the tokens of all tiles; of equal ones the first.
    """
    values, places = None, None
    for tile, inputs in enumerate(q):  # one by one: products of one shape round in one way
        activations = torch.addmm(bias, inputs[kept.to(inputs.device)].float(), weight.T)  # (kept, R)
        value, at = activations.max(0)
        place = (kept.to(at.device)[at] + tile * q.shape[1]).int()
        if values is None or places is None:
            values, places = value, place
        else:
            places = torch.where(value > values, place, places)
            values = torch.maximum(values, value)
    if values is None or places is None:
        raise ImageError("a picture without tiles cannot be looked at.")
    return values.cpu(), places.cpu()
