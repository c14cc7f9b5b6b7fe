"""Keys of cached work: hashes of everything it depends on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from elude_steer.utils import optional


def versions() -> dict[str, str | None]:
    """The versions of this package and of those that affect its numbers."""
    names = ("elude-steer", "torch", "transformers", "hdbscan", "numpy", "pillow")
    return {name: optional.version(name) for name in names}


def make_key(*causes: Any) -> str:
    """A short hash of everything that a piece of work depends on."""
    text = json.dumps(causes, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
