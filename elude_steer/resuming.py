"""The tower up to the target layer once a picture, and from there on as often as there are plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elude_steer.hooks import record, replaced
from elude_steer.vlm import PROMPT, Vlm


@dataclass(frozen=True, eq=False)
class Looked:
    """What a model made of some pictures before its target layer.

    Attributes:
        inputs: what the model was called with, a row a picture.
        q: the target layer's inputs, `(tiles, patches, d_in)` a picture.
        before: what the block before the target's gave, `(tiles, …)` a picture; None where there is none.
        sizes: width and height of each picture.
    """

    inputs: Mapping[str, Any]
    q: tuple[torch.Tensor, ...]
    before: tuple[torch.Tensor, ...] | None
    sizes: tuple[tuple[int, int], ...]

    def rows(self, pictures: Sequence[int]) -> dict[str, Any]:
        """The model's inputs for these pictures, in this order, a picture as often as it is named."""
        at = torch.as_tensor(pictures)
        count = len(self.q)
        return {
            name: value[at.to(value.device)] if isinstance(value, torch.Tensor) and len(value) == count else value
            for name, value in self.inputs.items()
        }


@torch.inference_mode()
def look(vlm: Vlm, images: Sequence[Any], prompt: str = PROMPT) -> Looked:
    """Runs the pictures through the tower as far as the target layer."""
    inputs = vlm.inputs(images, prompt)
    before, seen = blocks_before(vlm), []

    def keep(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    with ExitStack() as stack:
        if before:
            stack.enter_context(replaced(before[-1], keep))
        recorded = stack.enter_context(record(vlm.layer))
        vlm.model(**inputs)
    q = vlm.split_by_image(recorded.input, inputs, len(images))
    hidden = seen[0] if seen and isinstance(seen[0], torch.Tensor) else None  # other shapes are computed again
    kept = vlm.split_by_image(hidden, inputs, len(images)) if hidden is not None else None
    sizes = tuple((image.width, image.height) for image in images)
    return Looked(inputs, tuple(q), tuple(kept) if kept is not None else None, sizes)


@contextmanager
def resumed(vlm: Vlm, looked: Looked, pictures: Sequence[int]) -> Iterator[None]:
    """Inside, the tower goes on from what was looked at: its blocks before the target's do not compute."""
    before = blocks_before(vlm)
    if looked.before is None or not before:
        yield
        return
    hidden = torch.cat([looked.before[i].reshape(-1, *looked.before[i].shape[-2:]) for i in pictures])

    def skip(_original: Any, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states

    def last(_original: Any, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden.reshape(states.shape)

    with ExitStack() as stack:
        for block in before[:-1]:
            stack.enter_context(replaced(block, skip))
        stack.enter_context(replaced(before[-1], last))
        yield


def blocks_before(vlm: Vlm) -> list[nn.Module]:
    """The blocks of the tower before the one that the target layer is in."""
    parts = vlm.layer_name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if parts[i].isdigit():
            holder, number = vlm.model.get_submodule(".".join(parts[:i])), int(parts[i])
            read = getattr(vlm.model.config, "vision_feature_layer", -1)
            if not isinstance(holder, nn.ModuleList) or not isinstance(read, int):
                return []  # who reads several layers sees what skipped blocks would not give
            at = read if read >= 0 else len(holder) + 1 + read
            return list(holder.children())[:number] if at >= number else []
    return []
