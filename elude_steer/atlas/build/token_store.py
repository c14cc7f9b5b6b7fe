"""The stored instances of a build, and the strongest of them for each unit or sub-unit."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elude_steer.errors import ImageError, StorageError
from elude_steer.utils.files import read_json
from elude_steer.utils.remote.mirror import Mirror
from elude_steer.utils.remote.root import find_folder

# Which image, which tile of it and which token of the tile an instance is.
PLACE = np.dtype([("image", np.int32), ("tile", np.uint16), ("token", np.uint16)])
# Rows of one product with the weights; fixed, because another shape may round differently.
_BLOCK_ROWS = 1024


def read_store_file(folder: Path, name: str, kind: type, keys: Sequence[str] = ()) -> Any:
    """Read a JSON file of a store; without it, the store is of no use."""
    try:
        return read_json(folder / name, kind, keys)
    except StorageError as error:
        raise StorageError(f"the stored tokens in '{folder}' are damaged; delete that folder and run again.") from error


class TokenStore:
    """The stored instances, mapped into memory: only what is read takes time and memory."""

    def __init__(self, folder: Path) -> None:
        shape = read_store_file(folder, "shape.json", dict, ("d_in", "dtype"))
        self.folder = folder
        self.d_in: int = shape["d_in"]
        self.places = np.memmap(folder / "places.bin", PLACE, mode="r")
        self._tokens = np.memmap(folder / "tokens.bin", shape["dtype"], mode="r").reshape(-1, self.d_in)

    def __len__(self) -> int:
        return len(self._tokens)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _find_store, (self.folder.name,)

    @cached_property
    def image_ids(self) -> dict[int, str]:
        """The ids of the images by their index in the image set."""
        merged = read_store_file(self.folder, "merged.json", dict, ("images",))
        return {int(index): id for index, id in merged["images"].items()}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Instances `start` to `stop`, `(rows, d_in)` float32."""
        return torch.from_numpy(self._tokens[start:stop].astype(np.float32))

    def gather(self, rows: np.ndarray) -> torch.Tensor:
        """The instances with these row numbers, in this order, `(rows, d_in)` float32."""
        order = np.argsort(rows, kind="stable")  # the disk is read from front to back
        out = np.empty((len(rows), self.d_in), np.float32)
        for start in range(0, len(order), _BLOCK_ROWS):  # in pieces, because NumPy copies them first
            part = order[start : start + _BLOCK_ROWS]
            out[part] = self._tokens[rows[part]]
            self._release_pages()
        return torch.from_numpy(out)

    def _release_pages(self) -> None:
        """Give mapped pages back: they stay in the system's cache, but no longer count as memory of this process."""
        mapped = self._tokens.base
        while not isinstance(mapped, mmap.mmap) and mapped is not None:
            mapped = mapped.base
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def activations(self, weight: torch.Tensor, bias: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Activations of the rows of `weight` on instances `start` to `stop`, `(units, stop - start)`."""
        blocks = []
        for first in range(start, stop, _BLOCK_ROWS):
            q = self.read(first, min(first + _BLOCK_ROWS, stop)).to(weight.device)
            blocks.append(torch.addmm(bias, q, weight.T).T)
        return torch.cat(blocks, 1)


def _find_store(name: str) -> TokenStore:
    """The store of this name among the folders of the build that this process works for."""
    path, url = find_folder(name)
    Mirror(path, url).bring(once=True)
    return TokenStore(path)


def strongest_instances(
    store: TokenStore,
    weight: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    *,
    chunk_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k instances with the largest activation of each unit, strongest first; ties keep the order of the store.

    Args:
        store: the instances.
        weight: `(units, d_in)`; its device does the work.
        bias: `(units,)`.
        k: how many; fewer if the store has fewer.
        chunk_blocks: how many blocks of instances are read at a time, by default as many as fit the memory. Never
            changes the result.

    Returns:
        Values `(units, k)` float32 and row numbers `(units, k)` int64.
    """
    values = torch.empty(len(weight), 0, device=weight.device)
    rows = torch.empty(len(weight), 0, dtype=torch.long, device=weight.device)
    chunk_blocks = chunk_blocks or _blocks_that_fit(weight)
    # Sorting pays off once there are as many new rows as are kept.
    step = _BLOCK_ROWS * max(chunk_blocks, -(-k // _BLOCK_ROWS))
    for start in range(0, len(store), step):
        stop = min(start + step, len(store))
        new = store.activations(weight, bias, start, stop)
        numbers = torch.arange(start, stop, device=weight.device).expand(len(weight), -1)
        values, order = torch.cat([values, new], 1).sort(dim=1, descending=True, stable=True)
        rows = torch.cat([rows, numbers], 1).gather(1, order)[:, :k]
        values = values[:, :k]
    return values, rows


def _blocks_that_fit(weight: torch.Tensor) -> int:
    """How many blocks of instances are read at a time: those that fill a quarter of a GPU's free memory."""
    if weight.device.type != "cuda":
        return 8
    free, _ = torch.cuda.mem_get_info(weight.device)
    block = _BLOCK_ROWS * 4 * (weight.shape[1] + 6 * len(weight))  # inputs; activations, numbers, their sorted copies
    return int(max(1, min(256, free // 4 // block)))


def strongest_patches(
    q: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest activation of each row of `weight` over all patches of an image, and its place.

    Args:
        q: `(tiles, tokens, d_in)` layer inputs.
        positions: the tokens of a tile that count as patches.
        weight: `(R, d_in)`.
        bias: `(R,)`.

    Returns:
        Values `(R,)` and places `(R,)` int32, counted through the tokens of all tiles; the first of equal ones.
    """
    values, places = None, None
    for tile, inputs in enumerate(q):  # one by one, because products of one shape round in one way
        activations = torch.addmm(bias, inputs[positions.to(inputs.device)].float(), weight.T)  # (positions, R)
        value, index = activations.max(0)
        place = (positions.to(index.device)[index] + tile * q.shape[1]).int()
        if values is None or places is None:
            values, places = value, place
        else:
            places = torch.where(value > values, place, places)
            values = torch.maximum(values, value)
    if values is None or places is None:
        raise ImageError("an image without tiles has no strongest patch.")
    return values.cpu(), places.cpu()
