"""A vision-language model: its vision tower and target layer, its patches, and greedy captions."""

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

from elude_steer.errors import EludeSteerError, EludeSteerWarning, ModelError, SpecError
from elude_steer.models.execution.device_maps import input_device, keep_in_memory
from elude_steer.models.execution.quantized import refuse_quantized_target
from elude_steer.models.hooks import block_of, find_layer, record
from elude_steer.models.loading import load_pretrained, load_processor
from elude_steer.models.patch_layout import Canvases, Layout, PatchGrid, confirm_layout, find_layout
from elude_steer.models.vision import Tower, vision_part
from elude_steer.utils.files import resolve_id
from elude_steer.utils.threads import check_threads, with_threads

PROMPT = "Describe this image in one sentence."
__all__ = ["PROMPT", "PatchGrid", "Vlm", "limit_logits", "report_tokens"]
_ON_TOKEN: ContextVar[Callable[[int], object] | None] = ContextVar("on_token", default=None)


@contextmanager
def report_tokens(on_token: Callable[[int], object]) -> Iterator[None]:
    """Inside, in this thread only, call `on_token(count)` after each generated token; raise from it to stop.

    Example:
        >>> with report_tokens(lambda tokens: print(tokens)):
        ...     steerer.steer("dog.png", minus=["dog"])
    """
    previous = _ON_TOKEN.set(on_token)
    try:
        yield
    finally:
        _ON_TOKEN.reset(previous)


@dataclass(frozen=True, eq=False)
class Vlm(Tower):
    """A Hugging Face image-text-to-text model with its processor and one target layer in its vision tower.

    Its parts are recognised by their structure, not by their names; see `patch_layout` for its patches.
    """

    model: Any
    processor: Any = None
    confirmed_layout: Layout | None = None

    @classmethod
    def load(
        cls,
        model_id: str,
        *,
        layer: str = "",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "float32",
        device_map: str | Mapping[str, Any] | None = None,
        quantize: str | None = None,
        revision: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        threads: int | None = None,
    ) -> Vlm:
        """Load the model of a Hub id or folder.

        Args:
            model_id: e.g. `llava-hf/llava-onevision-qwen2-0.5b-ov-hf`, or a folder with the same files.
            layer: end of the target layer's name inside the vision tower; by default, the last layer of the last MLP
                whose output reaches the language model (`mlp.fc2`, `mlp.down_proj`).
            device: where the model goes, the CPU by default; ignored with `device_map`.
            dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
            device_map: as in transformers; the target layer's block stays in memory also where the map offloads it.
            quantize: how the language model is quantised: `torchao-int8`, `torchao-int8-dynamic`, `bitsandbytes-8bit`
                or `bitsandbytes-4bit`; everything else keeps its numbers.
            revision: commit, tag or branch on the Hub.
            attn_implementation: as in transformers.
            trust_remote_code: whether code that comes with the model may run.
            threads: threads of torch while it computes on a CPU; by default its size and the free cores decide.

        Example:
            >>> vlm = Vlm.load("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", layer="layers.25.mlp.fc2")
            >>> vlm.caption([image])
        """
        check_threads(threads)
        from transformers import AutoModelForImageTextToText

        model_id = resolve_id(model_id)
        model = load_pretrained(
            AutoModelForImageTextToText,
            model_id,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            quantize=quantize,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        processor = load_processor(
            model_id, model.config.model_type, revision=revision, trust_remote_code=trust_remote_code
        )
        return cls.from_model(model, processor, layer=layer, id=model_id, revision=revision, threads=threads)

    @classmethod
    def from_model(
        cls,
        model: Any,
        processor: Any,
        *,
        layer: str = "",
        id: str = "",
        revision: str | None = None,
        threads: int | None = None,
    ) -> Vlm:
        """Wrap a model and a processor that are already loaded."""
        within = vision_part(model)
        blocks = _blocks(model, within)
        name, module = find_layer(model, layer or _last_target(model, blocks), within=within)
        refuse_quantized_target(model, within, name)
        keep_in_memory(block_of(model, name))
        vlm = cls(
            model,
            name,
            module,
            prepare=lambda images: _model_inputs(model, processor, images, PROMPT),
            within=within,
            settings={"processor": processor.image_processor.to_dict()},
            processor=processor,
            id=id,
            revision=revision,
            threads=threads,
        )
        with vlm.use_threads():
            layout = _test_layout(vlm, blocks)
        if callable(processor) and not _chat_template(processor):
            warnings.warn(
                f"{type(model).__name__} has no chat template, so its prompt is only the image and the question. "
                "A model trained to chat needs one: processor.chat_template = …, processor.save_pretrained(FOLDER).",
                EludeSteerWarning,
                stacklevel=2,
            )
        return replace(vlm, skip_tokens=tuple(range(layout.before)), confirmed_layout=layout)

    def inputs(self, images: Sequence[Any], prompt: str | Sequence[str] = PROMPT) -> Mapping[str, Any]:
        """Return the model's inputs for these images, left-padded, on the model's device.

        Args:
            images: PIL images.
            prompt: the question, or one for each image.
        """
        return _model_inputs(self.model, self.processor, images, prompt)

    @with_threads
    @torch.inference_mode()
    def caption(self, images: Sequence[Any], prompt: str = PROMPT, max_new_tokens: int = 64) -> list[str]:
        """Generate greedy captions for a batch of images."""
        if not len(images):
            return []
        return self.answer(self.inputs(images, prompt), max_new_tokens)

    def chat_inputs(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], device: torch.device | None = None
    ) -> Mapping[str, Any]:
        """Return the model's inputs for one conversation.

        Args:
            messages: `{"role": …, "content": [parts]}`, where a part is
                `{"type": "image"}` or `{"type": "text", "text": …}`.
            images: the PIL images of all parts, in their order.
            device: where the inputs are; the model's device by default.
        """
        inputs = _tokenize(self.processor, [images], [_format_chat(self.processor, messages)])
        moved: Mapping[str, Any] = inputs.to(input_device(self.model) if device is None else device, self.model.dtype)
        return moved

    @with_threads
    @torch.inference_mode()
    def answer(self, inputs: Mapping[str, Any], max_new_tokens: int = 64) -> list[str]:
        """Generate greedy answers to prepared inputs."""
        self._check_length(inputs, max_new_tokens)
        on_token = _ON_TOKEN.get()

        def report(new: torch.Tensor) -> None:
            if on_token is not None:
                on_token(new.shape[1])

        return self.decode(self.generate(inputs, max_new_tokens, report))

    def decode(self, tokens: Any) -> list[str]:
        """The text of the tokens of each answer."""
        return [text.strip() for text in self.processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    @torch.inference_mode()
    def generate(
        self,
        inputs: Mapping[str, Any],
        max_new_tokens: int,
        on_step: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor:
        """Generate the tokens of greedy answers to prepared inputs, `(rows, tokens)`.

        Args:
            inputs: one row for each answer.
            max_new_tokens: the longest answer.
            on_step: is called with the tokens so far after each step; may return which rows end here, `(rows,)` bool.
        """
        prompt_length = inputs["input_ids"].shape[1]

        def report(ids: torch.Tensor, *_scores: Any, **_options: Any) -> torch.Tensor:
            ended = on_step(ids[:, prompt_length:])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device) if ended is None else ended

        tokens: torch.Tensor = self.model.generate(
            **inputs,
            stopping_criteria=[report],
            do_sample=False,
            num_beams=1,
            # A checkpoint may contain sampling settings, which greedy decoding warns about,
            temperature=None,
            top_p=None,
            top_k=None,
            # and penalties, with which the most likely token is not the one that is chosen.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            min_length=0,
            min_new_tokens=None,
            max_new_tokens=max_new_tokens,
        )
        return tokens[:, prompt_length:]

    @torch.inference_mode()
    def embed_images(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return what the language model gets in place of each prepared image's tokens, `(tokens, width)` each."""
        config = self.model.config
        token = getattr(config, "image_token_id", None)
        token = config.image_token_index if token is None else token
        embedding = self.model.get_input_embeddings()
        # The language model is the module that holds the embedding of words.
        language_model = next(m for m in self.model.modules() if any(child is embedding for child in m.children()))
        with record(language_model, argument="inputs_embeds") as recorded:
            self.model(**inputs)
        return [row[ids == token] for row, ids in zip(recorded.input, inputs["input_ids"], strict=True)]

    def _check_length(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Raise if the prompt and the answer have more tokens than the language model was made for."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        ids = inputs["input_ids"]
        if not isinstance(limit, int) or ids.shape[1] + max_new_tokens <= limit:
            return
        token = getattr(self.model.config, "image_token_id", None)
        image = 0 if token is None else int((ids == token).sum(1).max())
        raise SpecError(
            f"the prompt has {ids.shape[1] - image:,} tokens, and {max(0, limit - image - max_new_tokens):,} fit: the "
            f"model takes {limit:,}, of which the image needs {image:,} and the answer {max_new_tokens:,} "
            "(max_new_tokens); shorten the prompt, or lower max_new_tokens."
        )

    @cached_property
    def layout(self) -> Layout:
        """How images become tiles and patches."""
        return self.confirmed_layout or find_layout(self.model.config, self._process_image)

    @property
    def patch_shape(self) -> tuple[int, int] | None:
        """Rows and columns of patches in a tile; None if they differ between images."""
        return self.layout.shape

    def grid(self, size: tuple[int, int]) -> PatchGrid:
        """Return the positions of the patches of an image of this `(width, height)`, tile by tile."""
        return self.layout.grid(size)

    def tile_counts(self, inputs: Mapping[str, Any]) -> list[int] | None:
        """Return the number of tiles of each image of prepared `inputs`; None if the model does not use canvases."""
        return self.layout.counts(inputs, len(inputs["image_sizes"])) if isinstance(self.layout, Canvases) else None

    def split_by_image(self, q: torch.Tensor, inputs: Any, images: int) -> list[torch.Tensor]:
        """Split tokens of a tower layer by image, one `(tiles, tokens, …)` tensor each, patches row by row."""
        counts = self.tile_counts(inputs)
        if counts is not None and sum(counts) != len(q):
            return super().split_by_image(q, inputs, images)
        return self.layout.split(q, inputs, images)

    def join_images(self, parts: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Undo `split_by_image`: join tensors of that shape in the order of the tower."""
        return self.layout.join(parts, inputs)

    def _process_image(self, image: Any) -> Mapping[str, Any]:
        if not callable(self.processor):  # it has no tokenizer, so there is no prompt
            inputs: Mapping[str, Any] = self.processor.image_processor(images=[image], return_tensors="pt")
            return inputs
        return _process(self.model, self.processor, [image], PROMPT)


def _model_inputs(model: Any, processor: Any, images: Sequence[Any], prompt: str | Sequence[str]) -> Mapping[str, Any]:
    inputs: Mapping[str, Any] = _process(model, processor, images, prompt).to(input_device(model), model.dtype)
    return inputs  # only the pixels are cast


def _chat_template(processor: Any) -> Any:
    return getattr(processor, "chat_template", None) or processor.tokenizer.chat_template


def _process(model: Any, processor: Any, images: Sequence[Any], prompt: str | Sequence[str]) -> Any:
    prompts = [prompt] * len(images) if isinstance(prompt, str) else prompt
    texts = {one: _format_prompt(processor, one) for one in dict.fromkeys(prompts)}
    return _tokenize(processor, [[image] for image in images], [texts[one] for one in prompts])


def _tokenize(processor: Any, images: Sequence[Sequence[Any]], texts: Sequence[str]) -> Any:
    """The inputs for formatted prompts, each with its images."""
    bos, first = processor.tokenizer.bos_token, texts[0] if texts else ""
    options = {"add_special_tokens": False} if bos and first.startswith(bos) else {}  # a template may add it already
    inputs = processor(
        images=[[image.convert("RGB") for image in own] for own in images],
        text=list(texts),
        padding=True,
        padding_side="left",  # generation continues at the right end of each row
        return_tensors="pt",
        **options,
    )
    inputs.pop("labels", None)  # for training only
    return inputs


def _format_prompt(processor: Any, prompt: str) -> str:
    """The question about an image as the model reads it."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
    try:
        return _format_chat(processor, [message])
    except EludeSteerError:
        raise
    except Exception as error:  # the template is a program of the model's author, in a sandbox
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"the chat template of the model fails: {cause}; use another revision.") from error


def _format_chat(processor: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the model reads it."""
    token = str(getattr(processor, "image_token", "<image>"))
    texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
    if any(token in text for text in texts):
        raise SpecError(f"the question contains '{token}', which stands for the image itself; leave it out.")
    if _chat_template(processor):
        return str(processor.apply_chat_template(list(messages), add_generation_prompt=True))
    if len(messages) > 1:
        raise SpecError("this model has no chat template, so it takes a single message of the user.")
    # For models that are not trained to chat, such as PaliGemma.
    return "".join(token if part["type"] == "image" else part["text"] for part in messages[0]["content"])


def _blocks(model: Any, within: str) -> list[nn.Module]:
    """Return the blocks of a tower: its longest module list."""
    lists = [list(m) for m in model.get_submodule(within).modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _last_target(model: Any, blocks: Sequence[nn.Module]) -> str:
    """Return the name of the last wide-to-narrow layer in the last block whose output reaches the language model."""
    read = getattr(model.config, "vision_feature_layer", None)
    layers = [read] if isinstance(read, int) else read or [-1]  # indices of hidden states: 0 is the first block's input
    last = max(layer if layer >= 0 else len(blocks) + 1 + layer for layer in layers)
    for block in reversed(blocks[:last]):
        narrowing = [m for m in block.modules() if isinstance(m, nn.Linear) and m.in_features > m.out_features]
        if narrowing:
            return next(name for name, module in model.named_modules() if module is narrowing[-1])
    return "mlp.fc2"


def _test_layout(vlm: Vlm, blocks: Sequence[nn.Module]) -> Layout:
    """Return the layout of a model after a test with two noise images, which run only through the embedding.

    The config describes canvases completely, except for tokens before the patches, which are counted.
    """
    if not blocks:
        raise ModelError(f"the tower of {type(vlm.model).__name__} has no list of blocks, so it is not supported.")
    if isinstance(vlm.layout, Canvases):
        return replace(vlm.layout, before=_count_tokens_before(vlm, vlm.layout, blocks[0]))
    # Two shapes, larger than a window: otherwise the order of windows would not show.
    scale = max(1.0, 2.5 * getattr(vlm.layout, "window", 0) * vlm.layout.patch[0] / 40)
    rng, sizes = np.random.default_rng(0), [(round(w * scale), round(h * scale)) for w, h in ((90, 60), (40, 70))]
    inputs = vlm.inputs([Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes])

    def embed(pixels: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), record(blocks[0]) as recorded:
            vlm.model(**{**inputs, "pixel_values": pixels})
        return recorded.input

    try:
        for size in sizes:
            vlm.grid(size)
        return confirm_layout(vlm.layout, inputs, len(sizes), embed)
    except ModelError as error:
        raise ModelError(f"{type(vlm.model).__name__} cannot be steered: {error}") from error


@torch.inference_mode()
def _count_tokens_before(vlm: Vlm, layout: Canvases, first_block: nn.Module) -> int:
    """Count the tokens before the patches of a tile: those that do not depend on the pixels."""
    tower, tokens = vlm.model.get_submodule(vlm.within), []
    for value in (-1.0, 1.0):
        with record(first_block) as recorded:
            tower(torch.full((1, 3, layout.side, layout.side), value, device=vlm.device, dtype=vlm.model.dtype))
        tokens.append(recorded.input[0])
    fixed = (tokens[0] == tokens[1]).all(-1).tolist()
    before = fixed.count(True)
    if before + math.prod(layout.shape or ()) != len(fixed) or not all(fixed[:before]):
        raise ModelError(
            f"the tower of {type(vlm.model).__name__} makes {len(fixed)} tokens of {layout.shape} patches; which "
            "token belongs to which patch is unknown."
        )
    return before


def limit_logits(model: torch.nn.Module, count: int) -> dict[str, int]:
    """Return the argument that limits logits to the last `count` positions; those of all would take gigabytes.

    It is empty for models that always compute all of them.
    """
    parameters = inspect.signature(type(model).forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in parameters else {}
