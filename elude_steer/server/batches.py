"""Conversations of several clients as one call of the model, each with its own images and its own edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elude_steer.errors import EludeSteerError
from elude_steer.models.execution.device_maps import input_device
from elude_steer.models.patch_layout import PatchGrid
from elude_steer.models.prefix_cache import MAX_TILES, Prefix, run_tower
from elude_steer.models.vlm import Vlm
from elude_steer.server.edits import Edit, Edits
from elude_steer.server.image_cache import ImageCache, Key, TowerState, join_states, split_prefix
from elude_steer.steering.apply_plans import image_patches, resume_under_plans
from elude_steer.steering.intervention import ImageMemo, PreparedPlan
from elude_steer.steering.result import image_notes, result_notes
from elude_steer.steering.steerer import Steerer


@dataclass(frozen=True, eq=False)
class Conversation:
    """What the model gets for one request.

    Attributes:
        inputs: a single row of inputs.
        keys: of its images.
        sizes: width and height of its images.
        grids: of its images. The thread of the model makes none: that may take the processor, which another uses.
        edit: None is the model without edits.
    """

    inputs: Mapping[str, Any]
    keys: tuple[Key, ...]
    sizes: tuple[tuple[int, int], ...]
    grids: tuple[PatchGrid, ...]
    edit: Edit | None

    @property
    def tiles(self) -> int:
        """The number of tiles that its images are cut into."""
        return sum(grid.tiles for grid in self.grids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt with its images."""
        return int(self.inputs["input_ids"].shape[1])

    @property
    def nbytes(self) -> int:
        """The memory that its inputs take."""
        return sum(value.nbytes for value in self.inputs.values() if isinstance(value, torch.Tensor))


def join_inputs(rows: Sequence[Mapping[str, Any]], pad_token: int) -> dict[str, Any]:
    """The inputs of several rows as the processor makes them for a batch: prompts padded on the left.

    The processor itself would cut and scale all images anew, in the thread in which the model waits.
    """
    joined = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if not isinstance(first, torch.Tensor):
            joined[name] = first
            continue
        is_text = all(value.shape == row["input_ids"].shape for value, row in zip(values, rows, strict=True))
        shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        fill = pad_token if name == "input_ids" else 0
        joined[name] = torch.cat([_fill_up(value, shape, fill, left=is_text) for value in values])
    return joined


def _fill_up(value: torch.Tensor, shape: Sequence[int], fill: int, *, left: bool) -> torch.Tensor:
    """A tensor enlarged to this shape in all dimensions but the first."""
    missing = [size - own for size, own in zip(shape, value.shape[1:], strict=True)]
    if not any(missing):
        return value
    pads = [pad for count in reversed(missing) for pad in ((count, 0) if left else (0, count))]
    return torch.nn.functional.pad(value, pads, value=fill)


def takes_several(vlm: Vlm, inputs: Mapping[str, Any], images: int) -> bool:
    """Whether it is known which part of the tower's input belongs to which image of one prompt."""
    try:
        return len(vlm.layout.counts(inputs, images)) == len(vlm.layout.shapes(inputs, images)) == images
    except EludeSteerError:
        return False


class Batches:
    """Runs batches on one model; for one thread.

    Args:
        steerer: the model and its atlas.
        edits: prepares edits.
        images: keeps what the tower computes.
        on_tower: called with the number of images that the tower runs for, and of those that are known.
    """

    def __init__(
        self, steerer: Steerer[Any], edits: Edits, images: ImageCache, on_tower: Callable[[int, int], object]
    ) -> None:
        self.steerer, self.edits, self.images, self.on_tower = steerer, edits, images, on_tower
        token = steerer.vlm.processor.tokenizer.pad_token_id
        self.pad_token = 0 if token is None else int(token)
        self.device = input_device(steerer.vlm.model)

    def run(
        self,
        conversations: Sequence[Conversation],
        max_tokens: int,
        on_report: Callable[[int, dict[str, Any] | None], object],
        on_step: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        """Answer several conversations, each under its edit.

        Args:
            conversations: what the model gets.
            max_tokens: the longest answer of all.
            on_report: is called before the first token with the number of each conversation and what is to say of its
                edit.
            on_step: see `Vlm.generate`.
        """
        vlm = self.steerer.vlm
        with self.steerer.use_threads(), torch.inference_mode():
            known = self._find_states(conversations)
            keys = list(dict.fromkeys(key for one in conversations for key in one.keys))
            grids = {key: grid for one in conversations for key, grid in zip(one.keys, one.grids, strict=True)}
            inputs = self._join(conversations)
            prefix = join_states([known[key] for key in keys], inputs, [grids[key] for key in keys])
            prepared = [self.edits.prepare(one.edit) for one in conversations]
            memos = [known[key].recall() for key in keys]
            for number, (one, plan) in enumerate(zip(conversations, prepared, strict=True)):
                places = [keys.index(key) for key in one.keys]
                on_report(
                    number, self._report(one, plan, prefix, places, [known[key].notes for key in one.keys], memos)
                )
            for key, memo in zip(keys, memos, strict=True):
                known[key].remember(memo)
                self.images.measure(key)
            rows = [
                (keys.index(key), plan) for one, plan in zip(conversations, prepared, strict=True) for key in one.keys
            ]
            with resume_under_plans(vlm, prefix, rows, inputs, memos):
                vlm.generate(inputs, max_tokens, on_step)

    def _join(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        """The inputs of a batch, on the model's device."""
        joined, device = join_inputs([one.inputs for one in conversations], self.pad_token), self.device
        return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in joined.items()}

    def _find_states(self, conversations: Sequence[Conversation]) -> dict[Key, TowerState]:
        """The state of each image; the tower runs for those that are not known."""
        known = {key: state for one in conversations for key in one.keys if (state := self.images.get(key)) is not None}
        images = len({key for one in conversations for key in one.keys})
        self.on_tower(images - len(known), len(known))
        for part in self._parts_with_new_images(conversations, known):
            prefix = run_tower(self.steerer.vlm, self._join(part), [size for one in part for size in one.sizes])
            states = split_prefix(prefix, self._image_notes)
            for key, state in zip([key for one in part for key in one.keys], states, strict=True):
                known.setdefault(key, state)
                self.images.add(key, state)
        return known

    def _parts_with_new_images(
        self, conversations: Sequence[Conversation], known: Mapping[Key, TowerState]
    ) -> Iterator[list[Conversation]]:
        """Conversations that hold every unknown image, in parts that go through the tower together."""
        found, part, tiles = set(known), list[Conversation](), 0
        for one in conversations:
            if found.issuperset(one.keys):
                continue
            if part and tiles + one.tiles > MAX_TILES:
                yield part
                part, tiles = [], 0
            found.update(one.keys)
            part.append(one)
            tiles += one.tiles
        if part:
            yield part

    def _image_notes(self, q: torch.Tensor) -> list[str]:
        return image_notes(self.steerer.atlas, q, self.steerer.vlm.token_indices(q.shape[1]))

    def _report(
        self,
        one: Conversation,
        prepared: PreparedPlan | None,
        prefix: Prefix,
        numbers: Sequence[int],
        image_notes: Sequence[Sequence[str]],
        memos: Sequence[ImageMemo],
    ) -> dict[str, Any] | None:
        """What is to say of an edit, for all images of a conversation; None without an edit."""
        if one.edit is None or prepared is None:
            return None
        notes: list[str] = []
        seen: dict[str, float] = {}
        for place, (number, noted) in enumerate(zip(numbers, image_notes, strict=True), 1):
            seen_by = prefix.q[number], image_patches(self.steerer.vlm, prefix, number), memos[number]
            maps, own = prepared.maps(*seen_by), prepared.presences(*seen_by)
            found = [*noted, *result_notes(None, "", one.edit.plan, maps, own)]
            notes += found if len(numbers) == 1 else [f"image {place}: {note}" for note in found]
            seen = {word: max(value, seen.get(word, value)) for word, value in own.items()}
        return one.edit.report(seen, notes)
