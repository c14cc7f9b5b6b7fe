"""Layer inputs and residual streams of images, kept on disk so that the tower runs once for each image.

By default they are stored in the tower's own precision: a stage that reads them gets the same bits as if it had run the
tower on the same batch. When the disk is full, the tower runs again for the images that are missing.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elude_steer.errors import ImageError, StorageError
from elude_steer.models.images import Item
from elude_steer.models.vision import Tower
from elude_steer.utils.files import read_tensors, write_tensors

_DISK_SHARE = 0.25  # of the free space at the start; the rest is left to others
# Errors of the machine or the network, which say nothing about the file: read again, it may be sound.
_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EINTR", "EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "ESTALE", "ETIMEDOUT", "EPIPE", "ENETDOWN"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH"),
    )
    if hasattr(errno, name)
)


class Activations(NamedTuple):
    """Activations of one image: layer inputs `(tiles, tokens, d_in)` and the stream behind the layer, `(…, d_out)`."""

    inputs: torch.Tensor
    stream: torch.Tensor


class ActivationCache:
    """Activations of the items of an image set.

    Args:
        tower: the model that is run for images that are not stored yet.
        folder: where activations are stored; None stores nothing.
        keep: whether the image with this index is needed again and worth storing.
        processes: how many processes share the disk space.
        dtype: the precision of everything the cache returns and stores; None for the tower's own.

    Example:
        >>> cache = ActivationCache(tower, folder)
        >>> for item, (inputs, stream) in cache.activations(items):
        ...     ...
    """

    def __init__(
        self,
        tower: Tower,
        folder: Path | None,
        *,
        keep: Callable[[int], bool] = lambda index: True,
        processes: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tower, self.folder, self.keep, self.dtype = tower, folder, keep, dtype
        self.free_bytes = shutil.disk_usage(folder).free * _DISK_SHARE / processes if folder is not None else 0.0
        self._lock = threading.Lock()

    def encode(self, items: Sequence[Item], images: Sequence[Any]) -> list[torch.Tensor]:
        """Run the tower on images that have just been read; returns the layer inputs of each."""
        if self.free_bytes <= 0 or not any(self.keep(item.index) for item in items):
            return [self._convert(inputs) for inputs in self.tower.encode(images)]
        return [inputs for inputs, _ in self._run_tower(items, images)]

    def layer_inputs(self, items: Sequence[Item]) -> Iterator[tuple[Item, torch.Tensor]]:
        """Layer inputs of the readable images of one batch, from disk where stored; new ones are not stored."""
        inputs = {index: found.inputs for index, found in self._load_all(items).items()}
        missing = _read_images([item for item in items if item.index not in inputs])
        encoded = self.tower.encode([image for _, image in missing]) if missing else []
        inputs |= {item.index: self._convert(q) for (item, _), q in zip(missing, encoded, strict=True)}
        return ((item, inputs[item.index].to(self.tower.device)) for item in items if item.index in inputs)

    def activations(self, items: Sequence[Item]) -> Iterator[tuple[Item, Activations]]:
        """Layer inputs and streams of the readable images of one batch; new ones are stored."""
        known = self._load_all(items)
        missing = _read_images([item for item in items if item.index not in known])
        if missing:
            new = self._run_tower([item for item, _ in missing], [image for _, image in missing])
            known |= {item.index: activations for (item, _), activations in zip(missing, new, strict=True)}
        device = self.tower.device
        return (
            (item, Activations(*(tensor.to(device) for tensor in known[item.index])))
            for item in items
            if item.index in known
        )

    def remove(self) -> None:
        """Delete everything that is stored."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run_tower(self, items: Sequence[Item], images: Sequence[Any]) -> list[Activations]:
        pairs = [Activations(*map(self._convert, pair)) for pair in self.tower.streams(images)]
        for item, activations in zip(items, pairs, strict=True):
            self._store(item.index, activations)
        return pairs

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def _path(self, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{index:08d}.safetensors"

    def _load_all(self, items: Sequence[Item]) -> dict[int, Activations]:
        return {item.index: found for item in items if (found := self._load(item.index)) is not None}

    def _load(self, index: int) -> Activations | None:
        path = self._path(index)
        if path is None or not path.exists():
            return None
        try:
            tensors = read_tensors(path)
        except StorageError:  # another build of the same images has finished and deleted it
            return None
        return Activations(tensors["inputs"], tensors["stream"])

    def _store(self, index: int, activations: Activations) -> None:
        path = self._path(index)
        if path is None or not self.keep(index) or path.exists():
            return
        size = sum(tensor.nbytes for tensor in activations)
        with self._lock:
            if size > self.free_bytes:
                self.free_bytes = 0.0
                return
            self.free_bytes -= size
        try:
            write_tensors(path, {name: t.cpu().contiguous() for name, t in activations._asdict().items()})
        except StorageError:  # the disk is full, or another build of the same images has deleted the folder
            self.free_bytes = 0.0


def read_item(item: Item, skipped: dict[str, str]) -> tuple[Any, bytes] | None:
    """Read an image and the hash of its content; if it is damaged or missing, return None and note it in `skipped`.

    Raises if the store, the network or this machine fails: an atlas without these images would be another one.
    """
    try:
        return item.read()
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(error, ImageError) and _is_transient(error):
            what = " ".join(str(error).split())[:200] or type(error).__name__
            raise StorageError(
                f"image '{item.id}' cannot be read now ({what}); finished work is kept: run the same command again."
            ) from error
        skipped[item.id] = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None


def _is_transient(error: Exception) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _TRANSIENT


def _read_images(items: Sequence[Item]) -> list[tuple[Item, Any]]:
    skipped: dict[str, str] = {}  # already reported when tokens were collected
    return [(item, got[0]) for item in items if (got := read_item(item, skipped)) is not None]
