"""Uploaded images, in memory: bounded, forgotten after a while, and each for the key that uploaded it alone."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elude_steer.server.access import Limits, RefusedError


@dataclass(frozen=True)
class Upload:
    """An uploaded file."""

    id: str
    owner: str
    name: str
    data: bytes
    created: float

    @property
    def cost(self) -> int:
        """The memory that it counts as; an empty file takes some too."""
        return len(self.data) + 4096

    def to_dict(self) -> dict[str, Any]:
        """The file as OpenAI's API describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": int(self.created),
            "filename": self.name,
            "purpose": "vision",
            "status": "processed",
        }


class Uploads:
    """The uploaded files of all clients; when there is no room, the oldest go."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.limits, self.clock, self.nbytes = limits, clock, 0
        self._files: OrderedDict[str, Upload] = OrderedDict()

    def add(self, owner: str, name: str, data: bytes) -> Upload:
        """Keep a file."""
        shown = "".join(letter for letter in name if letter.isprintable())[:100] or "image"
        upload = Upload(f"file-{secrets.token_hex(12)}", owner, shown, data, self.clock())
        self._files[upload.id] = upload
        self.nbytes += upload.cost
        self._forget()
        return upload

    def get(self, owner: str, id: str) -> Upload:
        """A file of somebody; raises if there is none, also if it is that of another."""
        self._forget()
        upload = self._files.get(id)
        if upload is None or upload.owner != owner:
            raise RefusedError(
                f"there is no such file of yours here; upload it again: files are kept in memory, for at most "
                f"{self.limits.upload_seconds / 60:.0f} minutes and {self.limits.upload_bytes / 2**20:.0f} MB in all.",
                404,
                code="not_found",
            )
        return upload

    def delete(self, owner: str, id: str) -> None:
        """Forget a file of somebody."""
        self._drop(self.get(owner, id).id)

    def list(self, owner: str) -> list[Upload]:
        """The files of somebody."""
        self._forget()
        return [upload for upload in self._files.values() if upload.owner == owner]

    def _forget(self) -> None:
        oldest = self.clock() - self.limits.upload_seconds
        while self._files:
            first = next(iter(self._files.values()))
            if self.nbytes <= self.limits.upload_bytes and first.created >= oldest:
                return
            self._drop(first.id)

    def _drop(self, id: str) -> None:
        self.nbytes -= self._files.pop(id).cost
