"""A vision-language model: its tower and target layer, where each patch lies in the picture, greedy captions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elude_steer.errors import ModelError, SpecError
from elude_steer.hooks import find_layer
from elude_steer.storage import resolve_id
from elude_steer.towers import Tower, as_dtype, explained, pil_backend, refuse_partial_load, vision_part

PROMPT = "Describe this image in one sentence."
_told: ContextVar[Callable[[int], object] | None] = ContextVar("told", default=None)


@contextmanager
def telling(step: Callable[[int], object]) -> Iterator[None]:
    """Inside, in this thread alone, `step` is told an answer's length after each token; if it raises, the work ends.

    Example:
        >>> with telling(lambda tokens: print(tokens)):
        ...     steerer.steer("dog.png", minus=["dog"])
    """
    before = _told.set(step)
    try:
        yield
    finally:
        _told.reset(before)


@dataclass(frozen=True)
class PatchGrid:
    """Where the patches of one picture lie.

    Attributes:
        boxes: `(tiles, patches, 4)` left, top, right, bottom as fractions of the picture; patches over the padding
            of a tile reach outside 0 to 1. Tile 0 shows the whole picture.
        shape: rows and columns of patches in a tile.
    """

    boxes: np.ndarray
    shape: tuple[int, int]

    @property
    def tiles(self) -> int:
        """How many tiles the picture is cut into."""
        return len(self.boxes)


@dataclass(frozen=True, eq=False)
class Vlm(Tower):
    """A Hugging Face image-text-to-text model with its processor and one target layer in its vision tower."""

    model: Any
    processor: Any = None
    id: str = ""
    revision: str | None = None

    @classmethod
    def load(
        cls,
        model_id: str,
        *,
        layer: str = "",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        device_map: str | Mapping[str, Any] | None = None,
        revision: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> Vlm:
        """The model of a Hub id or folder.

        Args:
            model_id: e.g. `llava-hf/llava-onevision-qwen2-0.5b-ov-hf`, or a folder of that shape.
            layer: end of the target layer's name inside the vision tower; empty: `mlp.fc2` of its last block.
            device: where the model goes; with `device_map`, leave it out.
            dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
            device_map: as in transformers.
            revision: commit, tag or branch on the Hub.
            attn_implementation: as in transformers.
            trust_remote_code: as in transformers.

        Example:
            >>> vlm = Vlm.load("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", layer="layers.25.mlp.fc2")
            >>> vlm.caption([image])
        """
        from transformers import AutoModelForImageTextToText

        model_id = resolve_id(model_id)
        with explained(model_id):
            model, info = AutoModelForImageTextToText.from_pretrained(
                model_id,
                revision=revision,
                dtype=as_dtype(dtype),
                device_map=device_map,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            processor = _load_processor(model_id, model.config.model_type, revision, trust_remote_code)
        refuse_partial_load(model_id, info)
        model.eval()
        if device_map is None:
            model.to(device or "cpu")
        return cls.of(model, processor, layer=layer, id=model_id, revision=revision)

    @classmethod
    def of(cls, model: Any, processor: Any, *, layer: str = "", id: str = "", revision: str | None = None) -> Vlm:
        """The same from a model and processor that are already loaded."""
        within = vision_part(model)
        name, module = find_layer(model, layer or _last_fc2(model, within), within=within)
        return cls(
            model,
            name,
            module,
            prepare=lambda images: _inputs(model, processor, images, PROMPT),
            within=within,
            settings={"processor": processor.image_processor.to_dict()},
            processor=processor,
            id=id,
            revision=revision,
        )

    def inputs(self, images: Sequence[Any], prompt: str = PROMPT) -> Mapping[str, Any]:
        """What the model is called with for these pictures: one prompt each, left-padded, on its device."""
        return _inputs(self.model, self.processor, images, prompt)

    @torch.inference_mode()
    def caption(self, images: Sequence[Any], prompt: str = PROMPT, max_new_tokens: int = 64) -> list[str]:
        """Greedy captions of a batch of pictures."""
        if not len(images):
            return []
        return self.answer(self.inputs(images, prompt), max_new_tokens)

    @torch.inference_mode()
    def answer(self, inputs: Mapping[str, Any], max_new_tokens: int = 64) -> list[str]:
        """Greedy answers to prepared inputs."""
        asked, step = inputs["input_ids"].shape[1], _told.get()

        def tell(ids: torch.Tensor, *_scores: Any, **_more: Any) -> torch.Tensor:
            if step is not None:
                step(ids.shape[1] - asked)
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)  # never a reason to stop by itself

        tokens = self.model.generate(
            **inputs,
            stopping_criteria=[tell],
            do_sample=False,
            num_beams=1,
            # A checkpoint may carry sampling settings, which greedy decoding warns about.
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=max_new_tokens,
        )
        new = tokens[:, asked:]
        return [text.strip() for text in self.processor.tokenizer.batch_decode(new, skip_special_tokens=True)]

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Rows and columns of patches in a tile."""
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size  # a remainder at the right and lower edge is never seen
        return side, side

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Where the patches of a picture of this `(width, height)` lie, tile by tile."""
        vision = self.model.config.vision_config
        side, patch = vision.image_size, vision.patch_size
        rows = self.patch_shape[0]
        if _pinpoints(self.model) is None:
            areas = [_whole_picture(self.processor.image_processor, size, side)]
        else:
            areas = [(0.0, 0.0, 1.0, 1.0), *_tile_areas(size, _pinpoints(self.model), side)]
        steps = np.arange(rows + 1) * patch / side
        boxes = [_patch_boxes(area, steps) for area in areas]
        return PatchGrid(np.stack(boxes), (rows, rows))

    def tile_counts(self, inputs: Mapping[str, Any]) -> list[int] | None:
        """How many tiles each picture of prepared `inputs` has, or None where the model does not cut pictures."""
        pinpoints = _pinpoints(self.model)
        if pinpoints is None:
            return None
        side = self.model.config.vision_config.image_size
        sizes = [tuple(size) for size in inputs["image_sizes"].tolist()]
        return [1 + _tile_rows_columns((w, h), pinpoints, side)[2] for h, w in sizes]

    def split_by_image(self, q: torch.Tensor, inputs: Any, images: int) -> list[torch.Tensor]:
        """What a layer of the tower saw, a `(tiles, tokens, …)` tensor an image."""
        counts = self.tile_counts(inputs)
        if counts is None or sum(counts) != len(q):
            return super().split_by_image(q, inputs, images)
        return list(q.split(counts))


def _inputs(model: Any, processor: Any, images: Sequence[Any], prompt: str) -> Mapping[str, Any]:
    token = str(getattr(processor, "image_token", "<image>"))
    if token in prompt:
        raise SpecError(f"the question holds '{token}', which stands for the picture itself; leave it out.")
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
        raise ModelError(f"{type(model).__name__} comes without a chat template; save one with its processor.")
    text = processor.apply_chat_template(message, add_generation_prompt=True)
    inputs = processor(
        images=[[image.convert("RGB")] for image in images],
        text=[text] * len(images),
        padding=True,
        padding_side="left",  # generation continues at the right end of every row
        return_tensors="pt",
    )
    return inputs.to(model.device, model.dtype)  # casts the pixels only


def _load_processor(model_id: str, model_type: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code, **pil_backend()}
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    if "backend" not in options or name is None:
        return AutoProcessor.from_pretrained(model_id, **options)
    # Without torchvision a processor's video half cannot be made, and then neither can the processor.
    full = processor_class_from_name(name)
    kept = [part for part in full.get_attributes() if "video" not in part]
    image_only: Any = type(name, (full,), {"get_attributes": classmethod(lambda _cls: kept)})
    return image_only.from_pretrained(model_id, **options)


def _last_fc2(model: Any, within: str) -> str:
    # A number before it: one of the blocks, and not the MLP of a pooling head behind them.
    names = [name for name, _ in model.get_submodule(within).named_modules() if re.search(r"\.\d+\.mlp\.fc2$", name)]
    return names[-1] if names else "mlp.fc2"


def _pinpoints(model: Any) -> list[list[int]] | None:
    return getattr(model.config, "image_grid_pinpoints", None)


def _tile_rows_columns(size: tuple[int, int], pinpoints: list[list[int]], side: int) -> tuple[int, int, int]:
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution((size[1], size[0]), pinpoints)
    rows, columns = height // side, width // side
    return rows, columns, rows * columns


def _tile_areas(size: tuple[int, int], pinpoints: Any, side: int) -> list[tuple[float, float, float, float]]:
    """What part of the picture each grid tile shows: the picture is fitted into the canvas and centred on it."""
    rows, columns, _ = _tile_rows_columns(size, pinpoints, side)
    width, height = size
    canvas_w, canvas_h = columns * side, rows * side
    if canvas_w / width < canvas_h / height:
        new_w, new_h = canvas_w, min(math.ceil(height * (canvas_w / width)), canvas_h)  # rounded as transformers does
    else:
        new_w, new_h = min(math.ceil(width * (canvas_h / height)), canvas_w), canvas_h
    left, top = (canvas_w - new_w) // 2, (canvas_h - new_h) // 2
    return [
        (
            (c * side - left) / new_w,
            (r * side - top) / new_h,
            (c * side + side - left) / new_w,
            (r * side + side - top) / new_h,
        )
        for r in range(rows)
        for c in range(columns)
    ]


def _whole_picture(processor: Any, size: tuple[int, int], side: int) -> tuple[float, float, float, float]:
    """What a single tile shows: the stretched picture, or its centre where the processor crops."""
    if not getattr(processor, "do_center_crop", False):
        return 0.0, 0.0, 1.0, 1.0
    shortest = (processor.size or {}).get("shortest_edge") or side
    scale = shortest / min(size)
    wide, high = side / (size[0] * scale), side / (size[1] * scale)
    return 0.5 - wide / 2, 0.5 - high / 2, 0.5 + wide / 2, 0.5 + high / 2


def _patch_boxes(area: tuple[float, float, float, float], steps: np.ndarray) -> np.ndarray:
    x = area[0] + steps * (area[2] - area[0])
    y = area[1] + steps * (area[3] - area[1])
    top, left = np.meshgrid(y[:-1], x[:-1], indexing="ij")
    bottom, right = np.meshgrid(y[1:], x[1:], indexing="ij")
    return np.stack([left, top, right, bottom], axis=-1).reshape(-1, 4)  # (patches, 4)
