"""A vision-language model: its tower and target layer, how its pictures become patches, greedy captions."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from elude_steer.errors import EludeSteerWarning, ModelError, SpecError
from elude_steer.models.hooks import find_layer, record
from elude_steer.models.loading import load_pretrained, load_processor
from elude_steer.models.patch_layout import Canvases, Layout, PatchGrid, confirmed, layout_of
from elude_steer.models.vision import Tower, vision_part
from elude_steer.utils.files import resolve_id

PROMPT = "Describe this image in one sentence."
__all__ = ["PROMPT", "PatchGrid", "Vlm", "limit_logits", "report_tokens"]
_ON_TOKEN: ContextVar[Callable[[int], object] | None] = ContextVar("on_token", default=None)


@contextmanager
def report_tokens(on_token: Callable[[int], object]) -> Iterator[None]:
    """Inside, in this thread alone, `step` is told an answer's length after each token; if it raises, the work ends.

    Example:
        >>> with report_tokens(lambda tokens: print(tokens)):
        ...     steerer.steer("dog.png", minus=["dog"])
    """
    before = _ON_TOKEN.set(on_token)
    try:
        yield
    finally:
        _ON_TOKEN.reset(before)


@dataclass(frozen=True, eq=False)
class Vlm(Tower):
    """A Hugging Face image-text-to-text model with its processor and one target layer in its vision tower.

    Its parts are found by what they are made of, whatever the model is called; see `layouts` for its patches.
    """

    model: Any
    processor: Any = None
    id: str = ""
    revision: str | None = None
    tried_layout: Layout | None = None

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
            layer: end of the target layer's name inside the vision tower; empty: the last layer of the last MLP whose
                output reaches the language model (`mlp.fc2`, `mlp.down_proj`).
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
        model = load_pretrained(
            AutoModelForImageTextToText,
            model_id,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        processor = load_processor(
            model_id, model.config.model_type, revision=revision, trust_remote_code=trust_remote_code
        )
        return cls.of(model, processor, layer=layer, id=model_id, revision=revision)

    @classmethod
    def of(cls, model: Any, processor: Any, *, layer: str = "", id: str = "", revision: str | None = None) -> Vlm:
        """The same from a model and processor that are already loaded."""
        within = vision_part(model)
        blocks = _blocks(model, within)
        name, module = find_layer(model, layer or _last_target(model, blocks), within=within)
        vlm = cls(
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
        layout = _tried(vlm, blocks)
        if callable(processor) and not _template(processor):
            warnings.warn(
                f"{type(model).__name__} comes without a chat template, so it gets picture and question alone. "
                "One that was taught to chat wants it: processor.chat_template = …, processor.save_pretrained(FOLDER).",
                EludeSteerWarning,
                stacklevel=2,
            )
        return replace(vlm, skip_tokens=tuple(range(layout.before)), tried_layout=layout)

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
        asked, step = inputs["input_ids"].shape[1], _ON_TOKEN.get()

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
            # … and penalties, with which the likeliest word is not the one that is said.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            min_length=0,
            min_new_tokens=None,
            max_new_tokens=max_new_tokens,
        )
        new = tokens[:, asked:]
        return [text.strip() for text in self.processor.tokenizer.batch_decode(new, skip_special_tokens=True)]

    @cached_property
    def layout(self) -> Layout:
        """How pictures become tiles and patches."""
        return self.tried_layout or layout_of(self.model.config, self._shown)

    @property
    def patch_shape(self) -> tuple[int, int] | None:
        """Rows and columns of patches in a tile; None where they are others for every picture."""
        return self.layout.shape

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Where the patches of a picture of this `(width, height)` lie, tile by tile."""
        return self.layout.grid(size)

    def tile_counts(self, inputs: Mapping[str, Any]) -> list[int] | None:
        """How many tiles each picture of prepared `inputs` has, or None where the model does not cut pictures."""
        return self.layout.counts(inputs, len(inputs["image_sizes"])) if isinstance(self.layout, Canvases) else None

    def split_by_image(self, q: torch.Tensor, inputs: Any, images: int) -> list[torch.Tensor]:
        """What a layer of the tower saw, a `(tiles, tokens, …)` tensor an image, its patches row by row."""
        counts = self.tile_counts(inputs)
        if counts is not None and sum(counts) != len(q):
            return super().split_by_image(q, inputs, images)
        return self.layout.split(q, inputs, images)

    def join_images(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """What `split_by_image` gave, or anything of its shape, again one after the other as the tower has it."""
        return self.layout.join(parts, inputs)

    def _shown(self, image: Any) -> Mapping[str, Any]:
        if not callable(self.processor):  # no words, no prompt
            shown: Mapping[str, Any] = self.processor.image_processor(images=[image], return_tensors="pt")
            return shown
        return _prepared(self.model, self.processor, [image], PROMPT)


def _inputs(model: Any, processor: Any, images: Sequence[Any], prompt: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _prepared(model, processor, images, prompt).to(model.device, model.dtype)
    return found  # of which only the pixels are cast


def _template(processor: Any) -> Any:
    return getattr(processor, "chat_template", None) or processor.tokenizer.chat_template


def _prepared(model: Any, processor: Any, images: Sequence[Any], prompt: str) -> Any:
    token = str(getattr(processor, "image_token", "<image>"))
    if token in prompt:
        raise SpecError(f"the question holds '{token}', which stands for the picture itself; leave it out.")
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}]
    if _template(processor):
        text = processor.apply_chat_template(message, add_generation_prompt=True)
    else:
        text = f"{token}{prompt}"  # models that were never taught to chat, such as PaliGemma, are asked like this
    bos = processor.tokenizer.bos_token
    told = {"add_special_tokens": False} if bos and text.startswith(bos) else {}  # a template may begin with it
    inputs = processor(
        images=[[image.convert("RGB")] for image in images],
        text=[text] * len(images),
        padding=True,
        padding_side="left",  # generation continues at the right end of every row
        return_tensors="pt",
        **told,
    )
    inputs.pop("labels", None)  # of an answer that nobody has given
    return inputs


def _blocks(model: Any, within: str) -> list[nn.Module]:
    """The blocks of a tower: the longest list of modules in it."""
    lists = [list(m) for m in model.get_submodule(within).modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _last_target(model: Any, blocks: Sequence[nn.Module]) -> str:
    """The layer that ends the MLP of the last block whose output the language model gets: it makes wide narrow."""
    read = getattr(model.config, "vision_feature_layer", None)
    layers = [read] if isinstance(read, int) else read or [-1]  # of states: 0 is what the first block is given
    last = max(layer if layer >= 0 else len(blocks) + 1 + layer for layer in layers)
    for block in reversed(blocks[:last]):
        inside = [m for m in block.modules() if isinstance(m, nn.Linear) and m.in_features > m.out_features]
        if inside:
            return next(name for name, module in model.named_modules() if module is inside[-1])
    return "mlp.fc2"


def _tried(vlm: Vlm, blocks: Sequence[nn.Module]) -> Layout:
    """The layout of a model, after two pictures of noise have shown that it holds; no more runs than the embedding.

    Canvases, which the config describes, are only asked for tokens before the patches.
    """
    if not blocks:
        raise ModelError(f"the tower of {type(vlm.model).__name__} has no list of blocks; it is not understood.")
    if isinstance(vlm.layout, Canvases):
        return replace(vlm.layout, before=_before(vlm, vlm.layout, blocks[0]))
    # Larger than a window, or its order would not show; of two shapes.
    scale = max(1.0, 2.5 * getattr(vlm.layout, "window", 0) * vlm.layout.patch[0] / 40)
    rng, sizes = np.random.default_rng(0), [(round(w * scale), round(h * scale)) for w, h in ((90, 60), (40, 70))]
    inputs = vlm.inputs([Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes])

    def seen(pixels: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), record(blocks[0]) as first:
            vlm.model(**{**inputs, "pixel_values": pixels})
        return first.input

    try:
        for size in sizes:
            vlm.grid(size)
        return confirmed(vlm.layout, inputs, len(sizes), seen)
    except ModelError as error:
        raise ModelError(f"{type(vlm.model).__name__} cannot be steered: {error}") from error


@torch.inference_mode()
def _before(vlm: Vlm, layout: Canvases, first: nn.Module) -> int:
    """How many tokens stand before the patches of a tile: those that no pixel changes."""
    tower, seen = vlm.model.get_submodule(vlm.within), []
    for value in (-1.0, 1.0):
        with record(first) as given:
            tower(torch.full((1, 3, layout.side, layout.side), value, device=vlm.device, dtype=vlm.model.dtype))
        seen.append(given.input[0])
    fixed = (seen[0] == seen[1]).all(-1).tolist()
    before = fixed.count(True)
    if before + math.prod(layout.shape or ()) != len(fixed) or not all(fixed[:before]):
        raise ModelError(
            f"the tower of {type(vlm.model).__name__} makes {len(fixed)} tokens of {layout.shape} patches; which of "
            "them is which is not understood."
        )
    return before


def limit_logits(model: torch.nn.Module, count: int) -> dict[str, int]:
    """What a call adds to get the logits of the last so many positions: those of all of them would take gigabytes.

    Models that cannot leave any out give them all.
    """
    takes = inspect.signature(type(model).forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in takes else {}
