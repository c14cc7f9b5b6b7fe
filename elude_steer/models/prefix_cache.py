"""The tower up to the target layer once a picture, and from there on as often as there are plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from elude_steer.models.hooks import record, replace_forward
from elude_steer.models.vlm import PROMPT, Vlm

AT_ONCE = 128  # tiles that the tower is given together; what is kept of one takes 42 MB at the size of LLaVA-OneVision
Piece = TypeVar("Piece")
_TILE = 729  # patches of a tile of LLaVA-OneVision; a tile of another model may be a whole picture


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a model made of some pictures before its target layer.

    Attributes:
        inputs: what the model was called with, a row a picture.
        q: the target layer's inputs, `(tiles, patches, d_in)` a picture.
        outputs: what the parts of the tower gave that ran before the target, for each a list with an entry a picture.
        sizes: width and height of each picture.
        counts: how many rows the tower was given for each picture.
        shapes: rows and columns of a tile's patches, of each picture.
    """

    inputs: Mapping[str, Any]
    q: tuple[torch.Tensor, ...]
    outputs: Mapping[nn.Module, Sequence[Any]]
    sizes: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    shapes: tuple[tuple[int, int] | None, ...]

    @property
    def tiles(self) -> list[int]:
        """How many tiles of common size each picture is worth, by which batches are bounded."""
        return [max(len(q), -(-q.shape[0] * q.shape[1] // _TILE)) for q in self.q]

    def select(self, pictures: Sequence[int]) -> dict[str, Any]:
        """The model's inputs for these pictures, in this order, a picture as often as it is named."""
        at, count = torch.as_tensor(pictures), len(self.q)

        def taken(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if len(value) == count:
                return value[at.to(value.device)]
            if len(value) != sum(self.counts):
                return value
            parts = value.split(self.counts)  # tiles or patches of all pictures, one after the other
            return torch.cat([parts[i] for i in pictures])

        return {name: taken(value) for name, value in self.inputs.items()}


def image_batches(
    vlm: Vlm, pieces: Iterable[Piece], image_of: Callable[[Piece], Any], most: int
) -> Iterator[tuple[list[Piece], list[Any]]]:
    """Pieces of work and their pictures, which are read in their turn, by what is looked at together.

    That is at most `most` pictures, of at most `AT_ONCE` tiles, at least one.
    """
    part: list[Piece] = []
    images: list[Any] = []
    tiles = 0
    for piece in pieces:
        image = image_of(piece)
        own = vlm.grid((image.width, image.height)).tiles
        if part and (len(part) == most or tiles + own > AT_ONCE):
            yield part, images
            part, images, tiles = [], [], 0
        part.append(piece)
        images.append(image)
        tiles += own
    if part:
        yield part, images


@torch.inference_mode()
def run_prefix(vlm: Vlm, images: Sequence[Any], prompt: str = PROMPT) -> Prefix:
    """Runs the pictures through the tower as far as the target layer."""
    inputs = vlm.inputs(images, prompt)
    gave: dict[nn.Module, list[Any]] = {module: [] for module in [*blocks_before(vlm)[-1:], *beside(vlm)]}

    def keep(own: list[Any], original: Any, *args: Any, **kwargs: Any) -> Any:
        own.append(original(*args, **kwargs))
        return own[-1]

    with ExitStack() as stack:
        for module, own in gave.items():
            stack.enter_context(replace_forward(module, partial(keep, own)))
        recorded = stack.enter_context(record(vlm.layer))
        vlm.model(**inputs)
    counts = vlm.layout.counts(inputs, len(images))
    kept = {
        module: parts
        for module, own in gave.items()
        if len(own) == 1 and (parts := _by_picture(own[0], counts, recorded.input)) is not None
    }
    q = vlm.split_by_image(recorded.input, inputs, len(images))
    sizes = tuple((image.width, image.height) for image in images)
    shapes = vlm.layout.shapes(inputs, len(images))
    return Prefix(inputs, tuple(q), kept, sizes, tuple(counts), tuple(shapes))


@contextmanager
def resume_from(vlm: Vlm, prefix: Prefix, pictures: Sequence[int]) -> Iterator[None]:
    """Inside, the tower goes on from what was looked at: what runs before the target does not compute."""
    before = blocks_before(vlm)

    def skip(_original: Any, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states

    def recall(parts: Sequence[Any], _original: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _joined([parts[i] for i in pictures])

    with ExitStack() as stack:
        if before and before[-1] in prefix.outputs:
            for block in before[:-1]:
                stack.enter_context(replace_forward(block, skip))
        for module, parts in prefix.outputs.items():
            stack.enter_context(replace_forward(module, partial(recall, parts)))
        yield


def _by_picture(gave: Any, counts: list[int], seen: torch.Tensor) -> list[Any] | None:
    """What a module gave, an entry a picture; None where it is anything but tensors with a row as the target's."""
    if isinstance(gave, torch.Tensor):
        fits = gave.dim() >= seen.dim() and len(gave) == len(seen) == sum(counts)
        return list(gave.split(counts)) if fits else None
    if not isinstance(gave, tuple):
        return None
    parts = [[None] * len(counts) if one is None else _by_picture(one, counts, seen) for one in gave]
    return None if any(part is None for part in parts) else list(zip(*parts, strict=True))


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    return None if parts[0] is None else tuple(_joined(column) for column in zip(*parts, strict=True))


def beside(vlm: Vlm) -> list[nn.Module]:
    """The modules next to the way from the tower down to the target layer; its other blocks do not count."""
    at, found = vlm.model.get_submodule(vlm.within), []
    for name in vlm.layer_name.removeprefix(f"{vlm.within}.").split("."):
        if not isinstance(at, nn.ModuleList):
            found += [child for own, child in at.named_children() if own != name]
        at = at.get_submodule(name)
    return found


def blocks_before(vlm: Vlm) -> list[nn.Module]:
    """The blocks of the tower before the one that the target layer is in."""
    parts = vlm.layer_name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if parts[i].isdigit():
            holder, number = vlm.model.get_submodule(".".join(parts[:i])), int(parts[i])
            read = getattr(vlm.model.config, "vision_feature_layer", -1)
            # Who reads several layers, as Qwen3-VL does too, sees what skipped blocks would not give.
            several = getattr(vlm.model.config.vision_config, "deepstack_visual_indexes", None)
            if not isinstance(holder, nn.ModuleList) or not isinstance(read, int) or several:
                return []
            at = read if read >= 0 else len(holder) + 1 + read
            return list(holder.children())[:number] if at >= number else []
    return []
