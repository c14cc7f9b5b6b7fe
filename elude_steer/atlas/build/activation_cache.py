"""What the tower gave for each picture, kept on the disk while a build lasts: later stages need no second pass.

It is kept in the tower's own precision, so a stage that reads it finds the bits it would have computed from the same
batch. Where the disk has no room the tower runs again, in batches of the pictures that are needed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from elude_steer.atlas.build.tokens import read_item
from elude_steer.errors import StorageError
from elude_steer.models.images import Item
from elude_steer.models.vision import Tower
from elude_steer.utils.files import read_tensors, write_tensors

_SHARE = 0.25  # of the room that is free when it begins; the rest is for others


class ActivationCache:
    """One look at each picture.

    Args:
        tower: that looks.
        folder: where looks are kept; None keeps none.
        wanted: whether the picture of this number is looked at again.
        processes: that share the room.
    """

    def __init__(
        self, tower: Tower, folder: Path | None, wanted: Callable[[int], bool] = lambda number: True, processes: int = 1
    ) -> None:
        self.tower, self.folder, self.wanted = tower, folder, wanted
        self.room = shutil.disk_usage(folder).free * _SHARE / processes if folder is not None else 0.0
        self.lock = threading.Lock()

    def fresh(self, items: Sequence[Item], images: Sequence[Any]) -> list[torch.Tensor]:
        """The layer's inputs for pictures that were just read, `(tiles, tokens, d_in)` each."""
        if self.room <= 0 or not any(self.wanted(item.index) for item in items):
            return self.tower.encode(images)
        seen = self.tower.streams(images)
        for item, (q, stream) in zip(items, seen, strict=True):
            self._keep(item.index, q, stream)
        return [q for q, _ in seen]

    def inputs(self, items: Sequence[Item]) -> Iterator[tuple[Item, torch.Tensor]]:
        """Those of pictures that can be read, from the disk where they are there."""
        kept = {item.index: found["q"] for item in items if (found := self._kept(item.index)) is not None}
        read = self._read([item for item in items if item.index not in kept])
        made = self.tower.encode([image for _, image in read]) if read else []
        kept |= {item.index: q for (item, _), q in zip(read, made, strict=True)}
        return ((item, kept[item.index].to(self.tower.device)) for item in items if item.index in kept)

    def streams(self, items: Sequence[Item]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same with what is behind the layer; what is not there yet is kept for the next stage."""
        kept = {
            item.index: (found["q"], found["stream"]) for item in items if (found := self._kept(item.index)) is not None
        }
        read = self._read([item for item in items if item.index not in kept])
        made = self.tower.streams([image for _, image in read]) if read else []
        for (item, _), pair in zip(read, made, strict=True):
            self._keep(item.index, *pair)
            kept[item.index] = pair
        device = self.tower.device
        return ((q.to(device), s.to(device)) for item in items if item.index in kept for q, s in [kept[item.index]])

    def remove(self) -> None:
        """Deletes all of it."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, items: Sequence[Item]) -> list[tuple[Item, Any]]:
        skipped: dict[str, str] = {}  # told when they were collected
        return [(item, got[0]) for item in items if (got := read_item(item, skipped)) is not None]

    def _path(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{number:08d}.safetensors"

    def _kept(self, number: int) -> dict[str, torch.Tensor] | None:
        path = self._path(number)
        if path is None or not path.exists():
            return None
        try:
            return read_tensors(path)
        except StorageError:  # another build of the same pictures has ended and taken it away
            return None

    def _keep(self, number: int, q: torch.Tensor, stream: torch.Tensor) -> None:
        path = self._path(number)
        if path is None or not self.wanted(number) or path.exists():
            return
        size = q.nbytes + stream.nbytes
        with self.lock:
            if size > self.room:
                self.room = 0.0
                return
            self.room -= size
        try:
            write_tensors(path, {"q": q.cpu().contiguous(), "stream": stream.cpu().contiguous()})
        except StorageError:  # the disk is full, or another build of the same pictures has taken the folder away
            self.room = 0.0
