"""What the tower computes for an image before the steered layer, kept for the next request with the same image.

The key is the content of the image, never a name that a client gives. The edit is not part of it, because all that is
kept comes before the layer that edits change: the tower runs once for an image, however many edits ask for it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from elude_steer.models.patch_layout import PatchGrid
from elude_steer.models.prefix_cache import Prefix
from elude_steer.steering.intervention import ImageMemo

_READINGS = 32  # that are kept of an image
Key = tuple[bytes, bool]


def image_key(image: Any, *, alone: bool) -> Key:
    """The key of an image: the hash of its pixels, and whether it is the only one of its prompt.

    Some models cut an image into more tiles where it is the only one.
    """
    digest = hashlib.blake2b(f"{image.mode}{image.size}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.digest(), alone


@dataclass(frozen=True, eq=False)
class TowerState:
    """What a tower computed for one image; see `Prefix`. `memo` is what edits found out of it that others can use."""

    q: torch.Tensor
    outputs: Mapping[nn.Module, Any]
    size: tuple[int, int]
    count: int
    shape: tuple[int, int] | None
    notes: tuple[str, ...]
    memo: ImageMemo = field(default_factory=ImageMemo)

    def recall(self) -> ImageMemo:
        """A memo for one batch, with what is known."""
        known = self.memo
        return ImageMemo(readings=dict(known.readings), presences=dict(known.presences), claims=known.claims)

    def remember(self, memo: ImageMemo) -> None:
        """Keep what is small and holds for every edit: which patches all words claim, and where some words are read."""
        self.memo.claims = memo.claims
        for row, reading in memo.readings.items():
            if len(self.memo.readings) < _READINGS:
                self.memo.readings[row] = reading
        for row, presence in memo.presences.items():
            if len(self.memo.presences) < _READINGS:
                self.memo.presences[row] = presence

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        kept = (self.q, *self.outputs.values(), *self.memo.readings.values(), self.memo.claims)
        return sum(one.nbytes for output in kept for one in _arrays(output))


def split_prefix(prefix: Prefix, find_notes: Callable[[torch.Tensor], Sequence[str]]) -> list[TowerState]:
    """The state of each image of a prefix. Tensors are copied: a view would keep those of the whole batch."""
    return [
        TowerState(
            q.clone(),
            {module: _copy(parts[number]) for module, parts in prefix.outputs.items()},
            prefix.sizes[number],
            prefix.counts[number],
            prefix.shapes[number],
            tuple(find_notes(q)),
        )
        for number, q in enumerate(prefix.q)
    ]


def join_states(states: Sequence[TowerState], inputs: Mapping[str, Any], grids: Sequence[PatchGrid] = ()) -> Prefix:
    """The prefix of several images, with the grid of each."""
    modules = set.intersection(*(set(state.outputs) for state in states))
    outputs = {module: [state.outputs[module] for state in states] for module in states[0].outputs if module in modules}
    return Prefix(
        inputs,
        tuple(state.q for state in states),
        outputs,
        tuple(state.size for state in states),
        tuple(state.count for state in states),
        tuple(state.shape for state in states),
        tuple(grids),
    )


class ImageCache:
    """States by key, at most `max_bytes` of them; those that were used last stay. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._states: OrderedDict[Key, TowerState] = OrderedDict()
        self._sizes: dict[Key, int] = {}

    def get(self, key: Key) -> TowerState | None:
        """The state of an image, if it is here."""
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def add(self, key: Key, state: TowerState) -> None:
        """Keep a state, and drop those that were not used for longest."""
        if key in self._states or state.nbytes > self.max_bytes:
            return
        self._states[key] = state
        self.measure(key)

    def measure(self, key: Key) -> None:
        """Count the memory of a state again, which has changed, and drop others if it is too much."""
        if key not in self._states:
            return
        size = self._states[key].nbytes
        self.nbytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        while self.nbytes > self.max_bytes:
            oldest, _ = self._states.popitem(last=False)
            self.nbytes -= self._sizes.pop(oldest)


def _arrays(output: Any) -> Iterable[torch.Tensor | np.ndarray]:
    if isinstance(output, torch.Tensor | np.ndarray):
        yield output
    elif isinstance(output, tuple):
        for one in output:
            yield from _arrays(one)


def _copy(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_copy(one) for one in output)
    return output.clone() if isinstance(output, torch.Tensor) else output
