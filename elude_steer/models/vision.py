"""A vision tower: a torch model, one linear layer in it, and the way from images to the inputs of that layer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elude_steer.errors import ImageError, ModelError
from elude_steer.method.layers import layer_parameters
from elude_steer.models.execution.device_maps import input_device
from elude_steer.models.hooks import block_of, find_layer, find_stream_scale, record, record_output
from elude_steer.models.loading import (
    as_dtype,
    check_device,
    explain_load_errors,
    load_image_processor,
    load_pretrained,
    read_stored_layer,
)
from elude_steer.trust import call_loader
from elude_steer.utils import optional
from elude_steer.utils.threads import caller_threads, choose_threads, use_threads, with_threads


@dataclass(frozen=True, eq=False)
class Tower:
    """The model that the method is applied to; `encode` turns images into inputs of the target layer.

    Attributes:
        model: the complete model, in eval mode.
        layer_name: dotted name of the target layer.
        layer: the target layer itself.
        prepare: turns images into the inputs of `model`: a tensor, or a mapping of keyword arguments.
        skip_tokens: positions of tokens that are not instances (register tokens).
        within: dotted name of the part of the model that the layer's input depends on; empty for the complete model.
        settings: how images are prepared, for the fingerprint.
        autocast: dtype of matrix products during encoding; None for the model's own.
        id: the Hub id or folder that the model was loaded from; empty if it is not known.
        revision: of that id.
        gpu_lock: lets one thread at a time compute on a GPU, while the others read images.
        threads: threads of torch while the model computes on a CPU; None chooses them by its size and the free cores
            when it first computes, and no more than the caller has.
    """

    model: nn.Module
    layer_name: str
    layer: nn.Module
    prepare: Callable[[Sequence[Any]], torch.Tensor | Mapping[str, Any]]
    skip_tokens: tuple[int, ...] = ()
    within: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    id: str = ""
    revision: str | None = None
    gpu_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    threads: int | None = None

    @property
    def device(self) -> torch.device:
        """The device that inputs are moved to: that of the model's first parameter that is in memory."""
        return input_device(self.model)

    def use_threads(self) -> AbstractContextManager[None]:
        """Inside, torch computes with the threads of this model; afterwards with as many as the caller had."""
        if self.device.type != "cpu":
            return nullcontext()
        return use_threads(self.threads or min(self._suitable_threads, caller_threads()))

    @cached_property
    def _suitable_threads(self) -> int:
        """Chosen once, so that a model computes the same bits as long as it is loaded."""
        return choose_threads(sum(parameter.numel() for parameter in self.model.parameters()))

    @with_threads
    @torch.inference_mode()
    def encode(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return the target layer's inputs, one `(tiles, tokens, d_in)` tensor per image; the model stops there."""
        if not len(images):
            raise ImageError("there are no images to encode.")
        inputs = self.prepare(images)
        with record(self.layer) as recorded:
            self._call(inputs)
        return self.split_by_image(self._as_tokens(recorded.input), inputs, len(images))

    @with_threads
    @torch.inference_mode()
    def streams(self, images: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each image the layer's inputs and the output of its block, `(tiles, tokens, d_out)`.

        The output of the block is the residual stream after the layer. If a block returns anything else, the layer's
        own output takes its place.
        """
        inputs = self.prepare(images)
        block = block_of(self.model, self.layer_name)
        with record(self.layer, stop=False) as recorded, record_output(block) as outputs:
            self._call(inputs)
        q, stream = self._as_tokens(recorded.input), outputs[0]
        width = self.layer.out_channels if isinstance(self.layer, nn.Conv2d) else int(self.layer.out_features)  # type: ignore[arg-type]
        if stream.dim() == 4 and stream.shape[1] == width and stream.shape[-1] != width:
            stream = stream.movedim(1, -1)  # a feature map with channels first
        if stream.shape[-1] != width or stream.numel() != q.shape[:-1].numel() * width:
            stream = self.layer(recorded.input)
            stream = stream.flatten(2).transpose(1, 2) if isinstance(self.layer, nn.Conv2d) else stream
        stream = stream.reshape(*q.shape[:-1], width)
        count = len(images)
        pairs = zip(self.split_by_image(q, inputs, count), self.split_by_image(stream, inputs, count), strict=True)
        return list(pairs)

    def _as_tokens(self, q: torch.Tensor) -> torch.Tensor:
        """Return the layer's input with feature maps flattened to rows of tokens."""
        if isinstance(self.layer, nn.Conv2d):
            return read_positions(self.layer, q).flatten(2).transpose(1, 2)  # (batch, height x width, d_in)
        return q.flatten(1, -2) if q.dim() > 3 else q  # channels-last maps: (batch, height x width, d_in)

    @cached_property
    def stream_scale(self) -> torch.Tensor | None:
        """By what the layer's output is multiplied before it enters the residual stream, `(d_out,)`; None for 1."""
        return find_stream_scale(self.model, self.layer_name, len(layer_parameters(self.layer)[1]))

    def token_indices(self, tokens: int) -> torch.Tensor:
        """Return the positions among `tokens` that count as instances."""
        indices = [i for i in range(tokens) if i not in set(self.skip_tokens)]
        return torch.tensor(indices, dtype=torch.long)

    def read_stored(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the weight and bias of the target layer as its checkpoint stores them; nothing where that is unknown.

        Yields more than one pair where several layers of the checkpoint have names that end as this layer's does.
        """
        name = self.layer_name.removeprefix(f"{self.within}." if self.within else "")
        return read_stored_layer(self.id, name, revision=self.revision)

    def fingerprint(self) -> str:
        """Return a hash of everything that the layer's inputs depend on, except the images."""
        digest = hashlib.blake2b(digest_size=16)
        part = self.model.get_submodule(self.within)
        described = {
            "class": type(self.model).__name__,
            "modules": str(part),  # shows what is not a weight, such as activation functions
            "config": _describe_config(part),
            "layer": self.layer_name,
            "skip": self.skip_tokens,
            "settings": dict(self.settings),
            **({"autocast": str(self.autocast)} if self.autocast is not None else {}),
        }
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
        for name, tensor in sorted(part.state_dict().items()):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
        return digest.hexdigest()

    def _call(self, inputs: torch.Tensor | Mapping[str, Any]) -> None:
        lock = nullcontext() if self.device.type == "cpu" else self.gpu_lock
        with lock, torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            if isinstance(inputs, torch.Tensor):
                self.model(inputs.to(self.device))
            else:
                self.model(**inputs)

    def split_by_image(
        self, q: torch.Tensor, inputs: torch.Tensor | Mapping[str, Any], images: int
    ) -> list[torch.Tensor]:
        """Split a layer's tokens by image, one `(tiles, tokens, …)` tensor each."""
        if q.shape[0] % images:
            raise ModelError(
                f"layer '{self.layer_name}' has {q.shape[0]} rows for {images} images; which row belongs to which "
                "image is unknown; set tokens.batch_size: 1."
            )
        if q.dim() == 2:  # one vector per image, or the tokens of all images one after the other
            return list(q.reshape(images, 1, -1, q.shape[-1]).unbind(0))
        return list(q.reshape(images, -1, *q.shape[1:]).unbind(0))


def load_vision(
    model_id: str,
    *,
    layer: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Tower:
    """Load a vision backbone of transformers (DINOv2, ViT, …), or the vision half of a dual encoder (SigLIP, CLIP)."""
    from transformers import AutoModel

    target = check_device(device)
    model = load_pretrained(
        AutoModel,
        model_id,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    processor = load_image_processor(model_id, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(model.config, "vision_config", None) is not None:
        model = model.get_submodule(vision_part(model))
    model = model.to(target)
    name, module = find_layer(model, layer)

    def prepare(images: Sequence[Any]) -> Mapping[str, Any]:
        pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels.to(next(model.parameters()).device, next(model.parameters()).dtype)}

    registers = getattr(model.config, "num_register_tokens", 0)
    skip = tuple(range(1, 1 + registers))  # after CLS
    settings = {"processor": processor.to_dict()}
    return Tower(model, name, module, prepare, skip, settings=settings, id=model_id, revision=revision)


def load_timm(
    model_id: str,
    *,
    layer: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    trust_remote_code: bool = False,
) -> Tower:
    """Load a vision backbone of timm with its preprocessing (needs the extra `timm`).

    Repositories of others (`hf-hub:`), and folders (`local-dir:`) without `model.safetensors`, can hold pickles, which
    are code: they need `trust_remote_code`.
    """
    timm = optional.require("timm", f"model.kind 'timm' ({model_id})")
    with explain_load_errors(model_id):
        model = call_loader(
            timm.create_model,
            model_id,
            subject=f"model '{model_id}'",
            trust_remote_code=trust_remote_code,
            code=_find_code(model_id),
            has_switch=False,
            pretrained=True,
        )
        model = model.eval().to(check_device(device))
        if dtype != "auto":
            model.to(as_dtype(dtype))
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    name, module = find_layer(model, layer)

    def prepare(images: Sequence[Any]) -> torch.Tensor:
        parameter = next(model.parameters())
        return torch.stack([transform(image) for image in images]).to(parameter.device, parameter.dtype)

    prefix = getattr(model, "num_prefix_tokens", 0)
    skip = tuple(range(prefix - getattr(model, "num_reg_tokens", 0), prefix))
    return Tower(model, name, module, prepare, skip, settings={"transform": str(transform)})


def _find_code(model_id: str) -> str | None:
    """What timm could run: weights that are no safetensors are pickles, which timm reads with safeguards of its own."""
    place, colon, name = model_id.partition(":")
    if not colon or (place == "hf-hub" and name.startswith("timm/")):  # a name that timm knows, or its own repository
        return None
    if place == "local-dir" and (not Path(name).is_dir() or (Path(name) / "model.safetensors").is_file()):
        return None
    return "weights that may be a pickle"


def vision_part(model: nn.Module) -> str:
    """Return the dotted name of a model's vision tower: the module that was built from `config.vision_config`."""
    vision_config = getattr(model.config, "vision_config", None)
    if vision_config is not None:
        for name, module in model.named_modules():
            config = getattr(module, "config", None)
            if name and (config is vision_config or type(config) is type(vision_config)):
                return name
    raise ModelError(f"{type(model).__name__} has no vision tower that its config describes (no vision_config).")


def _describe_config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    if config is None:
        return None
    attention = getattr(config, "_attn_implementation", None)
    if not hasattr(config, "to_dict"):
        return [str(config), attention]
    # The path of a checkpoint and the version that wrote it change nothing.
    return [
        {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")},
        attention,
    ]


def read_positions(layer: nn.Conv2d, q: torch.Tensor) -> torch.Tensor:
    """Return the positions of a feature map that a 1x1 convolution computes an output for."""
    if not isinstance(layer.padding, str):  # "same" and "valid" pad nothing at this kernel size
        rows, columns = layer.padding
        q = F.pad(q, (columns, columns, rows, rows))
    return q[:, :, :: layer.stride[0], :: layer.stride[1]]


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:
        raise ModelError("part of the vision tower is offloaded; keep it in memory (give device_map='auto' more room).")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
