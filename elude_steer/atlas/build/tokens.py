"""The first stage: run the tower on all images and store a random sample of their tokens (paper 3.1).

Every image is in a fixed batch, and its tokens are drawn from its content and the seed. So the stored numbers do not
depend on the number of threads or processes, or on where a run was interrupted.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from elude_steer.atlas.build.activation_cache import read_item
from elude_steer.atlas.build.sizes import tokens_per_image
from elude_steer.atlas.build.stages import Build, StageFolder, warn
from elude_steer.atlas.build.token_store import PLACE, read_store_file
from elude_steer.errors import ImageError, ModelError, StorageError
from elude_steer.models.images import Item
from elude_steer.models.vision import Tower
from elude_steer.specs import TokensSpec
from elude_steer.utils.files import explain_write_errors, read_json, write_array, write_file

_COUNT = "counted.json"
_STORE = ("tokens.bin", "places.bin", "shape.json", _COUNT, "merged.json")  # what all shards become


def collect_tokens(build: Build) -> StageFolder:
    """Store a random sample of the tokens of every image; a `TokenStore` reads the folder."""
    return collect_draws([build])[0]


def collect_draws(builds: Sequence[Build]) -> list[StageFolder]:
    """The same for several builds that differ in the seed of their tokens alone, in one pass over the images."""
    first = builds[0]
    if len(builds) > 1 and (first.url is not None or first.workers.travels):  # what travels is one stage at a time
        return [collect_tokens(build) for build in builds]
    folders = [_open_tokens(build) for build in builds]
    # Another build of the same tokens waits here and then finds them done. A killed process releases its lock.
    with ExitStack() as locks:
        for folder in sorted(folders, key=lambda folder: folder.key):  # in one order: two builds cannot wait in a ring
            if first.is_main:
                _lock(locks, folder.path)
        first.workers.barrier()
        for folder in folders:
            folder.mirror.bring()
        pairs = list(zip(builds, folders, strict=True))
        left = [(build, folder) for build, folder in pairs if not _count_path(folder.path).exists()]
        first.workers.barrier()  # nobody counts before all have looked
        if left:
            _collect_shards([build for build, _ in left], [folder for _, folder in left])
        if first.is_main:
            for build, folder in pairs:
                _merge_and_report(build, folder.path)
                _share_store(folder)
    first.workers.barrier()
    for folder in folders:
        folder.mirror.bring()
    return folders


def _open_tokens(build: Build) -> StageFolder:
    spec = build.spec.tokens
    # The shard's size is a cause, because unfinished shards are numbered files.
    return build.open_stage(
        "tokens", *build.source, spec.per_image, spec.seed, spec.dtype, spec.batch_size, build.shard
    )


def _collect_shards(builds: Sequence[Build], folders: Sequence[StageFolder]) -> None:
    first = builds[0]

    def files(shard: Any) -> list[Path]:
        number = shard if isinstance(shard, int) else shard[0]
        # A draw that lacks the shard comes last: a piece is done when its last file is there.
        order = sorted(folders, key=lambda folder: not shard_path(folder.path, number).exists())
        return [file for folder in order for file in _shard_files(folder.path, number)]

    def work(shard: Any) -> None:
        number, batches = first.open_shard(shard)
        collect_shard(
            first.tower,
            batches,
            [
                (build.spec.tokens, folder.path)
                for build, folder in zip(builds, folders, strict=True)
                if not shard_path(folder.path, number).exists()
            ],
            number,
            encode=first.cache.encode,
            stop=first.workers.stopped,
            on_batch=first.advance,
        )

    shards = _CountingIterable(first.shards())
    first.run_pieces(
        "collecting",
        folders[0],
        shards,
        files,
        work,
        "images",
        size=first.shard_size,
        total=first.images.length,
        groups=first.shard_groups(),
    )
    if first.is_main:
        count = shards.count or len(list(first.shards()))
        for folder in folders:
            write_file(_count_path(folder.path), lambda file: file.write(json.dumps(count).encode()))


def _share_store(folder: StageFolder) -> None:
    """Give other machines the store instead of the shards that it was made from."""
    files = [folder.path / name for name in _STORE]
    if not folder.mirror.has(files[-1]):
        count = read_store_file(folder.path, _COUNT, int)
        folder.mirror.share(files)
        folder.mirror.forget(file for number in range(count) for file in _shard_files(folder.path, number))


def _merge_and_report(build: Build, folder: Path) -> None:
    count = read_store_file(folder, _COUNT, int)
    # Only a stream is still `auto` here: now that its images are counted, the surplus of the first ones is dropped.
    per_image = tokens_per_image(_count_images(folder, count)) if build.spec.tokens.per_image == "auto" else None
    skipped = merge_shards(folder, count, build.images.name, build.images.length, per_image)
    if skipped:
        more = f"; and {len(skipped) - 5} more in '{folder / 'merged.json'}'" if len(skipped) > 5 else ""
        shown = "; ".join(skipped[:5]) + more
        warn(f"{len(skipped)} images of {build.images.name} cannot be read and were left out: {shown}")


class _CountingIterable:
    """An iterable that counts the elements it has yielded."""

    def __init__(self, elements: Iterable[Any]) -> None:
        self.elements, self.count = elements, 0

    def __iter__(self) -> Iterator[Any]:
        for element in self.elements:
            self.count += 1
            yield element


def shard_path(folder: Path, number: int) -> Path:
    """The summary of a finished shard; the arrays beside it are written before it."""
    return folder / f"shard-{number:06d}.json"


def _shard_files(folder: Path, number: int) -> tuple[Path, ...]:
    path = shard_path(folder, number)
    return path.with_suffix(".tokens.npy"), path.with_suffix(".places.npy"), path


def _count_images(folder: Path, shards: int) -> int:
    """How many images of all shards could be read."""
    return sum(len(_read_shard(folder, number)["images"]) for number in range(shards))


def _count_path(folder: Path) -> Path:
    return folder / _COUNT


def _read_shard(folder: Path, number: int) -> dict[str, Any]:
    return dict(read_json(shard_path(folder, number), dict, ("rows", "images", "skipped")))


def collect_shard(
    tower: Tower,
    batches: Sequence[Sequence[Item]],
    draws: Sequence[tuple[TokensSpec, Path]],
    number: int,
    *,
    encode: Callable[[Sequence[Item], Sequence[Any]], list[torch.Tensor]] | None = None,
    stop: threading.Event | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Run the tower on one shard's images and write the tokens drawn from them.

    Args:
        tower: the model.
        batches: the images.
        draws: for each draw how many tokens of each image it takes, and how, and the folder of its shards.
        number: of the shard.
        encode: gives the layer inputs of images that were read, instead of the tower alone.
        stop: once set, nothing is written.
        on_batch: called with the number of images after each batch.
    """
    drawn: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in draws]
    ids: dict[int, str] = {}
    skipped: dict[str, str] = {}
    for batch in batches:
        if stop is not None and stop.is_set():
            return
        loaded = [(item, *got) for item in batch if (got := read_item(item, skipped)) is not None]
        items, images = [item for item, _, _ in loaded], [image for _, image, _ in loaded]
        encoded = (encode(items, images) if encode else tower.encode(images)) if loaded else []
        for (item, _, digest), q in zip(loaded, encoded, strict=True):
            for (spec, _), found in zip(draws, drawn, strict=True):
                found.append(_draw_tokens(tower, q, digest, item.index, spec))
            ids[item.index] = item.id
        if on_batch:
            on_batch(len(batch))
    for (_, folder), found in zip(draws, drawn, strict=True):
        path = shard_path(folder, number)
        if found:
            write_array(path.with_suffix(".tokens.npy"), np.concatenate([tokens for tokens, _ in found]))
            write_array(path.with_suffix(".places.npy"), np.concatenate([places for _, places in found]))
        summary = {"rows": sum(len(tokens) for tokens, _ in found), "images": ids, "skipped": skipped}
        write_file(path, lambda file, summary=summary: file.write(json.dumps(summary).encode()))  # type: ignore[misc]


def _draw_tokens(
    tower: Tower, q: torch.Tensor, digest: bytes, image: int, spec: TokensSpec
) -> tuple[np.ndarray, np.ndarray]:
    positions = tower.token_indices(q.shape[1]).to(q.device)
    if not len(positions):
        raise ModelError(f"skip_tokens leaves none of the {q.shape[1]} tokens of layer '{tower.layer_name}'.")
    q = q[:, positions]  # (tiles, positions, d_in)
    total = q.shape[0] * q.shape[1]
    # Of a stream, whose length is unknown, as many as if this were its last image.
    count = tokens_per_image(image + 1) if spec.per_image == "auto" else spec.per_image
    generator = np.random.default_rng([spec.seed, *np.frombuffer(digest, np.uint32).tolist()])
    if spec.per_image == "auto":
        chosen = generator.permutation(total)[: int(count)]  # in random order: the first of them are random too
    elif count == "all" or int(count) >= total:
        chosen = np.arange(total)
    else:
        chosen = np.sort(generator.choice(total, int(count), replace=False))
    drawn = q.flatten(0, 1)[torch.from_numpy(chosen).to(q.device)]
    rows = drawn.to(getattr(torch, spec.dtype)).cpu().numpy()
    if not np.isfinite(rows).all():
        if not torch.isfinite(drawn).all():
            raise ModelError(f"the inputs of layer '{tower.layer_name}' are not finite numbers; is the model sound?")
        raise ModelError(
            f"the inputs of layer '{tower.layer_name}' do not fit {spec.dtype}; set tokens.dtype: float32."
        )
    place = np.zeros(len(chosen), PLACE)
    place["image"], place["tile"] = image, chosen // len(positions)
    place["token"] = positions.cpu().numpy()[chosen % len(positions)]
    return rows, place


def merge_shards(
    folder: Path, count: int, source: str, length: int | None = None, per_image: int | None = None
) -> list[str]:
    """Join the shards into one store; returns a note for each skipped image.

    Each shard is deleted once it is copied, so that the disk holds the tokens once. An interrupted merge continues
    where it stopped: the rows of a shard always go to the same place.

    Args:
        folder: where the shards are.
        count: how many.
        source: the name of the images.
        length: how many images; None if unknown.
        per_image: keep only the first so many tokens of each image; None keeps all.
    """
    progress = folder / "merged.json"
    new: dict[str, Any] = {"shards": 0, "rows": 0, "images": {}, "skipped": {}}
    merged: dict[str, Any] = read_store_file(folder, progress.name, dict, tuple(new)) if progress.exists() else new
    for number in range(merged["shards"], count):
        summary = _read_shard(folder, number)
        rows = _append(folder, shard_path(folder, number), merged["rows"], summary["rows"], per_image)
        merged["shards"] += 1
        merged["rows"] += rows
        merged["images"].update(summary["images"])
        merged["skipped"].update(summary["skipped"])
        if merged["shards"] % 1024 == 0 or merged["shards"] == count:
            state = json.dumps(merged).encode()
            _flush_store(folder)  # before the shards are deleted
            write_file(progress, lambda file, state=state: file.write(state))  # type: ignore[misc]
            _delete_shards(folder, range(count)[: merged["shards"]])
    notes = [f"{id} ({cause})" for id, cause in merged["skipped"].items()]
    images = len(merged["images"]) + len(merged["skipped"])
    size = (folder / "places.bin").stat().st_size if merged["rows"] else 0
    if size != merged["rows"] * PLACE.itemsize or (length is not None and images != length):
        raise StorageError(f"the stored tokens in '{folder}' are damaged; delete that folder and run again.")
    if not merged["rows"]:
        raise ImageError(
            f"none of the {len(notes)} images of {source} can be read; the first: {notes[0] if notes else '-'}"
        )
    return notes


def _append(folder: Path, shard: Path, first_row: int, rows: int, per_image: int | None) -> int:
    """Copy a shard to the store from this row on; returns how many rows were copied."""
    if rows == 0:
        return 0
    images = np.load(shard.with_suffix(".places.npy"))["image"]  # ascending
    number_in_image = np.arange(rows) - np.searchsorted(images, images)
    kept = np.arange(rows) if per_image is None else np.flatnonzero(number_in_image < per_image)
    for kind in ("tokens", "places"):
        array = np.load(shard.with_suffix(f".{kind}.npy"))[kept]
        target = folder / f"{kind}.bin"
        with explain_write_errors(target), target.open("r+b" if target.exists() else "w+b") as file:
            file.seek(first_row * array[:1].nbytes)
            file.write(array.tobytes())
            file.truncate()
    shape = folder / "shape.json"
    if not shape.exists():
        tokens = np.load(shard.with_suffix(".tokens.npy"), mmap_mode="r")
        text = json.dumps({"d_in": tokens.shape[1], "dtype": str(tokens.dtype)}).encode()
        write_file(shape, lambda file: file.write(text))
    return len(kept)


def _lock(locks: ExitStack, folder: Path) -> None:
    """Hold the lock of a folder until the stack ends."""
    with explain_write_errors(folder):
        locks.enter_context(FileLock(f"{folder}.lock"))


def _flush_store(folder: Path) -> None:
    """Let the copied rows reach the disk, so that a power cut does not lose them with their shards."""
    for path in (folder / "tokens.bin", folder / "places.bin"):
        if path.exists():
            with explain_write_errors(path), path.open("rb") as file:
                os.fsync(file.fileno())


def _delete_shards(folder: Path, numbers: Sequence[int]) -> None:
    with explain_write_errors(folder):
        for number in numbers:
            for file in reversed(_shard_files(folder, number)):
                file.unlink(missing_ok=True)
