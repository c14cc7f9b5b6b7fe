"""Apply prepared plans to a model: to every call of it inside a `with` block, or to images whose prefix is known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from elude_steer.errors import AtlasError, ModelError, SpecError
from elude_steer.models.execution.compiled import is_compiled
from elude_steer.models.hooks import replace_forward, watch_inputs
from elude_steer.models.patch_layout import Tiles
from elude_steer.models.prefix_cache import Prefix, resume_from
from elude_steer.models.vlm import Vlm
from elude_steer.steering.intervention import ImageMemo, PreparedPlan, make_edited_forward, make_resumed_forward
from elude_steer.steering.regions import ImagePatches


@contextmanager
def apply_to_calls(vlm: Vlm, prepared: Sequence[PreparedPlan | None]) -> Iterator[None]:
    """Inside, and nowhere else (see `hooks`), the model and its methods for images see images under the plans.

    Args:
        vlm: the model.
        prepared: a single plan for all images, or one for each image of a batch.
    """
    inputs: dict[str, Any] = {}  # of the current call of the model

    def remember_inputs(arguments: Mapping[str, Any]) -> None:
        if arguments.get("pixel_values") is not None:
            inputs.clear()
            inputs.update(arguments)

    def generate(original: Any, *args: Any, **kwargs: Any) -> Any:
        remember_inputs(kwargs)  # `generate` encodes images before it calls the model itself
        return original(*args, **kwargs)

    def get_image_features(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
        pixels = given.get("pixel_values")
        if pixels is not None:
            # The model calls this method itself; then the inputs of that call say more, and only they hold the prompts.
            if "pixel_values" not in inputs or inputs["pixel_values"].shape != pixels.shape:
                inputs.clear()
            inputs.update({name: value for name, value in given.items() if value is not None})
        return original(*args, **kwargs)

    def split(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return vlm.split_by_image(x, inputs, _count_images(vlm, inputs))

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        return vlm.join_images(parts, inputs)

    def compute(original: Any, x: torch.Tensor) -> torch.Tensor:
        count = _count_images(vlm, inputs)
        if len(prepared) not in (1, count):
            raise SpecError(f"{len(prepared)} plans for {count} images; give one for all, or one for each.")
        shapes = vlm.layout.shapes(inputs, count)
        patches = [ImagePatches(vlm, partial(_image_size, inputs, i), shapes[i]) for i in range(count)]
        return make_edited_forward(vlm.layer, prepared, split, patches, join)(original, x)

    active = any(one is not None and one.plan.has_effect for one in prepared)
    if not active and is_compiled(vlm.model, vlm.layer_name):
        yield  # the model runs the compiled code that it runs without us
        return
    with ExitStack() as stack:
        stack.enter_context(watch_inputs(vlm.model, remember_inputs))
        stack.enter_context(replace_forward(vlm.model, generate, "generate"))
        for module in vlm.model.modules():
            if hasattr(type(module), "get_image_features"):
                stack.enter_context(replace_forward(module, get_image_features, "get_image_features"))
        stack.enter_context(replace_forward(vlm.layer, compute))
        yield


@contextmanager
def resume_under_plans(
    vlm: Vlm,
    prefix: Prefix,
    rows: Sequence[tuple[int, PreparedPlan | None]],
    inputs: Mapping[str, Any] | None = None,
    memos: Sequence[ImageMemo] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Inside, a call of the model with the inputs that this gives resumes at the target layer, under the plans.

    Args:
        vlm: the model.
        prefix: of some images.
        rows: for each row of the batch the number of its image, and its plan.
        inputs: those of the call, where a row may hold several images; then `rows` has one entry for each of these.
        memos: see `make_resumed_forward`.
    """
    numbers = [image for image, _ in rows]
    edits = [(image, prepared, image_patches(vlm, prefix, image)) for image, prepared in rows]
    inputs = prefix.select(numbers) if inputs is None else inputs
    forward = make_resumed_forward(prefix.q, edits, partial(vlm.join_images, inputs=inputs), memos)
    active = any(one is not None and one.plan.has_effect for _, one in rows)
    if not active and not prefix.outputs:
        yield inputs  # nothing to resume from and nothing to change
        return
    with resume_from(vlm, prefix, numbers), replace_forward(vlm.layer, forward):
        yield inputs


def image_patches(vlm: Vlm, prefix: Prefix, image: int) -> ImagePatches:
    """The patches of one image of a prefix."""
    grid = prefix.grids[image] if prefix.grids else None
    return ImagePatches(vlm, lambda: prefix.sizes[image], prefix.shapes[image], len(prefix.q[image]), grid)


def _count_images(vlm: Vlm, inputs: Mapping[str, Any]) -> int:
    """Count the images in a call of the model; raise if it is not one for each prompt."""
    sizes = [inputs[name] for name in ("image_sizes", "image_grid_thw") if inputs.get(name) is not None]
    if inputs.get("input_ids") is not None:
        count = len(inputs["input_ids"])
        if any(len(one) != count for one in sizes):
            raise ModelError("a prompt with several images cannot be steered; give each image a prompt.")
        return count
    if sizes:  # `get_image_features` gets no prompts
        return len(sizes[0])
    pixels = inputs.get("pixel_values")
    if pixels is None:
        raise ModelError("inside `applied`, call the model itself, with input_ids and pixel_values as keywords.")
    if pixels.dim() == 4 and isinstance(vlm.layout, Tiles) and vlm.grid((128, 64)).tiles > 1:
        raise ModelError(
            "this model cuts an image into several tiles, and without input_ids it is unknown which of them belong "
            "together; call the model itself, or use `Steerer.embeds`."
        )
    return len(pixels)


def _image_size(inputs: Mapping[str, Any], index: int) -> tuple[int, int]:
    if "image_sizes" not in inputs:
        raise AtlasError("this model does not say how large its images are; use `Steerer.captions` for regions.")
    height, width = inputs["image_sizes"][index].tolist()
    return int(width), int(height)
