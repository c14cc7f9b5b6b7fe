"""Run the tower up to the target layer once per image, and from there on once per plan.

Which modules run before the target is found by structure, and no structure is taken on trust: on the first image of a
model, resuming must give the language model the same bits as a complete run, with and without an edit. Otherwise the
tower runs completely for every plan.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elude_steer.errors import EludeSteerWarning
from elude_steer.models.execution.compiled import is_compiled
from elude_steer.models.hooks import record, replace_forward
from elude_steer.models.patch_layout import PatchGrid
from elude_steer.models.vlm import PROMPT, Vlm

MAX_TILES = 128  # tiles that run through the tower together; the prefix of one takes 42 MB in LLaVA-OneVision
_TILE_PATCHES = 729  # patches of a tile of LLaVA-OneVision; in other models a tile may be a complete image
Item = TypeVar("Item")

# target layer -> the modules whose outputs can be kept; None if resuming did not prove right
_KEPT: WeakKeyDictionary[nn.Module, list[nn.Module] | None] = WeakKeyDictionary()
_PROVING = threading.Lock()


@dataclass(frozen=True, eq=False)
class Prefix:
    """The results of a tower for some images, up to its target layer.

    Attributes:
        inputs: the model's inputs, a row per image.
        q: for each image, the inputs of the target layer, `(tiles, patches, d_in)`.
        outputs: for each module of the tower that ran before the target, a list of its outputs per image.
        sizes: width and height of each image.
        counts: number of rows of the tower's input that belong to each image.
        shapes: for each image, rows and columns of patches in a tile.
        grids: the grid of each image; empty if they are made where they are needed.
    """

    inputs: Mapping[str, Any]
    q: tuple[torch.Tensor, ...]
    outputs: Mapping[nn.Module, Sequence[Any]]
    sizes: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    shapes: tuple[tuple[int, int] | None, ...]
    grids: tuple[PatchGrid, ...] = ()

    @property
    def tiles(self) -> list[int]:
        """The size of each image, counted in tiles of the usual size; it bounds batches."""
        return [max(len(q), -(-q.shape[0] * q.shape[1] // _TILE_PATCHES)) for q in self.q]

    def select(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the model's inputs for these images in this order; an index may occur several times."""
        at, count = torch.as_tensor(indices), len(self.q)

        def select_rows(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if len(value) == count:
                return value[at.to(value.device)]
            if len(value) != sum(self.counts):
                return value
            parts = value.split(self.counts)  # tiles or patches of all images, one image after the other
            return torch.cat([parts[i] for i in indices])

        return {name: select_rows(value) for name, value in self.inputs.items()}


def image_batches(
    vlm: Vlm, items: Iterable[Item], get_image: Callable[[Item], Any], max_images: int
) -> Iterator[tuple[list[Item], list[Any]]]:
    """Group items into batches and yield each batch with its images, which are read only then.

    A batch has at most `max_images` images and at most `MAX_TILES` tiles, but at least one image.
    """
    batch: list[Item] = []
    images: list[Any] = []
    tiles = 0
    for item in items:
        image = get_image(item)
        new_tiles = vlm.grid((image.width, image.height)).tiles
        if batch and (len(batch) == max_images or tiles + new_tiles > MAX_TILES):
            yield batch, images
            batch, images, tiles = [], [], 0
        batch.append(item)
        images.append(image)
        tiles += new_tiles
    if batch:
        yield batch, images


@torch.inference_mode()
def run_prefix(vlm: Vlm, images: Sequence[Any], prompt: str | Sequence[str] = PROMPT) -> Prefix:
    """Run the images through the tower up to the target layer; the prompt is one for all, or one for each."""
    with vlm.use_threads():
        return _run_prefix(vlm, images, prompt)


def change_prompt(vlm: Vlm, prefix: Prefix, images: Sequence[Any], prompts: Sequence[str]) -> Prefix:
    """The prefix of the same images with another prompt for each of them; the tower does not run again."""
    return replace(prefix, inputs=vlm.inputs(images, prompts))


def _run_prefix(vlm: Vlm, images: Sequence[Any], prompt: str | Sequence[str]) -> Prefix:
    sizes = [(image.width, image.height) for image in images]
    if is_compiled(vlm.model, vlm.layer_name):  # compiled code has no place to resume
        return _collect_prefix(vlm, vlm.inputs(images, prompt), sizes, [])
    with _PROVING:
        if vlm.layer not in _KEPT:
            first = prompt if isinstance(prompt, str) else prompt[0]
            _KEPT[vlm.layer] = _prove_resuming(vlm, images[:1], first)
    return _collect_prefix(vlm, vlm.inputs(images, prompt), sizes, _KEPT[vlm.layer] or [])


@torch.inference_mode()
def run_tower(vlm: Vlm, inputs: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> Prefix:
    """Do what `run_prefix` does for prepared inputs, whose rows may hold several images each.

    Args:
        vlm: the model; `run_prefix` must have run with it once.
        inputs: prepared inputs.
        sizes: width and height of all images of all rows.
    """
    with vlm.use_threads():
        return _collect_prefix(vlm, inputs, sizes, _KEPT.get(vlm.layer) or [])  # none of a compiled model


def _collect_prefix(
    vlm: Vlm, inputs: Mapping[str, Any], sizes: Sequence[tuple[int, int]], modules: Sequence[nn.Module]
) -> Prefix:
    """Run the tower up to the target and keep what these modules compute."""
    calls: dict[nn.Module, list[Any]] = {module: [] for module in modules}

    def keep_output(outputs: list[Any], original: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(original(*args, **kwargs))
        return outputs[-1]

    with ExitStack() as stack:
        for module, outputs in calls.items():
            stack.enter_context(replace_forward(module, partial(keep_output, outputs)))
        recorded = stack.enter_context(record(vlm.layer))
        vlm.model(**inputs)
    counts = vlm.layout.counts(inputs, len(sizes))
    by_image = {
        module: parts
        for module, outputs in calls.items()
        if len(outputs) == 1 and (parts := _split_by_image(outputs[0], counts, recorded.input)) is not None
    }
    q = vlm.split_by_image(recorded.input, inputs, len(sizes))
    shapes = vlm.layout.shapes(inputs, len(sizes))
    return Prefix(inputs, tuple(q), by_image, tuple(sizes), tuple(counts), tuple(shapes))


def _prove_resuming(vlm: Vlm, images: Sequence[Any], prompt: str) -> list[nn.Module] | None:
    """Return the modules whose outputs can be kept, or None if resuming differs from complete runs."""
    candidates = [*blocks_before(vlm)[-1:], *_modules_beside_path(vlm)]
    inputs = vlm.inputs(images, prompt)
    again = _called_behind_target(vlm, inputs, candidates)
    kept = [module for module in candidates if module not in again]
    prefix = _collect_prefix(vlm, inputs, [(image.width, image.height) for image in images], kept)
    q = vlm.join_images(prefix.q, prefix.inputs)
    for edit in (_no_edit, _trial_edit):

        def complete(original: Any, x: torch.Tensor, edit: Any = edit) -> torch.Tensor:
            return edit(original(x))

        def resumed(original: Any, _x: torch.Tensor, edit: Any = edit) -> torch.Tensor:
            return edit(original(q))

        with replace_forward(vlm.layer, complete):
            expected = vlm.embed_images(prefix.inputs)
        with resume_from(vlm, prefix, [0]), replace_forward(vlm.layer, resumed):
            found = vlm.embed_images(prefix.inputs)
        if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
            warnings.warn(
                f"the tower of {type(vlm.model).__name__} cannot be resumed at '{vlm.layer_name}': that would change "
                "what it computes. Every caption runs the whole tower, which is right but slower.",
                EludeSteerWarning,
                stacklevel=2,
            )
            return None
    return kept


def _no_edit(output: torch.Tensor) -> torch.Tensor:
    return output


def _trial_edit(output: torch.Tensor) -> torch.Tensor:
    return output * 1.5 + 1


def _called_behind_target(vlm: Vlm, inputs: Mapping[str, Any], modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Return those modules that run again, or for the first time, once the target layer has run."""
    found: set[nn.Module] = set()
    passed: list[bool] = []

    def pass_target(original: Any, *args: Any, **kwargs: Any) -> Any:
        passed.append(True)
        return original(*args, **kwargs)

    def notice(module: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        if passed:
            found.add(module)
        return original(*args, **kwargs)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replace_forward(module, partial(notice, module)))
        stack.enter_context(replace_forward(vlm.layer, pass_target))
        vlm.embed_images(inputs)
    return found


@contextmanager
def resume_from(vlm: Vlm, prefix: Prefix, indices: Sequence[int]) -> Iterator[None]:
    """Inside, the tower starts from the prefix of these images: modules before the target do not compute."""
    before = blocks_before(vlm)

    def skip(_original: Any, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return states

    def reuse(parts: Sequence[Any], _original: Any, *_args: Any, **_kwargs: Any) -> Any:
        return _concatenate([parts[i] for i in indices])

    with ExitStack() as stack:
        if before and before[-1] in prefix.outputs:
            for block in before[:-1]:
                stack.enter_context(replace_forward(block, skip))
        for module, parts in prefix.outputs.items():
            stack.enter_context(replace_forward(module, partial(reuse, parts)))
        yield


def _split_by_image(output: Any, counts: list[int], q: torch.Tensor) -> list[Any] | None:
    """Split a module's output by image; None unless it consists of tensors with the same rows as `q`."""
    if isinstance(output, torch.Tensor):
        fits = output.dim() >= q.dim() and len(output) == len(q) == sum(counts)
        return list(output.split(counts)) if fits else None
    if not isinstance(output, tuple):
        return None
    parts = [[None] * len(counts) if one is None else _split_by_image(one, counts, q) for one in output]
    return None if any(part is None for part in parts) else list(zip(*parts, strict=True))


def _concatenate(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        # Kernels round by the order of a tensor's dimensions in memory, so that order must stay.
        order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
        joined = torch.cat([part.permute(order) for part in parts], order.index(0))
        return joined.permute([order.index(dim) for dim in range(len(order))])
    return None if parts[0] is None else tuple(_concatenate(column) for column in zip(*parts, strict=True))


def _modules_beside_path(vlm: Vlm) -> list[nn.Module]:
    """Submodules beside the path from the tower to the target layer, without the other blocks of the tower."""
    module, found = vlm.model.get_submodule(vlm.within), []
    for name in vlm.layer_name.removeprefix(f"{vlm.within}.").split("."):
        if not isinstance(module, nn.ModuleList):
            found += [child for child_name, child in module.named_children() if child_name != name]
        module = module.get_submodule(name)
    return found


def blocks_before(vlm: Vlm) -> list[nn.Module]:
    """Return the blocks of the tower before the block of the target layer; none if they cannot be skipped."""
    parts = vlm.layer_name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        if parts[i].isdigit():
            blocks, number = vlm.model.get_submodule(".".join(parts[:i])), int(parts[i])
            read = getattr(vlm.model.config, "vision_feature_layer", -1)
            # A model that reads several layers, such as Qwen3-VL, needs the outputs of skipped blocks too.
            reads_several = getattr(vlm.model.config.vision_config, "deepstack_visual_indexes", None)
            if not isinstance(blocks, nn.ModuleList) or not isinstance(read, int) or reads_several:
                return []
            last = read if read >= 0 else len(blocks) + 1 + read
            return list(blocks.children())[:number] if last >= number else []
    return []
